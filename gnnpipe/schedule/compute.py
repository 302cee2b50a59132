"""The orders: functions from stages and K to a table of compute actions.

Each returns, for one stage, its F actions and its B actions in order. Communication, the gradient
sum and the optimizer step are added by ``lower``. The backward list is always the forward list
reversed, which is the only order that loses no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from gnnpipe.schedule.program import Action, ActionKind

__all__ = ["ORDERS", "Order", "fill_drain", "layer_sync"]

Order = Callable[[int, int, int], list[Action]]
"""(stage, its number of steps, K) to the stage's F actions in order."""


def fill_drain(stage: int, steps: int, chunks: int) -> list[Action]:
    """Every chunk through the whole stage before the next one (GNNPipe, section 3).

    A chunk reads those before it live and those after it stale.
    """
    return [Action(ActionKind.FORWARD, stage, position, (0, steps)) for position in range(chunks)]


def layer_sync(stage: int, steps: int, chunks: int) -> list[Action]:
    """All chunks through one step before the next step: nothing is ever stale."""
    if chunks == 1:
        return fill_drain(stage, steps, chunks)
    return [
        Action(ActionKind.FORWARD, stage, position, (step, step + 1))
        for step in range(steps)
        for position in range(chunks)
    ]


ORDERS: dict[str, Order] = {"fill-drain": fill_drain, "layer-sync": layer_sync}
