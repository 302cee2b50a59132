"""Stage to stage: values forward, gradients back, without waiting.

``post`` and ``send`` return at once; ``take`` waits for one message, ``drain`` for everything that
was sent. Messages between two ranks keep their order, so no tags are needed: the program checker
has proved that both ends agree on it. Every value is its own message, by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.start_thread import Transfer

__all__ = ["PointToPoint"]

Key = tuple[str, int, int]
"""(way 'F' or 'B', stage of the peer, position of the chunk)."""


class PointToPoint:
    """The messages of one rank."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype, row_dtype: torch.dtype) -> None:
        """Values are of ``dtype`` and travel as ``row_dtype``."""
        self.mesh = mesh
        self.dtype, self.row_dtype = dtype, row_dtype
        self.sent_bytes = 0
        self._arriving: dict[Key, tuple[dict[str, Tensor], Transfer, float]] = {}
        self._leaving: list[tuple[list[Tensor], Transfer]] = []

    def post(
        self, way: str, peer: int, position: int, sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        """Make room for values of these sizes (rows, width) and start to receive them."""
        room = {
            name: torch.empty(sizes[name], dtype=self.row_dtype, device=self.mesh.device)
            for name in sorted(sizes)
        }
        source = self.mesh.peer(peer)
        coming = [t for t in room.values() if len(t)]
        transfer = self.mesh.start_thread.start(lambda: [dist.irecv(t, src=source) for t in coming])
        self._arriving[way, peer, position] = (room, transfer, self.mesh.recorder.clock())

    def take(self, way: str, peer: int, position: int) -> dict[str, Tensor]:
        """The values that were posted, once they are here."""
        room, transfer, posted = self._arriving.pop((way, peer, position))
        wait_start_s = self.mesh.recorder.clock()
        transfer.wait()
        size = sum(t.nbytes for t in room.values())
        self.mesh.recorder.add_message(
            way, self.mesh.peer(peer), position, size, posted, wait_start_s
        )
        return {name: values.to(self.dtype) for name, values in room.items()}

    @property
    def is_rounding(self) -> bool:
        """What arrives is not what was sent."""
        return self.row_dtype != self.dtype

    def send(self, way: str, peer: int, position: int, values: Mapping[str, Tensor]) -> None:
        """Start to send values; they must not change before ``drain``."""
        self.mesh.recorder.add_send(way, self.mesh.peer(peer), position)
        target = self.mesh.peer(peer)
        # A chunk may have no vertex of a type; nobody waits for it.
        leaving = [
            values[name].detach().to(self.row_dtype).contiguous()
            for name in sorted(values)
            if len(values[name])
        ]
        transfer = self.mesh.start_thread.start(
            lambda: [dist.isend(t, dst=target) for t in leaving]
        )
        self._leaving.append((leaving, transfer))
        self.sent_bytes += sum(t.numel() * t.element_size() for t in leaving)

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for _, transfer in self._leaving:
            transfer.wait()
        self._leaving.clear()
