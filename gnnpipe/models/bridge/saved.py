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
    owners: dict[int, fx.Node] = {}
    weights = {_place(t) for t in run.module.state_dict(keep_vars=True).values()}
    for call in run.module.graph.nodes:
        if call.op == "output" or call in run.of_edges:
            continue
        for tensor in _tensors(run.whole[call]):
            owners.setdefault(_place(tensor), call)
        count = run.sample.counts.get(run.types[call], 0)
        numbers = numbers_of(run.whole[call]) // _MASKED if call.target is drop else 0
        values, others = _saved_by(call, run)
        for tensor in values:
            if _place(tensor) in owners:
                kept.add(owners[_place(tensor)])
            elif _place(tensor) not in weights and count in tensor.shape:
                numbers += tensor.untyped_storage().nbytes() // 8 // count
        found[call] = numbers
        if others:
            kept.add(call)
    return found, kept


def numbers_of(value: Any) -> int:
    """In a row of a value, or of all that it consists of."""
    return sum(t[0].numel() for t in _tensors(value) if t.dim() and len(t))


def _saved_by(call: fx.Node, run: SampleRun) -> tuple[list[Tensor], bool]:
    """What is saved when a call is made, its result left out; and whether that is."""
    inputs = call.all_input_nodes
    if call.target in (squares, normalise):
        return _tensors(run.whole[inputs[0]]), False
    is_map = is_linear(run.module, call) and any(is_input(s, FEATURES) for s in inputs[:1])
    is_mark = call.target in (aggregate, drop, in_training, of_vertices)
    if call.op in ("placeholder", "get_attr") or is_mark or is_map:
        return [], False
    if any(is_input(source, EDGES) for source in inputs):
        return [], False
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    values = {source: _with_gradients(run.whole[source]) for source in inputs}
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            result = run.call(call, values)
    except InputError:
        # It minds gradients, or writes to what it reads: the guess is that its value is kept.
        return [], True
    given = {_place(t) for value in values.values() for t in _tensors(value)}
    made = {_place(t) for t in _tensors(result)} - given
    others = [t for t in saved if _place(t) not in made]
    return others, len(others) < len(saved)


def _with_gradients(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_with_gradients, value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().requires_grad_(True)


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
