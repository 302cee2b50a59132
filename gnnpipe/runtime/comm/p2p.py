"""Point-to-point messages between stages: values forward, gradients backward.

``post`` and ``send`` return at once; ``take`` waits for one message, ``drain`` for all sends.
A message has a part for each rank of the other stage that owns some of its rows (``RowLinks``);
it goes through shared memory to a rank of the same machine, and over gloo or NCCL to another one.
Parts of one direction between two ranks arrive in the order in which they were sent:
``schedule.check`` has proved that both ends use the same order. The two directions have channels of
their own (a tag over gloo, a group over NCCL), because 1F1B mixes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.row_links import Pieces
from gnnpipe.runtime.comm.shared_memory import Channel, SharedMemoryMessage
from gnnpipe.runtime.comm.start_thread import StartedMessages
from gnnpipe.schedule import Direction

Key = tuple[str, int, int]
"""Direction ('F' or 'B'), stage of the peer, position of the chunk."""


_CHANNELS: Mapping[str, Channel] = {
    Direction.FORWARD: Channel.FORWARD,
    Direction.BACKWARD: Channel.BACKWARD,
}
"""Channel in shared memory, and the tag over gloo, by direction."""


class ValueSize(NamedTuple):
    """Size of a value that arrives, and the rows that each rank sends."""

    rows: int
    width: int
    pieces: Pieces


class ArrivingMessage(NamedTuple):
    """A message on its way."""

    values: dict[str, Tensor]
    parts: list[tuple[int, int, StartedMessages | SharedMemoryMessage]]
    """Rank that sends, bytes, and the transfer."""
    posted_s: float


class PointToPoint:
    """Sends and receives one rank's messages, to and from the ranks of other stages."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype, row_dtype: torch.dtype) -> None:
        """``dtype``: number type of values; ``row_dtype``: number type in messages."""
        self.mesh = mesh
        self.dtype, self.row_dtype = dtype, row_dtype
        self.sent_bytes = 0
        self._arriving: dict[Key, ArrivingMessage] = {}
        self._leaving: deque[tuple[int, list[Tensor], StartedMessages]] = deque()
        """Position, parts and transfer of the sends that may not be complete."""

    def post(self, way: str, peer: int, position: int, sizes: Mapping[str, ValueSize]) -> None:
        """Start to receive values of these ``sizes`` from stage ``peer``."""
        values = {
            name: torch.empty(size.rows, size.width, dtype=self.row_dtype, device=self.mesh.device)
            for name, size in sorted(sizes.items())
        }
        parts = []
        for rank, coming in _by_rank(values, {n: size.pieces for n, size in sizes.items()}).items():
            parts.append((rank, sum(t.nbytes for t in coming), self._receive(coming, rank, way)))
        clock_s = self.mesh.recorder.clock()
        self._arriving[way, peer, position] = ArrivingMessage(values, parts, clock_s)

    def take(self, way: str, peer: int, position: int) -> dict[str, Tensor]:
        """Wait for posted values and return them, by name."""
        arriving = self._arriving.pop((way, peer, position))
        recorder = self.mesh.recorder
        for rank, size, transfer in arriving.parts:
            wait_start_s = recorder.clock()
            transfer.wait()
            recorder.add_message(way, rank, position, size, arriving.posted_s, wait_start_s)
        return {name: value.to(self.dtype) for name, value in arriving.values.items()}

    def send(
        self, way: str, position: int, values: Mapping[str, Tensor], pieces: Mapping[str, Pieces]
    ) -> None:
        """Start to send values to other ranks; they must not change before ``drain``.

        ``pieces``: the rows for each rank, by value.
        """
        for rank, parts in _by_rank(values, pieces).items():
            self.mesh.recorder.add_send(way, rank, position)
            link = self.mesh.links.get(rank)
            if link is not None:
                link.send(_CHANNELS[way], parts, self.row_dtype)
            else:
                leaving = [part.detach().to(self.row_dtype).contiguous() for part in parts]
                channel = self._channel(way)
                transfer = self.mesh.start_thread.start(partial(_send, leaving, rank, channel))
                self._leaving.append((position, leaving, transfer))
            self.sent_bytes += sum(part.numel() for part in parts) * self.row_dtype.itemsize

    def abandon(self) -> None:
        """Forget the messages of a pass that has failed."""
        self._arriving.clear()
        self._leaving.clear()

    def drain(self) -> None:
        """Wait until all sends are complete."""
        for *_, transfer in self._leaving:
            transfer.wait()
        self._leaving.clear()

    def free(self, position: int) -> None:
        """Free the values of the oldest sends, those up to ``position``; all must have arrived."""
        while self._leaving and self._leaving[0][0] <= position:
            self._leaving.popleft()[-1].wait()

    def _receive(
        self, parts: list[Tensor], rank: int, way: str
    ) -> StartedMessages | SharedMemoryMessage:
        link = self.mesh.links.get(rank)
        if link is not None:
            return link.receive(_CHANNELS[way], parts)
        return self.mesh.start_thread.start(partial(_receive, parts, rank, self._channel(way)))

    def _channel(self, way: str) -> GroupChannel:
        group = None if way == Direction.FORWARD else self.mesh.backward_group
        return GroupChannel(group, _CHANNELS[way])


class GroupChannel(NamedTuple):
    """Group and tag of the messages of one direction."""

    group: dist.ProcessGroup | None
    tag: int


def _receive(parts: list[Tensor], rank: int, channel: GroupChannel) -> list[dist.Work | None]:
    return [dist.irecv(p, src=rank, group=channel.group, tag=channel.tag) for p in parts]


def _send(parts: list[Tensor], rank: int, channel: GroupChannel) -> list[dist.Work | None]:
    return [dist.isend(p, dst=rank, group=channel.group, tag=channel.tag) for p in parts]


def _by_rank(values: Mapping[str, Tensor], pieces: Mapping[str, Pieces]) -> dict[int, list[Tensor]]:
    """Return the parts of values by rank, in the same order on both ends.

    A piece without rows has no message: a chunk may have no vertex of a type.
    """
    found: dict[int, list[Tensor]] = {}
    for name in sorted(values):
        for rank, rows in pieces[name]:
            part = values[name][rows]
            parts = found.setdefault(rank, [])
            if len(part):
                parts.append(part)
    return found
