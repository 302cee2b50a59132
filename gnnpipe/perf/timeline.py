"""When everything happens: tasks with a start and an end, and what each of them waited for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gnnpipe.perf.tasks import Tasks

__all__ = ["CriticalTask", "Timeline"]


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
