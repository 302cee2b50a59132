"""The proof that a program is right, made before anything runs.

A wrong order does not crash: it drops gradients and leaves the loss as it was (measured: 50 to 88 %
error in a prototype). So every program is checked here for four things: each stage does every
step of every chunk once, forward before backward; the gradients of exactly those rows that were
read live are there when they are pulled; sends and receives pair up in the same order; and nobody
waits for ever. On the way it counts which reads are live and which are stale.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gnnpipe.schedule.program import Action, ActionKind, Direction, Program, SpecialPosition

__all__ = ["ProgramError", "ProgramReport", "check"]


class ProgramError(ValueError):
    """A program that would compute something else than its plan says, or hang."""


@dataclass(frozen=True)
class ProgramReport:
    """What a checked program reads: pairs (reading chunk, other chunk) summed over aggregations."""

    live_reads: int
    stale_reads: int

    @property
    def exact(self) -> bool:
        """No read is stale: losses and gradients equal those of one device."""
        return self.stale_reads == 0

    def text(self) -> str:
        """One line for the run's head."""
        total = self.live_reads + self.stale_reads
        if self.exact:
            return "exact: no stale read"
        return f"stale: {self.stale_reads} of {total} chunk reads come from an earlier epoch"


def check(program: Program) -> ProgramReport:
    """Prove ``program`` and say whether it is exact; ``ProgramError`` names the fault."""
    live = stale = 0
    for stage, actions in enumerate(program.stages):
        forward, backward = _step_times(stage, actions, program)
        for step in range(1, program.num_steps[stage]):
            counts = _check_reads(stage, step, forward, backward)
            live += counts[0]
            stale += counts[1]
        if backward is not None:
            _check_end(stage, actions, program)
    _check_forecast(program)
    _check_recall(program)
    _check_pairs(program)
    _check_progress(program)
    if program.is_exact and stale:
        raise ProgramError(f"the program calls itself exact, and {stale} of its reads are stale")
    return ProgramReport(live, stale)


_FORECAST = (ActionKind.FORECAST, ActionKind.CARRY)

Times = npt.NDArray[np.int64]


def _step_times(
    stage: int, actions: tuple[Action, ...], program: Program
) -> tuple[Times, Times | None]:
    """When each step of each chunk runs, [steps, K], forward and (if any) backward."""
    steps, chunks = program.num_steps[stage], program.chunks
    times = {
        way: np.full((steps, chunks), -1, dtype=np.int64)
        for way in (ActionKind.FORWARD, ActionKind.BACKWARD)
    }
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
    forward, backward = times[ActionKind.FORWARD], times[ActionKind.BACKWARD]
    if (forward < 0).any():
        step, position = np.argwhere(forward < 0)[0]
        raise ProgramError(f"stage {stage}: F{position} step {step} never runs")
    if (np.diff(forward, axis=0) < 0).any():
        raise ProgramError(f"stage {stage}: a chunk's steps run out of order forward")
    if (backward < 0).all():
        return forward, None
    if (backward < 0).any():
        step, position = np.argwhere(backward < 0)[0]
        raise ProgramError(f"stage {stage}: B{position} step {step} never runs")
    if (np.diff(backward, axis=0) > 0).any() or (backward[-1] < forward[-1]).any():
        raise ProgramError(f"stage {stage}: a chunk's backward does not mirror its forward")
    return forward, backward


def _check_reads(stage: int, step: int, forward: Times, backward: Times | None) -> tuple[int, int]:
    """Count live and stale pairs of one aggregation, and see that gradients follow the live ones.

    Step ``step`` of chunk a aggregates what step - 1 of chunk b pushed. It is live if the push
    came first; then, and only then, a's gradient must be recorded before b's is pulled.
    """
    reads, pushes = forward[step], forward[step - 1]
    live = pushes[None, :] < reads[:, None]
    if backward is not None:
        delivered = backward[step][:, None] < backward[step - 1][None, :]
        wrong = np.argwhere(live != delivered)
        if len(wrong):
            a, b = wrong[0]
            what = "is lost" if live[a, b] else "of a stale read is delivered"
            raise ProgramError(
                f"stage {stage} step {step}: the gradient from chunk {a} to chunk {b} {what}; "
                "backward must walk the chunks in exactly the reverse order"
            )
    count = int(live.sum()) - len(reads)
    return count, live.size - len(reads) - count


def _check_end(stage: int, actions: tuple[Action, ...], program: Program) -> None:
    """Training ends with one step, behind all B; before it every gradient is summed, once, whole.

    Nothing is summed where there is one shard.
    """
    found = [
        (i, a)
        for i, a in enumerate(actions)
        if a.kind in (ActionKind.REDUCE_GRADIENTS, ActionKind.STEP)
    ]
    last = max(i for i, a in enumerate(actions) if a.kind is ActionKind.BACKWARD)
    kinds = [a.kind for _, a in found]
    if kinds.count(ActionKind.STEP) != 1 or kinds[-1] is not ActionKind.STEP or found[-1][0] < last:
        raise ProgramError(
            f"stage {stage}: must end with STEP behind its last B, "
            f"has {' '.join(kinds) or 'nothing'}"
        )
    summed = [step for _, a in found[:-1] for step in range(*a.steps)]
    if sorted(summed) != list(range(program.num_steps[stage] if program.shards > 1 else 0)):
        raise ProgramError(
            f"stage {stage}: must sum the gradients of every step once over its shards, sums those "
            f"of steps {summed}"
        )
    for i, a in found[:-1]:
        later = [b.steps for b in actions[i:] if b.kind is ActionKind.BACKWARD]
        if any(first < a.steps[1] and a.steps[0] < end for first, end in later):
            raise ProgramError(
                f"stage {stage}: {a.text(program.num_steps[stage])} comes before its gradients are "
                "whole"
            )


def _check_forecast(program: Program) -> None:
    """Every stage or none carries its stale rows over, once, before any chunk reads one."""
    forecasts = any(a.kind in _FORECAST for s in program.stages for a in s)
    wanted = [*_FORECAST, ActionKind.FORWARD] if forecasts else [ActionKind.FORWARD]
    for stage, actions in enumerate(program.stages):
        found = [a for a in actions if a.kind in (*_FORECAST, ActionKind.FORWARD)][: len(wanted)]
        others = [a for a in actions if a.kind in _FORECAST]
        kinds = [a.kind for a in found]
        if (
            kinds != wanted
            or len(others) != len(wanted) - 1
            or any(a.position != SpecialPosition.PROBE for a in others)
        ):
            raise ProgramError(
                f"stage {stage}: must run FORECAST and then CARRY, once and before its first F, as "
                "every stage, or none does"
            )


def _check_recall(program: Program) -> None:
    """Where rows are forecast, every stage recalls them, once: its tables written, its weights old.

    So does an exact epoch between others, which forecasts nothing itself.
    """
    kinds = {a.kind for actions in program.stages for a in actions}
    for stage, actions in enumerate(
        program.stages if kinds & {ActionKind.FORECAST, ActionKind.RECALL} else ()
    ):
        last = max(i for i, a in enumerate(actions) if a.kind is ActionKind.FORWARD)
        step = next((i for i, a in enumerate(actions) if a.kind is ActionKind.STEP), -1)
        found = [(i, a.position) for i, a in enumerate(actions) if a.kind is ActionKind.RECALL]
        if (
            len(found) != 1
            or not last < found[0][0] < step
            or found[0][1] != SpecialPosition.RECALLED_PROBE
        ):
            raise ProgramError(
                f"stage {stage}: must run RECALL once, between its last F and its STEP, as every "
                "stage, or none does"
            )


def _check_pairs(program: Program) -> None:
    """Every send meets its receive, in the same order on both ends.

    That is the order of all that two stages exchange, both ways together: NCCL runs the messages of
    two ranks one after the other, as they were asked for.
    """
    loss_rows: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    """By (stage, the other one): way, source and position of each message."""
    for actions in program.stages:
        for a in actions:
            if a.kind.is_send or a.kind.is_receive:
                source = a.stage if a.kind.is_send else a.peer
                loss_rows[a.stage, a.peer].append((a.kind.direction.value, source, a.position))
    for (stage, peer), mine in list(loss_rows.items()):
        theirs = loss_rows[peer, stage]
        if mine != theirs:
            at = next((i for i, (m, t) in enumerate(zip(mine, theirs, strict=False)) if m != t), -1)
            if at < 0:
                what = f"has {len(theirs)} messages where it has {len(mine)}"
            else:
                what = f"has {theirs[at]} where it has {mine[at]}"
            raise ProgramError(
                f"stages {stage} and {peer} do not exchange the same messages in the same order "
                f"(way, source, position): beside stage {stage}, stage {peer} {what}"
            )


def _check_progress(program: Program) -> None:
    """Run the program with tokens for messages: every stage must come to its end.

    A compute action waits for the receives posted for its chunk; a receive is met once the other
    side has run its send. Using a value that was never received, or sending one that was not made,
    shows as a stall or as an error here.
    """
    sent: set[tuple[Direction, int, int, int]] = set()
    made: set[tuple[Direction, int, int]] = set()
    waiting: list[dict[tuple[Direction, int], list[int]]] = [
        defaultdict(list) for _ in program.stages
    ]
    needs = _needs(program)
    at = [0] * len(program.stages)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(program.stages):
            while at[stage] < len(actions):
                a = actions[at[stage]]
                if a.kind.is_send:
                    if (a.kind.direction, stage, a.position) not in made:
                        raise ProgramError(
                            f"stage {stage}: {a.text(program.num_steps[stage])} comes before "
                            "what it sends is made"
                        )
                    sent.add((a.kind.direction, stage, a.peer, a.position))
                elif a.kind.is_receive:
                    waiting[stage][a.kind.direction, a.position].append(a.peer)
                elif a.kind.is_pass and _is_first(a, program):
                    way = a.kind.direction
                    peers = waiting[stage].get((way, a.position), [])
                    if set(peers) != needs[way, stage]:
                        raise ProgramError(
                            f"stage {stage}: {a.text(program.num_steps[stage])} runs before its "
                            "receive is posted"
                        )
                    if any((way, p, stage, a.position) not in sent for p in peers):
                        break
                if a.kind.is_pass and _is_last(a, program):
                    made.add((a.kind.direction, stage, a.position))
                at[stage] += 1
                moved = True
    for stage, actions in enumerate(program.stages):
        if at[stage] < len(actions):
            stuck = actions[at[stage]].text(program.num_steps[stage])
            raise ProgramError(f"stage {stage} waits for ever at {stuck}")


def _needs(program: Program) -> dict[tuple[Direction, int], set[int]]:
    """The stages that each stage hears from, forward and backward."""
    needs: dict[tuple[Direction, int], set[int]] = defaultdict(set)
    for actions in program.stages:
        for a in actions:
            if a.kind.is_send:
                needs[a.kind.direction, a.peer].add(a.stage)
    return needs


def _is_first(action: Action, program: Program) -> bool:
    """The action begins its chunk on this stage, in its direction."""
    if action.position < 0:
        return True
    if action.kind is ActionKind.FORWARD:
        return action.steps[0] == 0
    return action.steps[1] == program.num_steps[action.stage]


def _is_last(action: Action, program: Program) -> bool:
    """The action ends its chunk on this stage, in its direction."""
    if action.position < 0:
        return True
    if action.kind is ActionKind.FORWARD:
        return action.steps[1] == program.num_steps[action.stage]
    return action.steps[0] == 0
