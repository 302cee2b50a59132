"""Finds the rows of a table that are read stale for a given order of the chunks.

A row is stale if a chunk that reads it comes before the chunk that pushes it. Only stale rows need
a forecast: with a good partition most rows are read by their own chunk alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.graph.blocks import Blocks
from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.graph.operators import LinearOperator

# Keep the draws apart from others with the same seed.
_PROBE_STREAM = 0x9110
_DRIFT_STREAM = 0xD21F


def choose_probe_vertices(
    chunking: Chunking, counts: Mapping[str, int], types: Mapping[str, BoolArray], seed: int
) -> npt.NDArray[np.int64]:
    """Rows of the renumbered graph, ascending: ``counts`` of each type, or all if there are fewer.

    ``types``: masks [N] of the rows of each type.
    """
    found = [np.empty(0, dtype=np.int64)]
    for place, (name, count) in enumerate(counts.items()):
        among = np.sort(chunking.perm[types[name]])
        key = [seed, _PROBE_STREAM] + ([place] if name else [])
        found.append(chunking.inverse[_sample(among, count, key)])
    return np.sort(np.concatenate(found))


def choose_drift_rows(chunking: Chunking, seed: int) -> npt.NDArray[np.int64]:
    """Rows [s] of the renumbered graph, ascending: every 32nd, at least 256, at most 2,048.

    Enough for a norm to two digits, and next to nothing to copy.
    """
    n = len(chunking.perm)
    count = min(max(n // 32, 256), 2048)
    return np.sort(chunking.inverse[_sample(np.arange(n), count, [seed, _DRIFT_STREAM])])


def _sample(among: npt.NDArray[np.int64], count: int, seed: list[int]) -> npt.NDArray[np.int64]:
    n = len(among)
    return among[np.random.default_rng(seed).choice(n, min(n, count), replace=False)]


class StaleRows:
    """The stale rows of one rank's tables that are read through one operator or block structure."""

    def __init__(
        self, structure: LinearOperator | Blocks, layout: ShardLayout, always: Tensor | None = None
    ) -> None:
        """``layout``: of the source rows; ``always`` [s]: rows that always count as stale."""
        pushes = np.empty(layout.num_rows, dtype=np.int32)
        chunks = np.arange(layout.num_chunks, dtype=np.int32)
        pushes[: layout.num_own] = np.repeat(chunks, np.diff(layout.own_ptr))
        pushes[layout.num_own :] = np.repeat(chunks, np.diff(layout.halo_ptr))
        rows, readers = [], []
        is_read = np.zeros(layout.num_rows, dtype=bool)
        for chunk in range(layout.num_chunks):
            found = structure.reads(chunk).cpu().numpy()
            is_read[found] = True
            others = np.flatnonzero(is_read & (pushes != chunk)).astype(np.int32)
            is_read[found] = False
            rows.append(others)
            readers.append(np.full(len(others), chunk, dtype=np.int32))
        # One entry for each row and each other chunk that reads it.
        self._rows, self._readers = np.concatenate(rows), np.concatenate(readers)
        self._pushes = pushes[self._rows]
        self._is_always = np.zeros(layout.num_rows, dtype=bool)
        self._device = torch.device("cpu")
        if always is not None:
            self._device = always.device
            self._is_always[always.cpu().numpy()] = True
        self._last: tuple[tuple[int, ...], Tensor] | None = None

    def in_order(self, order: Sequence[int], stale_pairs: npt.NDArray[np.bool_]) -> Tensor:
        """Rows [t] int64, ascending, that are read stale.

        ``order[position]`` is the chunk at a position; ``stale_pairs`` [K, K] by position: the
        first chunk reads the second one's rows stale.
        """
        key = tuple(order)
        if self._last is None or self._last[0] != key:
            position = np.empty(len(key), dtype=np.int32)
            position[list(key)] = np.arange(len(key))
            is_stale = self._is_always.copy()
            pairs = position[self._readers], position[self._pushes]
            is_stale[self._rows[stale_pairs[pairs]]] = True
            self._last = key, torch.from_numpy(np.flatnonzero(is_stale)).to(self._device)
        return self._last[1]
