"""Dropout of the reference, written from docs/adr/0002-dropout-by-a-hash-of-the-vertex.md.

Arithmetic is on unsigned 32-bit numbers. With ``m(s, h1, h2)`` for the steps
``s *= 0x85EBCA6B; s ^= s >> h1; s *= 0xC2B2AE35; s ^= s >> h2``, ``mix(s) = m(s, 15, 16)`` and
g = 0x9E3779B9:

    vertex(v) = mix(mix(v g + 1))                     v < 2^32
    column(j) = mix(j g + 99)
    pass      = fold of m(state ^ part, 13, 16) over (seed, epoch, site), from state = g
    drawn     = mix(mix(vertex(v) ^ pass) ^ column(j))

A drawn number holds four bytes, for features 4 j, 4 j + 1, ...; or two 16-bit numbers with the top
bit flipped if the probability is not a multiple of 1/256. An entry is kept if its number is at
least ``round(probability levels)``. Kept entries are divided by the share of kept entries.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt32 = npt.NDArray[np.uint32]
_GOLDEN = np.uint32(0x9E3779B9)


def drop(x: Tensor, probability: float, seed: int, epoch: int, site: int) -> Tensor:
    """Applies the dropout of one site of a model to rows x [N, ...] of all vertices."""
    if probability == 1.0:
        return x * 0.0
    flat = x.reshape(len(x), -1)
    kept, share = _kept(*flat.shape, probability, (seed, epoch, site))
    return (flat * kept.to(x.dtype) / share).reshape(x.shape)


@lru_cache(maxsize=32)
def _kept(
    num_vertices: int, width: int, probability: float, parts: tuple[int, int, int]
) -> tuple[Tensor, float]:
    """Returns the mask of kept entries [N, width], and their share."""
    is_bytes = float(probability * 256).is_integer()
    levels = 256 if is_bytes else 65536
    threshold = min(max(round(probability * levels), 1), levels - 1)
    vertices = np.arange(num_vertices, dtype=np.uint32)
    columns = np.arange(-(-width // (4 if is_bytes else 2)), dtype=np.uint32)
    rows = _mix(_mix(_mix(vertices * _GOLDEN + np.uint32(1))) ^ _key(parts))
    drawn = _mix(rows[:, None] ^ _mix(columns * _GOLDEN + np.uint32(99))).astype("<u4")
    if is_bytes:
        is_kept = drawn.view(np.uint8) >= threshold
    else:
        is_kept = (drawn.view(np.uint16) ^ np.uint16(0x8000)) >= threshold
    return torch.from_numpy(is_kept[:, :width]), 1.0 - threshold / levels


def _mix(state: UInt32, first: int = 15, second: int = 16) -> UInt32:
    state = state * np.uint32(0x85EBCA6B)
    state = state ^ (state >> np.uint32(first))
    state = state * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(second))


def _key(parts: tuple[int, int, int]) -> UInt32:
    """Returns the key of one dropout in one epoch, [1]."""
    state = np.array([_GOLDEN], dtype=np.uint32)
    for part in parts:
        state = _mix(state ^ np.uint32(part & 0xFFFFFFFF), 13, 16)
    return state
