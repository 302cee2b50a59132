"""Which vertices are sampled: pilots of the forecast, and rows whose drift is measured.

Both are fixed, even samples, drawn among the vertices as the graph was read, so they are the same
for every number of chunks, shards and stages (law 2).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.chunking import Chunking

__all__ = ["choose_drift_rows", "choose_pilots"]

# Keep the draws apart from others with the same seed.
_PILOT_STREAM = 0x9110
_DRIFT_STREAM = 0xD21F


def choose_pilots(chunking: Chunking, count: int, seed: int) -> npt.NDArray[np.int64]:
    """``count`` rows of the renumbered graph, ascending; all if there are not so many."""
    return _sample(chunking, count, [seed, _PILOT_STREAM])


def choose_drift_rows(chunking: Chunking, seed: int) -> npt.NDArray[np.int64]:
    """Rows [s] of the renumbered graph, ascending: every 32nd, at least 256, at most 2,048.

    Enough for a norm to two digits, and next to nothing to copy.
    """
    count = min(max(len(chunking.perm) // 32, 256), 2048)
    return _sample(chunking, count, [seed, _DRIFT_STREAM])


def _sample(chunking: Chunking, count: int, seed: list[int]) -> npt.NDArray[np.int64]:
    n = len(chunking.perm)
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(seed).choice(n, min(n, count), replace=False)] = True
    return np.flatnonzero(chosen[chunking.perm]).astype(np.int64)
