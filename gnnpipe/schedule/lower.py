"""From an order of compute to a program: sends, receives, gradient sum and step put in.

A receive is posted one compute action before its value is needed, so that it can arrive meanwhile
(a gloo send only completes once its receive is posted); a send follows the action that made the
value. Neither waits: the executor waits at first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from gnnpipe.plan import Plan
from gnnpipe.schedule.compute import ORDERS
from gnnpipe.schedule.program import Action, ActionKind, Program, SpecialPosition

__all__ = ["evaluation_program", "recall_actions", "training_program"]


def training_program(
    plan: Plan, forecast: bool = False, buckets: Sequence[Sequence[int]] = ()
) -> Program:
    """One epoch: forward over all chunks, backward in reverse, gradient sums, optimizer step.

    ``buckets``: by stage, the steps that the buckets of the gradient sum begin with, ascending from
    0 (``plan.gradient_buckets``); one for all without. With ``forecast`` the pilot rows go first,
    and carry the stale rows to the current weights; not in an exact program, which has none. Both
    recall them for the epoch that comes next.
    """
    program = _lower(plan, plan.schedule, backward=True, buckets=buckets)
    if not forecast:
        return program
    first = [() if program.is_exact else _forecast(plan, s) for s in range(plan.num_stages)]
    stages: list[tuple[Action, ...]] = []
    for s, actions in enumerate(program.stages):
        stages.append((*first[s], *_with_recall(plan, s, actions, program.is_exact, stages)))
    return replace(program, stages=tuple(stages))


def evaluation_program(plan: Plan) -> Program:
    """One exact forward pass, layer by layer."""
    return _lower(plan, "layer-sync", backward=False)


def recall_actions(plan: Plan, stage: int) -> tuple[Action, ...]:
    """The recall alone, for a run that goes on where another one ended."""
    return (*_receives(plan, stage, SpecialPosition.RECALLED_PROBE), *_recall(plan, stage))


def _forecast(plan: Plan, stage: int) -> tuple[Action, ...]:
    return (
        *_receives(plan, stage, SpecialPosition.PROBE),
        Action(ActionKind.FORECAST, stage, SpecialPosition.PROBE),
        *_sends(plan, stage, SpecialPosition.PROBE),
        # After the send: the next stage waits for the pilot rows, not for these tables.
        Action(ActionKind.CARRY, stage, SpecialPosition.PROBE),
    )


def _recall(plan: Plan, stage: int) -> tuple[Action, ...]:
    return (
        Action(ActionKind.RECALL, stage, SpecialPosition.RECALLED_PROBE),
        *_sends(plan, stage, SpecialPosition.RECALLED_PROBE),
    )


def _receives(plan: Plan, stage: int, position: int) -> tuple[Action, ...]:
    return tuple(
        Action(ActionKind.RECEIVE_FORWARD, stage, position, peer=t.source)
        for t in plan.receives(stage)
    )


def _sends(plan: Plan, stage: int, position: int) -> tuple[Action, ...]:
    return tuple(
        Action(ActionKind.SEND_FORWARD, stage, position, peer=t.target) for t in plan.sends(stage)
    )


def _with_recall(
    plan: Plan,
    stage: int,
    actions: tuple[Action, ...],
    is_exact: bool,
    earlier: list[tuple[Action, ...]],
) -> tuple[Action, ...]:
    """The recall between the last F and the STEP: the later, the later the stage.

    All tables are written by then, and the weights have not changed yet. The first stage recalls
    while it waits for its first gradients, the last one behind its last chunk, the others in even
    steps between: so the rows travel while all are at work, against the gradients, and nobody waits
    for them. On the critical path lies the recall of one stage, not of all. In an exact program all
    but the last stage have nothing to do in front of their first B.

    A receive stands where its send does in the stage before, ``earlier``, among the gradients that
    these two stages exchange: links that carry one message at a time (NCCL) need the same order at
    both ends.
    """
    back = [i for i, a in enumerate(actions) if a.kind is ActionKind.BACKWARD]
    last = plan.num_stages - 1
    share = 1.0 if stage == last else 0.0 if is_exact else stage / last
    place = ([back[0]] + [i + 1 for i in back])[math.ceil(share * len(back))]
    while actions[place].kind in (
        ActionKind.SEND_BACKWARD,
        ActionKind.RECEIVE_BACKWARD,
        ActionKind.REDUCE_GRADIENTS,
    ):
        place += 1
    receives: dict[int, list[Action]] = {}
    for receive in _receives(plan, stage, SpecialPosition.RECALLED_PROBE):
        theirs = earlier[receive.peer]
        sent = theirs.index(
            Action(
                ActionKind.SEND_FORWARD, receive.peer, SpecialPosition.RECALLED_PROBE, peer=stage
            )
        )
        count = sum(
            a.kind is ActionKind.RECEIVE_BACKWARD and a.peer == stage for a in theirs[:sent]
        )
        mine = [
            i
            for i, a in enumerate(actions)
            if a.kind is ActionKind.SEND_BACKWARD and a.peer == receive.peer
        ]
        receives.setdefault(mine[count - 1] + 1, []).append(receive)
    place = max([place, *receives])
    changed: list[Action] = []
    for i, action in enumerate(actions):
        changed += receives.get(i, [])
        if i == place:
            changed += _recall(plan, stage)
        changed.append(action)
    return tuple(changed)


def _lower(
    plan: Plan, schedule: str, backward: bool, buckets: Sequence[Sequence[int]] = ()
) -> Program:
    stages = []
    for stage, num_steps in enumerate(plan.steps):
        forward = ORDERS[schedule](stage, num_steps, plan.chunks)
        actions = _with_forward(plan, forward, num_steps)
        if backward:
            drain = [
                Action(ActionKind.BACKWARD, stage, a.position, a.steps) for a in reversed(forward)
            ]
            if plan.shards == 1:
                actions += _with_backward(plan, drain, num_steps)
            else:
                begins = buckets[stage] if buckets else (0,)
                ends = (*begins[1:], num_steps)
                sums = [
                    Action(ActionKind.REDUCE_GRADIENTS, stage, steps=steps)
                    for steps in zip(begins, ends, strict=True)
                ]
                drain = _parted(drain, begins)
                actions += _with_sums(_with_backward(plan, drain, num_steps), sums)
            actions.append(Action(ActionKind.STEP, stage))
        stages.append(tuple(actions))
    return Program(
        tuple(stages), plan.steps, plan.chunks, plan.shards, is_exact=schedule == "layer-sync"
    )


def _parted(drain: list[Action], begins: Sequence[int]) -> list[Action]:
    """The last chunk's backward through several steps, cut where a bucket begins."""
    *others, last = drain
    inner = [step for step in begins if last.steps[0] < step < last.steps[1]]
    bounds = [last.steps[0], *inner, last.steps[1]]
    parts = [replace(last, steps=steps) for steps in pairwise(bounds)]
    return [*others, *reversed(parts)]


def _with_sums(actions: list[Action], sums: list[Action]) -> list[Action]:
    """Each sum behind the last B of its steps (and what that sends to other stages)."""
    found = list(actions)
    for a in sums:
        last = max(
            i
            for i, b in enumerate(found)
            if b.kind is ActionKind.BACKWARD and a.steps[0] in range(*b.steps)
        )
        while last + 1 < len(found) and found[last + 1].kind is ActionKind.SEND_BACKWARD:
            last += 1
        found.insert(last + 1, a)
    return found


def _with_forward(plan: Plan, compute: list[Action], num_steps: int) -> list[Action]:
    return _interleave(
        compute,
        [t.source for t in plan.receives(compute[0].stage)],
        [t.target for t in plan.sends(compute[0].stage)],
        (ActionKind.RECEIVE_FORWARD, ActionKind.SEND_FORWARD),
        first=lambda a: a.steps[0] == 0,
        last=lambda a: a.steps[1] == num_steps,
    )


def _with_backward(plan: Plan, compute: list[Action], num_steps: int) -> list[Action]:
    return _interleave(
        compute,
        [t.target for t in plan.sends(compute[0].stage)],
        [t.source for t in plan.receives(compute[0].stage)],
        (ActionKind.RECEIVE_BACKWARD, ActionKind.SEND_BACKWARD),
        first=lambda a: a.steps[1] == num_steps,
        last=lambda a: a.steps[0] == 0,
    )


def _interleave(
    compute: list[Action],
    sources: list[int],
    targets: list[int],
    kinds: tuple[ActionKind, ActionKind],
    first: Callable[[Action], bool],
    last: Callable[[Action], bool],
) -> list[Action]:
    """Receives one compute action ahead of a chunk's first step, sends right after its last."""
    receive, send = kinds
    posts: dict[int, list[Action]] = {}
    for index, a in enumerate(compute):
        if first(a):
            posts.setdefault(max(index - 1, 0), []).extend(
                Action(receive, a.stage, a.position, peer=peer) for peer in sources
            )
    actions: list[Action] = []
    for index, a in enumerate(compute):
        actions += [*posts.get(index, []), a]
        if last(a):
            actions += [Action(send, a.stage, a.position, peer=peer) for peer in targets]
    return actions
