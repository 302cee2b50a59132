"""The order of the vertices inside a chunk: those that read the same rows stand together.

The sparse product is bound by the rows that it gathers from memory. A row that was read a moment
ago is still in the cache; so vertices of one neighbourhood should be neighbours in memory, too,
and hubs, which everyone reads, should share few pages. What that is worth is measured:
``docs/benchmarks/order.md``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.graph.graph import IntArray
from gnnpipe.graph.partition import PARTITIONERS

__all__ = ["locality_rank", "resolve_order"]

_SMALL = 1 << 14
"""Below so many vertices the rows of a layer are in the cache anyhow."""
_PART, _MOST = 512, 256
"""Vertices in a part, and most parts: more take METIS longer and bring nothing more."""


def resolve_order(order: str, partitioner: str, num_vertices: int) -> str:
    """'metis' or 'given', for --order; who cuts otherwise wants no METIS."""
    if order != "auto":
        return order
    return "metis" if partitioner == "metis" and num_vertices >= _SMALL else "given"


def locality_rank(
    adjacency: sp.csr_array, work: IntArray, order: str, seed: int
) -> npt.NDArray[np.int64]:
    """[N], where each vertex would stand if there were no chunks; ``order`` is resolved.

    By small parts of METIS, and in each of them by degree, the largest first. ``adjacency`` [N, N]
    as from ``structure``, ``work`` [N] as from ``vertex_work``.
    """
    n = len(work)
    rank = np.arange(n, dtype=np.int64)
    if order == "given":
        return rank
    parts = max(1, min(_MOST, n // _PART))
    part = PARTITIONERS["metis"](adjacency, work, parts, least=0, seed=seed, objective="edges")
    rank[np.lexsort((-np.diff(adjacency.indptr), part))] = np.arange(n)
    return rank
