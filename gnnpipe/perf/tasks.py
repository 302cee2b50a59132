"""Table of tasks: computations and communications, their durations, resources and dependencies.

As in the DAG model of S-SGD (arXiv 1805.03812), an epoch is a directed acyclic graph of tasks, each
on one resource, and its time is the longest path once the resources have been scheduled. The table
has a column per field, since there may be millions of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Task(NamedTuple):
    """Description of a task; -1 where a field has no meaning.

    On a device (``kind``): BEGIN (work once per epoch), F and B (steps of a chunk), PULL (the part
    of a B step that overlaps with the exchange of halo gradients), FORECAST, CARRY, STEP.
    On a link: SEND_F and SEND_B (stage to stage), EXCHANGE_F and EXCHANGE_B (among the shards of a
    stage), REDUCE_FIT (sums that FORECAST is fitted to), REDUCE_MEAN (a mean over all vertices, or
    its gradient), REDUCE_GRAD, SYNC (all-reduce of a few numbers over all ranks, position 0 before
    the optimizer's step and 1 after). READ and COPY (input) are tasks of scripts/ssgd_model.py.
    """

    kind: str
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
    size_bytes: int = 0
    """Bytes that all senders send."""


@dataclass(frozen=True)
class Resource:
    """A device or link, which runs one task at a time."""

    name: str
    in_order: bool
    """Whether tasks run in the order in which they were added, as on a device; otherwise first
    come, first served, as on a link."""


@dataclass
class Tasks:
    """The table. ``before`` may name tasks that are added later."""

    what: list[Task] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    duration_s: list[float] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    """Tasks that must end before a task starts. For a task on a link these are the last
    tasks on the devices that take part: source and target, or one per shard."""
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
        self, what: Task, resource: int, duration_s: float, before: tuple[int, ...] = ()
    ) -> int:
        """Add a task; return its number."""
        self.what.append(what)
        self.resource.append(resource)
        self.duration_s.append(duration_s)
        self.before.append(before)
        return len(self.what) - 1
