"""From a graph to what a layer aggregates with: weighted rows, their transpose, or plain blocks.

Fixed edge weights are computed once from the whole graph's degrees, so a shard or a chunk weighs an
edge exactly as one device would. ``At`` is kept beside ``A`` because the backward pass multiplies
by it; one shard of a symmetric graph needs only one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout

__all__ = [
    "EVERYONE", "LINEAR_KINDS", "Block", "Blocks", "Everyone", "LinearOperator", "weighted_rows",
]  # fmt: skip

Int64 = npt.NDArray[np.int64]
LINEAR_KINDS = ("gcn", "gcn-loopless", "gcn-outgoing", "mean", "mean-looped", "sum")


EVERYONE = "everyone"
"""Every vertex reads the mean over all vertices: no matrix is made of it."""


def weighted_rows(graph: Graph, kind: str) -> sp.csr_array:
    """The aggregation matrix [N, N] of the whole graph, float64.

    ``gcn``: D^-1/2 (A + I) D^-1/2 with D the row sums of A + I, as PyG's ``gcn_norm``;
    ``gcn-loopless``: the same of A; ``gcn-outgoing``: of A with D its column sums; ``mean``:
    D^-1 A; ``mean-looped``: the same of A + I; ``sum``: A; ``edges`` and ``loops``: A and A + I,
    for what needs both ends of an edge.
    """
    n = graph.num_vertices
    ones = np.ones(graph.num_edges)
    adjacency = sp.csr_array((ones, graph.indices, graph.indptr), shape=(n, n))
    if kind in ("gcn", "mean-looped", "loops"):
        adjacency = sp.csr_array(adjacency + sp.eye_array(n, format="csr"))
        adjacency.sort_indices()
    elif kind not in (*LINEAR_KINDS, "edges"):
        raise ValueError(f"unknown aggregation {kind!r}; one of {LINEAR_KINDS}, 'edges', 'loops'")
    counts = np.diff(adjacency.indptr)
    if kind.startswith("mean"):
        adjacency.data = np.repeat(1.0 / np.maximum(counts, 1.0), counts)
    elif kind.startswith("gcn"):
        columns = np.bincount(adjacency.indices, minlength=n)
        degree = columns if kind == "gcn-outgoing" else counts
        root = np.where(degree > 0, 1.0 / np.sqrt(np.maximum(degree, 1.0)), 0.0)
        adjacency.data = np.repeat(root, counts) * root[adjacency.indices]
    return adjacency


def _local(rows: sp.csr_array, layout: ShardLayout) -> sp.csr_array:
    """The own rows of a shard with columns in its local numbering, [n, n + h]."""
    number = np.full(rows.shape[1], -1, dtype=np.int64)
    number[layout.own] = np.arange(layout.num_own)
    number[layout.halo] = layout.num_own + np.arange(len(layout.halo))
    own = rows[layout.own]
    shape = (layout.num_own, layout.num_rows)
    local = sp.csr_array((own.data, number[own.indices], own.indptr), shape=shape)
    local.sort_indices()
    return local


@dataclass(frozen=True, eq=False)
class LinearOperator:
    """A and its transpose for one shard: own rows n, table rows n + h."""

    forward: RowCSR
    """[n, n + h]: row v weighs the rows that v reads."""
    transposed: RowCSR
    """[n + h, n]: row u weighs the own rows that read u."""

    @classmethod
    def build(
        cls, rows: sp.csr_array, layout: ShardLayout, dtype: torch.dtype, device: torch.device
    ) -> LinearOperator:
        """Cut a shard's part out of the whole graph's ``weighted_rows``."""
        local = _local(rows, layout)
        turned = sp.csr_array(local.T.tocsr())
        turned.sort_indices()
        forward = RowCSR.from_scipy(local, dtype, device)
        same = (
            local.shape == turned.shape
            and np.array_equal(local.indptr, turned.indptr)
            and np.array_equal(local.indices, turned.indices)
            and np.array_equal(local.data, turned.data)
        )
        return cls(forward, forward if same else RowCSR.from_scipy(turned, dtype, device))


@dataclass(frozen=True, eq=False)
class Everyone:
    """All vertices, for a mean over them."""

    num_vertices: int
    shares: Tensor
    """[K] float64, the share of the vertices that is in each chunk."""


@dataclass(frozen=True, eq=False)
class Block:
    """The edges into one chunk's own rows, for convolutions that need both ends. C own, H halo."""

    edge_index: Tensor
    """[2, E_c] int64: source in 0..C+H-1 (the C own rows first), target in 0..C-1."""
    halo_rows: Tensor
    """[H] int64, local table row of each halo row of the block."""
    same_chunk: Tensor
    """[H, 1] bool: the halo row belongs to the same chunk (another shard's part of it)."""
    size: tuple[int, int]
    """(C + H, C)."""
    keys: Tensor | None = None
    """[C + H] int32, dropout key of each row; pilots have none, for nothing of them is dropped."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """One ``Block`` per chunk of a shard."""

    chunks: tuple[Block, ...]
    local: sp.csr_array
    """[n, n + h], the shard's own rows of the structure they were cut from."""

    @classmethod
    def build(cls, rows: sp.csr_array, layout: ShardLayout, keys: Tensor) -> Blocks:
        """Cut a shard's blocks out of the whole graph's structure (values are ignored).

        ``keys`` [n + h] int32, on the rank's device: the dropout key of each local row.
        """
        local = _local(rows, layout)
        return cls(tuple(_block(local, layout, c, keys) for c in range(layout.num_chunks)), local)

    def select(self, rows: Tensor) -> Block:
        """The edges into some own rows [P]; every neighbour counts as a halo row of the block."""
        part = self.local[rows.cpu().numpy()]
        halo, source = np.unique(part.indices.astype(np.int64), return_inverse=True)
        target = np.repeat(np.arange(len(rows)), np.diff(part.indptr))
        return Block(
            torch.from_numpy(np.stack([source + len(rows), target])).to(rows.device),
            torch.from_numpy(halo).to(rows.device),
            torch.zeros(len(halo), 1, dtype=torch.bool, device=rows.device),
            (len(rows) + len(halo), len(rows)),
        )


def _block(local: sp.csr_array, layout: ShardLayout, chunk: int, keys: Tensor) -> Block:
    device = keys.device
    start, stop = int(layout.own_ptr[chunk]), int(layout.own_ptr[chunk + 1])
    count = stop - start
    columns = local.indices[local.indptr[start] : local.indptr[stop]].astype(np.int64)
    target = np.repeat(np.arange(count), np.diff(local.indptr[start : stop + 1]))
    inside = (columns >= start) & (columns < stop)
    halo = np.unique(columns[~inside])
    source = np.where(inside, columns - start, count + np.searchsorted(halo, columns))
    low, high = layout.num_own + layout.halo_ptr[chunk : chunk + 2]
    same = (halo >= low) & (halo < high)
    halo_rows = torch.from_numpy(halo).to(device)
    return Block(
        torch.from_numpy(np.stack([source, target])).to(device),
        halo_rows,
        torch.from_numpy(same[:, None]).to(device),
        (count + len(halo), count),
        torch.cat([keys[start:stop], keys[halo_rows]]),
    )
