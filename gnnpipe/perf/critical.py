"""Shares of an epoch's critical path by kind of task and place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from gnnpipe.perf.simulate import Timeline
from gnnpipe.perf.tasks import Task

_GROUPS = {
    "F": ("compute of", "all compute"),
    "B": ("compute of", "all compute"),
    "PULL": ("compute of", "all compute"),
    "BEGIN": ("begin of", "all beginnings"),
    "FORECAST": ("forecast of", "all forecasts"),
    "CARRY": ("forecast of", "all forecasts"),
    "REDUCE_FIT": ("forecast of", "all forecasts"),
    "STEP": ("optimizer of", "all optimizers"),
    "EXCHANGE_F": ("exchange in", "all exchanges"),
    "EXCHANGE_B": ("exchange in", "all exchanges"),
    "REDUCE_MEAN": ("exchange in", "all exchanges"),
    "REDUCE_GRAD": ("gradient sum of", "all gradient sums"),
}
"""Names of kinds of task: in one stage, and in all."""


def task_place(task: Task) -> str:
    """Name of a task by kind and stage, like 'compute of stage 2' or 'transfer 2 to 3'."""
    if task.kind.startswith("SEND_"):
        return f"transfer {task.stage} to {task.peer}"
    if task.kind not in _GROUPS:
        return "all-reduce of all ranks" if task.kind == "SYNC" else "input"
    return f"{_GROUPS[task.kind][0]} stage {task.stage}"


def task_group(task: Task) -> str:
    """Name of a task by kind alone, like 'all compute'."""
    if task.kind.startswith("SEND_"):
        return "all transfers"
    return _GROUPS[task.kind][1] if task.kind in _GROUPS else task_place(task)


def critical_shares(
    timeline: Timeline, name: Callable[[Task], str] = task_place
) -> dict[str, float]:
    """Return the share of the makespan by ``name``, the largest first; the shares add up to 1.

    If a share of 0.2 takes 1 % less time, the epoch is 0.2 % shorter, or less where another path is
    about as long.
    """
    time_s: dict[str, float] = defaultdict(float)
    for number, _ in timeline.critical_path():
        time_s[name(timeline.tasks.what[number])] += timeline.tasks.duration_s[number]
    total_s = sum(time_s.values())
    shares = {place: spent_s / total_s for place, spent_s in time_s.items() if spent_s > 0}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
