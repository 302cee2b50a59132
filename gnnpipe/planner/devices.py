"""Assigns unequal devices to stages: orders along the stages, and shares of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from gnnpipe.plan.cluster import Cluster


def machine_of(cluster: Cluster) -> list[int]:
    """Return for each device the number of its machine: that of one device of the machine.

    A machine is a set of devices that links faster than the usual one connect.
    """
    machine = list(range(len(cluster.devices)))

    def root(device: int) -> int:
        while machine[device] != device:
            device = machine[device]
        return device

    for (low, high), link in cluster.pairs.items():
        if link.bandwidth_bytes_per_s > cluster.link.bandwidth_bytes_per_s:
            machine[root(high)] = root(low)
    return [root(device) for device in range(len(machine))]


def by_machine(cluster: Cluster) -> list[int]:
    """Return the devices, fastest machine first and fastest device of a machine first."""
    machine = machine_of(cluster)
    members: dict[int, list[int]] = {}
    # Of equal speeds the device with more memory first.
    for device in sorted(
        range(len(machine)),
        key=lambda d: (-cluster.devices[d].speed, -cluster.devices[d].memory_bytes),
    ):
        members.setdefault(machine[device], []).append(device)

    def speed(group: Sequence[int]) -> float:
        return sum(cluster.devices[device].speed for device in group)

    return [d for group in sorted(members.values(), key=speed, reverse=True) for d in group]


Slot = tuple[tuple[int, ...], tuple[float, ...]]
"""The ranks of a stage, and the share of each of them."""

MOST_UNEVEN = 16
"""Ranks up to which stages may also have different numbers of ranks."""


def stage_counts(count: int, are_all: bool) -> list[int]:
    """Return the numbers of stages that are tried for so many ranks, which may be all there are."""
    may_differ = are_all and count <= MOST_UNEVEN
    return [n for n in range(1, count + 1) if count % n == 0 or may_differ]


def arrangements(cluster: Cluster | None, count: int, stages: int) -> list[tuple[Slot, ...]]:
    """Return assignments of ``count`` ranks to stages; few for equal devices and links."""
    found: dict[tuple[Slot, ...], None] = {}
    for sizes in _sizes(count, stages):
        if cluster is None or (not cluster.pairs and len(set(cluster.devices)) == 1):
            found[_even(_runs(range(count), sizes))] = None
            continue
        speeds = [device.speed for device in cluster.devices]
        for groups in _orders(cluster, speeds, sizes):
            found[_even(groups)] = None
            found[_by_speed(groups, speeds)] = None
            if len(set(sizes)) == 1:
                found[_by_mean_speed(groups, speeds)] = None
    return list(found)


def _sizes(count: int, stages: int) -> list[list[int]]:
    """Return the numbers of ranks of the stages, equal or with one more at either end."""
    each, more = divmod(count, stages)
    sizes = [each + 1] * more + [each] * (stages - more)
    return [sizes] if not more else [sizes, sizes[::-1]]


def _runs(order: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ends = [0, *accumulate(sizes)]
    return tuple(tuple(order[a:b]) for a, b in pairwise(ends))


def _orders(
    cluster: Cluster, speeds: Sequence[float], sizes: Sequence[int]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return the ranks of the stages, each ascending, in several orders of the devices."""
    machines = by_machine(cluster)
    fastest = sorted(machines, key=lambda device: -speeds[device])
    orders = [machines, machines[::-1], fastest, fastest[::-1]]
    found = [_runs(order, sizes) for order in orders]
    if len(set(sizes)) == 1:
        # Every stage gets the same mixture of fast and slow devices.
        stages = range(len(sizes))
        found += [tuple(tuple(o[i :: len(sizes)]) for i in stages) for o in (machines, fastest)]
    return [tuple(tuple(sorted(group)) for group in groups) for groups in found]


def _even(groups: Sequence[tuple[int, ...]]) -> tuple[Slot, ...]:
    return tuple((group, (1 / len(group),) * len(group)) for group in groups)


def _by_speed(groups: Sequence[tuple[int, ...]], speeds: Sequence[float]) -> tuple[Slot, ...]:
    """Give every rank a share in proportion to its speed in its stage."""
    found = []
    for group in groups:
        total = sum(speeds[rank] for rank in group)
        found.append((group, tuple(speeds[rank] / total for rank in group)))
    return tuple(found)


def _by_mean_speed(groups: Sequence[tuple[int, ...]], speeds: Sequence[float]) -> tuple[Slot, ...]:
    """Give every shard the same share in all stages, so that rows stay on their shard."""
    sums = [sum(speeds[rank] for rank in shard) for shard in zip(*groups, strict=True)]
    shares = tuple(total / sum(sums) for total in sums)
    return tuple((group, shares) for group in groups)
