"""What autograd keeps until backward of a recorded call, counted on the sample.

Every call is made once more with gradients, and what it saves is looked up by its memory: the value
of a call is kept if that call or another one saves it, however often; what is nobody's value is the
call's own. So a ReLU behind a linear map keeps one row and not two, and a sum keeps none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gnnpipe.capture.fx_names import EDGES, FEATURES, is_input
from gnnpipe.capture.markers import aggregate, drop, in_training, of_vertices
from gnnpipe.capture.stage.linear import is_linear
from gnnpipe.capture.stage.norm_rows import normalise, squares
from gnnpipe.capture.trial.run import SampleRun
from gnnpipe.errors import InputError
from gnnpipe.ops.saved_tensors import recorded_saved_tensors, storage_address, tensors_in

__all__ = ["Saved", "saved_by_calls"]

_NUMBER_BYTES = 4
"""Of a number where models are trained; of masks and indices a part of one, or several, is kept."""


@dataclass(frozen=True)
class Saved:
    """What autograd keeps of one call, in numbers of a row."""

    is_kept: bool
    """Its value, for itself or for another call."""
    value: int
    """Of its value, kept or not."""
    beside: int
    """What is nobody's value."""
    per_edge: int
    """Of a convolution that runs unchanged: numbers of an edge."""


def saved_by_calls(run: SampleRun) -> dict[fx.Node, Saved]:
    """What is kept by call; the run's module goes over to 32 bits.

    What calls on the edges keep, or have kept of them, counts for the convolution that reads them.
    Of a convolution nothing is said of what it makes for some of its edges, or of others.
    """
    values: dict[fx.Node, Any] = {}
    beside: dict[fx.Node, int] = {}
    of_edges: dict[fx.Node, int] = {}
    kept: set[fx.Node] = set()
    # In the numbers that are trained: of wider ones a recurrent cell keeps other things.
    run.module.float()
    owners: dict[int, fx.Node] = {}
    # Memory is told apart by its address, so nothing of it may be given back and used again.
    alive: list[Tensor] = []
    given = run.module.state_dict(keep_vars=True).values(), run.sample.edges.values()
    seen = {storage_address(t) for several in given for t in several}
    shapes = {tuple(sorted(weight.shape)) for weight in run.module.parameters()}
    for call in run.module.graph.nodes:
        if call.op == "output":
            continue
        saved = _make(call, run, values)
        alive += saved
        for tensor in tensors_in(values[call]):
            owners.setdefault(storage_address(tensor), call)
        beside[call] = _bytes(values[call], torch.bool) if _has_mask(call) else 0
        of_edges[call] = 0
        rows, edges = _sizes(call, run)
        for tensor in saved:
            address, size = storage_address(tensor), tensor.untyped_storage().nbytes()
            if address in owners:
                kept.add(owners[address])
            elif tuple(sorted(tensor.shape)) in shapes:
                pass  # A weight turned round, which may be as long as there are edges.
            elif address not in seen and edges & {*tensor.shape[:1]}:
                of_edges[call] += size // len(tensor)
            elif address not in seen and (_is_workspace(tensor) or rows & {*tensor.shape}):
                beside[call] += size
            seen.add(address)
    found = {}
    for call, size in beside.items():
        row = max(run.sample.counts.get(run.types[call], 0), 1) * _NUMBER_BYTES
        per_edge = of_edges[call]
        for source in _on_edges(call, run) if _edges_of(call) is not None else ():
            value = _bytes(values[source]) if source in kept and source.op != "placeholder" else 0
            per_edge += of_edges[source] + value // run.sample.num_edges
        value, beside_it = round(_bytes(values[call]) / row), round(size / row)
        found[call] = Saved(call in kept, value, beside_it, round(per_edge / _NUMBER_BYTES))
    return found


def _bytes(value: Any, dtype: torch.dtype | None = None) -> int:
    """Of a call's value, or of all that it consists of, as if it were of another type."""
    return sum(t.numel() * (dtype or t.dtype).itemsize for t in tensors_in(value))


def _sizes(call: fx.Node, run: SampleRun) -> tuple[set[int], set[int]]:
    """The numbers of rows that a call reads and makes, and of edges, without loops and with."""
    sample, index = run.sample, _edges_of(call)
    if call in run.of_edges:
        return set(), {sample.num_edges}
    if index is None:
        return {sample.counts.get(run.types[call], 0)} - {0}, set()
    rows = {sample.counts[t] for t in sample.ends[str(index.target)]}
    count = sample.edges[str(index.target)].shape[1]
    return rows, {count, count + min(rows)}


def _on_edges(call: fx.Node, run: SampleRun) -> set[fx.Node]:
    """The values of edges that a convolution reads, and those that they are made of."""
    found: set[fx.Node] = set()
    waiting = [call]
    while waiting:
        new = {s for s in waiting.pop().all_input_nodes if s in run.of_edges} - found
        found |= new
        waiting += new
    return found


def _edges_of(call: fx.Node) -> fx.Node | None:
    """What a convolution that runs unchanged is given as its edges."""
    return next((source for source in call.all_input_nodes if is_input(source, EDGES)), None)


def _is_workspace(tensor: Tensor) -> bool:
    """Of a library, which grows with the rows but does not have them as a dimension."""
    return tensor.dim() == 1 and tensor.dtype == torch.uint8


def _make(call: fx.Node, run: SampleRun, values: dict[fx.Node, Any]) -> list[Tensor]:
    """Put a call's value into ``values``; what is saved for that.

    Values hang together as in training, so that what needs no gradient has none.
    """
    inputs = call.all_input_nodes
    if call.target is drop:
        with torch.enable_grad():
            values[call] = values[inputs[0]].clone() if _has_mask(call) else values[inputs[0]]
        return []
    if call.target in (squares, normalise):
        values[call] = _leaf(run.whole[call], True)
        return list(tensors_in(values[inputs[0]]))
    if call.op in ("placeholder", "get_attr"):
        # A weight as it is, now a float.
        value = run.call(call, {}) if call.op == "get_attr" else run.whole[call]
        values[call] = _leaf(value, False) if call.op == "placeholder" else value
        return []
    if is_linear(run.module, call) and any(is_input(s, FEATURES) for s in inputs[:1]):
        values[call] = _leaf(run.whole[call], _trains(call, run, values))
        return []
    if call.target in (aggregate, in_training, of_vertices):
        values[call] = _leaf(run.whole[call], True)
        return []
    given = {source: values[source] for source in inputs}
    arrived: set[int] = set()
    if _edges_of(call) is not None:
        # The rows that it reads come out of the history table, and are counted there.
        rows = {k for k, v in given.items() if _is_rows(v) and k not in run.of_edges}
        given |= {k: _leaf(given[k].clone(), True) for k in rows}
        arrived = {storage_address(given[k]) for k in rows}

    try:
        with recorded_saved_tensors(lambda t: storage_address(t) not in arrived) as saved:
            values[call] = run.call(call, given)
    except InputError:
        # It minds gradients, or writes to what it reads: the guess is that its value is kept.
        values[call] = _leaf(run.whole[call], True)
        return list(tensors_in(values[call]))
    return saved


def _has_mask(call: fx.Node) -> bool:
    """It drops, so that its value is not what it reads."""
    return call.target is drop and float(call.kwargs["probability"]) > 0.0  # type: ignore[arg-type]


def _trains(call: fx.Node, run: SampleRun, values: dict[fx.Node, Any]) -> bool:
    """Whether the weights of a linear map are trained."""
    weights = [t for source in call.all_input_nodes[1:] for t in tensors_in(values[source])]
    if call.op == "call_module":
        weights = list(run.module.get_submodule(str(call.target)).parameters())
    return any(weight.requires_grad for weight in weights)


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaf(value: Any, requires_grad: bool) -> Any:
    """A value that comes to a step from outside."""
    return value.float().detach().requires_grad_(requires_grad) if _is_rows(value) else value
