"""The notes that the ranks of a simulated epoch would have taken.

Of the same form as those that real ranks take, so that ``time_shares`` splits a predicted epoch and
a measured one by the same rules.
"""

from __future__ import annotations

from gnnpipe.perf.spans import Collective, EpochSpans, Message
from gnnpipe.perf.tasks import Task
from gnnpipe.perf.timeline import Timeline

__all__ = ["simulated_notes"]


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
