"""Binds each rank to CPU cores of its own, as MPI's launchers do.

Without binding, Linux often wakes a receiver on the core of the sender, and both share this core
for milliseconds while another core is idle (10 to 25 % of an epoch of 0.1 s, docs/adr/0020). All
usable cores of a machine are divided among its ranks, so gloo's threads have cores to run on if
there are more cores than ranks. Ranks with more threads than cores, and ranks that were bound from
outside (by a launcher, a container or ``OMP_PROC_BIND``), stay as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gnnpipe.machine import machine_key


def usable_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # not on macOS


def own_cores(rank: int, threads: int, gather: Callable[[Any], list[Any]]) -> frozenset[int]:
    """Return the cores of a rank: its share of the cores that its machine's ranks may use.

    Ranks keep all their usable cores if they were bound from outside (they may use different cores,
    or their threads are bound one by one by ``OMP_PROC_BIND``), or if a rank has more ``threads``
    than a share has cores.

    Args:
        rank: Number of this rank.
        threads: Threads that torch uses on this rank.
        gather: Returns the argument of every rank, by rank.
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
    """Return the number of threads per core on the most crowded machine, on every rank.

    Above 1, ranks of a machine wait for each other.
    """
    everyone = gather((machine_key(), usable_cores(), threads))
    found: list[float] = []
    for host in {place for place, _, _ in everyone}:
        here = [(cores, count) for place, cores, count in everyone if place == host]
        found.append(sum(n for _, n in here) / len(frozenset[int]().union(*(c for c, _ in here))))
    return max(found)


@contextmanager
def on_own_cores(rank: int, threads: int, gather: Callable[[Any], list[Any]]) -> Iterator[None]:
    """Bind all threads of this process, and those started inside the block, to ``own_cores``."""
    before = usable_cores()
    own = own_cores(rank, threads, gather)
    if own == before:
        yield
        return
    _bind(own)
    try:
        yield
    finally:
        _bind(before)


def _by_thread() -> set[frozenset[int]]:
    """Return the sets of cores that threads of this process may use; empty where not known."""
    found = set()
    for thread in _threads():
        with contextlib.suppress(OSError):  # the thread has ended
            found.add(frozenset(os.sched_getaffinity(thread)))
    return found


def _bind(cores: Collection[int]) -> None:
    """Bind every thread of this process; threads and processes started later inherit this."""
    for thread in _threads():
        with contextlib.suppress(OSError):  # the thread has ended, or may not be moved
            os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    """Return the thread ids; only this one (0) without /proc, none where none can be bound."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [0]
