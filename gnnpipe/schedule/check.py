"""Proves, before anything runs, that a program computes what its plan says.

A wrong order of actions does not crash. Gradients are lost while the loss stays the same (measured
in a prototype: gradient errors of 50 to 88 %). ``check`` proves that

- each stage runs every step of every pass once, forward before backward;
- the gradients of exactly the rows that were read live are recorded before they are pulled; or all
  gradients stay in their chunk (``GradientScope``);
- every optimizer step follows complete gradient sums, and the schedule keeps its promise
  (``Consistency``);
- no chunk is pushed anew while an earlier pass of the chunk waits for its backward;
- sends and receives pair up in the same order, and no stage waits forever.

``check`` also counts live and stale reads, and derives the version gap of every pass and the passes
in flight on every stage: predictors and memory estimates read these, and nothing assumes that the
stages form a chain. A program that gives the gradients of the full batch is exact; this is the only
place that decides whether a program is exact.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gnnpipe.schedule.check_steps import check_optimizer_steps, check_version_gaps
from gnnpipe.schedule.program import (
    Action,
    ActionKind,
    Direction,
    Program,
    ProgramError,
    SpecialPosition,
)


@dataclass(frozen=True, kw_only=True)
class CheckedProgram(Program):
    """A program that has passed ``check``, with what ``check`` has derived.

    A read is a pair (reading pass, other chunk) in one aggregation of one stage.
    """

    live_reads: int
    """Reads of rows that were pushed in the epoch of the reading pass."""
    stale_reads: int
    """Reads of rows that were pushed in the epoch before."""
    version_gaps: tuple[tuple[int, ...], ...] = ()
    """By stage and pass: optimizer steps of the stage between forward and backward; empty in
    evaluation."""
    in_flight: tuple[int, ...] = ()
    """By stage: most passes between their forward and their backward; empty in evaluation."""

    @property
    def is_exact(self) -> bool:
        """Whether an epoch equals one full-batch step on one device.

        No read is stale. With steps by chunk also: no chunk reads another one, whose rows get no
        gradient, and there is one step an epoch with the weights of the forward pass.
        """
        if not self.steps_by_chunk:
            return self.stale_reads == 0
        is_one_step = self.consistency.optimizer_steps == 1 and not self.largest_gap
        return is_one_step and self.live_reads + self.stale_reads == 0

    @property
    def largest_gap(self) -> int:
        """The largest version gap of any stage."""
        return max(map(max, self.version_gaps), default=0)

    @property
    def most_in_flight(self) -> int:
        """The most passes in flight on any stage."""
        return max(self.in_flight, default=1)

    def stale_pairs(self, stage: int) -> npt.NDArray[np.bool_]:
        """Return which chunks read stale rows of which chunks in some step of the stage.

        Returns:
            [K, K] by position in the chunk order: row, the reading chunk; column, the chunk read.
        """
        forward, _ = _step_times(stage, self.stages[stage], self)
        found = np.zeros((self.chunks, self.chunks), dtype=bool)
        for step in range(1, self.num_steps[stage]):
            found |= forward[step - 1][None, :] > forward[step][:, None]
        return found

    def reads_text(self) -> str:
        """Return the line about stale reads that is printed at the start of a run."""
        total, stale = self.live_reads + self.stale_reads, self.stale_reads
        if self.is_exact:
            return "exact: no stale read"
        total, stale = total // self.epochs, stale // self.epochs
        text = f"stale: {stale} of {total} chunk reads come from an earlier epoch"
        if not self.steps_by_chunk:
            return text
        gaps, flying = (
            [str(n) for n in ns] for ns in (map(max, self.version_gaps), self.in_flight)
        )
        return (
            f"{text}, gradients stay in their chunk; {self.consistency.optimizer_steps} optimizer "
            f"steps an epoch; by stage at most {', '.join(flying)} chunks in flight, and "
            f"{', '.join(gaps)} steps between forward and backward"
        )


def check(program: Program) -> CheckedProgram:
    """Check ``program`` and count its reads; ``ProgramError`` names the first fault."""
    live = stale = 0
    gaps: list[tuple[int, ...]] = []
    in_flight: list[int] = []
    for stage, actions in enumerate(program.stages):
        forward, backward = _step_times(stage, actions, program)
        for step in range(1, program.num_steps[stage]):
            counts = _check_reads(stage, step, forward, backward, program)
            live += counts[0]
            stale += counts[1]
        if backward is not None:
            check_optimizer_steps(stage, actions, program)
            gaps.append(check_version_gaps(stage, actions, program))
            in_flight.append(_check_in_flight(stage, forward, backward, program))
    # Every step of every chunk runs once an epoch, so a stale row is one epoch old.
    if stale and program.consistency.max_stale_epochs < 1:
        raise ProgramError(f"the schedule promises exact reads, but {stale} of its reads are stale")
    _check_forecast(program)
    _check_pairs(program)
    _Progress(program).run()
    return CheckedProgram(
        program.stages,
        program.num_steps,
        program.chunks,
        program.placement,
        program.consistency,
        program.scope,
        program.epochs,
        live_reads=live,
        stale_reads=stale,
        version_gaps=tuple(gaps),
        in_flight=tuple(in_flight),
    )


_FORECAST = (ActionKind.FORECAST, ActionKind.CARRY)

Times = npt.NDArray[np.int64]


def _step_times(
    stage: int, actions: tuple[Action, ...], program: Program
) -> tuple[Times, Times | None]:
    """Return when each step of each pass runs, forward and (``None`` in evaluation) backward.

    A time is the number of steps that the stage has run before, [steps, E x K] by position.
    """
    steps, passes = program.num_steps[stage], program.passes
    forward, backward = (np.full((steps, passes), -1, dtype=np.int64) for _ in Direction)
    times = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}
    clock = 0
    for a in actions:
        if a.kind not in times:
            continue
        if not (0 <= a.position < passes and 0 <= a.steps[0] < a.steps[1] <= steps):
            raise ProgramError(f"stage {stage}: {a} is outside the stage or the chunks")
        covered = range(*a.steps) if a.kind is ActionKind.FORWARD else reversed(range(*a.steps))
        for step in covered:
            if times[a.kind][step, a.position] >= 0:
                raise ProgramError(f"stage {stage}: {a.kind}{a.position} step {step} runs twice")
            times[a.kind][step, a.position] = clock
            clock += 1
    is_training = bool((backward >= 0).any())
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) if is_training else (ActionKind.FORWARD,):
        missing = np.argwhere(times[kind] < 0)
        if len(missing):
            step, position = missing[0]
            raise ProgramError(f"stage {stage}: {kind}{position} step {step} never runs")
    if (np.diff(forward, axis=0) < 0).any():
        raise ProgramError(f"stage {stage}: a chunk's steps run out of order forward")
    if not is_training:
        return forward, None
    if (np.diff(backward, axis=0) > 0).any() or (backward[-1] < forward[-1]).any():
        raise ProgramError(f"stage {stage}: a chunk's backward does not mirror its forward")
    return forward, backward


def _check_reads(
    stage: int, step: int, forward: Times, backward: Times | None, program: Program
) -> tuple[int, int]:
    """Count live and stale pairs of one aggregation; check that gradients follow the live pairs.

    Step ``step`` of chunk a aggregates the rows that step - 1 of chunk b pushed. The read is live
    if the push came first. If and only if the read is live, the gradient of a must be recorded
    before the gradient of b is pulled; not if gradients stay in their chunk.
    """
    chunks, live_count = program.chunks, 0
    for first in range(0, program.passes, chunks):
        epoch = slice(first, first + chunks)
        reads, pushes = forward[step, epoch], forward[step - 1, epoch]
        live = pushes[None, :] < reads[:, None]
        live_count += int(live.sum()) - chunks
        if backward is None or program.steps_by_chunk:
            continue
        delivered = backward[step, epoch][:, None] < backward[step - 1, epoch][None, :]
        wrong = np.argwhere(live != delivered)
        if len(wrong):
            a, b = wrong[0]
            fault = "is lost" if live[a, b] else "of a stale read is delivered"
            raise ProgramError(
                f"stage {stage} step {step}: the gradient from the chunk at position {a} to the "
                f"chunk at position {b} {fault}; backward must walk the chunks in exactly the "
                "reverse order"
            )
    return live_count, program.passes * (chunks - 1) - live_count


def _check_in_flight(stage: int, forward: Times, backward: Times, program: Program) -> int:
    """Return the most passes in flight, between the start of forward and the end of backward.

    With steps by chunk, passes must run in ascending order, so that a stale row is one epoch old.
    Rows lie in the tables until backward (docs/adr/0028). So in a program of several epochs, K must
    be at least the number of passes in flight: the order of an epoch may then end with the chunk
    that the next one begins with (``setup.prepared.chunk_order`` keeps the distance).
    """
    started = np.sort(forward[0])
    # A pass whose backward is the n-th to end had all passes started before in flight, but n.
    ended = np.sort(backward[0])
    most = int((np.searchsorted(started, ended) - np.arange(program.passes)).max())
    if not program.steps_by_chunk:
        return most
    for kind, times in (("F", forward[0]), ("B", backward[0])):
        if (np.diff(times) < 0).any():
            raise ProgramError(f"stage {stage}: {kind} actions are not in the order of the passes")
    if program.epochs > 1 and program.chunks < most:
        raise ProgramError(
            f"--chunks {program.chunks}: stage {stage} works on {most} chunks at once, so that the "
            f"next epoch would reach a chunk before its backward; give at least {most}, better "
            f"--chunks {4 * most}, or fewer --stages or --passes-ahead"
        )
    return most


def _check_forecast(program: Program) -> None:
    """Check that all stages or none run FORECAST and CARRY once, before their first F."""
    has_forecast = any(a.kind in _FORECAST for s in program.stages for a in s)
    wanted = [*(_FORECAST if has_forecast else ()), ActionKind.FORWARD]
    for stage, actions in enumerate(program.stages):
        first = [a.kind for a in actions if a.kind in (*_FORECAST, ActionKind.FORWARD)]
        found = [a for a in actions if a.kind in _FORECAST]
        if found and sum(a.kind is ActionKind.STEP for a in actions) != 1:
            raise ProgramError(
                f"stage {stage}: a forecast needs one STEP in the epoch: it compares the weights "
                "before and after"
            )
        if (
            first[: len(wanted)] != wanted
            or len(found) != len(wanted) - 1
            or any(a.position != SpecialPosition.PROBE for a in found)
        ):
            raise ProgramError(
                f"stage {stage}: must run FORECAST and then CARRY, once and before its first F; "
                "either all stages do, or none"
            )


def _check_pairs(program: Program) -> None:
    """Check that every send has its receive, in the same order on both ends.

    Each direction counts alone, because gradients have channels of their own (``comm.p2p``): if
    forward and backward passes alternate, stages that skip others need not agree on one order.
    """
    messages: dict[tuple[int, int, Direction], list[tuple[str, int, int]]] = defaultdict(list)
    """By (stage, other stage, direction): direction, source and position of each message."""
    for actions in program.stages:
        for a in actions:
            if a.kind.is_send or a.kind.is_receive:
                source, way = a.stage if a.kind.is_send else a.peer, a.kind.direction
                messages[a.stage, a.peer, way].append((way.value, source, a.position))
    for (stage, peer, way), mine in list(messages.items()):
        theirs = messages[peer, stage, way]
        if mine != theirs:
            at = next((i for i, (m, t) in enumerate(zip(mine, theirs, strict=False)) if m != t), -1)
            if at < 0:
                fault = f"stage {stage} has {len(mine)} messages, stage {peer} {len(theirs)}"
            else:
                fault = f"stage {stage} has {mine[at]} where stage {peer} has {theirs[at]}"
            raise ProgramError(
                f"stages {stage} and {peer} do not exchange the same messages in the same order "
                f"(direction, source, position): {fault}"
            )


class _Progress:
    """Dry run of a program without data, to prove that every stage reaches its end.

    A compute action waits for the receives posted for its chunk. A receive completes once the other
    stage has run its send. To use a value before its receive is posted, or to send a value before
    it is computed, is an error.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._sent: set[tuple[Direction, int, int, int]] = set()
        """Direction, source, target and position of the messages that were sent."""
        self._made: set[tuple[Direction, int, int]] = set()
        """Direction, stage and position of the values that have been computed."""
        self._posted: list[dict[tuple[Direction, int], set[int]]] = [
            defaultdict(set) for _ in program.stages
        ]
        """By stage: sources of the receives posted for (direction, position)."""
        self._sources: dict[tuple[Direction, int], set[int]] = defaultdict(set)
        """By (direction, stage): stages that send to the stage."""
        for actions in program.stages:
            for a in actions:
                if a.kind.is_send:
                    self._sources[a.kind.direction, a.peer].add(a.stage)

    def run(self) -> None:
        """Advance all stages as far as possible; ``ProgramError`` if a stage does not end."""
        stages = self._program.stages
        at = [0] * len(stages)
        has_moved = True
        while has_moved:
            has_moved = False
            for stage, actions in enumerate(stages):
                while at[stage] < len(actions) and self._runs(actions[at[stage]]):
                    at[stage] += 1
                    has_moved = True
        for stage, actions in enumerate(stages):
            if at[stage] < len(actions):
                raise ProgramError(
                    f"stage {stage} waits for ever at {self._text(actions[at[stage]])}"
                )

    def _runs(self, a: Action) -> bool:
        """Run one action; return ``False`` if the action must wait for a message."""
        num_steps, direction = self._program.num_steps[a.stage], a.kind.direction
        if a.kind.is_send:
            if (direction, a.stage, a.position) not in self._made:
                raise ProgramError(
                    f"stage {a.stage}: {self._text(a)} comes before its value is computed"
                )
            self._sent.add((direction, a.stage, a.peer, a.position))
        elif a.kind.is_receive:
            self._posted[a.stage][direction, a.position].add(a.peer)
        elif a.kind.is_pass:
            if a.is_first(num_steps):
                sources = self._posted[a.stage][direction, a.position]
                if sources != self._sources[direction, a.stage]:
                    raise ProgramError(
                        f"stage {a.stage}: {self._text(a)} runs before its receive is posted"
                    )
                if any((direction, p, a.stage, a.position) not in self._sent for p in sources):
                    return False
            if a.is_last(num_steps):
                self._made.add((direction, a.stage, a.position))
        return True

    def _text(self, action: Action) -> str:
        return action.text(self._program.num_steps[action.stage])
