"""Which vertices are sampled: pilots of the forecast, and rows whose drift is measured.

Both are fixed, even samples, drawn among the vertices as the graph was read, so they are the same
for every number of chunks, shards and stages (law 2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray

__all__ = ["choose_drift_rows", "choose_pilots"]

# Keep the draws apart from others with the same seed.
_PILOT_STREAM = 0x9110
_DRIFT_STREAM = 0xD21F


def choose_pilots(
    chunking: Chunking, counts: Mapping[str, int], types: Mapping[str, BoolArray], seed: int
) -> npt.NDArray[np.int64]:
    """``counts`` rows of each type of the renumbered graph, all if there are not so many.

    Ascending. ``types``: [N] by type, which rows are of it.
    """
    found = [np.empty(0, dtype=np.int64)]
    for place, (name, count) in enumerate(counts.items()):
        among = np.sort(chunking.perm[types[name]])
        key = [seed, _PILOT_STREAM] + ([place] if name else [])
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
