"""What autograd keeps until backward of a recorded call, counted on the sample.

Every call is made once more with gradients, and what it saves is looked up by its memory: the value
of a call is kept if that call or another one saves it, however often; what is nobody's value is the
call's own. So a ReLU behind a linear map keeps one row and not two, and a sum keeps none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from gnnpipe.errors import InputError
from gnnpipe.models.bridge.linear_maps import is_linear
from gnnpipe.models.bridge.marks import aggregate, drop, in_training, of_vertices
from gnnpipe.models.bridge.norm_rows import normalise, squares
from gnnpipe.models.bridge.recording import EDGES, FEATURES, is_input
from gnnpipe.models.bridge.run import SampleRun

__all__ = ["numbers_of", "saved_by_calls"]

_MASKED = 4
"""A dropout keeps a byte for a number of four."""


def saved_by_calls(run: SampleRun) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """By call the numbers of a row that it keeps beside values of calls; the calls whose are kept.

    Of calls on edges, and of convolutions that run unchanged, nothing is said.
    """
    found: dict[fx.Node, int] = {}
    kept: set[fx.Node] = set()
    values: dict[fx.Node, Any] = {}
    owners: dict[int, fx.Node] = {}
    weights = {_place(t) for t in run.module.state_dict(keep_vars=True).values()}
    for call in run.module.graph.nodes:
        if call.op == "output" or call in run.of_edges:
            continue
        saved = _make(call, run, values)
        for tensor in _tensors(values[call]):
            owners.setdefault(_place(tensor), call)
        count = run.sample.counts.get(run.types[call], 0)
        found[call] = numbers_of(values[call]) // _MASKED if _has_mask(call) else 0
        for tensor in saved:
            if _place(tensor) in owners:
                kept.add(owners[_place(tensor)])
            elif _place(tensor) not in weights and count in tensor.shape:
                found[call] += tensor.untyped_storage().nbytes() // 8 // count
    return found, kept


def numbers_of(value: Any) -> int:
    """In a row of a value, or of all that it consists of."""
    return sum(t[0].numel() for t in _tensors(value) if t.dim() and len(t))


def _make(call: fx.Node, run: SampleRun, values: dict[fx.Node, Any]) -> list[Tensor]:
    """Put a call's value into ``values``; what is saved for that."""
    inputs = call.all_input_nodes
    values[call] = run.whole[call]
    if call.target is drop:
        values[call] = values[inputs[0]].clone() if _has_mask(call) else values[inputs[0]]
    if call.target in (squares, normalise):
        return _tensors(values[inputs[0]])
    is_map = is_linear(run.module, call) and any(is_input(s, FEATURES) for s in inputs[:1])
    is_mark = call.target in (aggregate, drop, in_training, of_vertices)
    is_given = call.op in ("placeholder", "get_attr")
    if is_given or is_mark or is_map or any(is_input(source, EDGES) for source in inputs):
        return []
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    given = {source: _with_gradients(values[source]) for source in inputs}
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            values[call] = _without(run.call(call, given))
    except InputError:
        # It minds gradients, or writes to what it reads: the guess is that its value is kept.
        return _tensors(values[call])
    return saved


def _has_mask(call: fx.Node) -> bool:
    """It drops, so that its value is not what it reads."""
    return call.target is drop and float(call.kwargs["probability"]) > 0.0  # type: ignore[arg-type]


def _with_gradients(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_with_gradients, value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().requires_grad_(True)


def _without(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_without, value))
    return value.detach() if isinstance(value, Tensor) else value


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    return list(_walk(value))


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _walk(one)
