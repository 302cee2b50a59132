"""The graph axis: boundary rows to the shards that read them, their gradients back, and the sum.

Everything here is an all-to-all with split sizes among the shards of one stage, and everything that
is sent is counted. The gradient sum is two of them (each shard adds up its part, then hands it
out): 2 (G - 1) P numbers over all shards, like a ring, but added in a fixed order, so that all
shards hold the same bits whatever the network does.

Large ones go up and down, to shards of higher and of lower number, over connections of their own:
over one, gloo's word that a shard is ready to receive waits behind what it sends, and the two
directions of a link take turns (docs/adr/0021).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gnnpipe.graph.layout import ShardLayout
from gnnpipe.runtime.mesh import Mesh

__all__ = ["LARGE", "Arrival", "Exchange", "GradientSum", "sum_over_shards"]

LARGE = 1 << 18
"""Bytes that a shard sends, from which two all-to-alls, up and down, are worth their start."""


class Exchange:
    """Moves the boundary rows of one chunk between the shards of a stage. H columns."""

    def __init__(self, layout: ShardLayout, mesh: Mesh, dtype: torch.dtype) -> None:
        """``dtype``: of the tables, and so of the rows that are sent."""
        self.mesh, self.dtype = mesh, dtype
        self.sent_bytes = 0
        self._send_rows = [torch.from_numpy(rows).to(mesh.device) for rows in layout.send_rows]
        self._send_counts: list[list[int]] = layout.send_counts.tolist()
        self._receive_counts: list[list[int]] = layout.receive_counts.tolist()
        self._halo = [
            (layout.num_own + int(a), layout.num_own + int(b))
            for a, b in zip(layout.halo_ptr[:-1], layout.halo_ptr[1:], strict=True)
        ]
        self._busiest = _busiest(self._send_counts, self._receive_counts, mesh)

    def halo_range(self, chunk: int) -> tuple[int, int]:
        """Table rows that hold the halo of one chunk."""
        return self._halo[chunk]

    def push(self, chunk: int, table: Tensor) -> Arrival:
        """Send the chunk's boundary rows of ``table`` [n + h, H], receive its halo rows into it.

        Nobody may read those before they have arrived.
        """
        start, stop = self._halo[chunk]
        boundary = table[self._send_rows[chunk]]
        counts = self._receive_counts[chunk], self._send_counts[chunk]
        return self._start(chunk, table[start:stop], boundary, *counts)

    def send_back(self, chunk: int, halo: Tensor) -> Arrival:
        """The adjoint of ``push``: gradients ``halo`` [halo rows of the chunk, H] to their owners.

        What arrives is for ``add``.
        """
        counts = self._send_counts[chunk]
        arrived = halo.new_empty(sum(counts), halo.shape[1], dtype=self.dtype)
        data = halo.to(self.dtype).contiguous()
        return self._start(chunk, arrived, data, counts, self._receive_counts[chunk])

    def add(self, chunk: int, arrival: Arrival, own: Tensor, first: int) -> None:
        """Add what other shards found for this shard's boundary rows.

        To ``own`` [own rows of the chunk, H], whose first row is table row ``first``.
        """
        arrived, counts = arrival.wait(), self._send_counts[chunk]
        rows = self._send_rows[chunk] - first
        # Shard by shard: within one shard no row repeats, so the sum has one fixed order.
        for part, where in zip(
            torch.split(arrived.to(own.dtype), counts), torch.split(rows, counts), strict=True
        ):
            own.index_add_(0, where, part)

    def _start(
        self, chunk: int, out: Tensor, data: Tensor, outs: list[int], ins: list[int]
    ) -> Arrival:
        self.sent_bytes += data.numel() * data.element_size()
        most_bytes = self._busiest[chunk] * data.shape[1] * data.element_size()
        return Arrival(out, data, outs, ins, self.mesh, most_bytes)


class Arrival:
    """Rows on their way between shards; work goes on until somebody waits for them."""

    def __init__(
        self,
        out: Tensor,
        data: Tensor,
        outs: list[int],
        ins: list[int],
        mesh: Mesh,
        most_bytes: int,
    ) -> None:
        """``data`` goes out in runs of ``ins`` rows, ``out`` comes in in runs of ``outs``.

        ``most_bytes``: what the shard with most sends or receives, the same on all of them.
        """
        self._out, self._recorder = out, mesh.recorder
        self._data = data  # must live until it has left
        self._started_s = mesh.recorder.clock()
        if mesh.down_group is None or most_bytes < LARGE:
            works = [
                dist.all_to_all_single(out, data, outs, ins, group=mesh.graph_group, async_op=True)
            ]
        else:
            works = _both_ways(out, data, outs, ins, mesh)
        self._works = works

    def wait(self) -> Tensor:
        """What has come in."""
        asked = self._recorder.clock()
        for work in self._works:
            work.wait()
        self._recorder.met(self._started_s, asked)
        return self._out


def _both_ways(
    out: Tensor, data: Tensor, outs: list[int], ins: list[int], mesh: Mesh
) -> list[dist.Work]:
    """To shards of higher number over one group, to those of lower number over the other."""
    me, none = mesh.shard, [0] * mesh.shards
    from_low, own, from_high = torch.split(out, [sum(outs[:me]), outs[me], sum(outs[me + 1 :])])
    to_low, kept, to_high = torch.split(data, [sum(ins[:me]), ins[me], sum(ins[me + 1 :])])
    own.copy_(kept)
    low, high = slice(me), slice(me + 1, None)

    def only(counts: list[int], part: slice) -> list[int]:
        found = none.copy()
        found[part] = counts[part]
        return found

    return [
        dist.all_to_all_single(
            from_low, to_high, only(outs, low), only(ins, high), group=mesh.graph_group,
            async_op=True,
        ),
        dist.all_to_all_single(
            from_high, to_low, only(outs, high), only(ins, low), group=mesh.down_group,
            async_op=True,
        ),
    ]  # fmt: skip


def _busiest(sent: list[list[int]], received: list[list[int]], mesh: Mesh) -> list[int]:
    """By chunk, the rows that the shard with most sends or receives."""
    if mesh.shards == 1 or mesh.down_group is None:
        return [0] * len(sent)
    rows = torch.tensor([max(sum(s), sum(r)) for s, r in zip(sent, received, strict=True)])
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=mesh.graph_group)
    return [int(n) for n in rows]


class GradientSum:
    """Adds the weight gradients of a stage over its shards. P weights."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], mesh: Mesh) -> None:
        self.mesh = mesh
        self.parameters = list(parameters)
        self.sent_bytes = 0

    def reduce(self) -> None:
        """Replace every ``.grad`` by the sum over the shards; a missing one counts as zero."""
        if self.mesh.shards == 1 or not self.parameters:
            return
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        self.sent_bytes += sum_over_shards(flat, self.mesh)
        for g, summed in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
            g.copy_(summed.view(g.shape))


def sum_over_shards(flat: Tensor, mesh: Mesh) -> int:
    """Replace ``flat`` [n] by its sum over the shards, in a fixed order; the bytes sent from here.

    Over all shards these are 2 (G - 1) n numbers.
    """
    shards = mesh.shards
    if shards == 1:
        return 0
    parts = [flat.numel() * (g + 1) // shards - flat.numel() * g // shards for g in range(shards)]
    mine = parts[mesh.shard]
    gathered = flat.new_empty(mine * shards)
    most_bytes = flat.nbytes // shards * (shards - 1)
    Arrival(gathered, flat, [mine] * shards, parts, mesh, most_bytes).wait()
    total = gathered.view(shards, mine).sum(0)
    # To everyone: an all-gather of uneven parts, written as an all-to-all of copies.
    Arrival(flat, total.repeat(shards), parts, [mine] * shards, mesh, most_bytes).wait()
    return (flat.numel() - mine + (shards - 1) * mine) * flat.element_size()
