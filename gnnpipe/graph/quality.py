"""Quality of a chunking: stale edges, rows sent between shards, balance of work.

Edges between chunks can be stale; graph parallelism sends the M rows that one shard reads from
another, 2 L M H 4 bytes per epoch; and all ranks wait for the heaviest chunk or cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.pairs import PAIRS, Pairs
from gnnpipe.graph.partition import vertex_work


@dataclass(frozen=True)
class CutQuality:
    """Measures of one chunking of one graph; shares are fractions of 1."""

    chunks: int
    shards: int
    chunk_cut_edges: int
    """Directed edges between two chunks."""
    chunk_cut_share: float
    shard_cut_edges: int
    """Directed edges between two shards."""
    shard_cut_share: float
    halo_share: float
    """Mean over the chunks of rows read from other chunks / own rows."""
    crossings: int
    """M: pairs of a vertex and another shard that reads it."""
    crossings_by_type: Mapping[str, int]
    """M by the type of the vertex, '' if there is only one; ``PAIRS``: rows read over pairs."""
    crossings_per_vertex: float
    """M / N."""
    chunk_balance: float
    """Work of the heaviest chunk / mean."""
    cell_balance: float
    """Work of the heaviest (chunk, shard) / mean."""

    def lines(self) -> list[str]:
        """The report, one line for chunks and one for shards."""
        out = []
        if self.chunks > 1:
            out.append(
                f"chunks: {self.chunks}, edge cut {self.chunk_cut_edges:,} "
                f"({self.chunk_cut_share:.1%}), halo {self.halo_share:.2f} rows per own row, "
                f"balance {self.chunk_balance:.2f}"
            )
        if self.shards > 1:
            out.append(
                f"shards: {self.shards}, edge cut {self.shard_cut_edges:,} "
                f"({self.shard_cut_share:.1%}), rows read from other shards {self.crossings:,} "
                f"(M/N {self.crossings_per_vertex:.2f}), balance {self.cell_balance:.2f}"
            )
            if PAIRS in self.crossings_by_type:
                rows = self.crossings_by_type[PAIRS]
                out.append(f"pairs: final rows read from other shards {rows:,}")
        return out or ["one chunk, one shard: nothing is cut"]


def cut_quality(graph: Graph, chunking: Chunking) -> CutQuality:
    """Measure ``chunking`` on ``graph`` as it was before renumbering."""
    n, e = graph.num_vertices, max(graph.num_edges, 1)
    chunk = chunking.chunk_of_row()[chunking.inverse]
    shard = chunking.shard_of_row()[chunking.inverse]
    chunk_edges, halo = _crossings(graph, chunk)
    shard_edges, pairs = _crossings(graph, shard)
    work = vertex_work(graph)
    cell = chunk.astype(np.int64) * chunking.shards + shard
    halo_rows = np.bincount(halo // n, minlength=chunking.chunks)
    return CutQuality(
        chunks=chunking.chunks,
        shards=chunking.shards,
        chunk_cut_edges=chunk_edges,
        chunk_cut_share=chunk_edges / e,
        shard_cut_edges=shard_edges,
        shard_cut_share=shard_edges / e,
        halo_share=float((halo_rows / chunking.cell_sizes.sum(axis=1)).mean()),
        crossings=len(pairs),
        crossings_by_type={t: int(chosen[pairs % n].sum()) for t, chosen in graph.row_types.items()}
        | ({PAIRS: len(_crossings(graph.pairs, shard)[1])} if graph.pairs is not None else {}),
        crossings_per_vertex=len(pairs) / n,
        chunk_balance=_balance(np.bincount(chunk, work)),
        cell_balance=_balance(np.bincount(cell, work)),
    )


def chunk_edges(graph: Graph, chunking: Chunking) -> sp.coo_array:
    """[K, K] edge counts by (reading chunk, chunk read) of a graph renumbered by ``chunking``."""
    chunk, k = chunking.chunk_of_row(), chunking.chunks
    rows, columns, counts = [], [], []
    for c in range(k):
        start, stop = graph.indptr[np.searchsorted(chunk, [c, c + 1])]
        count = np.bincount(chunk[graph.indices[start:stop]], minlength=k)
        read = np.flatnonzero(count)
        rows.append(np.full(len(read), c))
        columns.append(read)
        counts.append(count[read])
    data = np.concatenate(counts)
    return sp.coo_array((data, (np.concatenate(rows), np.concatenate(columns))), shape=(k, k))


def crossing_degrees(graph: Graph, chunking: Chunking) -> npt.NDArray[np.int64]:
    """Number of edges into each vertex from other chunks, [N]."""
    chunk = chunking.chunk_of_row()
    target = np.repeat(np.arange(graph.num_vertices), graph.degrees)
    crosses = chunk[target] != chunk[graph.indices]
    return np.bincount(target[crosses], minlength=graph.num_vertices)


def copied_rows(graph: Graph, chunking: Chunking) -> int:
    """Rows that chunks read from others, once for each chunk, of a renumbered graph."""
    return len(_crossings(graph, chunking.chunk_of_row())[1])


def stale_share(counts: sp.coo_array, order: Sequence[int]) -> float:
    """Share of the edges (``counts`` as from ``chunk_edges``) that are stale in this chunk order.

    A chunk reads rows of earlier chunks live, and rows of later chunks stale.
    """
    position = np.empty(len(order), dtype=np.int64)
    position[np.asarray(order)] = np.arange(len(order))
    reading, read = counts.coords
    stale = counts.data[position[read] > position[reading]].sum()
    return float(stale / max(counts.data.sum(), 1))


def _crossings(
    graph: Graph | Pairs, group: npt.NDArray[np.int32]
) -> tuple[int, npt.NDArray[np.int64]]:
    """Edges between groups, and each (reading group, vertex read) once as group * N + vertex.

    ``group`` [N] is the group of each vertex.
    """
    reading = np.repeat(group, graph.degrees)
    crosses = np.flatnonzero(reading != group[graph.indices])
    pair = reading[crosses].astype(np.int64) * graph.num_vertices + graph.indices[crosses]
    return len(crosses), np.unique(pair)


def _balance(work: npt.NDArray[Any]) -> float:
    return float(work.max() / work.mean())
