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
from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["LARGE", "Arrival", "GradientSum", "HaloExchange", "sum_over_shards"]

LARGE = 1 << 18
"""Bytes that a shard sends, from which two all-to-alls, up and down, are worth their start."""


class HaloExchange:
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
        self._start_s = mesh.recorder.clock()
        if mesh.down_group is None or most_bytes < LARGE:
            works = [
                dist.all_to_all_single(out, data, outs, ins, group=mesh.graph_group, async_op=True)
            ]
        else:
            works = _both_ways(out, data, outs, ins, mesh)
        self._works = works

    def wait(self) -> Tensor:
        """What has come in."""
        wait_start_s = self._recorder.clock()
        for work in self._works:
            work.wait()
        self._recorder.add_collective(self._start_s, wait_start_s)
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
            from_low,
            to_high,
            only(outs, low),
            only(ins, high),
            group=mesh.graph_group,
            async_op=True,
        ),
        dist.all_to_all_single(
            from_high,
            to_low,
            only(outs, high),
            only(ins, low),
            group=mesh.down_group,
            async_op=True,
        ),
    ]


def _busiest(sent: list[list[int]], received: list[list[int]], mesh: Mesh) -> list[int]:
    """By chunk, the rows that the shard with most sends or receives."""
    if mesh.shards == 1 or mesh.down_group is None:
        return [0] * len(sent)
    rows = torch.tensor([max(sum(s), sum(r)) for s, r in zip(sent, received, strict=True)])
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=mesh.graph_group)
    return [int(n) for n in rows]


class GradientSum:
    """Adds the weight gradients of a stage over its shards, in buckets under backward."""

    def __init__(self, whole: Sequence[tuple[torch.nn.Parameter, int]], mesh: Mesh) -> None:
        """``whole``: the weights, each with the step behind whose backward its gradient is whole.

        The same on all shards of the stage.
        """
        self.mesh = mesh
        self._whole = list(whole)
        self.sent_bytes = 0
        self._summing: list[tuple[ShardSum, list[Tensor]]] = []

    def begin(self, steps: range) -> None:
        """Start to sum the gradients that are whole behind ``steps``; a missing one is zero."""
        for others, _ in self._summing:
            others.proceed()
        weights = [p for p, step in self._whole if step in steps]
        if self.mesh.shards == 1 or not weights:
            return
        for p in weights:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in weights if p.grad is not None]
        bucket = ShardSum(torch.cat([g.reshape(-1) for g in grads]), self.mesh)
        self.sent_bytes += bucket.sent_bytes
        self._summing.append((bucket, grads))

    def finish(self) -> None:
        """Every ``.grad`` is the sum over the shards."""
        for others, _ in self._summing:
            others.proceed()
        for bucket, grads in self._summing:
            parts = torch.split(bucket.wait(), [g.numel() for g in grads])
            for g, summed in zip(grads, parts, strict=True):
                g.copy_(summed.view(g.shape))
        self._summing.clear()

    def forget(self) -> None:
        """Of a pass that was ended by an error."""
        self._summing.clear()


class ShardSum:
    """The sum over the shards of ``flat`` [n], in a fixed order, on its way.

    Two exchanges: the parts to whom adds them up, and their sums to everyone. Over all shards these
    are 2 (G - 1) n numbers.
    """

    def __init__(self, flat: Tensor, mesh: Mesh) -> None:
        shards, n = mesh.shards, flat.numel()
        self._flat, self._mesh = flat, mesh
        self._parts = [n * (g + 1) // shards - n * g // shards for g in range(shards)]
        mine = self._parts[mesh.shard]
        self.sent_bytes = (n - mine + (shards - 1) * mine) * flat.element_size()
        self._most_bytes = flat.nbytes // shards * (shards - 1)
        gathered, counts = flat.new_empty(mine * shards), [mine] * shards
        self._gathering: Arrival | None = Arrival(
            gathered, flat, counts, self._parts, mesh, self._most_bytes
        )
        self._arrival = self._gathering

    def proceed(self) -> None:
        """Add up what has come to this shard, and hand it out; all shards at the same place."""
        if self._gathering is None:
            return
        shards, mine = self._mesh.shards, self._parts[self._mesh.shard]
        total = self._gathering.wait().view(shards, mine).sum(0)
        self._gathering = None
        # To everyone: an all-gather of uneven parts, written as an all-to-all of copies.
        copies, counts = total.repeat(shards), [mine] * shards
        self._arrival = Arrival(
            self._flat, copies, self._parts, counts, self._mesh, self._most_bytes
        )

    def wait(self) -> Tensor:
        """The sum, [n], in the place of ``flat``."""
        self.proceed()
        return self._arrival.wait()


def sum_over_shards(flat: Tensor, mesh: Mesh) -> int:
    """Replace ``flat`` [n] by its sum over the shards; the bytes sent from here."""
    if mesh.shards == 1:
        return 0
    found = ShardSum(flat, mesh)
    found.wait()
    return found.sent_bytes
