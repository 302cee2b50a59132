"""A simulated epoch as spans, beside the measured one in trace.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gnnpipe.perf.tasks import Task
from gnnpipe.perf.timeline import Timeline
from gnnpipe.perf.trace import Span

__all__ = ["predicted_spans"]


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
                at, kind, start_s, end_s, what.chunk, what.stage,
                steps if kind in ("F", "B") else (0, 0), peer, what.size_bytes, task in critical,
                lane,
            )  # fmt: skip
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
