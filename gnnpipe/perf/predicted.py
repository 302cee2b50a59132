"""A simulated epoch as spans, beside the measured one in trace.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnnpipe.perf.simulate import Timeline
from gnnpipe.perf.spans import Collective, EpochSpans, Message
from gnnpipe.perf.tasks import Task
from gnnpipe.perf.trace import Span

__all__ = ["predicted_spans", "simulated_notes"]


def simulated_notes(timeline: Timeline, shards: int) -> list[EpochSpans]:
    """By rank (stage * ``shards`` + shard), of a timeline of ``program_tasks``."""
    tasks, end_s = timeline.tasks, timeline.end_s
    ranks = sum(resource.in_order for resource in tasks.resources)
    notes = [EpochSpans(0.0, timeline.makespan_s) for _ in range(ranks)]
    for task, what in enumerate(tasks.what):
        rank = tasks.resource[task]
        if rank >= ranks:
            if what.kind.startswith("SEND_"):
                source, target = _ends(what, shards)
                key = what.kind[-1], target, what.position
                notes[source].sent_s[key] = end_s[tasks.before[task][0]]
            continue
        now_s = notes[rank].done_s
        for other in tasks.before[task]:
            now_s = _note(timeline, other, rank, now_s, notes, shards)
        notes[rank].done_s = end_s[task]
    return notes


def _note(
    timeline: Timeline, wire: int, rank: int, asked_s: float, notes: list[EpochSpans], shards: int
) -> float:
    """Note that ``rank`` waits for a task on a wire; when it goes on."""
    what, parties = timeline.tasks.what[wire], timeline.tasks.before[wire]
    came_s = [timeline.end_s[task] for task in parties]
    left_s = max(asked_s, timeline.end_s[wire])
    if what.kind == "MEET":
        notes[rank].meeting = Collective(asked_s, asked_s, left_s)
        return left_s
    if not what.kind.startswith("SEND_"):
        notes[rank].collectives.append(Collective(came_s[rank % shards], asked_s, left_s))
        return left_s
    source, target = _ends(what, shards)
    if rank == target:
        key = what.kind[-1], source, what.position
        message = Message(key, what.size_bytes, came_s[-1], asked_s, left_s)
    else:
        # Sent without overlap: what it waits for is, as it were, the receipt of who gets it.
        notes[target].sent_s[what.kind[-1], source, what.position] = came_s[0]
        message = Message((what.kind[-1], target, what.position), 0, came_s[0], asked_s, left_s)
    notes[rank].messages.append(message)
    return left_s


def _ends(what: Task, shards: int) -> tuple[int, int]:
    """The ranks that a message goes from and to."""
    return what.stage * shards + what.shard, what.peer * shards + what.shard


def predicted_spans(timeline: Timeline, num_steps: Sequence[int], shards: int) -> tuple[Span, ...]:
    """By rank (stage * ``shards`` + shard), its own work and waits, then its lanes.

    Of a timeline of ``program_tasks``; ``num_steps`` of each stage. Messages stand in a lane of
    the rank that sends them, exchanges in one of every shard that takes part.
    """
    tasks = timeline.tasks
    critical = {step.task for step in timeline.critical_path()}
    ranks = len(num_steps) * shards
    own: list[list[Span]] = [[] for _ in range(ranks)]
    lanes: list[list[Span]] = [[] for _ in range(ranks)]
    over_s = [0.0] * ranks
    for task, what in enumerate(tasks.what):
        start_s, end_s = timeline.start_s[task], timeline.end_s[task]
        rank = tasks.resource[task]
        if rank < ranks:
            if start_s > over_s[rank]:
                own[rank].append(Span(rank, "WAIT", over_s[rank], start_s, stage=what.stage))
            over_s[rank] = end_s
        if end_s == start_s:
            continue
        steps = (0, num_steps[what.stage]) if what.step < 0 else (what.step, what.step + 1)
        for at, peer, lane in _places(what, rank, ranks, shards):
            # The product that halo gradients travel under is a part of its step.
            kind = "B" if what.kind == "PULL" else what.kind
            span = Span(
                at,
                kind,
                start_s,
                end_s,
                what.chunk,
                what.stage,
                steps if kind in ("F", "B") else (0, 0),
                peer,
                what.size_bytes,
                task in critical,
                lane,
            )
            (lanes if lane else own)[at].append(span)
    for rank in range(ranks):
        if timeline.makespan_s > over_s[rank]:
            stage = rank // shards
            own[rank].append(Span(rank, "WAIT", over_s[rank], timeline.makespan_s, stage=stage))
        lanes[rank].sort(key=lambda span: span.start_s)
    return tuple(span for rank in range(ranks) for span in (*own[rank], *lanes[rank]))


def _places(what: Task, rank: int, ranks: int, shards: int) -> Iterator[tuple[int, int, str]]:
    """Rank, peer and lane of each span of a task."""
    if rank < ranks:
        yield rank, -1, ""
    elif what.kind.startswith("SEND_"):
        target = what.peer * shards + what.shard
        yield what.stage * shards + what.shard, target, f"to {target}"
    elif what.kind != "MEET":
        for shard in range(shards):
            yield what.stage * shards + shard, -1, "shards"
