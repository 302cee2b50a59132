"""Schedules: order of the compute actions, and the consistency that the order promises.

A schedule is one object in ``SCHEDULES``. To add one, write a file with a subclass of ``Schedule``,
register an instance there and import the file in ``gnnpipe.schedule``. If gradients stay in their
chunk, add its name to ``config.settings.BY_CHUNK``. Communication and gradient
sums are added by ``lower``; ``check`` verifies the promise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gnnpipe.registry import Registry
from gnnpipe.schedule.program import Action, ActionKind, Consistency


@dataclass(frozen=True)
class StageWork:
    """The passes that one stage runs between two flushes."""

    stage: int
    num_steps: int
    chunks: int
    epochs: int = 1
    """More than 1 only for a schedule that ``spans_epochs``."""
    steps_every: int = 1
    """Passes per optimizer step, in a schedule with steps by chunk."""
    passes_ahead: int = 1
    """Forward passes by which a stage is ahead of the next one, in 1F1B."""
    distance: int = 0
    """Number of stages behind this one on the longest path of transfers to a last stage."""


class Schedule(ABC):
    """Rule that orders the compute actions of one stage from one flush to the next."""

    consistency: Consistency
    """Promise about stale rows, optimizer steps and weight versions, for any number of chunks."""
    spans_epochs = False
    """Whether several epochs may follow each other without a flush."""
    interleaves = False
    """Whether forward and backward passes alternate, so that messages of both directions are on
    their way at once."""

    @abstractmethod
    def forward(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """Return the F actions of a stage in order; they run every step of every chunk once."""

    def backward(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """Return the B actions: the F actions reversed, the only order that loses no gradient."""
        forward = self.forward(stage, num_steps, chunks)
        return [Action(ActionKind.BACKWARD, stage, a.position, a.steps) for a in reversed(forward)]

    def actions(self, work: StageWork) -> list[Action]:
        """Return the F, B and STEP actions.

        By default all F, then all B, then one optimizer step.
        """
        stage, num_steps, chunks = work.stage, work.num_steps, work.chunks
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


class OneForwardOneBackward(Schedule):
    """Alternates forward and backward passes (1F1B, PipeDream-Flush, arXiv 2006.09503).

    A stage with d stages behind it runs d forward passes first, then one forward and one backward
    pass in turn, so that at most d + 1 chunks are in flight. With ``passes_ahead`` = a it runs a d
    forward passes first, and at most a d + 1 chunks are in flight. A message that takes up to
    (a - 1) / 2 of one forward and backward pass then delays no stage. Gradients stay in their
    chunk, and the stages are drained before each optimizer step: every pass computes with the
    newest weights.
    """

    consistency = Consistency(max_stale_epochs=1, optimizer_steps=None)
    interleaves = True

    def forward(self, stage: int, num_steps: int, chunks: int) -> list[Action]:
        """One action per chunk."""
        return whole_chunks(stage, num_steps, range(chunks))

    def actions(self, work: StageWork) -> list[Action]:
        """Return the passes of each optimizer step after those of the last."""
        found: list[Action] = []
        for first in range(0, work.epochs * work.chunks, work.steps_every):
            passes = range(first, first + work.steps_every)
            found += one_forward_one_backward(work, passes)
            found.append(Action(ActionKind.STEP, work.stage, passes[-1]))
        return found


class Asynchronous(OneForwardOneBackward):
    """1F1B without a drain before optimizer steps (PipeDream, arXiv 1806.03377).

    Between forward and backward of a pass, a stage with d stages behind it makes up to d optimizer
    steps (with one step a chunk, and one pass ahead of the next stage).
    """

    consistency = Consistency(max_stale_epochs=1, max_versions_behind=None, optimizer_steps=None)
    spans_epochs = True

    def actions(self, work: StageWork) -> list[Action]:
        """Return all passes in one 1F1B order, with each STEP right after its last B."""
        found: list[Action] = []
        for action in one_forward_one_backward(work, range(work.epochs * work.chunks)):
            found.append(action)
            ends_step = (action.position + 1) % work.steps_every == 0
            if action.kind is ActionKind.BACKWARD and ends_step:
                found.append(Action(ActionKind.STEP, work.stage, action.position))
        return found


def one_forward_one_backward(work: StageWork, passes: range) -> list[Action]:
    """Return the F and B actions of consecutive passes, from the fill to the drain."""
    forward = whole_chunks(work.stage, work.num_steps, passes)
    backward = [Action(ActionKind.BACKWARD, a.stage, a.position, a.steps) for a in forward]
    warm_up = min(work.distance * work.passes_ahead, len(passes))
    steady = zip(forward[warm_up:], backward, strict=False)
    return [
        *forward[:warm_up],
        *(action for pair in steady for action in pair),
        *backward[len(passes) - warm_up :],
    ]


def whole_chunks(stage: int, num_steps: int, positions: Sequence[int]) -> list[Action]:
    """One F action over all steps for each of ``positions``."""
    return [Action(ActionKind.FORWARD, stage, p, (0, num_steps)) for p in positions]


SCHEDULES.add("fill-drain", FillDrain())
SCHEDULES.add(EXACT_SCHEDULE, LayerSync())
SCHEDULES.add("1f1b", OneForwardOneBackward())
SCHEDULES.add("async", Asynchronous())
