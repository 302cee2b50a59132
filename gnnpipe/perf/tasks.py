"""Tasks: what takes time, on what, and behind what. Computation and communication are both tasks.

The idea is that of the DAG model of S-SGD (arXiv 1805.03812): an epoch is a directed acyclic graph
of tasks, each on one resource, and its time is the longest path once the resources have been shared
out. A table with a column for each fact, since there may be millions of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Resource", "Task", "Tasks"]


class Task(NamedTuple):
    """What a task is; -1 where a field has no meaning.

    On a device (``kind``): BEGIN (an epoch's own work), F and B (steps of a chunk), PULL (the part
    of a B step that halo gradients travel under), FORECAST, CARRY, RECALL, STEP. On a wire: SEND_F
    and SEND_B (stage to stage), EXCHANGE_F and EXCHANGE_B (among the shards of a stage),
    REDUCE_FIT (sums that FORECAST fits from), REDUCE_MEAN (of a mean over all vertices, or of its
    gradient), REDUCE_GRAD, SYNC (an all-reduce of a few numbers over all
    ranks, position 0 before the step and 1 behind it).
    Outside of programs also READ and COPY (input).
    """

    kind: str
    stage: int
    shard: int = -1
    """-1: of all shards of the stage."""
    position: int = -1
    """Place of the chunk in the walk."""
    chunk: int = -1
    step: int = -1
    """-1: all steps of its action."""
    peer: int = -1
    """The stage that a message goes to."""
    size_bytes: int = 0
    """What passes over the wire, from all senders."""


@dataclass(frozen=True)
class Resource:
    """Does one task at a time."""

    name: str
    in_order: bool
    """In the order in which its tasks were added, as a device does its actions; or first come,
    first served, as a wire."""


@dataclass
class Tasks:
    """The table. ``before`` may name tasks that are added later."""

    what: list[Task] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    duration_s: list[float] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    """By task, the tasks that must be over before it starts. Of one on a wire these are the last
    ones on the devices that it waits for: the source's and then the target's, or by shard."""
    resources: list[Resource] = field(default_factory=list)
    _number: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.what)

    def open(self, name: str, in_order: bool) -> int:
        """The number of the resource of that name, made on first use."""
        if name not in self._number:
            self._number[name] = len(self.resources)
            self.resources.append(Resource(name, in_order))
        return self._number[name]

    def add(
        self, what: Task, resource: int, duration_s: float, before: tuple[int, ...] = ()
    ) -> int:
        """The number of the new task."""
        self.what.append(what)
        self.resource.append(resource)
        self.duration_s.append(duration_s)
        self.before.append(before)
        return len(self.what) - 1
