"""Measures the devices of the ranks: the speed of each, and the link of each pair.

The speed of a rank is the time of a fixed work: epochs of the run's model on the whole graph, in
one stage and one chunk. Wall clock is measured, so a device that other programs, heat or a limit
make slow counts as slow. Ranks that share cores are measured in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from gnnpipe.machine import machine_key
from gnnpipe.plan import Placement
from gnnpipe.plan.cluster import NO_LINK, Cluster, Device, Link
from gnnpipe.profiling.links import LinkTest, message_links
from gnnpipe.profiling.steps import measured_epochs
from gnnpipe.runtime.comm.cpu_affinity import crowding
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.memory_estimate import rank_memory_bytes
from gnnpipe.setup.prepared import Prepared

FEWEST, MOST, MIN_TIME_S = 3, 25, 1.0
"""Epochs of every rank, after one for warm-up; beyond ``FEWEST``, only until ``MIN_TIME_S``."""

SAME_SPEED = 0.1
"""Devices whose times differ by less than this share count as equal."""

SAME_LINK = 1.3
"""Links whose times of a message differ by less than this factor count as equal."""

MESSAGE_BYTES = 1 << 20
"""Size of the message by which links are compared."""

EVERY_PAIR = 8
"""Ranks up to which every pair is measured; of more, one pair for each two machines."""


@dataclass(frozen=True)
class RankSpeeds:
    """Speeds of the ranks' devices, relative to the fastest ones."""

    speeds: tuple[float, ...]
    """By rank; exactly 1 for the ranks that count as equal to the fastest."""

    @classmethod
    def of_times(cls, rounds: Sequence[Sequence[float]]) -> RankSpeeds:
        """Return the speeds from the times of the same work, by round and rank.

        Times are taken relative to the mean of their round, so that what slows all ranks for a
        while cancels; the median of the rounds counts. Ranks count as equal to the fastest one if
        their times differ by less than ``SAME_SPEED``, or by less than the spread of the
        rounds (between the quartiles, of the rank whose times spread least).

        >>> RankSpeeds.of_times([(1.0, 2.0, 1.05), (1.0, 2.0, 1.05), (9.0, 2.0, 1.05)]).speeds
        (1.0, 0.5, 1.0)
        """
        relative = [[time_s / statistics.geometric_mean(row) for time_s in row] for row in rounds]
        by_rank = [sorted(times) for times in zip(*relative, strict=True)]
        medians = [statistics.median(times) for times in by_rank]
        cut, fastest = len(rounds) // 4, min(medians)
        spread = min(times[-1 - cut] - times[cut] for times in by_rank)
        limit = fastest + max(SAME_SPEED * fastest, spread)
        return cls(tuple(1.0 if m <= limit else round(fastest / m, 4) for m in medians))

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> RankSpeeds:
        """Return the speeds of a cluster's devices, relative to the fastest ones."""
        fastest = max(device.speed for device in cluster.devices)
        return cls(tuple(device.speed / fastest for device in cluster.devices))

    @property
    def are_equal(self) -> bool:
        """Whether all ranks have the same speed."""
        return set(self.speeds) == {1.0}

    @property
    def reference(self) -> list[int]:
        """The fastest ranks, to which the speeds are relative."""
        return [rank for rank, speed in enumerate(self.speeds) if speed == 1.0]

    def line(self) -> str:
        """Return the speeds in words."""
        shown = ", ".join(f"{speed:.2f} (rank {rank})" for rank, speed in enumerate(self.speeds))
        return f"measured speeds: {shown}"


def measure_speeds(prepared: Prepared, mesh: Mesh) -> RankSpeeds:
    """Measure the speed of every rank; call it on every rank, with the same result.

    ``prepared``: the run with one stage of one shard.
    """
    turn, turns = 0, 1
    if crowding(torch.get_num_threads(), mesh.gather) > 1:
        hosts = mesh.gather(machine_key())
        turn = hosts[: mesh.rank].count(hosts[mesh.rank])
        turns = max(hosts.count(host) for host in hosts)
    alone = Mesh(0, 1, mesh.device, placement=Placement.grid(1, 1))
    rounds: list[list[float]] = []
    with measured_epochs(prepared, [alone], False) as run_epoch:
        _round(mesh, run_epoch, turn, turns)  # memory pages are first touched
        while len(rounds) < FEWEST or (len(rounds) < MOST and _spent_s(rounds) < MIN_TIME_S):
            rounds.append(_round(mesh, run_epoch, turn, turns))
    return RankSpeeds.of_times(rounds)


def _spent_s(rounds: Sequence[Sequence[float]]) -> float:
    return sum(map(max, rounds))


def _round(mesh: Mesh, run_epoch: Callable[[], object], turn: int, turns: int) -> list[float]:
    """Seconds of one epoch of every rank."""
    time_s = 0.0
    for now in range(turns):
        mesh.gather(None)  # the ranks of a turn start at once
        if now == turn:
            start_s = time.perf_counter()
            run_epoch()
            time_s = time.perf_counter() - start_s
    found: list[float] = mesh.gather(time_s)
    return found


def times_of_fewer(prepared: Prepared, mesh: Mesh) -> dict[int, float]:
    """Measure 1, 2, 4, ... ranks of every machine at once; the same on every rank.

    Returns the time of an epoch over that of an epoch while all ranks compute, at most 1, by the
    number of ranks of a machine. ``prepared``: the run with one stage of one shard.
    """
    hosts = mesh.gather(machine_key())
    most = max(hosts.count(host) for host in hosts)
    counts = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    if not counts:
        return {}
    place = hosts[: mesh.rank].count(hosts[mesh.rank])
    alone = Mesh(0, 1, mesh.device, placement=Placement.grid(1, 1))
    found: dict[int, float] = {}
    with measured_epochs(prepared, [alone], False) as run_epoch:
        run_epoch()  # memory pages are first touched
        of_all = _epoch_time_s(mesh, run_epoch)
        for count in counts:
            own_s = _epoch_time_s(mesh, run_epoch if place < count else None)
            shares = mesh.gather(own_s / of_all if place < count else None)
            found[count] = min(statistics.fmean(s for s in shares if s is not None), 1.0)
    # More ranks are never faster each; where they seem to be, the machine was disturbed.
    counts.reverse()
    for count, more in zip(counts[1:], counts, strict=False):
        found[count] = min(found[count], found[more])
    return found


def _epoch_time_s(mesh: Mesh, run_epoch: Callable[[], object] | None) -> float:
    """Return the median time of some epochs of this rank, which start together on all ranks.

    ``None``: the rank waits, and the result is 0.
    """
    times: list[float] = []
    spent_s = 0.0
    while not times or (len(times) < FEWEST and spent_s < MIN_TIME_S):
        mesh.gather(None)
        start_s = time.perf_counter()
        if run_epoch is not None:
            run_epoch()
        times.append(time.perf_counter() - start_s)
        spent_s += max(mesh.gather(times[-1]))
    return statistics.median(times) if run_epoch is not None else 0.0


def measure_cluster(mesh: Mesh, speeds: RankSpeeds, test: LinkTest) -> Cluster:
    """Measure memory and links; the same cluster on every rank.

    The link is that of the median pair; pairs with another one are listed.
    """
    memory = mesh.gather(rank_memory_bytes(mesh))
    devices = tuple(Device(s, size) for s, size in zip(speeds.speeds, memory, strict=True))
    groups = list(_alike_pairs(mesh.gather(machine_key())).values())
    if not groups:
        return Cluster(devices, NO_LINK)
    found = message_links(mesh, test, [pairs[0] for pairs in groups])
    links = {
        pair: Link(_rounded(times.bandwidth_bytes_per_s), _rounded(times.latency_s))
        for pairs, times in zip(groups, found, strict=True)
        for pair in pairs
    }
    usual = sorted(links.values(), key=_message_s)[len(links) // 2]
    return Cluster(
        devices, usual, {pair: own for pair, own in links.items() if _differ(own, usual)}
    )


def _alike_pairs(hosts: Sequence[str]) -> dict[object, list[tuple[int, int]]]:
    """Return groups of pairs of ranks whose links are assumed to be alike."""
    groups: dict[object, list[tuple[int, int]]] = {}
    for pair in combinations(range(len(hosts)), 2):
        ends = frozenset(hosts[rank] for rank in pair)
        groups.setdefault(pair if len(hosts) <= EVERY_PAIR else ends, []).append(pair)
    return groups


def _message_s(link: Link) -> float:
    return link.latency_s + MESSAGE_BYTES / link.bandwidth_bytes_per_s


def _differ(one: Link, other: Link) -> bool:
    times = sorted([_message_s(one), _message_s(other)])
    return times[1] > SAME_LINK * times[0]


def _rounded(value: float) -> float:
    """Return a value with three digits."""
    return float(f"{value:.3g}")


def relative_to_fastest(cluster: Cluster) -> Cluster:
    """Return the cluster with speeds relative to its fastest devices."""
    speeds = RankSpeeds.of_cluster(cluster).speeds
    devices = (replace(d, speed=s) for d, s in zip(cluster.devices, speeds, strict=True))
    return replace(cluster, devices=tuple(devices))
