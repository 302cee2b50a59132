"""Tasks of an epoch, and list scheduling: each starts as soon as its dependencies have ended.

As in the DAG model of S-SGD (arXiv 1805.03812), an epoch is a directed acyclic graph of tasks, each
a computation or a communication on one resource, and its time is the longest path once the
resources have been scheduled.

A link serves its tasks first come, first served. A device runs its tasks in the order of the
program, as an executor does. A link from one rank to one other rank also sees its messages in the
order of the program. If all resources have such a fixed order, every start is a maximum of ends: a
faster task delays no other task, and the makespan is the longest path through dependencies and
resources. On a link that several ranks share, and on the ports of ranks, the order may depend on
the durations, and this does not hold.

All that a rank sends passes its port out, and all that it receives its port in: one task after
another, each for the part of its duration in which it fills the port.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from gnnpipe.garbage_collector import collector_paused
from gnnpipe.schedule import Direction


class TaskKind(StrEnum):
    """Kind of a task; the value is its short form in traces."""

    BEGIN = "BEGIN"
    """Work once per epoch. This kind and those up to STEP are tasks on a device."""
    FORWARD = "F"
    BACKWARD = "B"
    PRODUCT = "PRODUCT"
    """The product with this shard's columns of all rows, before the rows of the result return."""
    PULL = "PULL"
    """Part of a backward step that overlaps with the exchange of halo gradients."""
    FORECAST = "FORECAST"
    CARRY = "CARRY"
    STEP = "STEP"
    SEND_FORWARD = "SEND_F"
    """A message from stage to stage. This kind and those up to SYNC are tasks on a link."""
    SEND_BACKWARD = "SEND_B"
    EXCHANGE_FORWARD = "EXCHANGE_F"
    """An exchange of rows among the shards of a stage."""
    EXCHANGE_BACKWARD = "EXCHANGE_B"
    REDUCE_FIT = "REDUCE_FIT"
    """Sums over the shards that FORECAST is fitted to."""
    REDUCE_MEAN = "REDUCE_MEAN"
    """Sum over the shards for a mean over all vertices, or for its gradient."""
    REDUCE_GRADIENTS = "REDUCE_GRAD"
    SYNC = "SYNC"
    """All-reduce of a few numbers over all ranks; the position is its number in the program: with
    one optimizer step 0 before the step, 1 after the step."""
    READ = "READ"
    """Input, on a device of its own; READ and COPY are tasks of scripts/ssgd_model.py."""
    COPY = "COPY"

    @property
    def is_send(self) -> bool:
        """The task is a message from stage to stage."""
        return self in SENDS.values()


SENDS = {Direction.FORWARD: TaskKind.SEND_FORWARD, Direction.BACKWARD: TaskKind.SEND_BACKWARD}
EXCHANGES = {
    Direction.FORWARD: TaskKind.EXCHANGE_FORWARD,
    Direction.BACKWARD: TaskKind.EXCHANGE_BACKWARD,
}


class Task(NamedTuple):
    """Description of a task; -1 where a field has no meaning."""

    kind: TaskKind
    stage: int
    shard: int = -1
    """-1: all shards of the stage."""
    position: int = -1
    """Position of the chunk in the order."""
    chunk: int = -1
    step: int = -1
    """-1: all steps of its action."""
    peer: int = -1
    """The stage that receives a message."""
    peer_shard: int = -1
    """The shard that receives a message."""
    size_bytes: int = 0
    """Bytes that all senders send."""


@dataclass(frozen=True)
class Resource:
    """A device, link or port, which runs one task at a time."""

    name: str
    in_order: bool
    """Whether tasks run in the order in which they were added, as on a device; otherwise first
    come, first served, as on a link."""


@dataclass
class Tasks:
    """Table of tasks, a column per field, since there may be millions.

    ``before`` may name tasks that are added later.
    """

    what: list[Task] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    duration_s: list[float] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    """Tasks that must end before a task starts. For a task on a link these are the last
    tasks on the devices that take part: source and target, or one per shard."""
    ports: list[tuple[int, ...]] = field(default_factory=list)
    """Resources that a task on a link occupies, too: ports of the ranks that take part."""
    port_s: list[float] = field(default_factory=list)
    """Seconds from its start for which a task occupies its ports, at most its duration."""
    resources: list[Resource] = field(default_factory=list)
    _number: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.what)

    def open(self, name: str, in_order: bool) -> int:
        """Return the number of the resource of that name, created on first use."""
        if name not in self._number:
            self._number[name] = len(self.resources)
            self.resources.append(Resource(name, in_order))
        return self._number[name]

    def add(
        self,
        what: Task,
        resource: int,
        duration_s: float,
        before: tuple[int, ...] = (),
        ports: tuple[int, ...] = (),
        port_s: float = 0.0,
    ) -> int:
        """Add a task; return its number."""
        self.what.append(what)
        self.resource.append(resource)
        self.duration_s.append(duration_s)
        self.before.append(before)
        self.ports.append(ports)
        self.port_s.append(port_s)
        return len(self.what) - 1


class CriticalTask(NamedTuple):
    """A task on the critical path and the reason why it did not start earlier."""

    task: int
    reason: str
    """'start': it started at 0; 'dependency': it waited for another task; 'resource': its device,
    link or port was busy."""


@dataclass(frozen=True)
class Timeline:
    """Tasks by number; times in seconds from the start of the epoch."""

    tasks: Tasks
    start_s: list[float]
    end_s: list[float]
    cause: list[int]
    """The task that a task waited for, to its end or until it had left a port; -1: none, it started
    at 0."""
    is_queued: list[bool]
    """Whether a task was ready while its resource or a port was busy."""

    @cached_property
    def makespan_s(self) -> float:
        """End of the last task."""
        return max(self.end_s, default=0.0)

    def busy_s(self) -> list[float]:
        """Return the busy time of each resource."""
        busy = [0.0] * len(self.tasks.resources)
        for resource, duration in zip(self.tasks.resource, self.tasks.duration_s, strict=True):
            busy[resource] += duration
        for ports, filled_s in zip(self.tasks.ports, self.tasks.port_s, strict=True):
            for port in ports:
                busy[port] += filled_s
        return busy

    def bubble_s(self) -> list[float]:
        """Return the idle time of each resource."""
        return [self.makespan_s - busy for busy in self.busy_s()]

    def critical_s(self) -> list[float]:
        """Return the seconds of each task of the critical path until the next one starts.

        They add up to the makespan. On a port the next one may start before a task ends.
        """
        starts_s = [self.start_s[step.task] for step in self.critical_path()]
        return [after - start for start, after in pairwise([*starts_s, self.makespan_s])]

    def critical_path(self) -> list[CriticalTask]:
        """Return tasks from the start to the end of the epoch without a gap between two tasks.

        Each starts at the end of the task before, or when that task has left a port. If there are
        several such paths, one is returned.
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
    # Times to look at a task, and since when it is ready, which decides between equal ones.
    waiting = [(0.0, 0.0, task) for task in range(count) if missing[task] == 0]
    heapify(waiting)
    done = 0
    while waiting:
        looked_s, _, task = heappop(waiting)
        now_s, on, ports = ready[task], resource[task], tasks.ports[task]
        for needed in (on, *ports):
            if free[needed] > now_s:
                now_s, cause[task], is_queued[task] = free[needed], last[needed], True
        if ports and now_s > looked_s:
            # Others may use what is free until then.
            heappush(waiting, (now_s, ready[task], task))
            continue
        start[task] = now_s
        end_s = end[task] = now_s + duration[task]
        free[on], last[on] = end_s, task
        for port in ports:
            free[port], last[port] = now_s + tasks.port_s[task], task
        done += 1
        for other in after[task]:
            if end_s > ready[other]:
                ready[other], cause[other], is_queued[other] = end_s, task, False
            missing[other] -= 1
            if not missing[other]:
                heappush(waiting, (ready[other], ready[other], other))
        other = is_next[task]
        if other >= 0:
            missing[other] -= 1
            if not missing[other]:
                heappush(waiting, (max(ready[other], end_s), ready[other], other))
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
