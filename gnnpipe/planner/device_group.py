"""The devices of one stage as cost formulas see them, and the shares of the work of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gnnpipe.plan.cluster import Cluster, Link
from gnnpipe.planner.devices import machine_of

Floats = npt.NDArray[np.float64]

BISECTIONS = 16
"""Steps towards the largest share that fits, whose error is then 2^-16."""


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """The devices that share the work of a stage, and their links."""

    speeds: Floats
    """Speed of dense products, relative to the profiled device, [G]."""
    memory_speeds: Floats
    """Speed of aggregation and row-wise work, [G]."""
    machines: Floats
    """1 if a device is on a machine, else 0, [machines, G]."""
    inside_bytes_per_s: float
    """Bandwidth of a device to the others of its machine."""
    outside_bytes_per_s: float
    """Bandwidth of a machine to the others."""
    latency_s: float
    most: Floats | None = None
    """Largest share of each device that fits into its memory, [G]; None: there is no limit."""

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        ranks: Sequence[int],
        memory_speeds: Sequence[float] = (),
        most: Floats | None = None,
    ) -> DeviceGroup:
        """Return the devices of some ranks.

        ``memory_speeds``: of all devices of the cluster; default: their ``speed``.
        """
        labels = machine_of(cluster)
        used = list(dict.fromkeys(labels[rank] for rank in ranks))
        speeds = [device.speed for device in cluster.devices]
        near: list[Link] = []
        far: list[Link] = []
        for i, a in enumerate(ranks):
            for b in ranks[i + 1 :]:
                (near if labels[a] == labels[b] else far).append(cluster.between(a, b))
        return cls(
            np.array([speeds[rank] for rank in ranks], dtype=float),
            np.array([(memory_speeds or speeds)[rank] for rank in ranks], dtype=float),
            np.array([[float(labels[r] == label) for r in ranks] for label in used]),
            min((link.bandwidth_bytes_per_s for link in near), default=np.inf),
            min((link.bandwidth_bytes_per_s for link in far), default=np.inf),
            max((link.latency_s for link in (*near, *far)), default=0.0),
            most,
        )

    @property
    def count(self) -> int:
        """G."""
        return len(self.speeds)

    @property
    def equal(self) -> Floats:
        """Equal shares as far as these fit, [G]."""
        return self._fitting(np.full(self.count, 1 / self.count))

    @property
    def by_speed(self) -> Floats:
        """Shares in proportion to the speed of dense products as far as these fit, [G]."""
        return self._fitting(self.speeds / self.speeds.sum())

    def _fitting(self, shares: Floats) -> Floats:
        return shares if self.most is None else capped(shares, self.most)

    def averaged(self, shares: Floats) -> Floats:
        """Return the mean share of devices that can replace each other, [G].

        Such devices are equal, on machines of equal devices. A sum of maxima does not grow by it.
        """
        most = np.ones(self.count) if self.most is None else self.most
        columns = self.speeds, self.memory_speeds, most
        both = list(zip(*(column.tolist() for column in columns), strict=True))
        mates = [tuple(sorted(both[j] for j in np.flatnonzero(row))) for row in self.machines]
        machine = self.machines.argmax(0)
        keys = [(both[g], mates[machine[g]]) for g in range(self.count)]
        found = shares.copy()
        for key in set(keys):
            members = [g for g in range(self.count) if keys[g] == key]
            found[members] = shares[members].mean()
        return found


@dataclass(frozen=True, eq=False)
class Shares:
    """The parts of vertices and of columns that each device gets, [G] each."""

    rows: Floats
    columns: Floats

    @classmethod
    def alike(cls, shares: Floats) -> Shares:
        """Return the same shares of both."""
        return cls(shares, shares)


def capped(shares: Floats, most: Floats) -> Floats:
    """Return the shares with none above its limit; the others take the rest in proportion.

    If ``shares`` are the speeds, no other shares within the limits have a smaller largest quotient
    of share and speed.

    Args:
        shares: [G], which sum to 1.
        most: Limits [G], which sum to at least 1.

    >>> capped(np.array([0.5, 0.25, 0.25]), np.array([0.2, 1.0, 1.0])).tolist()
    [0.2, 0.4, 0.4]
    """
    found = shares.copy()
    is_full = np.zeros(len(shares), dtype=bool)
    while (is_over := ~is_full & (found > most)).any():
        is_full |= is_over
        found[is_full] = most[is_full]
        left = 1 - most[is_full].sum()
        found[~is_full] = shares[~is_full] * left / shares[~is_full].sum()
    return found


def largest_share(size_bytes: Callable[[float], int], limit_bytes: int) -> float:
    """Return a share whose memory is within the limit, 2^-16 below the largest one; 0: none is.

    ``size_bytes``: returns the memory of a share, which grows with the share.
    """
    low, high = 0.0, 1.0
    if size_bytes(high) <= limit_bytes:
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if size_bytes(middle) <= limit_bytes:
            low = middle
        else:
            high = middle
    return low
