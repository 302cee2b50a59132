"""Moves rows and gradients between the shards of a stage, by the collectives of the plan.

Shapes: n own rows, h halo rows, F columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gnnpipe.collectives import CollectiveWork
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.shard_group import MeshShards


class HaloExchange:
    """Sends boundary rows of a chunk to the shards that read them, and brings gradients back."""

    def __init__(self, layout: ShardLayout, mesh: Mesh, dtype: torch.dtype) -> None:
        """``dtype``: number type of the tables and of the rows that are sent."""
        self.mesh, self.dtype = mesh, dtype
        self.sent_bytes = 0
        self._send_rows = [torch.from_numpy(rows).to(mesh.device) for rows in layout.send_rows]
        self._send_counts: list[list[int]] = layout.send_counts.tolist()
        self._receive_counts: list[list[int]] = layout.receive_counts.tolist()
        self._halo = [
            (layout.num_own + int(a), layout.num_own + int(b))
            for a, b in zip(layout.halo_ptr[:-1], layout.halo_ptr[1:], strict=True)
        ]
        self._largest_rows = _largest_rows(self._send_counts, self._receive_counts, mesh)
        self._group = MeshShards(mesh)

    def halo_range(self, chunk: int) -> tuple[int, int]:
        """Return the table rows that hold the halo of a chunk, as (start, stop)."""
        return self._halo[chunk]

    def push(self, chunk: int, table: Tensor) -> CollectiveWork:
        """Send the chunk's boundary rows of ``table`` [n + h, F] and receive its halo rows there.

        The halo rows must not be read before ``CollectiveWork.wait``.
        """
        start, stop = self._halo[chunk]
        boundary = table[self._send_rows[chunk]]
        counts = self._receive_counts[chunk], self._send_counts[chunk]
        return self._start(chunk, table[start:stop], boundary, *counts)

    def send_back(self, chunk: int, halo: Tensor) -> CollectiveWork:
        """Send the gradients of halo rows back to the owners of the rows: the adjoint of ``push``.

        ``halo``: [halo rows of the chunk, F]. The owner passes the transfer to ``add``.
        """
        counts = self._send_counts[chunk]
        arrived = halo.new_empty(sum(counts), halo.shape[1], dtype=self.dtype)
        data = halo.to(self.dtype).contiguous()
        return self._start(chunk, arrived, data, counts, self._receive_counts[chunk])

    def add(self, chunk: int, transfer: CollectiveWork, own: Tensor, first: int) -> None:
        """Add the gradients of boundary rows that other shards sent to the gradients of own rows.

        Args:
            chunk: The chunk.
            transfer: Result of ``send_back``.
            own: [own rows of the chunk, F], changed in place.
            first: Table row of the first row of ``own``.
        """
        arrived, counts = transfer.wait(), self._send_counts[chunk]
        rows = self._send_rows[chunk] - first
        # Shard by shard: no row repeats within a shard, so the order of the sum is fixed.
        for part, where in zip(
            torch.split(arrived.to(own.dtype), counts), torch.split(rows, counts), strict=True
        ):
            own.index_add_(0, where, part)

    def _start(
        self,
        chunk: int,
        out: Tensor,
        data: Tensor,
        receive_counts: list[int],
        send_counts: list[int],
    ) -> CollectiveWork:
        largest_bytes = self._largest_rows[chunk] * data.shape[1] * data.element_size()
        transfer = self.mesh.collectives.rows.start(
            self._group, out, data, receive_counts, send_counts, largest_bytes
        )
        self.sent_bytes += transfer.sent_bytes
        return transfer


def _largest_rows(sent: list[list[int]], received: list[list[int]], mesh: Mesh) -> list[int]:
    """Return for each chunk the most rows that any shard sends or receives, on all shards."""
    if mesh.shards == 1 or mesh.down_group is None:
        return [0] * len(sent)
    rows = torch.tensor([max(sum(s), sum(r)) for s, r in zip(sent, received, strict=True)])
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=mesh.graph_group)
    return [int(n) for n in rows]


class GradientSum:
    """Sums the weight gradients of a stage over its shards, in buckets, during backward."""

    def __init__(self, whole: Sequence[tuple[torch.nn.Parameter, int]], mesh: Mesh) -> None:
        """Prepare the sums.

        Args:
            whole: Weights, each with the step after whose backward its gradient is complete. The
                same on all shards of the stage.
            mesh: The ranks.
        """
        self.mesh = mesh
        self._whole = list(whole)
        self.sent_bytes = 0
        self._summing: list[tuple[CollectiveWork, list[Tensor]]] = []

    def begin(self, steps: range) -> None:
        """Start to sum the gradients that are complete after ``steps``; a missing one is zero."""
        self._proceed()
        weights = [p for p, step in self._whole if step in steps]
        if self.mesh.shards == 1 or not weights:
            return
        for p in weights:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in weights if p.grad is not None]
        bucket = torch.cat([g.reshape(-1) for g in grads])
        transfer = self.mesh.collectives.sum.start(MeshShards(self.mesh), bucket)
        self._summing.append((transfer, grads))

    def finish(self) -> None:
        """Wait for all sums; every ``.grad`` is then the sum over the shards."""
        self._proceed()
        for transfer, grads in self._summing:
            parts = torch.split(transfer.wait(), [g.numel() for g in grads])
            self.sent_bytes += transfer.sent_bytes
            for g, summed in zip(grads, parts, strict=True):
                g.copy_(summed.view(g.shape))
        self._summing.clear()

    def forget(self) -> None:
        """Drop the sums of a pass that failed."""
        self._summing.clear()

    def _proceed(self) -> None:
        for transfer, _ in self._summing:
            transfer.proceed()


def sum_over_shards(flat: Tensor, mesh: Mesh) -> int:
    """Replace ``flat`` [n] by its sum over the shards; return the bytes that this shard sent."""
    if mesh.shards == 1:
        return 0
    transfer = mesh.collectives.sum.start(MeshShards(mesh), flat)
    summed = transfer.wait()
    if summed is not flat:
        flat.copy_(summed.view_as(flat))
    return transfer.sent_bytes
