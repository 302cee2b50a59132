"""What the ranks noted in an epoch, as spans of one timeline, its critical path marked.

A rank's actions follow one another; what it waited for lies inside them, as WAIT spans. The
critical path is walked back from the action that was over last: along the rank's own work to the
latest wait for somebody who was late, over the wire to that rank, at the moment when it sent or
came, and so on to the beginning. Where nobody was late, the wait is the wire's and lies on the
path between the rank's own work. What is on the way made the epoch as long as it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from gnnpipe.perf.spans import EpochSpans
from gnnpipe.perf.trace import Span

__all__ = ["measured_spans"]

SHORTEST_WAIT_S = 20e-6
"""Below it a wait is the price of asking; nobody was late."""

Release = tuple[float, float, int, float]
"""A wait of a rank: asked, over, the rank that ended it, and when that rank did what it had to."""


def measured_spans(ranks: Sequence[EpochSpans], shards: int) -> tuple[Span, ...]:
    """By rank (stage * ``shards`` + shard), in the order of time; all notes on one clock.

    Times from the earliest beginning on.
    """
    zero_s = min(notes.start_s for notes in ranks)
    ranks = [notes.shifted(-zero_s) for notes in ranks]
    sizes = {
        (way, source, rank, position): m.size_bytes
        for rank, notes in enumerate(ranks)
        for m in notes.messages
        for way, source, position in [m.key]
    }
    work, wire = _critical_path(ranks, shards)
    found: list[Span] = []
    for rank, notes in enumerate(ranks):
        stage, shard = divmod(rank, shards)
        waits = [
            Span(
                rank,
                "WAIT",
                m.asked_s,
                m.taken_s,
                _chunk(notes, m.key[2]),
                stage,
                peer=m.key[1],
                size_bytes=m.size_bytes,
            )
            for m in notes.messages
        ]
        met = [*notes.collectives, *filter(None, [notes.meeting])]
        waits += [Span(rank, "WAIT", c.asked_s, c.left_s, stage=stage) for c in met]
        waited = _Stretches([(w.start_s, w.end_s) for w in waits])
        waits.append(Span(rank, "WAIT", notes.done_s, max(notes.end_s, notes.done_s), stage=stage))
        mine = []
        for w in waits:
            length_s = w.end_s - w.start_s
            if length_s > SHORTEST_WAIT_S:
                is_critical = wire[rank].inside(w.start_s, w.end_s) > length_s / 2
                mine.append(replace(w, is_critical=is_critical))
        for action, start_s, end_s in notes.actions:
            peer = action.peer * shards + shard if action.peer >= 0 else -1
            way = action.kind.removeprefix("SEND_")
            size = sizes.get((way, rank, peer, action.position), 0)
            own_s = end_s - start_s - waited.inside(start_s, end_s)
            is_critical = work[rank].inside(start_s, end_s) > own_s / 2
            mine.append(
                Span(
                    rank,
                    action.kind,
                    start_s,
                    end_s,
                    _chunk(notes, action.position),
                    stage,
                    action.steps,
                    peer,
                    size,
                    is_critical,
                )
            )
        # Of equal beginnings the longer one first: viewers draw the later inside the earlier.
        found += sorted(mine, key=lambda s: (s.start_s, -s.end_s))
    return tuple(found)


def _chunk(notes: EpochSpans, position: int) -> int:
    """The chunk at a position; PILOT, RECALLED and -1 stay what they are."""
    return notes.order[position] if position >= 0 else position


class _Stretches:
    """Stretches of time (start, end), none inside another, and how much of them lies somewhere."""

    def __init__(self, stretches: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(stretches)
        self._starts = [start for start, _ in ordered]
        self._lengths = [max(end - start, 0.0) for start, end in ordered]
        self._before = list(accumulate(self._lengths, initial=0.0))

    def inside(self, start_s: float, end_s: float) -> float:
        """Seconds of them between two moments."""
        return max(self._until(end_s) - self._until(start_s), 0.0)

    def _until(self, moment_s: float) -> float:
        i = bisect_right(self._starts, moment_s) - 1
        if i < 0:
            return 0.0
        return self._before[i] + min(self._lengths[i], moment_s - self._starts[i])


def _critical_path(
    ranks: Sequence[EpochSpans], shards: int
) -> tuple[list[_Stretches], list[_Stretches]]:
    """By rank when it worked on what the epoch waited for, and when that was on the wire to it."""
    work: list[list[tuple[float, float]]] = [[] for _ in ranks]
    wire: list[list[tuple[float, float]]] = [[] for _ in ranks]
    waits = [_releases(ranks, rank, shards) for rank in range(len(ranks))]
    rank = max(range(len(ranks)), key=lambda r: ranks[r].done_s)
    now_s = ranks[rank].done_s
    while True:
        left = waits[rank]
        while left and left[-1][1] > now_s:
            left.pop()
        if not left:
            work[rank].append((ranks[rank].start_s, now_s))
            return [_Stretches(w) for w in work], [_Stretches(w) for w in wire]
        # Taken off, so that clocks that are a little apart cannot lead round in a circle.
        asked_s, over_s, source, released_s = left.pop()
        work[rank].append((over_s, now_s))
        now_s = min(max(asked_s, released_s), over_s)
        wire[rank].append((now_s, over_s))
        if released_s > asked_s:
            rank = source


def _releases(ranks: Sequence[EpochSpans], rank: int, shards: int) -> list[Release]:
    """The waits of a rank that were no mere asking, in the order in which they were over."""
    found: list[Release] = []
    for m in ranks[rank].messages:
        way, source, position = m.key
        found.append((m.asked_s, m.taken_s, source, ranks[source].sent_s[way, rank, position]))
    first = rank // shards * shards
    for i, c in enumerate(ranks[rank].collectives):
        begun = {r: ranks[r].collectives[i].started_s for r in range(first, first + shards)}
        last = max(begun, key=lambda r: begun[r])
        found.append((c.asked_s, c.left_s, last, begun[last]))
    met = {r: notes.meeting for r, notes in enumerate(ranks) if notes.meeting is not None}
    if rank in met:
        last = max(met, key=lambda r: met[r].asked_s)
        found.append((met[rank].asked_s, met[rank].left_s, last, met[last].asked_s))
    return sorted((w for w in found if w[1] - w[0] > SHORTEST_WAIT_S), key=lambda w: w[1])
