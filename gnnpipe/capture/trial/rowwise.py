"""Checks that a recorded call works row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from gnnpipe.capture.fx_names import BY_HAND, line_of
from gnnpipe.errors import InputError

__all__ = ["check_rows", "name_of"]


def name_of(call: fx.Node) -> str:
    """Name of the function, method or module that is called."""
    target = call.target
    if isinstance(target, str):
        return target.removeprefix("model.")
    return str(getattr(target, "__name__", target))


def check_rows(
    call: fx.Node, value: Any, half_values: list[Any], count: int, of_edges: bool
) -> bool:
    """Raises ``InputError`` unless the values of both halves are the parts of the whole value.

    Only tensors are compared; a count or a shape matters in the calls that use it. ``of_edges``:
    rows are edges. Returns whether rows are the first dimension of every tensor.
    """
    one, many = ("edge", "edges") if of_edges else ("vertex", "vertices")
    halves = [_tensors(half) for half in half_values]
    are_first = True
    for index, tensor in enumerate(_tensors(value)):
        places = [d for d, size in enumerate(tensor.shape) if size == count]
        if not places:
            raise InputError(
                f"model: {name_of(call)} does not keep one row for each {one} (it gives "
                f"{list(tensor.shape)} for {count} {many}){line_of(call)}; only vertex-wise work "
                "and convolutions can be cut into chunks"
            )
        parts = [half[index] for half in halves]
        if not any(_fits(tensor, parts, place) for place in places):
            raise InputError(
                f"model: {name_of(call)} mixes {many} or draws random numbers{line_of(call)}; it "
                f"would give another result chunk by chunk. Make it work row by row, {BY_HAND}"
            )
        are_first &= places[0] == 0
    return are_first


def _fits(whole: Tensor, parts: list[Tensor], place: int) -> bool:
    """Whether the parts, concatenated in a dimension, equal the whole."""
    try:
        joined = torch.cat(parts, dim=place)
    except (RuntimeError, IndexError):
        return False
    return joined.shape == whole.shape and torch.allclose(
        joined.double(), whole.double(), 1e-9, 1e-12, equal_nan=True
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for one in value for t in _tensors(one)]
    return []
