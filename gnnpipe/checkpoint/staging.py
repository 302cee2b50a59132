"""Copies of tensors on the CPU, in a block of memory that another process can read as well.

The block stays for the next checkpoint: memory that has just been asked for costs six times as
long to write as memory that is held, for every page of it faults once.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["StagedTensors", "TensorPlace", "tensors_at"]

TensorPlace = tuple[str, str, list[int], int]
"""Name, dtype, shape and offset in bytes: plain, to be sent."""

_ALIGNED_BYTES = 64


class StagedTensors:
    """What the last ``take`` copied; it holds as much memory as the most that was ever taken."""

    def __init__(self) -> None:
        self.handle = _unnamed_file()
        # However the run ends: nobody has to remember.
        weakref.finalize(self, os.close, self.handle)
        self.size_bytes = 0
        self.places: list[TensorPlace] = []
        self._block: mmap.mmap | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that nobody else writes; those of the last call are written over."""
        self.places, end = [], 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.places.append((name, dtype, list(tensor.shape), end))
            end += math.ceil(tensor.nbytes / _ALIGNED_BYTES) * _ALIGNED_BYTES
        if self._block is None or end > self.size_bytes:
            self.size_bytes, self._block = max(end, _ALIGNED_BYTES), None
            # Not ftruncate: where there is no room, that would be told of by a signal.
            os.posix_fallocate(self.handle, 0, self.size_bytes)
            self._block = mmap.mmap(self.handle, self.size_bytes)
        copies = tensors_at(self._block, self.places)
        for name, copy in copies.items():
            copy.copy_(tensors[name].detach())
        return copies


def tensors_at(block: mmap.mmap, places: Iterable[TensorPlace]) -> dict[str, Tensor]:
    """The tensors that lie in ``block``, without a copy."""
    found = {}
    for name, word, shape, offset in places:
        dtype: Any = getattr(torch, word)
        count = math.prod(shape)
        found[name] = (
            torch.frombuffer(block, dtype=dtype, count=count, offset=offset).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    return found


def _unnamed_file() -> int:
    """In memory, where the system can; gone with the last process that has it open."""
    with contextlib.suppress(OSError, AttributeError):
        return os.memfd_create("gnnpipe-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
