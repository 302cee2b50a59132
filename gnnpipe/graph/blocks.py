"""The edges into a chunk as a small graph of its own, for convolutions that need both ends.

What edges carry goes with them. The structure is cut out of the whole graph once; what a block's
rows hold, the history table says.
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

from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.graph.operators import local_rows

__all__ = ["Block", "Blocks", "EdgeData", "Incidence", "edge_data_of"]


@dataclass(frozen=True, eq=False)
class Incidence:
    """E edges from T rows that are read into C that read, bag by bag; all on one device."""

    source: Tensor
    """[E], by target; of the type of ``offsets``."""
    target: Tensor
    """[E] int64, ascending."""
    offsets: Tensor
    """[C + 1], where the edges into a row begin and end."""
    order: Tensor | None
    """[E], which edge stands there: of the block's, and behind them the loops; none if they
    stood so."""
    by_source: Tensor
    """[E], the edges by source."""
    targets_by_source: Tensor
    """[E], their targets."""
    offsets_by_source: Tensor
    """[T + 1]."""

    @classmethod
    def build(cls, edge_index: Tensor, size: tuple[int, int], with_loops: bool) -> Incidence:
        """Of ``edge_index`` [2, E], sources below ``size[0]`` and targets below ``size[1]``.

        ``with_loops``: with one loop for every row that reads, and no other, as PyG adds them.
        """
        source, target = edge_index
        order = None
        if with_loops:
            loops = torch.arange(min(size), device=source.device)
            order = torch.cat(
                [
                    torch.nonzero(source != target)[:, 0],
                    torch.arange(len(source), len(source) + len(loops), device=source.device),
                ]
            )
            source, target = torch.cat([source, loops])[order], torch.cat([target, loops])[order]
        if bool((target[1:] < target[:-1]).any()):
            target, place = torch.sort(target, stable=True)
            source = source[place]
            order = place if order is None else order[place]
        # Half as large: these are what it keeps beyond the edges.
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
"""What edges carry, [E, ...] each, by the field of ``Graph``."""


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
    is_fused: bool = False
    """A convolution that is known to need no messages makes none; the oracle's makes them."""

    @cached_property
    def incidence(self) -> Incidence:
        """The edges in both orders."""
        return Incidence.build(self.edge_index, self.size, with_loops=False)

    @cached_property
    def incidence_with_loops(self) -> Incidence:
        """The same with a loop for every row that reads, and no other."""
        return Incidence.build(self.edge_index, self.size, with_loops=True)


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
        local = local_rows(rows, layout, into)
        blocks = (_block(local, layout, into, c, keys, edge_data) for c in range(layout.num_chunks))
        return cls(tuple(blocks), local, edge_data, layout is into)

    def reads(self, chunk: int) -> Tensor:
        """Table rows that a chunk reads, but for its own."""
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
    """What the edges of a graph carry, as tensors: floating numbers in ``dtype``."""
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
