"""Lowers a schedule's compute actions to a program: adds messages, gradient sums and probe passes.

A receive is posted one compute action before its value is needed, so that the message can arrive
meanwhile (a gloo send only completes once its receive is posted). A send follows the action that
produced the value. Neither blocks: the executor waits when a value is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from gnnpipe.plan import StageDag
from gnnpipe.schedule.check import CheckedProgram, ProgramError, check
from gnnpipe.schedule.program import Action, ActionKind, Program, SpecialPosition
from gnnpipe.schedule.schedules import EXACT_SCHEDULE, SCHEDULES


def training_program(
    dag: StageDag, buckets: Sequence[Sequence[int]] = (), schedule: str = ""
) -> CheckedProgram:
    """Return the checked program of one training epoch.

    ``buckets``: by stage, the first steps of the buckets of the gradient sum, ascending from 0
    (``plan.gradient_buckets``); default: one bucket per stage.
    ``schedule``: name of the schedule; default: that of the plan.
    """
    plan, name = dag.plan, schedule or dag.plan.schedule
    rule = SCHEDULES[name]
    stages = []
    for stage, num_steps in enumerate(dag.steps):
        compute = rule.actions(stage, num_steps, plan.chunks)
        bucket_starts = buckets[stage] if buckets else (0,)
        stages.append(tuple(_lower_stage(dag, compute, num_steps, bucket_starts)))
    program = Program(tuple(stages), dag.steps, plan.chunks, plan.placement, rule.consistency)
    try:
        return check(program)
    except ProgramError as error:
        raise ProgramError(f"schedule {name!r}: {error}") from None


def evaluation_program(dag: StageDag) -> CheckedProgram:
    """Return the checked program of one exact forward pass, layer by layer."""
    plan, schedule = dag.plan, SCHEDULES[EXACT_SCHEDULE]
    stages = (
        tuple(_with_messages(dag, schedule.forward(stage, num_steps, plan.chunks), num_steps))
        for stage, num_steps in enumerate(dag.steps)
    )
    return check(Program(tuple(stages), dag.steps, plan.chunks, plan.placement))


def with_forecast(dag: StageDag, program: CheckedProgram) -> CheckedProgram:
    """Return ``program`` with the actions of the forecast added.

    FORECAST and CARRY, before the first chunk, update the stale rows to the current weights. An
    exact program has no stale rows and is returned unchanged.
    """
    if program.is_exact:
        return program
    stages = ((*_forecast(dag, stage), *a) for stage, a in enumerate(program.stages))
    return check(replace(program, stages=tuple(stages)))


def _lower_stage(
    dag: StageDag, compute: list[Action], num_steps: int, bucket_starts: Sequence[int]
) -> list[Action]:
    """Add messages and gradient sums to the actions before each optimizer step of a stage."""
    found: list[Action] = []
    for is_step, part in groupby(compute, key=lambda a: a.kind is ActionKind.STEP):
        actions = list(part)
        if is_step:
            found += actions
        elif dag.plan.stages[actions[0].stage].shards == 1:
            found += _with_messages(dag, actions, num_steps)
        else:
            split = _split_last(actions, bucket_starts)
            found += _with_sums(_with_messages(dag, split, num_steps), num_steps, bucket_starts)
    return found


def _split_last(actions: list[Action], bucket_starts: Sequence[int]) -> list[Action]:
    """Split the last B action where a bucket begins, so that sums overlap with backward."""
    *others, last = actions
    inner = [step for step in bucket_starts if last.steps[0] < step < last.steps[1]]
    bounds = [last.steps[0], *inner, last.steps[1]]
    parts = [replace(last, steps=steps) for steps in pairwise(bounds)]
    return [*others, *reversed(parts)]


def _with_sums(actions: list[Action], num_steps: int, bucket_starts: Sequence[int]) -> list[Action]:
    """Insert each REDUCE_GRAD after the last B of its steps and the sends of that B."""
    found = list(actions)
    for first, end in zip(bucket_starts, (*bucket_starts[1:], num_steps), strict=True):
        index = 1 + max(
            i
            for i, b in enumerate(found)
            if b.kind is ActionKind.BACKWARD and first in range(*b.steps)
        )
        while index < len(found) and found[index].kind is ActionKind.SEND_BACKWARD:
            index += 1
        stage = found[index - 1].stage
        found.insert(index, Action(ActionKind.REDUCE_GRADIENTS, stage, steps=(first, end)))
    return found


def _with_messages(dag: StageDag, compute: list[Action], num_steps: int) -> list[Action]:
    """Insert receives one action before a chunk's first step, sends right after its last step."""
    found: list[Action] = []
    for kind, run in groupby(compute, key=lambda a: a.kind):
        actions = list(run)
        is_forward = kind is ActionKind.FORWARD
        earlier = [t.source for t in dag.receives(actions[0].stage)]
        later = [t.target for t in dag.sends(actions[0].stage)]
        sources, targets = (earlier, later) if is_forward else (later, earlier)
        receive = ActionKind.RECEIVE_FORWARD if is_forward else ActionKind.RECEIVE_BACKWARD
        send = ActionKind.SEND_FORWARD if is_forward else ActionKind.SEND_BACKWARD
        posts: dict[int, list[Action]] = {}
        for index, a in enumerate(actions):
            if a.is_first(num_steps):
                posts.setdefault(max(index - 1, 0), []).extend(
                    Action(receive, a.stage, a.position, peer=peer) for peer in sources
                )
        for index, a in enumerate(actions):
            found += [*posts.get(index, []), a]
            if a.is_last(num_steps):
                found += [Action(send, a.stage, a.position, peer=peer) for peer in targets]
    return found


def _forecast(dag: StageDag, stage: int) -> tuple[Action, ...]:
    position = SpecialPosition.PROBE
    receive, send = ActionKind.RECEIVE_FORWARD, ActionKind.SEND_FORWARD
    return (
        *(Action(receive, stage, position, peer=t.source) for t in dag.receives(stage)),
        Action(ActionKind.FORECAST, stage, position),
        *(Action(send, stage, position, peer=t.target) for t in dag.sends(stage)),
        # After the send: the next stage waits for the probe rows, not for these tables.
        Action(ActionKind.CARRY, stage, position),
    )
