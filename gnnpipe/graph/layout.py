"""Local row numbers, halo and send lists of one shard.

A shard's table has its OWN rows, chunk after chunk, and behind them its HALO (rows that the shard
reads and other shards own), sorted by chunk and then by owner. So the rows that arrive when chunk c
is pushed are one contiguous range of the halo, into which an all-to-all can write, and the halo's
gradients of chunk c are one contiguous range to send back.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray, Graph, IntArray
from gnnpipe.graph.pairs import PAIRS, Pairs

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """Local numbering of shard g: own rows 0..n-1, halo rows n..n+h-1. K chunks, G shards."""

    shard: int
    own: Int64
    """[n], row (in the renumbered graph) of each own row, ascending."""
    halo: Int64
    """[h], row of each halo row, ascending: by chunk, then owner."""
    own_ptr: Int64
    """[K + 1], own rows of chunk c are own_ptr[c]:own_ptr[c + 1]."""
    halo_ptr: Int64
    """[K + 1], halo rows of chunk c are n + halo_ptr[c] : n + halo_ptr[c + 1]."""
    receive_counts: Int64
    """[K, G], halo rows of chunk c that shard g owns."""
    send_counts: Int64
    """[K, G], own rows of chunk c that shard g reads: the boundary, once per reader."""
    send_rows: tuple[Int64, ...]
    """Per chunk the local own rows to send, by receiving shard, then ascending."""

    @property
    def num_chunks(self) -> int:
        """K."""
        return len(self.own_ptr) - 1

    @property
    def num_own(self) -> int:
        """n."""
        return len(self.own)

    @property
    def num_rows(self) -> int:
        """Rows of the shard's history table: n + h."""
        return len(self.own) + len(self.halo)


def shard_layout(graph: Graph | Pairs, chunking: Chunking, shard: int) -> ShardLayout:
    """The layout of one shard of a graph, or of pairs, renumbered by ``chunking``."""
    chunks, shards = chunking.chunks, chunking.shards
    own = np.concatenate([np.arange(*chunking.rows(c, shard)) for c in range(chunks)])
    sizes = [np.diff(chunking.rows(c, shard))[0] for c in range(chunks)]
    own_ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    owner, chunk = chunking.shard_of_row(), chunking.chunk_of_row()
    reader = np.repeat(owner, graph.degrees)
    read_owner = owner[graph.indices]

    halo = np.unique(graph.indices[(reader == shard) & (read_owner != shard)]).astype(np.int64)
    receive_counts = _count(chunk[halo], owner[halo], chunks, shards)
    halo_ptr = np.concatenate([[0], np.cumsum(receive_counts.sum(1))]).astype(np.int64)

    away = (read_owner == shard) & (reader != shard)
    n = graph.num_vertices
    row, to = graph.indices[away].astype(np.int64), reader[away].astype(np.int64)
    # One number per (chunk, receiving shard, row), so that unique also sorts as the wire wants it.
    key = np.unique((chunk[row].astype(np.int64) * shards + to) * n + row)
    row, group = key % n, key // n
    send_counts = _count(group // shards, group % shards, chunks, shards)
    local = np.searchsorted(own, row)
    send_rows = np.split(local, np.cumsum(send_counts.sum(1))[:-1])
    return ShardLayout(
        shard, own, halo, own_ptr, halo_ptr, receive_counts, send_counts, tuple(send_rows)
    )


def gathered_layout(chunking: Chunking, shard: int) -> ShardLayout:
    """The layout of a shard that reads all rows of all other shards."""
    owner, cells = chunking.shard_of_row(), chunking.cell_sizes
    others = np.arange(chunking.shards) != shard
    receive_counts, send_counts = cells * others, np.outer(cells[:, shard], others)
    own_ptr = np.concatenate([[0], np.cumsum(cells[:, shard])]).astype(np.int64)
    halo_ptr = np.concatenate([[0], np.cumsum(receive_counts.sum(1))]).astype(np.int64)
    send_rows = tuple(
        np.tile(np.arange(start, stop), chunking.shards - 1) for start, stop in pairwise(own_ptr)
    )
    return ShardLayout(
        shard,
        np.flatnonzero(owner == shard),
        np.flatnonzero(owner != shard),
        own_ptr,
        halo_ptr,
        receive_counts,
        send_counts,
        send_rows,
    )


def table_layouts(graph: Graph, chunking: Chunking, whole: ShardLayout) -> dict[str, ShardLayout]:
    """The layouts of a shard's tables by name (see ``Graph.table_rows``); ``whole``: all rows."""
    found = {name: restrict(whole, chosen) for name, chosen in graph.row_types.items()}
    if graph.pairs is not None:
        found[PAIRS] = shard_layout(graph.pairs, chunking, whole.shard)
    return found


def restrict(layout: ShardLayout, chosen: BoolArray) -> ShardLayout:
    """The layout of only the rows ``chosen`` [N], numbered without gaps.

    A chunk or a shard may then have no rows.
    """
    if chosen.all():
        return layout
    own, halo = chosen[layout.own], chosen[layout.halo]
    number = _before(own)
    groups = np.cumsum([0, *layout.receive_counts.ravel()])
    received = np.diff(_before(halo)[groups]).reshape(layout.receive_counts.shape)
    send_rows, send_counts = [], []
    for rows, counts in zip(layout.send_rows, layout.send_counts, strict=True):
        kept = own[rows]
        send_rows.append(number[rows[kept]])
        send_counts.append(np.diff(_before(kept)[np.cumsum([0, *counts])]))
    return ShardLayout(
        layout.shard,
        layout.own[own],
        layout.halo[halo],
        number[layout.own_ptr],
        _before(halo)[layout.halo_ptr],
        received,
        np.array(send_counts),
        tuple(send_rows),
    )


def common_rows(
    chunking: Chunking, shard: int, other: Chunking, other_shard: int, chosen: BoolArray
) -> Int64:
    """The rows of a shard that a shard of another stage owns too, [K, 2].

    Start and stop among the ``chosen`` rows [N] of each chunk of ``shard``. ``other`` has the same
    numbering of the rows.
    """
    before, first = _before(chosen), chunking.ptr[:, shard]
    start = np.maximum(first, other.ptr[:, other_shard])
    stop = np.minimum(chunking.ptr[:, shard + 1], other.ptr[:, other_shard + 1])
    ends = np.stack([start, np.maximum(start, stop)], axis=1)
    return np.asarray(before[ends] - before[first][:, None])


def _before(chosen: BoolArray) -> Int64:
    """Number of chosen rows before each row, [R + 1]."""
    return np.concatenate([[0], np.cumsum(chosen)]).astype(np.int64)


def _count(chunk: IntArray, shard: IntArray, chunks: int, shards: int) -> Int64:
    flat = np.bincount(chunk.astype(np.int64) * shards + shard, minlength=chunks * shards)
    return flat.reshape(chunks, shards).astype(np.int64)
