"""Which vertices are pilots: a fixed, even sample whose rows show how all rows move.

The sample is drawn among the vertices as the graph was read, so it is the same for every number of
chunks, shards and stages (law 2).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.chunking import Chunking

__all__ = ["choose_pilots"]

_STREAM = 0x9110
"""Keeps the draw apart from others with the same seed."""


def choose_pilots(chunking: Chunking, share: float, width: int, seed: int) -> npt.NDArray[np.int64]:
    """Rows [P] of the renumbered graph, ascending: ``share`` of the vertices.

    At least four for each of the ``width`` + 1 numbers that a column of the map has, so that the
    fit is well determined; all vertices if there are not so many.
    """
    n = len(chunking.perm)
    count = min(n, max(math.ceil(share * n), 4 * (width + 1)))
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng([seed, _STREAM]).choice(n, count, replace=False)] = True
    return np.flatnonzero(chosen[chunking.perm]).astype(np.int64)
