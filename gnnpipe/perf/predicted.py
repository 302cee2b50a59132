"""Turns a simulated epoch into the records and spans of a real one, for shares and trace.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnnpipe.perf.simulate import Task, TaskKind, Timeline
from gnnpipe.perf.spans import Collective, EpochSpans, Message
from gnnpipe.perf.trace import Span
from gnnpipe.plan import Placement


def simulated_epochs(timeline: Timeline, placement: Placement, count: int = 1) -> list[EpochSpans]:
    """Return the times of each rank; ``timeline`` is of ``program_tasks``, of ``count`` epochs."""
    tasks, end_s = timeline.tasks, timeline.end_s
    ranks = placement.num_ranks
    epochs = [EpochSpans(0.0, timeline.makespan_s, count=count) for _ in range(ranks)]
    for number, task in enumerate(tasks.what):
        rank = tasks.resource[number]
        if rank >= ranks:
            if task.kind.is_send:
                source, target = _ends(task, placement)
                key = task.kind[-1], target, task.position
                epochs[source].send_times_s[key] = end_s[tasks.before[number][0]]
            continue
        now_s = epochs[rank].actions_end_s
        for other in tasks.before[number]:
            now_s = _add_wait(timeline, other, rank, now_s, epochs, placement)
        epochs[rank].actions_end_s = end_s[number]
    return epochs


def _add_wait(
    timeline: Timeline,
    number: int,
    rank: int,
    start_s: float,
    epochs: list[EpochSpans],
    placement: Placement,
) -> float:
    """Add the wait of ``rank`` for communication task ``number``; return when the wait ends."""
    task, senders = timeline.tasks.what[number], timeline.tasks.before[number]
    ready_s = [timeline.end_s[sender] for sender in senders]
    end_s = max(start_s, timeline.end_s[number])
    if task.kind is TaskKind.SYNC:
        epochs[rank].step_sync = Collective(start_s, start_s, end_s)
        return end_s
    if not task.kind.is_send:
        epochs[rank].collectives.append(Collective(ready_s[placement.shard(rank)], start_s, end_s))
        return end_s
    source, target = _ends(task, placement)
    if rank == target:
        key = task.kind[-1], source, task.position
        message = Message(key, task.size_bytes, ready_s[-1], start_s, end_s)
    else:
        # A blocking send: the sender waits for the receiver as for a message without bytes.
        epochs[target].send_times_s[task.kind[-1], source, task.position] = ready_s[0]
        message = Message((task.kind[-1], target, task.position), 0, ready_s[0], start_s, end_s)
    epochs[rank].messages.append(message)
    return end_s


def _ends(task: Task, placement: Placement) -> tuple[int, int]:
    """Return the source and target rank of a message."""
    return placement.rank(task.stage, task.shard), placement.rank(task.peer, task.peer_shard)


def predicted_spans(
    timeline: Timeline, num_steps: Sequence[int], placement: Placement
) -> tuple[Span, ...]:
    """Return spans by rank: own work and waits first, then communication in lanes.

    ``timeline`` is of ``program_tasks``, ``num_steps`` of each stage. A message is in a lane of its
    sender, a collective in a lane of every shard that takes part.
    """
    tasks = timeline.tasks
    critical = {step.task for step in timeline.critical_path()}
    ranks = placement.num_ranks
    own: list[list[Span]] = [[] for _ in range(ranks)]
    lanes: list[list[Span]] = [[] for _ in range(ranks)]
    last_end_s = [0.0] * ranks
    for number, task in enumerate(tasks.what):
        start_s, end_s = timeline.start_s[number], timeline.end_s[number]
        rank = tasks.resource[number]
        if rank < ranks:
            if start_s > last_end_s[rank]:
                own[rank].append(Span(rank, "WAIT", last_end_s[rank], start_s, stage=task.stage))
            last_end_s[rank] = end_s
        if end_s == start_s:
            continue
        steps = (0, num_steps[task.stage]) if task.step < 0 else (task.step, task.step + 1)
        kind = _PARTS_OF_STEPS.get(task.kind, task.kind)
        for shown_rank, peer, lane in _lanes(task, rank, placement):
            span = Span(
                shown_rank,
                kind,
                start_s,
                end_s,
                task.chunk,
                task.stage,
                steps if kind in (TaskKind.FORWARD, TaskKind.BACKWARD) else (0, 0),
                peer,
                task.size_bytes,
                number in critical,
                lane,
            )
            (lanes if lane else own)[shown_rank].append(span)
    for rank in range(ranks):
        if timeline.makespan_s > last_end_s[rank]:
            stage = placement.stage(rank)
            own[rank].append(Span(rank, "WAIT", last_end_s[rank], timeline.makespan_s, stage=stage))
        lanes[rank].sort(key=lambda span: span.start_s)
    return tuple(span for rank in range(ranks) for span in (*own[rank], *lanes[rank]))


_PARTS_OF_STEPS = {TaskKind.PULL: TaskKind.BACKWARD, TaskKind.PRODUCT: TaskKind.FORWARD}
"""Products before or during an exchange, which a span shows as parts of their step."""


def _lanes(task: Task, rank: int, placement: Placement) -> Iterator[tuple[int, int, str]]:
    """Yield rank, peer and lane of each span of a task."""
    if rank < placement.num_ranks:
        yield rank, -1, ""
    elif task.kind.is_send:
        source, target = _ends(task, placement)
        yield source, target, f"to {target}"
    elif task.kind is not TaskKind.SYNC:
        for member in placement.stages[task.stage]:
            yield member, -1, "shards"
