"""Proves, before anything runs, that a program computes what its plan says.

A wrong order of actions does not crash. Gradients are lost while the loss stays the same (measured
in a prototype: gradient errors of 50 to 88 %). ``check`` proves that

- each stage runs every step of every chunk once, forward before backward;
- the gradients of exactly the rows that were read live are recorded before they are pulled;
- every optimizer step follows complete gradient sums, and the schedule keeps its promise
  (``Consistency``);
- sends and receives pair up in the same order, and no stage waits forever.

``check`` also counts live and stale reads. A program without stale reads is exact; this is the only
place that decides whether a program is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gnnpipe.errors import InputError
from gnnpipe.schedule.program import Action, ActionKind, Direction, Program, SpecialPosition


class ProgramError(InputError):
    """Raised for a program that would hang, or compute something other than its plan says."""


@dataclass(frozen=True, kw_only=True)
class CheckedProgram(Program):
    """A program that has passed ``check``, with the number of its live and stale reads.

    A read is a pair (reading chunk, other chunk) in one aggregation of one stage.
    """

    live_reads: int
    stale_reads: int

    @property
    def is_exact(self) -> bool:
        """Whether no read is stale, so that losses and gradients equal those of one device."""
        return self.stale_reads == 0

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
        total = self.live_reads + self.stale_reads
        if self.is_exact:
            return "exact: no stale read"
        return f"stale: {self.stale_reads} of {total} chunk reads come from an earlier epoch"


def check(program: Program) -> CheckedProgram:
    """Check ``program`` and count its reads; ``ProgramError`` names the first fault."""
    live = stale = 0
    for stage, actions in enumerate(program.stages):
        forward, backward = _step_times(stage, actions, program)
        for step in range(1, program.num_steps[stage]):
            counts = _check_reads(stage, step, forward, backward)
            live += counts[0]
            stale += counts[1]
        if backward is not None:
            _check_optimizer_steps(stage, actions, program)
            _check_versions(stage, actions, program)
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
        live_reads=live,
        stale_reads=stale,
    )


_FORECAST = (ActionKind.FORECAST, ActionKind.CARRY)

Times = npt.NDArray[np.int64]


def _step_times(
    stage: int, actions: tuple[Action, ...], program: Program
) -> tuple[Times, Times | None]:
    """Return when each step of each chunk runs, forward and (``None`` in evaluation) backward.

    A time is the number of steps that the stage has run before, [steps, K] by position.
    """
    steps, chunks = program.num_steps[stage], program.chunks
    forward, backward = (np.full((steps, chunks), -1, dtype=np.int64) for _ in Direction)
    times = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}
    clock = 0
    for a in actions:
        if a.kind not in times:
            continue
        if not (0 <= a.position < chunks and 0 <= a.steps[0] < a.steps[1] <= steps):
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


def _check_reads(stage: int, step: int, forward: Times, backward: Times | None) -> tuple[int, int]:
    """Count live and stale pairs of one aggregation; check that gradients follow the live pairs.

    Step ``step`` of chunk a aggregates the rows that step - 1 of chunk b pushed. The read is live
    if the push came first. If and only if the read is live, the gradient of a must be recorded
    before the gradient of b is pulled.
    """
    reads, pushes = forward[step], forward[step - 1]
    live = pushes[None, :] < reads[:, None]
    if backward is not None:
        delivered = backward[step][:, None] < backward[step - 1][None, :]
        wrong = np.argwhere(live != delivered)
        if len(wrong):
            a, b = wrong[0]
            fault = "is lost" if live[a, b] else "of a stale read is delivered"
            raise ProgramError(
                f"stage {stage} step {step}: the gradient from the chunk at position {a} to the "
                f"chunk at position {b} {fault}; backward must walk the chunks in exactly the "
                "reverse order"
            )
    count = int(live.sum()) - len(reads)
    return count, live.size - len(reads) - count


def _check_optimizer_steps(stage: int, actions: tuple[Action, ...], program: Program) -> None:
    """Check that the stage has the promised number of STEPs, each after complete gradient sums.

    The last STEP must come after the last B.
    """
    windows = list(_optimizer_windows(actions))
    promised = program.consistency.optimizer_steps
    kinds = [a.kind for a in actions if a.kind in (ActionKind.REDUCE_GRADIENTS, ActionKind.STEP)]
    ends_with_step = all(a.kind is not ActionKind.BACKWARD for a in windows[-1])
    if len(windows) < 2 or not ends_with_step or (promised or len(windows) - 1) != len(windows) - 1:
        raise ProgramError(
            f"stage {stage}: must end with STEP after its last B, has "
            f"{' '.join(kinds) or 'nothing'}"
        )
    if any(a.kind is ActionKind.REDUCE_GRADIENTS for a in windows[-1]):
        raise ProgramError(f"stage {stage}: sums gradients after its last STEP")
    for window in windows[:-1]:
        _check_gradient_sums(stage, window, program)


def _optimizer_windows(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Yield the actions before the first STEP, between two STEPs, and after the last STEP."""
    window: list[Action] = []
    for a in actions:
        if a.kind is ActionKind.STEP:
            yield window
            window = []
        else:
            window.append(a)
    yield window


def _check_gradient_sums(stage: int, window: Sequence[Action], program: Program) -> None:
    """Check that each step's gradients are summed over the shards once, after their last B."""
    num_steps = program.num_steps[stage]
    sums = [(i, a) for i, a in enumerate(window) if a.kind is ActionKind.REDUCE_GRADIENTS]
    summed = [step for _, a in sums for step in range(*a.steps)]
    if sorted(summed) != list(range(num_steps if len(program.placement.stages[stage]) > 1 else 0)):
        raise ProgramError(
            f"stage {stage}: must sum the gradients of every step once over its shards, sums those "
            f"of steps {summed}"
        )
    for i, a in sums:
        later = [b.steps for b in window[i:] if b.kind is ActionKind.BACKWARD]
        if any(first < a.steps[1] and a.steps[0] < end for first, end in later):
            raise ProgramError(
                f"stage {stage}: {a.text(num_steps)} comes before its gradients are complete"
            )


def _check_versions(stage: int, actions: Sequence[Action], program: Program) -> None:
    """Check that no chunk has more STEPs between its F and its B than the schedule promises."""
    promised = program.consistency.max_versions_behind
    version = 0
    version_of: dict[int, int] = {}
    for a in actions:
        if a.kind is ActionKind.STEP:
            version += 1
        elif a.kind is ActionKind.FORWARD:
            version_of.setdefault(a.position, version)
        elif a.kind is ActionKind.BACKWARD and version - version_of[a.position] > promised:
            raise ProgramError(
                f"stage {stage}: weights at {a.text(program.num_steps[stage])} are "
                f"{version - version_of[a.position]} optimizer steps newer than at the chunk's F; "
                f"the schedule promises at most {promised}"
            )


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

    The order covers all messages between two stages, both directions together: NCCL runs the
    messages of two ranks in the order in which they were issued.
    """
    messages: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    """By (stage, other stage): direction, source and position of each message."""
    for actions in program.stages:
        for a in actions:
            if a.kind.is_send or a.kind.is_receive:
                source = a.stage if a.kind.is_send else a.peer
                messages[a.stage, a.peer].append((a.kind.direction.value, source, a.position))
    for (stage, peer), mine in list(messages.items()):
        theirs = messages[peer, stage]
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
