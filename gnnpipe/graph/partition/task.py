"""The input of a partitioner, and the registry of partitioners.

An epoch waits for its slowest chunk and its slowest shard, and pays for every row that a part reads
from another part. So parts are balanced by work, not by the number of vertices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.graph.graph import Graph, IntArray, have_same_pattern
from gnnpipe.registry import Registry


class Objective(StrEnum):
    """The quantity that a partitioner keeps small."""

    EDGES = "edges"
    """Edges between parts."""
    ROWS = "rows"
    """Rows that parts read from each other (METIS: communication volume)."""


@dataclass(frozen=True, eq=False)
class PartitionTask:
    """A graph of N vertices to be split into parts of a given work."""

    adjacency: sp.csr_array
    """[N, N] int8, as from ``symmetric_pattern``."""
    work: IntArray
    """[N], as from ``vertex_work``."""
    parts: int
    shares: tuple[float, ...] | None = None
    """[parts], the share of each part in the work, summing to 1; ``None``: equal shares."""
    least: int = 1
    """Vertices that every part has at least; parts * least <= N."""
    seed: int = 0
    objective: Objective = Objective.EDGES


Parts: TypeAlias = npt.NDArray[np.int32]

Partitioner: TypeAlias = Callable[[PartitionTask], Parts]
"""Returns the part of each vertex, int32 [N] in [0, parts); no part has fewer than ``least``."""

PARTITIONERS: Registry[Partitioner] = Registry("partitioner")

METIS_BASED = frozenset({"metis", "mixed"})
"""Partitioners that call METIS."""


def vertex_work(graph: Graph) -> npt.NDArray[np.int64]:
    """Twice the work of each vertex [N], which is 50 + its degree (GNNPipe's weight).

    The constant stands for the dense products, the degree for the aggregation. Forward, a vertex
    costs the rows it reads; backward, the rows that read it: the degree is the mean of the two,
    and the factor two keeps it whole.
    """
    readers = np.bincount(graph.indices, minlength=graph.num_vertices)
    return np.asarray(100 + graph.degrees + readers, dtype=np.int64)


def symmetric_pattern(graph: Graph) -> sp.csr_array:
    """The symmetric pattern of the edges without self-loops, [N, N] int8, as METIS needs it.

    A directed edge becomes undirected: an edge between parts costs a row in either direction.
    """
    n = graph.num_vertices
    a = sp.csr_array((np.ones(graph.num_edges, np.int8), graph.indices, graph.indptr), shape=(n, n))
    if len(graph.self_loops) or not a.has_canonical_format:
        a.data[graph.self_loops] = 0
        a = a.copy()  # the graph's own arrays stay as they are
        a.eliminate_zeros()
        a.sum_duplicates()
        a.data[:] = 1
    transposed = a.T.tocsr()
    if have_same_pattern(a, transposed):
        return a
    both = sp.csr_array(a + transposed)
    both.data[:] = 1
    return both
