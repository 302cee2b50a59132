"""What the notes of several ranks need to be set side by side: clocks and the speed of links.

Both take some tens of milliseconds, outside of every epoch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["clock_offset", "receive_bandwidth"]

ROUNDS, PROBE_BYTES = 3, 1 << 20


def clock_offset(mesh: Mesh) -> float:
    """Seconds to add to this rank's clock to get rank 0's, to half the quickest round trip.

    Cristian's method: rank 0 answers each rank in turn with what its clock shows.
    """
    best = (float("inf"), 0.0)
    for rank in range(1, mesh.world_size):
        if mesh.rank not in (0, rank):
            continue
        for _ in range(ROUNDS):
            time = torch.zeros(1, dtype=torch.float64)
            asked = mesh.recorder.clock()
            if mesh.rank == 0:
                dist.recv(time, src=rank, group=mesh.control_group)
                time[0] = mesh.recorder.clock()
                dist.send(time, dst=rank, group=mesh.control_group)
            else:
                dist.send(time, dst=0, group=mesh.control_group)
                dist.recv(time, src=0, group=mesh.control_group)
                answered = mesh.recorder.clock()
                offset = float(time) - (asked + answered) / 2
                best = min(best, (answered - asked, offset))
    return best[1]


def receive_bandwidth(mesh: Mesh) -> float:
    """Bytes per second that arrive here while all stages send to the next and the one before.

    The best of a few rounds; infinite where there is one stage, and on GPUs, where nothing is noted
    that it would be for.
    """
    if mesh.device.type != "cpu":
        return float("inf")
    peers = [s for s in (mesh.stage - 1, mesh.stage + 1) if 0 <= s < mesh.stages]
    best = 0.0 if peers else float("inf")
    data = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=mesh.device)
    for _ in range(ROUNDS):
        start = mesh.recorder.clock()
        works = []
        for stage in peers:
            works.append(dist.irecv(torch.empty_like(data), src=mesh.peer(stage)))
            works.append(dist.isend(data, dst=mesh.peer(stage)))
        for work in works:
            assert work is not None
            work.wait()
        taken = max(mesh.recorder.clock() - start, 1e-9)
        best = max(best, len(peers) * PROBE_BYTES / taken)
    return best
