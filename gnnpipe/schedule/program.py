"""Actions and programs: the object that is checked, simulated and executed.

A program is one list of actions per stage; all shards of a stage run the same list. An action
names a chunk by its POSITION in the epoch's chunk order: the order changes with every epoch, the
program does not. A program of E epochs has E x K positions, its passes: position p is the chunk at
place p % K in the order of epoch p // K. All stages are drained (flushed) when a program ends.

A stage whose longest chain of aggregations has length n has n + 1 steps, cut where rows are pushed:
step 0 ends with the first pushes, step j aggregates the rows that step j - 1 pushed and ends with
the next pushes, step n ends with the stage's outputs. An F or B action covers a range of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import cached_property

from gnnpipe.errors import InputError
from gnnpipe.plan import Placement


class ProgramError(InputError):
    """Raised for a program that would hang, or compute something other than its plan says."""


class Direction(StrEnum):
    """Direction of a pass through the stages, and of the messages that belong to the pass."""

    FORWARD = "F"
    BACKWARD = "B"

    __hash__ = str.__hash__  # an Enum's own is slow, and a direction is part of many keys


class ActionKind(StrEnum):
    """Kind of an action; the value is its short form in texts, traces and profiles."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    """Start to send values to a later stage."""
    RECEIVE_FORWARD = "RECV_F"
    """Start to receive values of an earlier stage."""
    SEND_BACKWARD = "SEND_B"
    """Start to send gradients to an earlier stage."""
    RECEIVE_BACKWARD = "RECV_B"
    """Start to receive gradients of a later stage."""
    FORECAST = "FORECAST"
    """Run the probe vertices forward with the weights of the last epoch and with the current ones,
    and fit maps from their old to their new rows."""
    CARRY = "CARRY"
    """Apply the fitted maps to the stale rows of the history tables."""
    REDUCE_GRADIENTS = "REDUCE_GRAD"
    """Start to sum a bucket of weight gradients over the shards."""
    STEP = "STEP"
    """Finish the gradient sums and step the optimizer."""

    @cached_property
    def direction(self) -> Direction:
        """Direction of the pass; FORECAST passes forward."""
        is_backward = self in (
            ActionKind.BACKWARD,
            ActionKind.SEND_BACKWARD,
            ActionKind.RECEIVE_BACKWARD,
        )
        return Direction.BACKWARD if is_backward else Direction.FORWARD

    @cached_property
    def is_send(self) -> bool:
        """The action sends a message to another stage."""
        return self in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)

    @cached_property
    def is_receive(self) -> bool:
        """The action receives a message of another stage."""
        return self in (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)

    @cached_property
    def is_pass(self) -> bool:
        """The action consumes values of other stages or produces values for other stages."""
        return self in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.FORECAST)


class SpecialPosition(IntEnum):
    """Positions of actions that do not belong to a chunk."""

    NO_CHUNK = -1
    PROBE = -2
    """Probe rows (FORECAST, CARRY)."""


@dataclass(frozen=True)
class Action:
    """One action of a stage."""

    kind: ActionKind
    stage: int
    position: int = SpecialPosition.NO_CHUNK
    """The pass of a chunk, or a ``SpecialPosition``. Of a STEP: the last pass whose gradients the
    step uses, or ``NO_CHUNK`` for all."""
    steps: tuple[int, int] = (0, 0)
    """First step and one past the last. F runs them in order and B in reverse order; REDUCE_GRAD
    sums their gradients."""
    peer: int = -1
    """The other stage of a send or receive."""

    def is_first(self, num_steps: int) -> bool:
        """The action begins its chunk's pass through a stage of ``num_steps`` steps."""
        if self.position < 0:
            return True
        return self.steps[0] == 0 if self._is_forward else self.steps[1] == num_steps

    def is_last(self, num_steps: int) -> bool:
        """The action ends its chunk's pass through a stage of ``num_steps`` steps."""
        if self.position < 0:
            return True
        return self.steps[1] == num_steps if self._is_forward else self.steps[0] == 0

    @property
    def _is_forward(self) -> bool:
        return self.kind.direction is Direction.FORWARD

    def is_repeated_by(self, following: Action | None) -> bool:
        """Whether ``following`` is the same single step, for another chunk.

        After a backward step of this kind, all gradients that the next chunk pulls in the step have
        been recorded: every chunk has finished the backward of the step after it. So the exchange
        of these gradients may start early.
        """
        if following is None or self.steps[1] - self.steps[0] != 1:
            return False
        return replace(following, position=self.position) == self

    def text(self, num_steps: int) -> str:
        """Short form as in torch.distributed.pipelining: ``2F0``; part of a stage ``2F0[1:2]``."""
        kind = self.kind
        if kind in (ActionKind.FORECAST, ActionKind.CARRY):
            return f"{self.stage}{kind}"
        if kind is ActionKind.STEP:
            return f"{self.stage}{kind}{self.position if self.position >= 0 else ''}"
        part = ""
        if not (kind.is_send or kind.is_receive) and self.steps != (0, num_steps):
            part = f"[{self.steps[0]}:{self.steps[1]}]"
        if kind is ActionKind.REDUCE_GRADIENTS:
            return f"{self.stage}{kind}{part}"
        peer = f">{self.peer}" * kind.is_send + f"<{self.peer}" * kind.is_receive
        place = "P" if self.position == SpecialPosition.PROBE else self.position
        return f"{self.stage}{kind}{place}{part}{peer}"


class GradientScope(StrEnum):
    """The rows that the backward pass of a chunk sends gradients to."""

    LIVE = "live"
    """All rows that were read live: backward walks the chunks in the reverse order."""
    OWN_CHUNK = "own chunk"
    """The chunk's own rows; rows of other chunks are constants."""


@dataclass(frozen=True)
class Consistency:
    """Promise of a schedule about the values that an epoch computes with; by default exact."""

    max_stale_epochs: int = 0
    """Age in epochs of the oldest rows that an aggregation reads; 0: all rows are of this epoch."""
    max_versions_behind: int | None = 0
    """Most optimizer steps between a chunk's forward and its backward on a stage; None: any."""
    optimizer_steps: int | None = 1
    """STEP actions per epoch and stage; None: any number."""


@dataclass(frozen=True)
class Program:
    """The actions of every stage, in order, from one flush to the next (or for one evaluation)."""

    stages: tuple[tuple[Action, ...], ...]
    num_steps: tuple[int, ...]
    """Number of steps of each stage."""
    chunks: int
    placement: Placement
    """Ranks that run each stage's list. Gradients are summed over the shards of a stage."""
    consistency: Consistency = Consistency()
    """Promise of the schedule; ``check`` verifies it."""
    scope: GradientScope = GradientScope.LIVE
    epochs: int = 1
    """E."""

    @property
    def passes(self) -> int:
        """Number of passes of chunks through each stage: E x K."""
        return self.epochs * self.chunks

    @property
    def steps_by_chunk(self) -> bool:
        """Whether the optimizer may step before all chunks of an epoch have passed."""
        return self.scope is GradientScope.OWN_CHUNK

    def step_passes(self, position: int) -> range:
        """Return the passes whose gradients the STEP of this pass takes, itself among them."""
        every = self.chunks // (self.consistency.optimizer_steps or 1)
        start = position - position % every
        return range(start, start + every)

    def text(self) -> str:
        """Return one line per stage, its actions separated by blanks."""
        return "".join(
            f"stage {s}: " + " ".join(a.text(steps) for a in actions) + "\n"
            for s, (actions, steps) in enumerate(zip(self.stages, self.num_steps, strict=True))
        )
