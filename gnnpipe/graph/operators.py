"""Sparse matrices that layers aggregate with: weighted rows of the graph and their transpose.

Fixed edge weights are computed once from the whole graph's degrees, so a shard or a chunk weighs an
edge exactly as one device would. ``At`` is kept beside ``A`` because the backward pass multiplies
by it; one shard of a symmetric graph needs only one of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from gnnpipe.errors import InputError
from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.graph import Graph, have_same_pattern
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.types import Relation, relation_of
from gnnpipe.ops.spmm import Kernel, embedding_bag

Int64 = npt.NDArray[np.int64]
_KINDS = ("gcn", "gcn-improved", "gcn-loopless", "gcn-outgoing", "mean", "mean-looped", "sum")
WEIGHTED = "-weighted"
"""Suffix of the name of a matrix of the graph's edge weights instead of ones."""
RELATION = "@"
"""Separates the name of a structure from the number of the relation whose edges it has."""
_BLOCK_ENTRIES = 1 << 18
"""Entries of a matrix that are normalised at a time."""
LINEAR_KINDS = (*_KINDS, *(kind + WEIGHTED for kind in _KINDS))

SYMMETRIC_KINDS = ("gcn", "gcn-improved", "gcn-loopless", "sum", "edges", "loops")
"""Matrices that equal their transposes if the graph is symmetric."""

EVERYONE = "everyone"
"""Structure of a mean over all vertices, which every vertex reads; it needs no matrix."""
BY_EDGES = "everyone-by-edges"
"""Structure of a mean over all edges: each vertex counts once for each edge into it."""

SUM = "everyone-sum"
"""Structure of a sum over all vertices, of which each chunk pushes its own part as a single row."""


def weighted_rows(graph: Graph, kind: str) -> sp.csr_array:
    """The aggregation matrix [N, N] of the whole graph, float64.

    ``gcn``: D^-1/2 (A + I) D^-1/2 with D the row sums of A + I, as PyG's ``gcn_norm``;
    ``gcn-improved``: of A + 2 I; ``gcn-loopless``: of A; ``gcn-outgoing``: of A without
    self-loops, D its column sums; ``mean``: A over the number of edges; ``mean-looped``: the same
    of A + I; ``sum``: A; ``edges`` and ``loops``: A and A + I, for convolutions that need both ends
    of an edge. A holds a one for each edge, so parallel edges add up; with the suffix ``WEIGHTED``,
    the edge weights. A + I is without the graph's own self-loops, except that I holds their
    weights. The values of ``edges`` are the edges' numbers.

    With ``RELATION`` and a number at the end: of the edges of that type alone. ``PAIRS``: the pairs
    of a link prediction instead of the edges; the values are their numbers.

    Raises:
        InputError: weights that add up to less than 0 at a vertex, with a norm that takes the root.
    """
    if kind == PAIRS:
        assert graph.pairs is not None, "only a link prediction has pairs"
        return graph.pairs.matrix
    kind, _, relation = kind.partition(RELATION)
    if relation:
        graph = _of_relation(graph, int(relation))
    n = graph.num_vertices
    base = kind.removesuffix(WEIGHTED)
    if kind not in (*LINEAR_KINDS, "edges", "loops"):
        raise ValueError(f"unknown aggregation {kind!r}; one of {LINEAR_KINDS}, 'edges', 'loops'")
    values = None
    if kind == "edges":
        values = np.arange(graph.num_edges, dtype=np.float64)
    elif kind != base:
        assert graph.edge_weight is not None, "the model was recorded with edge weights"
        values = graph.edge_weight.astype(np.float64)
    if base in ("gcn", "gcn-improved", "mean-looped", "loops"):
        adjacency = _with_loops(graph, values, 2.0 if base == "gcn-improved" else 1.0)
    else:
        if base == "gcn-outgoing" and len(graph.self_loops):
            values = None if values is None else np.delete(values, graph.self_loops)
            graph = graph.without_self_loops()
        values = np.ones(graph.num_edges) if values is None else values
        adjacency = sp.csr_array((values, graph.indices, graph.indptr), shape=(n, n))
    counts = np.diff(adjacency.indptr)
    if base.startswith("mean"):
        for rows, entries in _blocks(adjacency.indptr):
            adjacency.data[entries] /= np.repeat(np.maximum(counts[rows], 1.0), counts[rows])
    elif base.startswith("gcn"):
        axis = 0 if base == "gcn-outgoing" else 1
        degree = np.asarray(adjacency.sum(axis=axis))
        if degree.min(initial=0.0) < 0:
            raise InputError(
                f"edge_weight: adds up to {degree.min():.3g} at some vertex, and GCN's norm takes "
                "the root of that (in PyG it is NaN); try weights from 0, or normalize=False"
            )
        root = np.where(degree > 0, 1.0 / np.sqrt(np.where(degree > 0, degree, 1.0)), 0.0)
        for rows, entries in _blocks(adjacency.indptr):
            scale = np.repeat(root[rows], counts[rows])
            scale *= root[adjacency.indices[entries]]
            adjacency.data[entries] *= scale
    return adjacency


def _blocks(indptr: npt.NDArray[Any]) -> Iterator[tuple[slice, slice]]:
    """Runs of rows and their entries, some ``_BLOCK_ENTRIES`` each: temporaries stay small."""
    start = 0
    while start < len(indptr) - 1:
        stop = int(np.searchsorted(indptr, indptr[start] + _BLOCK_ENTRIES, side="right")) - 1
        stop = max(stop, start + 1)
        yield slice(start, stop), slice(int(indptr[start]), int(indptr[stop]))
        start = stop


def edges_into(graph: Graph, kind: str) -> npt.NDArray[np.float64]:
    """Number of edges into each vertex [N], its weight in a mean ``BY_EDGES``."""
    rows = weighted_rows(graph, "sum" + kind.removeprefix(BY_EDGES))
    return np.asarray(rows.sum(axis=1), dtype=np.float64)


def relation_ends(relations: Sequence[Relation], kind: str) -> tuple[str, str]:
    """The types of a structure's source and target vertices."""
    number = kind.partition(RELATION)[2]
    if not number or not relations:  # Or edges of several types between vertices of one.
        return "", ""
    source, _, target = relations[int(number)]
    return source, target


def of_relation(graph: Graph, kind: str) -> Graph:
    """The graph of the edges that a structure has: those of its relation, or all.

    Edge data of a relation has its plain name there: 'edge_attr' for 'edge_attr__0'.
    """
    number = kind.partition(RELATION)[2]
    return _of_relation(graph, int(number)) if number else graph


def _of_relation(graph: Graph, number: int) -> Graph:
    """The edges of one type."""
    assert graph.edge_type is not None, "the model was recorded with relations"
    if graph.types is None:
        return graph.with_edges(graph.edge_type == number)
    own = [field for field in graph.derived if relation_of(field) == number]
    found = graph.reduced_to(own).with_edges(graph.edge_type == number)
    data = {field.partition("__")[0]: found.derived[field] for field in own}
    return replace(found, types=None).with_edge_data(data)


def _with_loops(
    graph: Graph, values: npt.NDArray[np.float64] | None, weight: float
) -> sp.csr_array:
    """A + weight I without the self-loops of the graph, of edge ``values`` (default: ones).

    A vertex whose self-loop has a value keeps that value, as in PyG's ``add_remaining_self_loops``.
    scipy's sum would merge parallel edges.
    """
    n, loops = graph.num_vertices, graph.self_loops
    loop_values = np.full(n, weight)
    if len(loops):
        if values is not None:
            loop_values[graph.indices[loops]] = values[loops]
            values = np.delete(values, loops)
        graph = graph.without_self_loops()
    indptr = graph.indptr
    indices = np.insert(graph.indices, indptr[1:], np.arange(n, dtype=graph.indices.dtype))
    ends = indptr[1:] + np.arange(1, n + 1)
    if values is None:
        looped_values = np.ones(len(indices))
        looped_values[ends - 1] = weight
    else:
        looped_values = np.insert(values, indptr[1:], loop_values)
    looped = sp.csr_array((looped_values, indices, np.append(0, ends)), shape=(n, n))
    looped.sort_indices()
    return looped


def local_rows(rows: sp.csr_array, layout: ShardLayout, into: ShardLayout) -> sp.csr_array:
    """A shard's own rows by ``into``, with the columns of its table by ``layout``: [m, n + h]."""
    if _is_whole(layout, rows.shape[1]) and _is_whole(into, rows.shape[0]):
        if not rows.has_sorted_indices:
            rows = rows.sorted_indices()
        return rows
    number = np.full(rows.shape[1], -1, dtype=np.int64)
    number[layout.own] = np.arange(layout.num_own)
    number[layout.halo] = layout.num_own + np.arange(len(layout.halo))
    own = rows[into.own]
    columns = number[own.indices]
    if columns.min(initial=0) < 0:
        raise InputError(
            "model: forward draws edges that it does not have in evaluation, whose rows shards do "
            "not exchange; try --row-way gather, or --shards 1"
        )
    shape = (into.num_own, layout.num_rows)
    local = sp.csr_array((own.data, columns, own.indptr), shape=shape)
    local.sort_indices()
    return local


def _is_whole(layout: ShardLayout, num_rows: int) -> bool:
    """Whether a shard owns all rows, in their order."""
    return layout.num_own == num_rows and np.array_equal(layout.own, np.arange(num_rows))


@dataclass(frozen=True, eq=False)
class LinearOperator:
    """A and its transpose for one shard: n + h table rows, and m own rows that read them.

    m is n unless source and target vertices have different types.
    """

    forward: RowCSR
    """[m, n + h], A: weights of the table rows that each own row reads."""
    transposed: RowCSR
    """[n + h, m], A's transpose."""
    into_ptr: list[int]
    """[K + 1], the target rows of chunk c are into_ptr[c]:into_ptr[c + 1]."""
    _parts: dict[tuple[int, int], tuple[int, RowCSR]] = field(
        default_factory=dict, init=False, repr=False
    )
    """For each range of rows of the transpose: a set of chunks, and the columns of these chunks.
    All layers of an epoch use the same."""
    _of_chunk: dict[tuple[int, int, int], RowCSR] = field(
        default_factory=dict, init=False, repr=False
    )
    """By range of rows of the transpose and chunk: the columns of the chunk."""

    @classmethod
    def build(
        cls,
        rows: sp.csr_array,
        layout: ShardLayout,
        into: ShardLayout,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel = embedding_bag,
    ) -> LinearOperator:
        """Cut a shard's part out of the whole graph's ``weighted_rows``.

        ``layout``: of the source rows; ``into``: of the target rows.
        """
        local = local_rows(rows, layout, into)
        del rows
        # Rounded before it is copied, to save memory; types of fewer bits are rounded once, later.
        kind = np.float32 if dtype == torch.float32 else np.float64
        values = local.data.astype(kind, copy=False)
        local = sp.csr_array((values, local.indices, local.indptr), shape=local.shape)
        transposed = sp.csr_array(local.T.tocsr())
        transposed.sort_indices()
        forward = RowCSR.from_scipy(local, dtype, device, kernel)
        is_symmetric = have_same_pattern(local, transposed) and np.array_equal(
            local.data, transposed.data
        )
        back = forward if is_symmetric else RowCSR.from_scipy(transposed, dtype, device, kernel)
        return cls(forward, back, into.own_ptr.tolist())

    def of_rows(self, rows: Tensor, into_ptr: list[int]) -> LinearOperator:
        """The operator of some target rows, [m'] ascending; ``into_ptr`` [K + 1] of these rows."""
        forward = self.forward.select(rows)
        return LinearOperator(forward, forward.transpose(), into_ptr)

    def back(self, grads: Tensor, start: int, stop: int, chunks: int) -> Tensor:
        """Rows start:stop of the transpose times ``grads`` [m, F] of some ``chunks`` (a bit mask).

        The rows of other chunks are not read.
        """
        if chunks == (1 << (len(self.into_ptr) - 1)) - 1:
            return self.transposed.matmul(grads, start, stop)
        kept, part = self._parts.get((start, stop), (0, None))
        if part is None or kept != chunks:
            bits = [chunks >> c & 1 for c in range(len(self.into_ptr) - 1)]
            is_kept = torch.tensor(bits, dtype=torch.bool, device=self._chunk_of.device)
            part = self.transposed.keep_columns(start, stop, self._chunk_of, is_kept)
            self._parts[start, stop] = chunks, part
        return part.matmul(grads)

    def back_from(self, chunk: int, grads: Tensor, start: int, stop: int) -> Tensor:
        """Rows start:stop of the transpose times ``grads`` [C, F] of one chunk's target rows."""
        key = start, stop, chunk
        if key not in self._of_chunk:
            columns = self.into_ptr[chunk], self.into_ptr[chunk + 1]
            self._of_chunk[key] = self.transposed.block((start, stop), columns)
        return self._of_chunk[key].matmul(grads)

    def forget(self) -> None:
        """Drop cached parts, after the order of the chunks changed."""
        self._parts.clear()

    @cached_property
    def _chunk_of(self) -> Tensor:
        """[m] int32, chunk of each target row."""
        sizes = torch.tensor(self.into_ptr).diff()
        chunks = torch.arange(len(sizes), dtype=torch.int32)
        return torch.repeat_interleave(chunks, sizes).to(self.forward.indices.device)

    def reads(self, chunk: int) -> Tensor:
        """Table rows that a chunk reads, one entry for each edge."""
        start, stop = self.into_ptr[chunk : chunk + 2]
        return self.forward.indices[
            int(self.forward.indptr[start]) : int(self.forward.indptr[stop])
        ]


@dataclass(frozen=True, eq=False)
class Everyone:
    """All vertices, for a mean over them or over the edges into them."""

    count: int
    """Vertices, or edges."""
    shares: Tensor
    """[K] float64, the share of each chunk in ``count``."""
    weights: Tensor | None = None
    """[n] float64, number of edges into each own row, for a mean over edges."""
    is_sum: bool = False
    """Chunks push single rows that are added up; ``count`` is then 1."""
