"""List scheduling: starts each task on its resource as soon as its dependencies have ended.

A link serves its tasks first come, first served. A device runs its tasks in the order of the
program, as an executor does. A link from one rank to one other rank also sees its messages in the
order of the program. If all resources have such a fixed order, every start is a maximum of ends: a
faster task delays no other task, and the makespan is the longest path through dependencies and
resources. On a link that several ranks share, the order may depend on the durations, and this does
not hold.
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


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, if it is on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CriticalTask(NamedTuple):
    """A task on the critical path and the reason why it did not start earlier."""

    task: int
    reason: str
    """'start': it started at 0; 'dependency': it waited for another task; 'resource': its device or
    link was busy."""


@dataclass(frozen=True)
class Timeline:
    """Tasks by number; times in seconds from the start of the epoch."""

    tasks: Tasks
    start_s: list[float]
    end_s: list[float]
    cause: list[int]
    """The task at whose end a task started; -1: it started at 0."""
    is_queued: list[bool]
    """Whether a task was ready while its resource was busy."""

    @cached_property
    def makespan_s(self) -> float:
        """End of the last task."""
        return max(self.end_s, default=0.0)

    def busy_s(self) -> list[float]:
        """Return the busy time of each resource."""
        busy = [0.0] * len(self.tasks.resources)
        for resource, duration in zip(self.tasks.resource, self.tasks.duration_s, strict=True):
            busy[resource] += duration
        return busy

    def bubble_s(self) -> list[float]:
        """Return the idle time of each resource."""
        return [self.makespan_s - busy for busy in self.busy_s()]

    def critical_path(self) -> list[CriticalTask]:
        """Return tasks from the start to the end of the epoch without a gap between two tasks.

        Their durations add up to the makespan. If there are several such paths, one is returned.
        """
        path: list[CriticalTask] = []
        task = self.end_s.index(self.makespan_s) if self.end_s else -1
        while task >= 0:
            cause = self.cause[task]
            reason = "start" if cause < 0 else "resource" if self.is_queued[task] else "dependency"
            path.append(CriticalTask(task, reason))
            task = cause
        return path[::-1]


@collector_paused()
def simulate(tasks: Tasks) -> Timeline:
    """Schedule all tasks, in O(n log(ready tasks)); ``ValueError`` names a task in a cycle."""
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
        now_s, on = ready[task], resource[task]
        if free[on] > now_s:
            now_s, cause[task], is_queued[task] = free[on], last[on], True
        start[task] = now_s
        end_s = end[task] = now_s + duration[task]
        free[on], last[on] = end_s, task
        done += 1
        for other in after[task]:
            if end_s > ready[other]:
                ready[other], cause[other], is_queued[other] = end_s, task, False
            missing[other] -= 1
            if not missing[other]:
                heappush(waiting, (ready[other], other))
        other = is_next[task]
        if other >= 0:
            missing[other] -= 1
            if not missing[other]:
                heappush(waiting, (max(ready[other], end_s), other))
    if done < count:
        stuck = next(task for task in range(count) if missing[task] > 0)
        raise ValueError(f"task {stuck} waits for ever: {tasks.what[stuck]}")
    return Timeline(tasks, start, end, cause, is_queued)


def _followers(tasks: Tasks) -> tuple[list[list[int]], list[int], list[int]]:
    """Return dependents, number of dependencies and successor on an ordered resource, by task.

    The predecessor on an ordered resource counts as one more dependency.
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
