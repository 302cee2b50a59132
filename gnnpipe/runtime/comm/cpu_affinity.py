"""Gives each rank cores of its own.

Ranks wake each other: whoever gets a message is often woken on the core of whoever sent it, and the
two share that core for milliseconds while another one has nothing to do. On two cores an epoch of
0.1 s took 10 to 25 % longer so, and never twice the same. MPI's launchers bind ranks for the same
reason. All cores that the ranks may use are shared out, so that gloo's threads find room where
there is some; ranks with more threads than cores, and those that somebody else has given cores, are
left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gnnpipe.machine import machine_key

__all__ = ["crowding", "on_own_cores", "own_cores", "usable_cores"]


def usable_cores() -> frozenset[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS has none


def own_cores(rank: int, threads: int, gather: Callable[[Any], list[Any]]) -> frozenset[int]:
    """The share of a rank in the cores that it may use, with others of its machine or alone.

    ``gather`` tells every rank what all say, by rank. Ranks that may use different cores have been
    given them by somebody, and keep them; so do those whose threads have been given places one by
    one (``OMP_PROC_BIND``), and those of which one needs more ``threads`` than its share.
    """
    mine = machine_key(), usable_cores()
    everyone = gather((mine, threads, len(_by_thread()) <= 1))
    peers = [other for other, (place, _, _) in enumerate(everyone) if place == mine]
    cores = sorted(mine[1])
    most = max(everyone[peer][1] for peer in peers)
    if len(cores) // len(peers) < most or not all(everyone[peer][2] for peer in peers):
        return mine[1]
    place = peers.index(rank)
    first, end = (i * len(cores) // len(peers) for i in (place, place + 1))
    return frozenset(cores[first:end])


def crowding(threads: int, gather: Callable[[Any], list[Any]]) -> float:
    """Threads of all ranks over cores, where there are most; the same on every rank.

    Above 1 the ranks of a machine wait for each other's turn.
    """
    everyone = gather((machine_key(), usable_cores(), threads))
    found: list[float] = []
    for host in {place for place, _, _ in everyone}:
        here = [(cores, count) for place, cores, count in everyone if place == host]
        found.append(sum(n for _, n in here) / len(frozenset[int]().union(*(c for c, _ in here))))
    return max(found)


@contextmanager
def on_own_cores(
    rank: int, threads: int, gather: Callable[[Any], list[Any]]
) -> Iterator[frozenset[int]]:
    """Every thread, and what is started, stays on ``own_cores``; gives the cores from before."""
    before = usable_cores()
    own = own_cores(rank, threads, gather)
    if own == before:
        yield before
        return
    _stay_on(own)
    try:
        yield before
    finally:
        _stay_on(before)


def _by_thread() -> set[frozenset[int]]:
    """The sets of cores that threads of this process may use; empty where nobody says."""
    found = set()
    for thread in _threads():
        with contextlib.suppress(OSError):  # It has ended.
            found.add(frozenset(os.sched_getaffinity(thread)))
    return found


def _stay_on(cores: Collection[int]) -> None:
    """Every thread of this process, and what it starts from now on."""
    for thread in _threads():
        with contextlib.suppress(OSError):  # It has ended, or may not be moved.
            os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    """Their numbers; this one's alone (0) without /proc, none where threads cannot be moved."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]
