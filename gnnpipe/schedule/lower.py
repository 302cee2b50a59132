"""From an order of compute to a program: sends, receives, gradient sum and step put in.

A receive is posted one compute action before its value is needed, so that it can arrive meanwhile
(a gloo send only completes once its receive is posted); a send follows the action that made the
value. Neither waits: the executor waits at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gnnpipe.plan import Plan
from gnnpipe.schedule.compute import ORDERS
from gnnpipe.schedule.program import PILOT, Action, Program

__all__ = ["evaluation_program", "training_program"]


def training_program(plan: Plan, forecast: bool = False) -> Program:
    """One epoch: forward over all chunks, backward in reverse, gradient sum, optimizer step.

    With ``forecast`` the pilot rows go first, and carry the stale rows to the current weights.
    """
    program = _lower(plan, plan.schedule, backward=True)
    if not forecast:
        return program
    stages = tuple((*_forecast(plan, s), *actions) for s, actions in enumerate(program.stages))
    return replace(program, stages=stages)


def evaluation_program(plan: Plan) -> Program:
    """One exact forward pass, layer by layer."""
    return _lower(plan, "layer-sync", backward=False)


def _forecast(plan: Plan, stage: int) -> list[Action]:
    return [
        *(Action("RECV_F", stage, PILOT, peer=t.source) for t in plan.receives(stage)),
        Action("FORECAST", stage, PILOT),
        *(Action("SEND_F", stage, PILOT, peer=t.target) for t in plan.sends(stage)),
        # After the send: the next stage waits for the pilot rows, not for these tables.
        Action("CARRY", stage, PILOT),
    ]


def _lower(plan: Plan, schedule: str, backward: bool) -> Program:
    stages = []
    for stage, num_steps in enumerate(plan.steps):
        forward = ORDERS[schedule](stage, num_steps, plan.chunks)
        actions = _with_forward(plan, forward, num_steps)
        if backward:
            drain = [Action("B", stage, a.position, a.steps) for a in reversed(forward)]
            actions += _with_backward(plan, drain, num_steps)
            if plan.shards > 1:
                actions.append(Action("REDUCE_GRAD", stage))
            actions.append(Action("STEP", stage))
        stages.append(tuple(actions))
    return Program(
        tuple(stages), plan.steps, plan.chunks, plan.shards, is_exact=schedule == "layer-sync"
    )


def _with_forward(plan: Plan, compute: list[Action], num_steps: int) -> list[Action]:
    return _interleave(
        compute,
        [t.source for t in plan.receives(compute[0].stage)],
        [t.target for t in plan.sends(compute[0].stage)],
        "F", first=lambda a: a.steps[0] == 0, last=lambda a: a.steps[1] == num_steps,
    )  # fmt: skip


def _with_backward(plan: Plan, compute: list[Action], num_steps: int) -> list[Action]:
    return _interleave(
        compute,
        [t.target for t in plan.sends(compute[0].stage)],
        [t.source for t in plan.receives(compute[0].stage)],
        "B", first=lambda a: a.steps[1] == num_steps, last=lambda a: a.steps[0] == 0,
    )  # fmt: skip


def _interleave(
    compute: list[Action],
    sources: list[int],
    targets: list[int],
    way: str,
    first: Callable[[Action], bool],
    last: Callable[[Action], bool],
) -> list[Action]:
    """Receives one compute action ahead of a chunk's first step, sends right after its last."""
    posts: dict[int, list[Action]] = {}
    for index, a in enumerate(compute):
        if first(a):
            posts.setdefault(max(index - 1, 0), []).extend(
                Action(f"RECV_{way}", a.stage, a.position, peer=peer) for peer in sources
            )
    actions: list[Action] = []
    for index, a in enumerate(compute):
        actions += [*posts.get(index, []), a]
        if last(a):
            actions += [Action(f"SEND_{way}", a.stage, a.position, peer=peer) for peer in targets]
    return actions
