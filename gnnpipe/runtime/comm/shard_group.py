"""The shards of one stage, and all-to-alls of rows among them.

Among shards of one machine, rows go through shared memory. Over gloo, a large all-to-all is split
into two that run at once: one to the shards of higher number and one to those of lower number, each
over its own connections. Over one connection, gloo's "ready to receive" message waits behind the
data that the shard sends, so that the two directions of a link take turns (docs/adr/0021).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gnnpipe.collectives import LARGE_BYTES
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.recorder import Recorder
from gnnpipe.runtime.comm.shared_memory import Channel, SharedMemoryLink, SharedMemoryMessage

LARGE = LARGE_BYTES
"""Least bytes sent by a shard for which an all-to-all is split into two."""


class MeshShards:
    """The shards of this rank's stage (``collectives.ShardGroup``)."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.shard, self.shards = mesh.shard, mesh.shards
        self.process_group = mesh.graph_group

    def all_to_all(
        self,
        out: Tensor,
        data: Tensor,
        receive_counts: Sequence[int],
        send_counts: Sequence[int],
        largest_bytes: int,
    ) -> AllToAllTransfer:
        """See ``collectives.ShardGroup``."""
        mesh, counts = self._mesh, (list(receive_counts), list(send_counts))
        start_s, links = mesh.recorder.clock(), mesh.shard_links
        works: Sequence[SharedMemoryMessage | dist.Work]
        if links is not None:
            works = _start_in_shared_memory(out, data, *counts, links)
        elif mesh.down_group is None or largest_bytes < LARGE:
            works = [_start(out, data, *counts, mesh.graph_group)]
        else:
            works = _start_both_ways(out, data, *counts, mesh)
        sent_bytes = data.nbytes - send_counts[mesh.shard] * data[:1].nbytes
        kept = data if links is None else None  # shared memory has a copy
        return AllToAllTransfer(out, kept, sent_bytes, works, mesh.recorder, start_s)


class AllToAllTransfer:
    """An all-to-all that has been started (``collectives.CollectiveWork``)."""

    def __init__(
        self,
        out: Tensor,
        data: Tensor | None,
        sent_bytes: int,
        works: Sequence[SharedMemoryMessage | dist.Work],
        recorder: Recorder,
        start_s: float,
    ) -> None:
        self._out, self.sent_bytes = out, sent_bytes
        self._data = data  # keeps the memory alive until it has been sent
        self._works, self._recorder, self._start_s = works, recorder, start_s

    def proceed(self) -> None:
        """Do nothing: there is one phase."""

    def wait(self) -> Tensor:
        """Wait for the rows and return them."""
        wait_start_s = self._recorder.clock()
        for work in self._works:
            work.wait()
        self._recorder.add_collective(self._start_s, wait_start_s)
        return self._out


def _start_in_shared_memory(
    out: Tensor,
    data: Tensor,
    receive_counts: list[int],
    send_counts: list[int],
    links: Sequence[SharedMemoryLink | None],
) -> list[SharedMemoryMessage]:
    """Send a message to each other shard; ``links``: by shard, ``None`` at this one."""
    messages = []
    arriving, leaving = torch.split(out, receive_counts), torch.split(data, send_counts)
    for link, target, part in zip(links, arriving, leaving, strict=True):
        if link is None:
            target.copy_(part)
        else:
            link.send(Channel.SHARDS, [part], data.dtype)
            messages.append(link.receive(Channel.SHARDS, [target]))
    return messages


def _start(
    out: Tensor,
    data: Tensor,
    receive_counts: list[int],
    send_counts: list[int],
    group: dist.ProcessGroup | None,
) -> dist.Work:
    work: dist.Work = dist.all_to_all_single(
        out, data, receive_counts, send_counts, group=group, async_op=True
    )
    return work


def _start_both_ways(
    out: Tensor, data: Tensor, receive_counts: list[int], send_counts: list[int], mesh: Mesh
) -> list[dist.Work]:
    """Start two all-to-alls: to shards of higher number, and to shards of lower number."""
    shard = mesh.shard

    def split(rows: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        sizes = [sum(counts[:shard]), counts[shard], sum(counts[shard + 1 :])]
        return torch.split(rows, sizes)

    from_lower, own, from_higher = split(out, receive_counts)
    to_lower, kept, to_higher = split(data, send_counts)
    own.copy_(kept)

    def lower(counts: list[int]) -> list[int]:
        return [*counts[:shard], *[0] * (mesh.shards - shard)]

    def higher(counts: list[int]) -> list[int]:
        return [*[0] * (shard + 1), *counts[shard + 1 :]]

    up = lower(receive_counts), higher(send_counts)
    down = higher(receive_counts), lower(send_counts)
    return [
        _start(from_lower, to_higher, *up, mesh.graph_group),
        _start(from_higher, to_lower, *down, mesh.down_group),
    ]
