"""Lowers a schedule's compute actions to a program: adds messages, gradient sums and probe passes.

A receive is posted one compute action before its value is needed, or two with several passes ahead
(``_with_messages``), so that the message can arrive meanwhile (a gloo send only completes once its
receive is posted). A send follows the action that
produced the value. Neither blocks: the executor waits when a value is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise

from gnnpipe.config.settings import BY_CHUNK, chunks_per_step
from gnnpipe.plan import StageDag
from gnnpipe.schedule.check import CheckedProgram, check
from gnnpipe.schedule.program import (
    Action,
    ActionKind,
    GradientScope,
    Program,
    ProgramError,
    SpecialPosition,
)
from gnnpipe.schedule.schedules import EXACT_SCHEDULE, SCHEDULES, Schedule, StageWork


def training_program(
    dag: StageDag,
    buckets: Sequence[Sequence[int]] = (),
    schedule: str = "",
    epochs: int = 1,
    steps_every: int | None = None,
    passes_ahead: int = 1,
) -> CheckedProgram:
    """Return the checked program from one flush to the next.

    Args:
        dag: The stages.
        buckets: By stage, the first steps of the buckets of the gradient sum, ascending from 0
            (``plan.gradient_buckets``); default: one bucket per stage.
        schedule: Name of the schedule; default: that of the plan.
        epochs: Epochs until the flush; more than 1 if the schedule ``spans_epochs``.
        steps_every: Chunks per optimizer step, which divide K, in a schedule with steps by chunk;
            default: by the schedule.
        passes_ahead: Forward passes by which a stage is ahead of the next one, in 1F1B.
    """
    plan, name = dag.plan, schedule or dag.plan.schedule
    rule = SCHEDULES[name]
    every = chunks_per_step(name, plan.chunks, steps_every)
    scope = GradientScope.OWN_CHUNK if name in BY_CHUNK else GradientScope.LIVE
    stages = []
    for stage, num_steps in enumerate(dag.steps):
        distance = dag.distances[stage]
        work = StageWork(stage, num_steps, plan.chunks, epochs, every, passes_ahead, distance)
        bucket_starts = buckets[stage] if buckets else (0,)
        stages.append(tuple(_lower_stage(dag, rule, work, bucket_starts)))
    consistency = rule.consistency
    if scope is GradientScope.OWN_CHUNK:
        consistency = replace(consistency, optimizer_steps=plan.chunks // every)
    program = Program(
        tuple(stages), dag.steps, plan.chunks, plan.placement, consistency, scope, epochs
    )
    try:
        return check(program)
    except ProgramError as error:
        raise ProgramError(f"schedule {name!r}: {error}") from None


def evaluation_program(dag: StageDag) -> CheckedProgram:
    """Return the checked program of one exact forward pass, layer by layer."""
    plan, schedule = dag.plan, SCHEDULES[EXACT_SCHEDULE]
    stages = (
        tuple(
            a
            for part in _with_messages(
                dag, schedule.forward(stage, num_steps, plan.chunks), num_steps
            )
            for a in part
        )
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
    dag: StageDag, rule: Schedule, work: StageWork, bucket_starts: Sequence[int]
) -> list[Action]:
    """Return the actions of a stage with messages and gradient sums."""
    has_sums = dag.plan.stages[work.stage].shards > 1
    windows: list[list[Action]] = [[]]
    steps: list[Action] = []
    for a in rule.actions(work):
        if a.kind is ActionKind.STEP:
            steps.append(a)
            windows.append([])
        else:
            windows[-1].append(a)
    if has_sums:
        windows = [_split_last(w, bucket_starts) if w else w for w in windows]
    every_pass = [a for window in windows for a in window]
    # More passes ahead are for slow messages, which also need an earlier receive.
    ahead = min(work.passes_ahead, 2) if rule.interleaves else 0
    with_messages = iter(_with_messages(dag, every_pass, work.num_steps, ahead))
    found: list[Action] = []
    for number, window in enumerate(windows):
        actions = [a for part in islice(with_messages, len(window)) for a in part]
        if has_sums and window:
            actions = _with_sums(actions, work.num_steps, bucket_starts)
        found += [*actions, *steps[number : number + 1]]
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


def _with_messages(
    dag: StageDag, compute: Sequence[Action], num_steps: int, ahead: int = 0
) -> list[list[Action]]:
    """Return each action with the receives to post before it and the sends after it.

    A receive is posted ``ahead`` actions before the first step of its pass, of both kinds; with 0,
    one action before if this is of the same kind. Two actions of both kinds take as long as a pass
    of forward and backward, and no link keeps up with a slower message.
    """
    before: list[list[Action]] = [[] for _ in compute]
    after: list[list[Action]] = [[] for _ in compute]
    for index, a in enumerate(compute):
        is_forward = a.kind is ActionKind.FORWARD
        earlier = [t.source for t in dag.receives(a.stage)]
        later = [t.target for t in dag.sends(a.stage)]
        sources, targets = (earlier, later) if is_forward else (later, earlier)
        receive = ActionKind.RECEIVE_FORWARD if is_forward else ActionKind.RECEIVE_BACKWARD
        send = ActionKind.SEND_FORWARD if is_forward else ActionKind.SEND_BACKWARD
        if a.is_first(num_steps):
            repeats = index > 0 and compute[index - 1].kind is a.kind
            before[index - (min(ahead, index) if ahead else repeats)] += [
                Action(receive, a.stage, a.position, peer=peer) for peer in sources
            ]
        if a.is_last(num_steps):
            after[index] += [Action(send, a.stage, a.position, peer=peer) for peer in targets]
    return [[*b, a, *c] for b, a, c in zip(before, compute, after, strict=True)]


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
