"""Blocks: the edges into a chunk as a bipartite graph, for convolutions that need both ends.

A block has the edges and their data, cut out of the whole graph once. The values of its rows are in
the history table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from gnnpipe.graph.graph import Graph, keep_order_of_parallel
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.graph.operators import local_rows


@dataclass(frozen=True, eq=False)
class Incidence:
    """E edges from T source rows into C target rows, in both orders; all on one device."""

    source: Tensor
    """[E], by target; of the type of ``offsets``."""
    target: Tensor
    """[E] int64, ascending."""
    offsets: Tensor
    """[C + 1], edges into target c are offsets[c]:offsets[c + 1]."""
    order: Tensor | None
    """[E], the position of each edge among the given ones, or among the given ones that are no
    self-loops followed by the added self-loops; ``None`` if these were sorted already."""
    by_source: Tensor
    """[E], positions of the edges sorted by source."""
    targets_by_source: Tensor
    """[E], the targets in this order."""
    offsets_by_source: Tensor
    """[T + 1], as ``offsets``, by source."""

    @classmethod
    def build(cls, edge_index: Tensor, size: tuple[int, int], with_loops: bool) -> Incidence:
        """Sort ``edge_index`` [2, E], sources below T = ``size[0]``, targets below C = ``size[1]``.

        ``with_loops``: exactly one self-loop for every target row, as PyG adds them.
        """
        source, target = edge_index
        order = None
        if with_loops:
            is_edge, loops = source != target, torch.arange(min(size), device=source.device)
            source = torch.cat([source[is_edge], loops])
            target = torch.cat([target[is_edge], loops])
        if bool((target[1:] < target[:-1]).any()):
            target, order = torch.sort(target, stable=True)
            source = source[order]
        # 32 bits where possible: these arrays are kept beside the edges.
        small = torch.int32 if max(len(source), *size) < 2**31 else torch.int64
        by_source = torch.argsort(source, stable=True)
        back = target[by_source].to(small), _offsets(source[by_source], size[0]).to(small)
        offsets = _offsets(target, size[1])
        if order is not None:
            source, offsets, order = source.to(small), offsets.to(small), order.to(small)
        return cls(source, target, offsets, order, by_source.to(small), *back)


def _offsets(ascending: Tensor, count: int) -> Tensor:
    ends = torch.arange(count + 1, device=ascending.device)
    return torch.searchsorted(ascending.contiguous(), ends)


EdgeData: TypeAlias = Mapping[str, Tensor]
"""Edge data [E, ...] by the field of ``Graph``."""


@dataclass(frozen=True, eq=False)
class Block:
    """The edges into one chunk's C own rows, from these rows and H halo rows.

    Between different types of vertices all source rows are halo rows.
    """

    edge_index: Tensor
    """[2, E_c] int64: source in 0..C+H-1 (the C own rows first, if any are), target in 0..C-1."""
    halo_rows: Tensor
    """[H] int64, local table row of each halo row of the block."""
    same_chunk: Tensor
    """[H, 1] bool: the halo row belongs to the same chunk (another shard's part of it)."""
    size: tuple[int, int]
    """(source rows: C + H, or H of another type; target rows: C)."""
    keys: Tensor | None = None
    """[C + H] int32, dropout key of each row; ``None`` for probe vertices (no dropout)."""
    into_keys: Tensor | None = None
    """[C], dropout keys of the target rows, if they are of another type."""
    edge_data: EdgeData = field(default_factory=dict)
    """[E_c, ...] by the field of ``Graph``."""
    is_fused: bool = False
    """Convolutions may avoid messages [E, F] where they can; the reference makes them."""

    @cached_property
    def incidence(self) -> Incidence:
        """The edges in both orders."""
        return Incidence.build(self.edge_index, self.size, with_loops=False)

    @cached_property
    def incidence_with_loops(self) -> Incidence:
        """The edges in both orders, with exactly one self-loop for every target row."""
        return Incidence.build(self.edge_index, self.size, with_loops=True)


@dataclass(frozen=True, eq=False)
class Blocks:
    """One ``Block`` per chunk of a shard."""

    chunks: tuple[Block, ...]
    local: sp.csr_array
    """[n, n + h], the shard's own rows of the whole graph's adjacency; the values are the edges'
    numbers where edges carry data."""
    edge_data: EdgeData
    """The data of all edges of the graph, in the number type of the run."""
    is_square: bool
    """Source and target rows have one type; a block then begins with the chunk's own rows."""

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

        ``layout``: of the source rows; ``into``: of the target rows; ``keys`` int32, on the rank's
        device: the dropout keys of the source rows [n + h] and target rows [m].
        """
        local = local_rows(rows, layout, into)
        if edge_data:
            keep_order_of_parallel(local)
        blocks = (_block(local, layout, into, c, keys, edge_data) for c in range(layout.num_chunks))
        return cls(tuple(blocks), local, edge_data, layout is into)

    def reads(self, chunk: int) -> Tensor:
        """Table rows that a chunk reads beside its own."""
        return self.chunks[chunk].halo_rows

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
            is_fused=True,
        )


def edge_data_of(graph: Graph, dtype: torch.dtype) -> EdgeData:
    """The edge data of a graph as tensors: floating numbers in ``dtype``."""
    found = {name: torch.from_numpy(values) for name, values in graph.edge_data.items()}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.items()}


def _of_edges(
    edge_data: EdgeData, numbers: npt.NDArray[np.float64], device: torch.device
) -> EdgeData:
    if not edge_data:
        return {}
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
        is_fused=True,
    )
