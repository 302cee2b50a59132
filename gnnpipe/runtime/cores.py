"""Gives each rank cores of its own.

Ranks wake each other: whoever gets a message is often woken on the core of whoever sent it, and the
two share that core for milliseconds while another one has nothing to do. On two cores an epoch of
0.1 s took 10 to 25 % longer so, and never twice the same. MPI's launchers bind ranks for the same
reason. All cores that a rank may use are shared out, so that gloo's threads find room where there
is some; ranks with more threads than cores are left alone.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["crowding", "own_cores", "stay_on", "usable_cores"]


def usable_cores() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS has none


def own_cores(rank: int, threads: int, gather: Callable[[Any], list[Any]]) -> frozenset[int]:
    """The share of a rank in the cores that it may use, with others of its machine or alone.

    ``gather`` tells every rank what all say, by rank. Ranks that may use different cores have been
    given them by somebody, and keep them; so do those of which one needs more ``threads`` than its
    share.
    """
    mine = platform.node(), usable_cores()
    everyone: list[tuple[tuple[str, frozenset[int]], int]] = gather((mine, threads))
    peers = [other for other, (place, _) in enumerate(everyone) if place == mine]
    cores, count = sorted(mine[1]), len(mine[1]) // len(peers)
    if count < max(everyone[peer][1] for peer in peers):
        return mine[1]
    first = peers.index(rank) * count
    return frozenset(cores[first : first + count])


def crowding(threads: int, gather: Callable[[Any], list[Any]]) -> float:
    """Threads of all ranks over cores, where there are most; the same on every rank.

    Above 1 the ranks of a machine wait for each other's turn.
    """
    everyone = gather((platform.node(), usable_cores(), threads))
    found: list[float] = []
    for host in {place for place, _, _ in everyone}:
        here = [(cores, count) for place, cores, count in everyone if place == host]
        found.append(sum(n for _, n in here) / len(frozenset[int]().union(*(c for c, _ in here))))
    return max(found)


def stay_on(cores: Collection[int]) -> None:
    """Every thread of this process, and what it starts from now on."""
    if not hasattr(os, "sched_setaffinity"):
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # It has ended, or may not be moved.
            os.sched_setaffinity(int(thread), cores)
