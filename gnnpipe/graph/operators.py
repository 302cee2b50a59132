"""From a graph to what a layer aggregates with: weighted rows and their transpose.

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
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.types import Relation
from gnnpipe.ops.spmm import Kernel, embedding_bag

__all__ = [
    "BY_EDGES",
    "EVERYONE",
    "LINEAR_KINDS",
    "RELATION",
    "WEIGHTED",
    "Everyone",
    "LinearOperator",
    "edges_into",
    "local_rows",
    "relation_ends",
    "weighted_rows",
]

Int64 = npt.NDArray[np.int64]
_KINDS = ("gcn", "gcn-improved", "gcn-loopless", "gcn-outgoing", "mean", "mean-looped", "sum")
WEIGHTED = "-weighted"
"""Ends the name of a matrix that is made of the graph's edge weights in place of ones."""
RELATION = "@"
"""Stands in the name of a structure before the type of the edges that it is made of."""
_BLOCK_ENTRIES = 1 << 18
"""Entries of a matrix that are normalised at a time."""
LINEAR_KINDS = (*_KINDS, *(kind + WEIGHTED for kind in _KINDS))

EVERYONE = "everyone"
"""Every vertex reads the mean over all vertices: no matrix is made of it."""
BY_EDGES = "everyone-by-edges"
"""The same, a vertex counted as often as there are edges into it: a mean over all edges."""


def weighted_rows(graph: Graph, kind: str) -> sp.csr_array:
    """The aggregation matrix [N, N] of the whole graph, float64.

    ``gcn``: D^-1/2 (A + I) D^-1/2 with D the row sums of A + I, as PyG's ``gcn_norm``;
    ``gcn-improved``: of A + 2 I; ``gcn-loopless``: of A; ``gcn-outgoing``: of A with D its column
    sums; ``mean``: A over the number of neighbours; ``mean-looped``: the same of A + I; ``sum``: A;
    ``edges`` and ``loops``: A and A + I, for what needs both ends of an edge. A holds ones; with
    ``WEIGHTED`` behind the name, the edge weights. The values of ``edges`` are the edges' numbers.

    ``RELATION`` and a number behind it all: of the edges of that type alone. ``PAIRS``: not of
    edges but of the pairs of a link prediction; the values are their numbers.

    Raises:
        InputError: weights that add up to less than 0, where a root is taken of that.
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
    """Weight of each vertex in a mean ``BY_EDGES`` [N]: its edges, of a ``RELATION`` or all."""
    rows = weighted_rows(graph, "sum" + kind.removeprefix(BY_EDGES))
    counts: npt.NDArray[np.float64] = np.asarray(rows.sum(axis=1), dtype=np.float64)
    return counts


def relation_ends(relations: Sequence[Relation], kind: str) -> tuple[str, str]:
    """The types of the vertices that a structure reads, and of those that read."""
    number = kind.partition(RELATION)[2]
    if not number or not relations:  # Or edges of several types between vertices of one.
        return "", ""
    source, _, target = relations[int(number)]
    return source, target


def _of_relation(graph: Graph, number: int) -> Graph:
    """The edges of one type."""
    assert graph.edge_type is not None, "the model was recorded with relations"
    chosen = graph.edge_type == number
    before = np.concatenate([[0], np.cumsum(chosen)])
    data: dict[str, Any] = {name: values[chosen] for name, values in graph.edge_data.items()}
    return replace(
        graph, indptr=before[graph.indptr], indices=graph.indices[chosen], types=None, **data
    )


def _with_loops(
    graph: Graph, values: npt.NDArray[np.float64] | None, weight: float
) -> sp.csr_array:
    """A + weight I, of edge ``values`` (default: ones); scipy's sum would merge parallel edges."""
    n, indptr = graph.num_vertices, graph.indptr
    indices = np.insert(graph.indices, indptr[1:], np.arange(n, dtype=graph.indices.dtype))
    ends = indptr[1:] + np.arange(1, n + 1)
    if values is None:
        looped_values = np.ones(len(indices))
        looped_values[ends - 1] = weight
    else:
        looped_values = np.insert(values, indptr[1:], weight)
    looped = sp.csr_array((looped_values, indices, np.append(0, ends)), shape=(n, n))
    looped.sort_indices()
    return looped


def local_rows(rows: sp.csr_array, layout: ShardLayout, into: ShardLayout) -> sp.csr_array:
    """The rows that a shard owns in ``into``, columns as in ``layout``: [m, n + h]."""
    if _is_whole(layout, rows.shape[1]) and _is_whole(into, rows.shape[0]):
        if not rows.has_sorted_indices:
            rows = rows.sorted_indices()
        return rows
    number = np.full(rows.shape[1], -1, dtype=np.int64)
    number[layout.own] = np.arange(layout.num_own)
    number[layout.halo] = layout.num_own + np.arange(len(layout.halo))
    own = rows[into.own]
    shape = (into.num_own, layout.num_rows)
    local = sp.csr_array((own.data, number[own.indices], own.indptr), shape=shape)
    local.sort_indices()
    return local


def _is_whole(layout: ShardLayout, num_rows: int) -> bool:
    """Whether a shard owns all rows, in their order."""
    return layout.num_own == num_rows and np.array_equal(layout.own, np.arange(num_rows))


@dataclass(frozen=True, eq=False)
class LinearOperator:
    """A and its transpose for one shard: table rows n + h, and m own rows that read them.

    m is n unless rows of one type read those of another.
    """

    forward: RowCSR
    """[m, n + h]: row v weighs the rows that v reads."""
    transposed: RowCSR
    """[n + h, m]: row u weighs the own rows that read u."""
    into_ptr: list[int]
    """[K + 1], the rows of chunk c that read are into_ptr[c]:into_ptr[c + 1]."""
    _parts: dict[tuple[int, int], tuple[int, RowCSR]] = field(
        default_factory=dict, init=False, repr=False
    )
    """By range of rows of the transpose its entries of some chunks, and the chunks: all layers of
    an epoch ask for the same ones."""

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

        ``layout`` of the rows that are read, ``into`` of those that read.
        """
        local = local_rows(rows, layout, into)
        del rows
        # Rounded before it is copied, to save memory; types of fewer bits are rounded once, later.
        kind = np.float32 if dtype == torch.float32 else np.float64
        values = local.data.astype(kind, copy=False)
        local = sp.csr_array((values, local.indices, local.indptr), shape=local.shape)
        turned = sp.csr_array(local.T.tocsr())
        turned.sort_indices()
        forward = RowCSR.from_scipy(local, dtype, device, kernel)
        same = (
            local.shape == turned.shape
            and np.array_equal(local.indptr, turned.indptr)
            and np.array_equal(local.indices, turned.indices)
            and np.array_equal(local.data, turned.data)
        )
        other = forward if same else RowCSR.from_scipy(turned, dtype, device, kernel)
        return cls(forward, other, into.own_ptr.tolist())

    def of_rows(self, rows: Tensor, into_ptr: list[int]) -> LinearOperator:
        """The operator of some target rows, [m'] ascending; ``into_ptr`` [K + 1] of these rows."""
        forward = self.forward.select(rows)
        return LinearOperator(forward, forward.turned(), into_ptr)

    def back(self, grads: Tensor, start: int, stop: int, chunks: int) -> Tensor:
        """Rows start:stop of the transpose times ``grads`` [m, F] of some ``chunks``.

        A bit for each; what stands in the rows of other chunks is not read.
        """
        if chunks == (1 << (len(self.into_ptr) - 1)) - 1:
            return self.transposed.matmul(grads, start, stop)
        kept, part = self._parts.get((start, stop), (0, None))
        if part is None or kept != chunks:
            bits = [chunks >> c & 1 for c in range(len(self.into_ptr) - 1)]
            is_kept = torch.tensor(bits, dtype=torch.bool, device=self._chunk_of.device)
            part = self.transposed.only(start, stop, self._chunk_of, is_kept)
            self._parts[start, stop] = chunks, part
        return part.matmul(grads)

    def forget(self) -> None:
        """The chunks stand in another order now."""
        self._parts.clear()

    @cached_property
    def _chunk_of(self) -> Tensor:
        """[m] int32, of the rows that read."""
        sizes = torch.tensor(self.into_ptr).diff()
        chunks = torch.arange(len(sizes), dtype=torch.int32)
        return torch.repeat_interleave(chunks, sizes).to(self.forward.indices.device)

    def reads(self, chunk: int) -> Tensor:
        """Table rows that a chunk reads, once for each edge."""
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
    """[K] float64, the share of them that is in each chunk."""
    weights: Tensor | None = None
    """[n] float64, the edges into each own row, if it is a mean over edges."""
