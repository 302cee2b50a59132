"""The order of the vertices inside a chunk: neighbours close together in memory (--order)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.graph.graph import IntArray
from gnnpipe.graph.partition import METIS_BASED, PARTITIONERS, PartitionTask

_SMALL_GRAPH = 1 << 14
"""Vertices below which the rows of a layer are in the processor's cache in any order."""
_PART_VERTICES = 512
_MOST_PARTS = 256
"""More parts take METIS longer and gain nothing."""


_NUMBERS_PAID_BACK = 10_000
"""Aggregated numbers per edge whose faster products, forward and backward, take back the time of
METIS: the middle of what docs/benchmarks/order.md shows for six graphs."""


def pays_back(epochs: int, width: int, shards: int) -> bool:
    """Whether the order by METIS saves its own time within a run.

    METIS costs a time per edge once. An epoch aggregates ``width`` numbers per edge, divided among
    the shards, in all layers together.
    """
    return epochs * width >= _NUMBERS_PAID_BACK * shards


def resolve_order(order: str, partitioner: str, num_vertices: int) -> str:
    """'metis' or 'given', for --order; 'auto' uses METIS only where the partitioner does."""
    if order != "auto":
        return order
    return "metis" if partitioner in METIS_BASED and num_vertices >= _SMALL_GRAPH else "given"


def parts_of_order(num_vertices: int) -> int:
    """The number of METIS parts that the order is made of."""
    return max(1, min(_MOST_PARTS, num_vertices // _PART_VERTICES))


def locality_rank(
    adjacency: sp.csr_array, work: IntArray, order: str, seed: int
) -> npt.NDArray[np.int64]:
    """The position [N] of each vertex in the whole graph's order; ``order`` is resolved.

    'metis': by small METIS parts, and inside a part by degree, the largest first. ``adjacency``
    [N, N] and ``work`` [N] as in ``PartitionTask``.
    """
    n = len(work)
    rank = np.arange(n, dtype=np.int64)
    if order == "given":
        return rank
    parts = parts_of_order(n)
    part = PARTITIONERS["metis"](PartitionTask(adjacency, work, parts, least=0, seed=seed))
    rank[np.lexsort((-np.diff(adjacency.indptr), part))] = np.arange(n)
    return rank
