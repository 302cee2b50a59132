"""Times of messages, exchanges and gradient sums between real ranks, by size.

Nothing is computed meanwhile. On a CPU gloo's own threads take part of a core, and where the ranks
have no core to spare that is taken from what they compute; so processor time is measured as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from gnnpipe.runtime.exchange import Arrival, sum_over_shards
from gnnpipe.runtime.mesh import Mesh

__all__ = ["THOROUGH", "Probe", "Taken", "exchange_times", "gradient_sum_times", "message_times"]


@dataclass(frozen=True)
class Probe:
    """What is sent, and how often."""

    sizes_bytes: tuple[int, ...]
    warm_up: int
    repeats: int
    """At least 2."""


@dataclass(frozen=True)
class Taken:
    """Seconds of one transfer."""

    time_s: float
    own_s: float
    """Of the thread that asked for it, on a processor: at one end."""
    other_s: float
    """Of the other threads of that rank."""


THOROUGH = Probe((1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23), warm_up=2, repeats=7)


def message_times(mesh: Mesh, probe: Probe, pairs: Sequence[tuple[int, int]]) -> list[list[Taken]]:
    """A message by pair of ranks, one pair at a time, and size; on every rank.

    Half of there and back.
    """
    found = []
    for pair in pairs:
        times = _by_size(mesh, probe, partial(_there_and_back, mesh, *pair), mesh.rank in pair)
        both: list[Taken] = mesh.gather(times)[pair[0]]
        found.append([Taken(t.time_s / 2, t.own_s / 2, t.other_s / 2) for t in both])
    return found


def _there_and_back(mesh: Mesh, first: int, second: int, size_bytes: int) -> None:
    data = torch.zeros(size_bytes, dtype=torch.uint8, device=mesh.device)
    if mesh.rank == first:
        arriving = dist.irecv(torch.empty_like(data), src=second)
        dist.send(data, dst=second)
        assert arriving is not None
        arriving.wait()
    else:
        dist.recv(torch.empty_like(data), src=first)
        dist.send(data, dst=first)


def exchange_times(mesh: Mesh, probe: Probe) -> list[Taken]:
    """An all-to-all among the shards by size, what a shard sends; the slowest rank's."""
    peers = mesh.shards - 1

    def exchange(size_bytes: int) -> None:
        counts = [max(size_bytes // peers, 1)] * mesh.shards
        counts[mesh.shard] = 0
        data = torch.zeros(sum(counts), dtype=torch.uint8, device=mesh.device)
        Arrival(torch.empty_like(data), data, counts, counts, mesh).wait()

    return _slowest(mesh, _by_size(mesh, probe, exchange))


def gradient_sum_times(mesh: Mesh, probe: Probe) -> list[Taken]:
    """A sum over the shards by size of what is summed; the slowest rank's."""

    def add_up(size_bytes: int) -> None:
        sum_over_shards(torch.zeros(size_bytes // 4, device=mesh.device), mesh)

    return _slowest(mesh, _by_size(mesh, probe, add_up))


def _slowest(mesh: Mesh, times: list[Taken]) -> list[Taken]:
    by_size = zip(*mesh.gather(times), strict=True)
    return [max(of_rank, key=lambda taken: taken.time_s) for of_rank in by_size]


def _by_size(
    mesh: Mesh, probe: Probe, work: Callable[[int], None], takes_part: bool = True
) -> list[Taken]:
    """By size what a run takes, which all ranks begin together."""
    found = []
    for size_bytes in probe.sizes_bytes:
        mesh.gather(None)
        times = []
        for _ in range(probe.warm_up + probe.repeats if takes_part else 0):
            start_s, own_s, all_s = mesh.recorder.clock(), time.thread_time(), time.process_time()
            work(size_bytes)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            own_s, all_s = time.thread_time() - own_s, time.process_time() - all_s
            time_s = mesh.recorder.clock() - start_s
            times.append(Taken(time_s, own_s, max(all_s - own_s, 0.0)))
        kept = times[probe.warm_up :] or [Taken(0.0, 0.0, 0.0)] * 2
        # The second quickest: other programs can only slow it down. On a processor the least:
        # threads that have nothing to do with it are counted when they wake up.
        time_s = sorted(taken.time_s for taken in kept)[1]
        least = (min(t.own_s for t in kept), min(t.other_s for t in kept))
        found.append(Taken(time_s, *least))
    return found
