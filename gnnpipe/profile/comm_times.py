"""Times of messages, exchanges and gradient sums between real ranks, by size.

Nothing is computed meanwhile; what they take from ranks that compute is measured in ``link_load``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from gnnpipe.runtime.comm.halo_exchange import Arrival, sum_over_shards
from gnnpipe.runtime.comm.mesh import Mesh

__all__ = [
    "THOROUGH",
    "Probe",
    "clock_offset",
    "exchange_of",
    "exchange_times",
    "gradient_sum_times",
    "message_times",
    "receive_bandwidth",
]


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
            loss_rows = mesh.recorder.clock()
            if mesh.rank == 0:
                dist.recv(time, src=rank, group=mesh.control_group)
                time[0] = mesh.recorder.clock()
                dist.send(time, dst=rank, group=mesh.control_group)
            else:
                dist.send(time, dst=0, group=mesh.control_group)
                dist.recv(time, src=0, group=mesh.control_group)
                answered = mesh.recorder.clock()
                offset = float(time) - (loss_rows + answered) / 2
                best = min(best, (answered - loss_rows, offset))
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


@dataclass(frozen=True)
class Probe:
    """What is sent, and how often."""

    sizes_bytes: tuple[int, ...]
    warm_up: int
    repeats: int
    """At least 2."""


THOROUGH = Probe((1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23), warm_up=2, repeats=7)


def message_times(mesh: Mesh, probe: Probe, pairs: Sequence[tuple[int, int]]) -> list[list[float]]:
    """Seconds of a message by pair of ranks, one pair at a time, and size; on every rank.

    Half of there and back.
    """
    found = []
    for pair in pairs:
        times = _by_size(mesh, probe, partial(_there_and_back, mesh, *pair), mesh.rank in pair)
        both: list[float] = mesh.gather(times)[pair[0]]
        found.append([time_s / 2 for time_s in both])
    return found


def _there_and_back(mesh: Mesh, first: int, second: int, size_bytes: int) -> None:
    data = torch.zeros(size_bytes, dtype=torch.uint8, device=mesh.device)
    if mesh.rank == first:
        arriving = mesh.start_thread.start(lambda: [dist.irecv(torch.empty_like(data), src=second)])
        mesh.start_thread.start(lambda: [dist.isend(data, dst=second)]).wait()
        arriving.wait()
    else:
        mesh.start_thread.start(lambda: [dist.irecv(torch.empty_like(data), src=first)]).wait()
        mesh.start_thread.start(lambda: [dist.isend(data, dst=first)]).wait()


def exchange_of(size_bytes: int, mesh: Mesh) -> Arrival:
    """One under way, in which each shard sends ``size_bytes`` in equal parts."""
    counts = [max(size_bytes // (mesh.shards - 1), 1)] * mesh.shards
    counts[mesh.shard] = 0
    data = torch.zeros(sum(counts), 1, dtype=torch.uint8, device=mesh.device)
    return Arrival(torch.empty_like(data), data, counts, counts, mesh, len(data))


def exchange_times(mesh: Mesh, probe: Probe) -> list[float]:
    """Seconds of an all-to-all among the shards by size, what a shard sends; the slowest rank's."""

    def exchange(size_bytes: int) -> None:
        exchange_of(size_bytes, mesh).wait()

    return _slowest(mesh, _by_size(mesh, probe, exchange))


def gradient_sum_times(mesh: Mesh, probe: Probe) -> list[float]:
    """Seconds of a sum over the shards by size of what is summed; the slowest rank's."""

    def add_up(size_bytes: int) -> None:
        sum_over_shards(torch.zeros(size_bytes // 4, device=mesh.device), mesh)

    return _slowest(mesh, _by_size(mesh, probe, add_up))


def _slowest(mesh: Mesh, times: list[float]) -> list[float]:
    return [max(by_rank) for by_rank in zip(*mesh.gather(times), strict=True)]


def _by_size(
    mesh: Mesh, probe: Probe, work: Callable[[int], None], takes_part: bool = True
) -> list[float]:
    """By size what a run takes, which all ranks begin together."""
    found = []
    for size_bytes in probe.sizes_bytes:
        mesh.gather(None)
        times = []
        for _ in range(probe.warm_up + probe.repeats if takes_part else 0):
            start_s = mesh.recorder.clock()
            work(size_bytes)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            times.append(mesh.recorder.clock() - start_s)
        # The second quickest: other programs can only slow it down.
        found.append(sorted(times[probe.warm_up :] or [0.0, 0.0])[1])
    return found
