"""Critical path of an epoch, and its time on other devices and links (what-if analysis).

The critical path is split by kind and place of its tasks. The effect of a large change cannot be
read off the path, because another path then becomes critical. So the epoch is simulated again.
Other numbers of chunks, stages or shards mean another program and are not covered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.simulate import EXCHANGES, Task, TaskKind, Timeline, simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.plan import Placement
from gnnpipe.schedule import Program

LESS = 0.1
"""Relative reduction of a time in ``sensitivity``."""

_GROUPS = {
    TaskKind.FORWARD: ("compute of", "all compute"),
    TaskKind.BACKWARD: ("compute of", "all compute"),
    TaskKind.PRODUCT: ("compute of", "all compute"),
    TaskKind.PULL: ("compute of", "all compute"),
    TaskKind.BEGIN: ("epoch start of", "all epoch starts"),
    TaskKind.FORECAST: ("forecast of", "all forecasts"),
    TaskKind.CARRY: ("forecast of", "all forecasts"),
    TaskKind.REDUCE_FIT: ("forecast of", "all forecasts"),
    TaskKind.STEP: ("optimizer of", "all optimizers"),
    TaskKind.EXCHANGE_FORWARD: ("exchange in", "all exchanges"),
    TaskKind.EXCHANGE_BACKWARD: ("exchange in", "all exchanges"),
    TaskKind.REDUCE_MEAN: ("exchange in", "all exchanges"),
    TaskKind.REDUCE_GRADIENTS: ("gradient sum of", "all gradient sums"),
}
"""Names of kinds of task: in one stage, and in all."""


def task_place(task: Task) -> str:
    """Name of a task by kind and stage, like 'compute of stage 2' or 'transfer 2 to 3'."""
    if task.kind.is_send:
        return f"transfer {task.stage} to {task.peer}"
    if task.kind not in _GROUPS:
        return "all-reduce of all ranks" if task.kind is TaskKind.SYNC else "input"
    return f"{_GROUPS[task.kind][0]} stage {task.stage}"


def task_group(task: Task) -> str:
    """Name of a task by kind alone, like 'all compute'."""
    if task.kind.is_send:
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
    for step, spent_s in zip(timeline.critical_path(), timeline.critical_s(), strict=True):
        time_s[name(timeline.tasks.what[step.task])] += spent_s
    total_s = sum(time_s.values())
    shares = {place: spent_s / total_s for place, spent_s in time_s.items() if spent_s > 0}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def sensitivity(
    timeline: Timeline, name: Callable[[Task], str] = task_place, most: int = 6
) -> dict[str, float]:
    """Return the relative change of the epoch time if tasks of a name are shorter.

    Shorter by ``LESS``; for the ``most`` names with the largest shares of the critical path. It is
    0 or less, unless messages and exchanges then take turns in another order on a link or port.
    """
    tasks = timeline.tasks
    names = [name(task) for task in tasks.what]
    found = {}
    for chosen in list(critical_shares(timeline, name))[:most]:
        factors = [1 - LESS if at == chosen else 1.0 for at in names]
        shorter = replace(
            tasks,
            duration_s=[s * f for s, f in zip(tasks.duration_s, factors, strict=True)],
            port_s=[s * f for s, f in zip(tasks.port_s, factors, strict=True)],
        )
        found[chosen] = simulate(shorter).makespan_s / timeline.makespan_s - 1
    return found


def what_ifs(
    timeline: Timeline, program: Program, costs: ProfiledCosts, order: Sequence[int] | None = None
) -> dict[str, float]:
    """Return the seconds of an epoch for each change; ``timeline`` is of the unchanged program.

    The changes: twice the bandwidth between stages, and among shards, each also where a port is
    filled; the busiest rank half and twice as fast; nothing overlapped. Changes that have no
    meaning with a single stage, shard or rank are left out.
    """
    placement, ranks = program.placement, program.placement.num_ranks
    tasks = timeline.tasks
    busy = timeline.busy_s()[:ranks]
    busiest = busy.index(max(busy))
    found = {}

    def with_twice_the_bandwidth(time_of: Callable[[Task], float | None]) -> float:
        times = [time_of(task) for task in tasks.what]
        durations = zip(times, tasks.duration_s, strict=True)
        filled = zip(times, tasks.port_s, strict=True)
        faster = replace(
            tasks,
            duration_s=[s if new is None else new for new, s in durations],
            port_s=[s if new is None else s / 2 for new, s in filled],
        )
        return simulate(faster).makespan_s

    if len(program.stages) > 1:
        found["twice the bandwidth between stages"] = with_twice_the_bandwidth(
            lambda task: _fast_message_s(task, costs, placement)
        )
    if any(len(group) > 1 for group in placement.stages):
        found["twice the bandwidth among shards"] = with_twice_the_bandwidth(
            lambda task: _fast_collective_s(task, costs, placement)
        )
    for factor, words in ((0.5, "half"), (2.0, "twice")):
        durations = [
            time_s / factor if resource == busiest else time_s
            for resource, time_s in zip(tasks.resource, tasks.duration_s, strict=True)
        ]
        changed = replace(tasks, duration_s=durations)
        found[f"rank {busiest} {words} as fast"] = simulate(changed).makespan_s
    if ranks > 1:
        blocking = program_tasks(program, costs, order, overlap=False)
        found["nothing overlapped"] = simulate(blocking).makespan_s
    return {change: time_s / program.epochs for change, time_s in found.items()}


# With twice the bandwidth, a transfer takes as long as one of half the size.


def _fast_message_s(task: Task, costs: ProfiledCosts, placement: Placement) -> float | None:
    """Return the seconds of a message with twice the bandwidth; ``None`` for other tasks."""
    if not task.kind.is_send:
        return None
    source = placement.rank(task.stage, task.shard)
    target = placement.rank(task.peer, task.peer_shard)
    return costs.message_s(source, target, round(task.size_bytes / 2))


def _fast_collective_s(task: Task, costs: ProfiledCosts, placement: Placement) -> float | None:
    """Return the seconds of a collective with twice the bandwidth; ``None`` for other tasks."""
    stage = task.stage
    for direction, kind in EXCHANGES.items():
        if task.kind is kind:
            sizes = [
                costs.exchange_bytes(direction, stage, shard, task.chunk, task.step)
                for shard in range(len(placement.stages[stage]))
            ]
            return costs.exchange_s(stage, [round(size / 2) for size in sizes])
    sums = (TaskKind.REDUCE_FIT, TaskKind.REDUCE_MEAN, TaskKind.REDUCE_GRADIENTS)
    if task.kind not in sums:
        return None
    # The sum of a bucket of gradients has a task for each phase.
    parts = costs.shard_sum_phases() if task.kind is TaskKind.REDUCE_GRADIENTS else 1
    copy_bytes = parts * task.size_bytes / costs.shard_sum_bytes(stage, 1)
    return costs.shard_sum_s(stage, round(copy_bytes / 2)) / parts
