"""List scheduling: tasks on resources, each started as soon as what it waits for is over.

Tasks are taken in the order in which they become ready, so a wire serves those that came first. A
device keeps its order whatever becomes ready, as an executor does. While all resources do (wires
between two ranks do too: one rank feeds them, in the order of its program), a start is a maximum of
ends: a task that is made faster can delay no other, and the makespan is the longest path through
dependencies and resources. On a wire that several ranks share, the order can change with a duration
and that is lost.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from gnnpipe.perf.tasks import Tasks

__all__ = ["CriticalTask", "Timeline", "collector_paused", "simulate"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """It runs again afterwards if it ran before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CriticalTask(NamedTuple):
    """A task on the critical path, and why it did not start earlier."""

    task: int
    reason: str
    """'start': nothing was in its way; 'dependency': what it needs was not there; 'resource': its
    device or wire was busy."""


@dataclass(frozen=True)
class Timeline:
    """Tasks by number; times in seconds from the start of the epoch."""

    tasks: Tasks
    start_s: list[float]
    end_s: list[float]
    cause: list[int]
    """By task, the one whose end it started at; -1: it started at 0."""
    is_queued: list[bool]
    """By task: what it needs was there, and its resource was not yet free."""

    @cached_property
    def makespan_s(self) -> float:
        """When the last task ends."""
        return max(self.end_s, default=0.0)

    def busy_s(self) -> list[float]:
        """By resource."""
        busy = [0.0] * len(self.tasks.resources)
        for resource, duration in zip(self.tasks.resource, self.tasks.duration_s, strict=True):
            busy[resource] += duration
        return busy

    def bubble_s(self) -> list[float]:
        """By resource: the time at which it does nothing."""
        return [self.makespan_s - busy for busy in self.busy_s()]

    def critical_path(self) -> list[CriticalTask]:
        """From the first task to the one that ends last, with no gap between them.

        Of several such paths one. Their durations add up to the makespan.
        """
        path: list[CriticalTask] = []
        at = self.end_s.index(self.makespan_s) if self.end_s else -1
        while at >= 0:
            found = self.cause[at]
            reason = "start" if found < 0 else "resource" if self.is_queued[at] else "dependency"
            path.append(CriticalTask(at, reason))
            at = found
        return path[::-1]


@collector_paused()
def simulate(tasks: Tasks) -> Timeline:
    """The timeline of all tasks; ``ValueError`` names one that waits for ever.

    One pass, n log(number ready at a time).
    """
    resource, duration = tasks.resource, tasks.duration_s
    after, missing, is_next = _followers(tasks)
    count = len(tasks)
    start, end = [0.0] * count, [0.0] * count
    ready, cause, is_queued = [0.0] * count, [-1] * count, [False] * count
    free = [0.0] * len(tasks.resources)
    last = [-1] * len(tasks.resources)
    waiting = [(0.0, task) for task in range(count) if missing[task] == 0]
    heapify(waiting)
    done = 0
    while waiting:
        task = heappop(waiting)[1]
        now, on = ready[task], resource[task]
        if free[on] > now:
            now, cause[task], is_queued[task] = free[on], last[on], True
        start[task] = now
        over = end[task] = now + duration[task]
        free[on], last[on] = over, task
        done += 1
        for other in after[task]:
            if over > ready[other]:
                ready[other], cause[other], is_queued[other] = over, task, False
            missing[other] -= 1
            if not missing[other]:
                heappush(waiting, (ready[other], other))
        other = is_next[task]
        if other >= 0:
            missing[other] -= 1
            if not missing[other]:
                heappush(waiting, (max(ready[other], over), other))
    if done < count:
        stuck = next(task for task in range(count) if missing[task] > 0)
        raise ValueError(f"task {stuck} waits for ever: {tasks.what[stuck]}")
    return Timeline(tasks, start, end, cause, is_queued)


def _followers(tasks: Tasks) -> tuple[list[list[int]], list[int], list[int]]:
    """By task: who waits for it, how many it waits for, and who comes next on an ordered resource.

    The turn on an ordered resource counts as one more that is waited for.
    """
    count = len(tasks)
    after: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for task, before in enumerate(tasks.before):
        missing[task] = len(before)
        for other in before:
            after[other].append(task)
    in_order = [resource.in_order for resource in tasks.resources]
    latest = [-1] * len(in_order)
    is_next = [-1] * count
    for task, on in enumerate(tasks.resource):
        if in_order[on]:
            if latest[on] >= 0:
                is_next[latest[on]] = task
                missing[task] += 1
            latest[on] = task
    return after, missing, is_next
