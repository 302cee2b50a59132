"""Records the tensors that autograd saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def recorded_saved_tensors(
    is_counted: Callable[[Tensor], bool] = lambda _: True,
) -> Iterator[list[Tensor]]:
    """Yields a list of the tensors that operations inside save for backward, if ``is_counted``."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if is_counted(tensor):
            saved.append(tensor)
        return tensor

    # Dropout of a user's model draws random numbers; the run's generator must not advance.
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        yield saved


def storage_address(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory, which is unique among tensors that are alive."""
    return tensor.untyped_storage().data_ptr()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a value: the value itself, or those in nested dicts, lists, tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
