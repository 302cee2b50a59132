"""Turns the recorded times of an epoch into spans of one timeline and marks the critical path.

The actions of a rank follow one another; its waits are WAIT spans inside the actions. The critical
path is followed backwards from the action that ended last: along the rank's own work to its latest
wait for a rank that was late, over the link to the late rank at the moment when it sent the message
or started the collective, and so on to the beginning. If no rank was late, the link caused the
wait, and the path stays on the waiting rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from gnnpipe.perf.spans import EpochSpans
from gnnpipe.perf.trace import Span
from gnnpipe.plan.placement import Placement

SHORTEST_WAIT_S = 20e-6
"""A shorter wait counts as the cost of the call, and not as a rank that was late."""

MessageSizes = dict[tuple[str, int, int, int], int]
"""Bytes by (way, source rank, target rank, position)."""


class _Wait(NamedTuple):
    """A wait of a rank, and the rank that ended it."""

    start_s: float
    end_s: float
    cause: int
    cause_s: float
    """When rank ``cause`` sent the message or started the collective."""


def measured_spans(ranks: Sequence[EpochSpans], placement: Placement) -> tuple[Span, ...]:
    """Return spans by rank, in order of time, with the earliest start at 0.

    The times of all ranks must be on one clock.
    """
    zero_s = min(epoch.start_s for epoch in ranks)
    ranks = [epoch.shifted(-zero_s) for epoch in ranks]
    sizes: MessageSizes = {}
    for rank, epoch in enumerate(ranks):
        for message in epoch.messages:
            way, source, position = message.key
            sizes[way, source, rank, position] = message.size_bytes
    work, link = _critical_path(ranks, placement)
    found: list[Span] = []
    for rank, epoch in enumerate(ranks):
        waits = _wait_spans(epoch, rank, placement.stage(rank), link[rank])
        actions = _action_spans(epoch, rank, placement, sizes, work[rank])
        # Of equal starts the longer span first: viewers draw a later span inside an earlier one.
        found += sorted([*waits, *actions], key=lambda s: (s.start_s, -s.end_s))
    return tuple(found)


def _wait_spans(epoch: EpochSpans, rank: int, stage: int, critical: _Intervals) -> Iterator[Span]:
    """Yield the waits of a rank that are not negligible."""
    waits = [
        (m.wait_start_s, m.wait_end_s, _chunk(epoch, m.key[2]), m.key[1], m.size_bytes)
        for m in epoch.messages
    ]
    waits += [(start_s, end_s, -1, -1, 0) for start_s, end_s in _collective_waits(epoch)]
    last_s = epoch.actions_end_s
    waits.append((last_s, max(epoch.end_s, last_s), -1, -1, 0))
    for start_s, end_s, chunk, peer, size in waits:
        if end_s - start_s > SHORTEST_WAIT_S:
            is_critical = critical.overlap_s(start_s, end_s) > (end_s - start_s) / 2
            yield Span(
                rank,
                "WAIT",
                start_s,
                end_s,
                chunk,
                stage,
                peer=peer,
                size_bytes=size,
                is_critical=is_critical,
            )


def _action_spans(
    epoch: EpochSpans, rank: int, placement: Placement, sizes: MessageSizes, critical: _Intervals
) -> Iterator[Span]:
    stage, shard = placement.place(rank)
    waited = _Intervals(
        [*((m.wait_start_s, m.wait_end_s) for m in epoch.messages), *_collective_waits(epoch)]
    )
    for action, start_s, end_s in epoch.actions:
        peer = placement.rank(action.peer, shard) if action.peer >= 0 else -1
        way = action.kind.removeprefix("SEND_")
        own_s = end_s - start_s - waited.overlap_s(start_s, end_s)
        yield Span(
            rank,
            action.kind,
            start_s,
            end_s,
            _chunk(epoch, action.position),
            stage,
            action.steps,
            peer,
            sizes.get((way, rank, peer, action.position), 0),
            critical.overlap_s(start_s, end_s) > own_s / 2,
        )


def _collective_waits(epoch: EpochSpans) -> list[tuple[float, float]]:
    collectives = [*epoch.collectives, *filter(None, [epoch.step_sync])]
    return [(c.wait_start_s, c.wait_end_s) for c in collectives]


def _chunk(epoch: EpochSpans, position: int) -> int:
    """Return the chunk at a position; a ``SpecialPosition`` is returned unchanged."""
    return epoch.order[position] if position >= 0 else position


class _Intervals:
    """Disjoint time intervals (start, end)."""

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(intervals)
        self._starts = [start for start, _ in ordered]
        self._lengths = [max(end - start, 0.0) for start, end in ordered]
        self._before = list(accumulate(self._lengths, initial=0.0))

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Return the seconds of the intervals that lie between two times."""
        return max(self._until(end_s) - self._until(start_s), 0.0)

    def _until(self, moment_s: float) -> float:
        i = bisect_right(self._starts, moment_s) - 1
        if i < 0:
            return 0.0
        return self._before[i] + min(self._lengths[i], moment_s - self._starts[i])


def _critical_path(
    ranks: Sequence[EpochSpans], placement: Placement
) -> tuple[list[_Intervals], list[_Intervals]]:
    """Return the intervals of the critical path by rank: of work, and of waiting for a link."""
    work: list[list[tuple[float, float]]] = [[] for _ in ranks]
    link: list[list[tuple[float, float]]] = [[] for _ in ranks]
    waits = [_waits(ranks, rank, placement) for rank in range(len(ranks))]
    rank = max(range(len(ranks)), key=lambda r: ranks[r].actions_end_s)
    now_s = ranks[rank].actions_end_s
    while True:
        earlier = waits[rank]
        while earlier and earlier[-1].end_s > now_s:
            earlier.pop()
        if not earlier:
            work[rank].append((ranks[rank].start_s, now_s))
            return [_Intervals(w) for w in work], [_Intervals(w) for w in link]
        # Each wait is used once, so that clocks that differ a little cannot cause a cycle.
        wait = earlier.pop()
        work[rank].append((wait.end_s, now_s))
        now_s = min(max(wait.start_s, wait.cause_s), wait.end_s)
        link[rank].append((now_s, wait.end_s))
        if wait.cause_s > wait.start_s:
            rank = wait.cause


def _waits(ranks: Sequence[EpochSpans], rank: int, placement: Placement) -> list[_Wait]:
    """Waits of a rank that are not negligible, in the order of their ends."""
    found: list[_Wait] = []
    for m in ranks[rank].messages:
        way, source, position = m.key
        send_s = ranks[source].send_times_s[way, rank, position]
        found.append(_Wait(m.wait_start_s, m.wait_end_s, source, send_s))
    for i, c in enumerate(ranks[rank].collectives):
        starts = {r: ranks[r].collectives[i].start_s for r in placement.group(rank)}
        last = max(starts, key=lambda r: starts[r])
        found.append(_Wait(c.wait_start_s, c.wait_end_s, last, starts[last]))
    if (sync := ranks[rank].step_sync) is not None:
        last = max(range(len(ranks)), key=lambda r: ranks[r].before_sync_s)
        cause_s = ranks[last].before_sync_s
        found.append(_Wait(sync.wait_start_s, sync.wait_end_s, last, cause_s))
    return sorted(
        (w for w in found if w.end_s - w.start_s > SHORTEST_WAIT_S), key=lambda w: w.end_s
    )
