"""Counts the tensors that autograd keeps for backward for each recorded call, on the sample.

Every call is computed once more with gradients. A saved tensor is identified by its memory: if the
memory is the value of a call, that value is kept, however many calls save it; otherwise the tensor
is an extra of the call that saves it. So a ReLU behind a linear map keeps one row and not two, and
a sum keeps none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from gnnpipe.capture.fx_names import FEATURES, edges_read, is_input
from gnnpipe.capture.markers import aggregate, drop, in_training, of_vertices
from gnnpipe.capture.stage.row_work import batch_norm_relu, drops_rows
from gnnpipe.capture.stage.step_calls import is_linear, normalise, squares
from gnnpipe.capture.trial.run import SampleRun
from gnnpipe.errors import InputError
from gnnpipe.ops.saved_tensors import recorded_saved_tensors, storage_address, tensors_in

_NUMBER_BYTES = 4
"""Size of the number that amounts are counted in; a mask of bytes counts as a quarter number."""


@dataclass(frozen=True)
class Saved:
    """Numbers that autograd keeps of one call until backward."""

    is_kept: bool = False
    """The call's value is kept, for this call or for another one."""
    per_row: int = 0
    """Numbers kept for each row beside the values of ops."""
    per_edge: int = 0
    """Numbers kept for each edge by a convolution."""
    per_read_row: int = 0
    """Numbers kept for each row that a convolution without messages reads."""


def saved_by_calls(run: SampleRun, ops: Collection[fx.Node]) -> dict[fx.Node, Saved]:
    """``Saved`` by call; converts the run's module to float32.

    Other calls than ``ops`` are computed again with each op that needs them, so that their values
    count as extras.
    Tensors that calls on edge values keep count for the convolution that reads these values.
    Tensors with rows for only some edges of a convolution are not counted.
    """
    values: dict[fx.Node, Any] = {}
    extra_bytes: dict[fx.Node, int] = {}
    edge_bytes: dict[fx.Node, int] = {}
    kept: set[fx.Node] = set()
    # Training uses float32; of float64 rows a recurrent cell keeps other tensors.
    run.module.float()
    owners: dict[int, fx.Node] = {}
    # Tensors are identified by address, so no memory may be freed and reused meanwhile.
    alive: list[Tensor] = []
    given = *run.module.state_dict(keep_vars=True).values(), *run.sample.edges.values()
    seen = {storage_address(tensor) for tensor in given}
    weight_shapes = {tuple(sorted(weight.shape)) for weight in run.module.parameters()}
    for call in run.graph.nodes:
        if call.op == "output":
            continue
        saved = _compute(call, run, values)
        alive += saved
        for tensor in tensors_in(values[call]):
            owners.setdefault(storage_address(tensor), call)
        extra_bytes[call] = _size_bytes(values[call], torch.bool) if _has_mask(call) else 0
        edge_bytes[call] = 0
        row_counts, edge_counts = _counts(call, run)
        for tensor in saved:
            address, size_bytes = storage_address(tensor), tensor.untyped_storage().nbytes()
            if address in owners:
                kept.add(owners[address])
            elif address not in seen and tuple(sorted(tensor.shape)) not in weight_shapes:
                # The copy of a transposed weight could be taken for rows of edges.
                if edge_counts & {*tensor.shape[:1]}:
                    edge_bytes[call] += size_bytes // len(tensor)
                elif _is_workspace(tensor) or row_counts & {*tensor.shape}:
                    extra_bytes[call] += size_bytes
            seen.add(address)
    found = {}
    for call, size_bytes in extra_bytes.items():
        row_bytes = max(run.sample.counts.get(run.types[call], 0), 1) * _NUMBER_BYTES
        on_block = run.block_memory.get(call)
        per_edge = edge_bytes[call] if on_block is None else on_block.per_edge * _NUMBER_BYTES
        for source in _edge_values(call, run) if edges_read(call) is not None else ():
            is_counted = source in kept and source.op != "placeholder"
            value_bytes = _size_bytes(values[source]) if is_counted else 0
            num_edges = run.sample.num_edges(run.of_edges[source])
            per_edge += edge_bytes[source] + value_bytes // num_edges
        per_row = round(size_bytes / row_bytes) if on_block is None else on_block.per_row
        if call in kept and call not in ops:
            per_row += round(_size_bytes(values[call]) / row_bytes)
        per_read_row = 0 if on_block is None else on_block.per_read_row
        found[call] = Saved(call in kept, per_row, round(per_edge / _NUMBER_BYTES), per_read_row)
    return found


def _size_bytes(value: Any, dtype: torch.dtype | None = None) -> int:
    """Size of the tensors in a value, as if they had another dtype."""
    return sum(t.numel() * (dtype or t.dtype).itemsize for t in tensors_in(value))


def _counts(call: fx.Node, run: SampleRun) -> tuple[set[int], set[int]]:
    """Numbers of rows that a call reads and makes; numbers of its edges without and with loops."""
    sample, index = run.sample, edges_read(call)
    if call in run.of_edges:
        return set(), {sample.num_edges(run.of_edges[call])}
    if index is None:
        return {sample.counts.get(run.types[call], 0)} - {0}, set()
    rows = {sample.counts[t] for t in sample.ends[str(index.target)]}
    source, target = sample.edges[str(index.target)]
    count, others = len(source), int((source != target).sum())
    return rows, {count, others + min(rows)}


def _edge_values(call: fx.Node, run: SampleRun) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [call]
    while waiting:
        new = {s for s in waiting.pop().all_input_nodes if s in run.of_edges} - found
        found |= new
        waiting += new
    return found


def _is_workspace(tensor: Tensor) -> bool:
    """Whether a tensor is a library's workspace: its size grows with the rows, in one dimension."""
    return tensor.dim() == 1 and tensor.dtype == torch.uint8


def _compute(call: fx.Node, run: SampleRun, values: dict[fx.Node, Any]) -> list[Tensor]:
    """Put a call's value into ``values``; returns the tensors that autograd saves for the call.

    Values require gradients where they do in training, because fewer tensors are saved elsewhere.
    """
    inputs = call.all_input_nodes
    if call.target is drop:
        with torch.enable_grad():
            values[call] = values[inputs[0]].clone() if _has_mask(call) else values[inputs[0]]
        return []
    if call.target in (squares, normalise):
        values[call] = _leaf(run.whole[call], True)
        return list(tensors_in(values[inputs[0]]))
    if call.target is batch_norm_relu:
        values[call] = _leaf(run.whole[call], True)
        return [*tensors_in(values[inputs[0]]), values[call]]
    if call.op == "get_attr":
        values[call] = run.call(call, {})  # float32 now, unlike in run.whole
        return []
    is_map = any(is_input(s, FEATURES) for s in inputs[:1]) and is_linear(run.module, call)
    if is_map or call.op == "placeholder" or call.target in (aggregate, in_training, of_vertices):
        is_trained = _has_trained_weights(call, run, values) if is_map else call.op != "placeholder"
        values[call] = _leaf(run.whole[call], is_trained)
        return []
    given = {source: values[source] for source in inputs}
    received: set[int] = set()
    if edges_read(call) is not None:
        # The rows that a convolution reads come from the history table and are counted there.
        rows = {k for k, v in given.items() if _is_floating(v) and k not in run.of_edges}
        given |= {k: _leaf(given[k].clone(), True) for k in rows}
        received = {storage_address(given[k]) for k in rows}
    try:
        with recorded_saved_tensors(lambda t: storage_address(t) not in received) as saved:
            values[call] = run.call(call, given)
    except InputError:
        # The call fails with gradients or writes to its input: assume that its value is kept.
        values[call] = _leaf(run.whole[call], True)
        return list(tensors_in(values[call]))
    return saved


def _has_mask(call: fx.Node) -> bool:
    """Whether a call is or ends with a dropout with a mask; its value is then not its input."""
    is_drop = call.target is drop and float(call.kwargs["probability"]) > 0.0  # type: ignore[arg-type]
    return is_drop or drops_rows(call)


def _has_trained_weights(call: fx.Node, run: SampleRun, values: dict[fx.Node, Any]) -> bool:
    weights = [t for source in call.all_input_nodes[1:] for t in tensors_in(values[source])]
    if call.op == "call_module":
        weights = list(run.module.get_submodule(str(call.target)).parameters())
    return any(weight.requires_grad for weight in weights)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaf(value: Any, requires_grad: bool) -> Any:
    """A float32 copy of a value, as a leaf of the autograd graph."""
    return value.float().detach().requires_grad_(requires_grad) if _is_floating(value) else value
