"""Moves rows between sharding by vertices and sharding by columns, among the shards of a stage.

Shapes: C rows of a chunk on all shards, C_g of them on this shard; F columns, f of them on this
shard. Rows on all shards lie shard by shard, as the vertices are numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gnnpipe.collectives import CollectiveWork
from gnnpipe.plan import column_bounds
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.shard_group import MeshShards


class ColumnExchange:
    """All-to-alls from rows to columns and back; each is the adjoint of the other."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype, shares: Sequence[float]) -> None:
        """``dtype``: number type on the wire; ``shares`` [G] of the shards in the columns."""
        self.mesh, self.dtype = mesh, dtype
        self.sent_bytes = 0
        self._shares, self._group = shares, MeshShards(mesh)

    def own_width(self, width: int) -> int:
        """Return f for rows of ``width`` columns; may be 0."""
        bounds = column_bounds(width, self._shares)
        return bounds[self.mesh.shard + 1] - bounds[self.mesh.shard]

    def to_columns(self, rows: Tensor, counts: Sequence[int], out: Tensor) -> CollectiveWork:
        """Start to send the columns of own rows to their shards.

        Args:
            rows: [C_g, F], the chunk's rows of this shard.
            counts: [G], the chunk's rows of each shard.
            out: [C, f], filled with this shard's columns; not to be read before the ``wait``.
        """
        bounds, rows = column_bounds(rows.shape[1], self._shares), rows.to(self.dtype)
        data = torch.cat([rows[:, first:last].reshape(-1) for first, last in pairwise(bounds)])
        send = [len(rows) * (last - first) for first, last in pairwise(bounds)]
        receive = [count * out.shape[1] for count in counts]
        return self._start(out.view(-1), data, receive, send, counts, bounds)

    def to_rows(self, columns: Tensor, counts: Sequence[int], width: int) -> ArrivingRows:
        """Start to send the columns of all rows to the shards that own the rows.

        Args:
            columns: [C, f], this shard's columns.
            counts: [G], the chunk's rows of each shard.
            width: F.
        """
        bounds = column_bounds(width, self._shares)
        own, data = counts[self.mesh.shard], columns.to(self.dtype).contiguous().view(-1)
        widths = [last - first for first, last in pairwise(bounds)]
        out = data.new_empty(own * width)
        send = [count * columns.shape[1] for count in counts]
        receive = [own * each for each in widths]
        work = self._start(out, data, receive, send, counts, bounds)
        return ArrivingRows(work, own, widths)

    def _start(
        self,
        out: Tensor,
        data: Tensor,
        receive_counts: list[int],
        send_counts: list[int],
        counts: Sequence[int],
        bounds: Sequence[int],
    ) -> CollectiveWork:
        transfer = self.mesh.collectives.rows.start(
            self._group,
            out,
            data,
            receive_counts,
            send_counts,
            _largest_numbers(counts, bounds) * data.element_size(),
        )
        self.sent_bytes += transfer.sent_bytes
        return transfer


class ArrivingRows:
    """Rows that arrive column by column."""

    def __init__(self, work: CollectiveWork, count: int, widths: Sequence[int]) -> None:
        self._work, self._count, self._widths = work, count, widths

    def wait(self) -> Tensor:
        """Wait for the columns and return the rows [C_g, F]."""
        parts = torch.split(self._work.wait(), [self._count * width for width in self._widths])
        shaped = [p.view(self._count, w) for p, w in zip(parts, self._widths, strict=True)]
        return torch.cat(shaped, dim=1)


def _largest_numbers(counts: Sequence[int], bounds: Sequence[int]) -> int:
    """Return the most numbers that a shard sends or receives; the same on all shards."""
    total, width = sum(counts), bounds[-1]
    widths = [last - first for first, last in pairwise(bounds)]
    return max(
        max(count * (width - own), (total - count) * own)
        for count, own in zip(counts, widths, strict=True)
    )
