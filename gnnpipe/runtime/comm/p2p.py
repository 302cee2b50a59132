"""Point-to-point messages between stages: values forward, gradients backward.

``post`` and ``send`` return at once; ``take`` waits for one message, ``drain`` for all sends.
Messages between two ranks arrive in the order in which they were sent, so no tags are needed:
``schedule.check`` has proved that both ends use the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.start_thread import StartedMessages

Key = tuple[str, int, int]
"""Direction ('F' or 'B'), stage of the peer, position of the chunk."""


class PointToPoint:
    """Sends and receives one rank's messages, to and from the same shard of other stages."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype, row_dtype: torch.dtype) -> None:
        """``dtype``: number type of values; ``row_dtype``: number type in messages."""
        self.mesh = mesh
        self.dtype, self.row_dtype = dtype, row_dtype
        self.sent_bytes = 0
        self._arriving: dict[Key, tuple[dict[str, Tensor], StartedMessages, float]] = {}
        self._leaving: list[tuple[list[Tensor], StartedMessages]] = []

    def post(
        self, way: str, peer: int, position: int, sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        """Start to receive values of these ``sizes`` (rows, width) from stage ``peer``."""
        values = {
            name: torch.empty(sizes[name], dtype=self.row_dtype, device=self.mesh.device)
            for name in sorted(sizes)
        }
        source = self.mesh.peer(peer)
        coming = [t for t in values.values() if len(t)]
        transfer = self.mesh.start_thread.start(lambda: [dist.irecv(t, src=source) for t in coming])
        self._arriving[way, peer, position] = (values, transfer, self.mesh.recorder.clock())

    def take(self, way: str, peer: int, position: int) -> dict[str, Tensor]:
        """Wait for posted values and return them, by name."""
        values, transfer, posted_s = self._arriving.pop((way, peer, position))
        recorder = self.mesh.recorder
        wait_start_s = recorder.clock()
        transfer.wait()
        size = sum(t.nbytes for t in values.values())
        recorder.add_message(way, self.mesh.peer(peer), position, size, posted_s, wait_start_s)
        return {name: value.to(self.dtype) for name, value in values.items()}

    def send(self, way: str, peer: int, position: int, values: Mapping[str, Tensor]) -> None:
        """Start to send values to stage ``peer``; they must not change before ``drain``."""
        target = self.mesh.peer(peer)
        self.mesh.recorder.add_send(way, target, position)
        # No message for a value without rows: a chunk may have no vertex of a type.
        leaving = [
            values[name].detach().to(self.row_dtype).contiguous()
            for name in sorted(values)
            if len(values[name])
        ]
        transfer = self.mesh.start_thread.start(
            lambda: [dist.isend(t, dst=target) for t in leaving]
        )
        self._leaving.append((leaving, transfer))
        self.sent_bytes += sum(t.nbytes for t in leaving)

    def drain(self) -> None:
        """Wait until all sends are complete."""
        for _, transfer in self._leaving:
            transfer.wait()
        self._leaving.clear()
