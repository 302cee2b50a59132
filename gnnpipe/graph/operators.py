"""From a graph to what a layer aggregates with: weighted rows, their transpose, or plain blocks.

Fixed edge weights are computed once from the whole graph's degrees, so a shard or a chunk weighs an
edge exactly as one device would. ``At`` is kept beside ``A`` because the backward pass multiplies
by it; one shard of a symmetric graph needs only one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.graph.types import Relation

__all__ = [
    "EVERYONE", "LINEAR_KINDS", "RELATION", "WEIGHTED", "Block", "Blocks", "EdgeData", "Everyone",
    "LinearOperator", "edge_data_of", "relation_ends", "weighted_rows",
]  # fmt: skip

Int64 = npt.NDArray[np.int64]
EdgeData: TypeAlias = Mapping[str, Tensor]
"""What edges carry, [E, ...] each, by the field of ``Graph``."""
_KINDS = ("gcn", "gcn-loopless", "gcn-outgoing", "mean", "mean-looped", "sum")
WEIGHTED = "-weighted"
"""Ends the name of a matrix that is made of the graph's edge weights in place of ones."""
RELATION = "@"
"""Stands in the name of a structure before the type of the edges that it is made of."""
LINEAR_KINDS = (*_KINDS, *(kind + WEIGHTED for kind in _KINDS))

EVERYONE = "everyone"
"""Every vertex reads the mean over all vertices: no matrix is made of it."""


def weighted_rows(graph: Graph, kind: str) -> sp.csr_array:
    """The aggregation matrix [N, N] of the whole graph, float64.

    ``gcn``: D^-1/2 (A + I) D^-1/2 with D the row sums of A + I, as PyG's ``gcn_norm``;
    ``gcn-loopless``: the same of A; ``gcn-outgoing``: of A with D its column sums; ``mean``:
    A over the number of neighbours; ``mean-looped``: the same of A + I; ``sum``: A; ``edges`` and
    ``loops``: A and A + I, for what needs both ends of an edge. A holds ones; with ``WEIGHTED``
    behind the name, the edge weights. The values of ``edges`` are the edges' numbers.

    ``RELATION`` and a number behind it all: of the edges of that type alone.
    """
    kind, _, relation = kind.partition(RELATION)
    if relation:
        graph = _of_relation(graph, int(relation))
    n = graph.num_vertices
    base = kind.removesuffix(WEIGHTED)
    values = np.ones(graph.num_edges)
    if kind == "edges":
        values = np.arange(graph.num_edges, dtype=np.float64)
    elif kind != base:
        assert graph.edge_weight is not None, "the model was recorded with edge weights"
        values = graph.edge_weight.astype(np.float64)
    adjacency = sp.csr_array((values, graph.indices, graph.indptr), shape=(n, n))
    if base in ("gcn", "mean-looped", "loops"):
        adjacency = _with_loops(adjacency)
    elif kind not in (*LINEAR_KINDS, "edges"):
        raise ValueError(f"unknown aggregation {kind!r}; one of {LINEAR_KINDS}, 'edges', 'loops'")
    counts = np.diff(adjacency.indptr)
    if base.startswith("mean"):
        adjacency.data /= np.repeat(np.maximum(counts, 1.0), counts)
    elif base.startswith("gcn"):
        axis = 0 if base == "gcn-outgoing" else 1
        degree = np.asarray(adjacency.sum(axis=axis))
        root = np.where(degree > 0, 1.0 / np.sqrt(np.where(degree > 0, degree, 1.0)), 0.0)
        adjacency.data *= np.repeat(root, counts) * root[adjacency.indices]
    return adjacency


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


def _with_loops(adjacency: sp.csr_array) -> sp.csr_array:
    """A + I; scipy's sum would merge parallel edges."""
    n = adjacency.shape[0]
    counts = np.diff(adjacency.indptr)
    own = np.arange(n)
    looped = sp.csr_array(
        (
            np.insert(adjacency.data, adjacency.indptr[1:], 1.0),
            np.insert(adjacency.indices, adjacency.indptr[1:], own),
            np.concatenate([[0], np.cumsum(counts + 1)]),
        ),
        shape=(n, n),
    )
    looped.sort_indices()
    return looped


def _local(rows: sp.csr_array, layout: ShardLayout, into: ShardLayout) -> sp.csr_array:
    """The rows that a shard owns in ``into``, columns as in ``layout``: [m, n + h]."""
    number = np.full(rows.shape[1], -1, dtype=np.int64)
    number[layout.own] = np.arange(layout.num_own)
    number[layout.halo] = layout.num_own + np.arange(len(layout.halo))
    own = rows[into.own]
    shape = (into.num_own, layout.num_rows)
    local = sp.csr_array((own.data, number[own.indices], own.indptr), shape=shape)
    local.sort_indices()
    return local


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

    @classmethod
    def build(
        cls,
        rows: sp.csr_array,
        layout: ShardLayout,
        into: ShardLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LinearOperator:
        """Cut a shard's part out of the whole graph's ``weighted_rows``.

        ``layout`` of the rows that are read, ``into`` of those that read.
        """
        local = _local(rows, layout, into)
        turned = sp.csr_array(local.T.tocsr())
        turned.sort_indices()
        forward = RowCSR.from_scipy(local, dtype, device)
        same = (
            local.shape == turned.shape
            and np.array_equal(local.indptr, turned.indptr)
            and np.array_equal(local.indices, turned.indices)
            and np.array_equal(local.data, turned.data)
        )
        other = forward if same else RowCSR.from_scipy(turned, dtype, device)
        return cls(forward, other, into.own_ptr.tolist())


@dataclass(frozen=True, eq=False)
class Everyone:
    """All vertices, for a mean over them."""

    num_vertices: int
    shares: Tensor
    """[K] float64, the share of the vertices that is in each chunk."""


@dataclass(frozen=True, eq=False)
class Block:
    """The edges into one chunk's own rows, for convolutions that need both ends. C own, H halo.

    Where rows of one type read those of another, all rows that are read are halo rows.
    """

    edge_index: Tensor
    """[2, E_c] int64: source in 0..C+H-1 (the C own rows first, if any are), target in 0..C-1."""
    halo_rows: Tensor
    """[H] int64, local table row of each halo row of the block."""
    same_chunk: Tensor
    """[H, 1] bool: the halo row belongs to the same chunk (another shard's part of it)."""
    size: tuple[int, int]
    """(rows that are read: C + H, or H of another type; rows that read: C)."""
    keys: Tensor | None = None
    """[C + H] int32, dropout key of each row; pilots have none, for nothing of them is dropped."""
    into_keys: Tensor | None = None
    """[C] of the rows that read, if they are of another type."""
    edge_data: EdgeData = field(default_factory=dict)
    """[E_c, ...] what the edges carry, by the field of ``Graph``."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """One ``Block`` per chunk of a shard."""

    chunks: tuple[Block, ...]
    local: sp.csr_array
    """[n, n + h], the shard's own rows of the structure they were cut from; its values are the
    edges' numbers where edges carry data."""
    edge_data: EdgeData
    """What all edges of the graph carry, in the number type of the run."""
    is_square: bool
    """Rows of one type read each other, and a block begins with the chunk's own."""

    @classmethod
    def build(
        cls,
        rows: sp.csr_array,
        layout: ShardLayout,
        into: ShardLayout,
        keys: tuple[Tensor, Tensor],
        edge_data: EdgeData,
    ) -> Blocks:
        """Cut a shard's blocks out of the whole graph's structure.

        ``layout`` of the rows that are read, ``into`` of those that read; ``keys`` int32, on the
        rank's device: the dropout keys of the rows [n + h] of the one and [m] of the other.
        """
        local = _local(rows, layout, into)
        blocks = (_block(local, layout, into, c, keys, edge_data) for c in range(layout.num_chunks))
        return cls(tuple(blocks), local, edge_data, layout is into)

    def select(self, rows: Tensor) -> Block:
        """The edges into some own rows [P]; every neighbour counts as a halo row of the block."""
        part = self.local[rows.cpu().numpy()]
        halo, source = np.unique(part.indices.astype(np.int64), return_inverse=True)
        target = np.repeat(np.arange(len(rows)), np.diff(part.indptr))
        before = len(rows) if self.is_square else 0
        return Block(
            torch.from_numpy(np.stack([source + before, target])).to(rows.device),
            torch.from_numpy(halo).to(rows.device),
            torch.zeros(len(halo), 1, dtype=torch.bool, device=rows.device),
            (before + len(halo), len(rows)),
            edge_data=_of_edges(self.edge_data, part.data, rows.device),
        )


def edge_data_of(graph: Graph, dtype: torch.dtype) -> EdgeData:
    """What the edges of a graph carry, as tensors: floating numbers in ``dtype``."""
    found = {name: torch.from_numpy(values) for name, values in graph.edge_data.items()}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.items()}


def _of_edges(
    edge_data: EdgeData, numbers: npt.NDArray[np.float64], device: torch.device
) -> EdgeData:
    chosen = torch.from_numpy(numbers.astype(np.int64))
    return {name: values[chosen].to(device) for name, values in edge_data.items()}


def _block(
    local: sp.csr_array,
    layout: ShardLayout,
    into: ShardLayout,
    chunk: int,
    keys: tuple[Tensor, Tensor],
    edge_data: EdgeData,
) -> Block:
    device = keys[0].device
    first, last = int(into.own_ptr[chunk]), int(into.own_ptr[chunk + 1])
    start, stop = int(layout.own_ptr[chunk]), int(layout.own_ptr[chunk + 1])
    is_square = layout is into
    count = stop - start if is_square else 0
    entries = slice(local.indptr[first], local.indptr[last])
    columns = local.indices[entries].astype(np.int64)
    target = np.repeat(np.arange(last - first), np.diff(local.indptr[first : last + 1]))
    inside = (columns >= start) & (columns < start + count)
    halo = np.unique(columns[~inside])
    source = np.where(inside, columns - start, count + np.searchsorted(halo, columns))
    low, high = layout.num_own + layout.halo_ptr[chunk : chunk + 2]
    same = ((halo >= low) & (halo < high)) | ((halo >= start) & (halo < stop))
    halo_rows = torch.from_numpy(halo).to(device)
    return Block(
        torch.from_numpy(np.stack([source, target])).to(device),
        halo_rows,
        torch.from_numpy(same[:, None]).to(device),
        (count + len(halo), last - first),
        torch.cat([keys[0][start : start + count], keys[0][halo_rows]]),
        None if is_square else keys[1][first:last],
        _of_edges(edge_data, local.data[entries], device),
    )
