"""Schedules: order of the compute actions of an epoch, and the consistency that the order promises.

A schedule is one object in ``SCHEDULES``. To add one, write a file with a subclass of ``Schedule``,
register an instance there and import the file in ``gnnpipe.schedule``. Communication and gradient
sums are added by ``lower``; ``check`` verifies the promise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gnnpipe.registry import Registry
from gnnpipe.schedule.program import Action, ActionKind, Consistency


class Schedule(ABC):
    """Rule that orders the compute actions of one stage for one epoch."""

    consistency: Consistency
    """Promise about stale rows, optimizer steps and weight versions, for any number of chunks."""

    @abstractmethod
    def forward(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """Return the F actions of a stage in order; they run every step of every chunk once."""

    def backward(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """Return the B actions: the F actions reversed, the only order that loses no gradient."""
        forward = self.forward(stage, num_steps, chunks)
        return [Action(ActionKind.BACKWARD, stage, a.position, a.steps) for a in reversed(forward)]

    def actions(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """Return the F, B and STEP actions of an epoch.

        By default all F, then all B, then one optimizer step.
        """
        return [
            *self.forward(stage, num_steps, chunks),
            *self.backward(stage, num_steps, chunks),
            Action(ActionKind.STEP, stage),
        ]


SCHEDULES = Registry[Schedule]("schedule", "plan: schedule")

EXACT_SCHEDULE = "layer-sync"
"""Name of the schedule of exact epochs and of evaluation."""


class FillDrain(Schedule):
    """Runs each chunk through the whole stage before the next chunk (GNNPipe, section 3).

    A chunk reads the rows of earlier chunks live and those of later chunks stale.
    """

    consistency = Consistency(max_stale_epochs=1)

    def forward(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """One action per chunk."""
        return whole_chunks(stage, num_steps, range(chunks))


class LayerSync(Schedule):
    """Runs all chunks through one step before the next step, so that no row is stale."""

    consistency = Consistency()

    def forward(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """One action per step and chunk."""
        if chunks == 1:
            return whole_chunks(stage, num_steps, range(1))
        return [
            Action(ActionKind.FORWARD, stage, position, (step, step + 1))
            for step in range(num_steps)
            for position in range(chunks)
        ]


def whole_chunks(stage: int, num_steps: int, positions: Sequence[int]) -> list[Action]:
    """One F action over all steps for each of ``positions``."""
    return [Action(ActionKind.FORWARD, stage, p, (0, num_steps)) for p in positions]


SCHEDULES.add("fill-drain", FillDrain())
SCHEDULES.add(EXACT_SCHEDULE, LayerSync())
