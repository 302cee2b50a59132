"""Recorded times of an epoch, split into compute, communication and waiting, or drawn as spans.

A rank only knows how long it waited. Whether the other rank was late or the link was slow can be
seen from the times of the other rank. So the times of all ranks are gathered as plain data and
split here:

- a wait for a message is bubble up to the moment the message was sent, and exposed communication
  afterwards;
- a wait for a collective of the shards is imbalance until the last shard has started it, and
  exposed communication afterwards;
- before the optimizer's step and at the end of the epoch, waiting for the other shards of the stage
  is imbalance, and waiting for other stages is bubble;
- everything else is compute, so the four add up to the epoch.

Communication that overlaps with compute is hidden, and part of none of the four.

In ``measured_spans`` the actions of a rank follow one another; its waits are WAIT spans inside the
actions. The critical path is followed backwards from the action that ended last: along the rank's
own work to its latest wait for a rank that was late, over the link to the late rank at the moment
when it sent the message or started the collective, and so on to the beginning. If no rank was late,
the link caused the wait, and the path stays on the waiting rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from gnnpipe.perf.trace import Span
from gnnpipe.plan import Placement
from gnnpipe.schedule import Action

ActionTimes = tuple[Action, float, float]
"""An action, its start and its end, waits included. A plain tuple, because creating any other
object would take longer than reading the clock."""


@dataclass(frozen=True)
class Message:
    """Values of one chunk that a rank received; times in seconds of the rank's own clock."""

    key: tuple[str, int, int]
    """(way 'F' or 'B', source rank, position of the chunk)."""
    size_bytes: int
    posted_s: float
    """When the receive was posted."""
    wait_start_s: float
    wait_end_s: float


@dataclass(frozen=True)
class Collective:
    """A collective of the shards of a stage; all shards record the same list of collectives."""

    start_s: float
    wait_start_s: float
    """When its result was needed; ``start_s`` if the rank waited at once."""
    wait_end_s: float


R = TypeVar("R", Message, Collective)


def _shifted(record: R, offset_s: float) -> R:
    """Return the record with all its times, the fields that end in ``_s``, ``offset_s`` later."""
    times = {name: t + offset_s for name, t in vars(record).items() if name.endswith("_s")}
    return replace(record, **times)


@dataclass
class EpochSpans:
    """Times that one rank recorded in one epoch, or from one flush to the next."""

    start_s: float
    end_s: float = 0.0
    actions_end_s: float = 0.0
    """End of the last action."""
    messages: list[Message] = field(default_factory=list)
    send_times_s: dict[tuple[str, int, int], float] = field(default_factory=dict)
    """By (way, target rank, position)."""
    collectives: list[Collective] = field(default_factory=list)
    actions: list[ActionTimes] = field(default_factory=list)
    order: Sequence[int] = ()
    """The chunk at each position."""
    step_sync: Collective | None = None
    """All-reduce over all ranks before the optimizer's step; None with a single rank."""
    is_exact: bool = False
    """Whether the epoch had no stale read."""
    count: int = 1
    """Number of epochs."""

    @property
    def before_sync_s(self) -> float:
        """When the rank reached the all-reduce before the optimizer's step."""
        return self.actions_end_s if self.step_sync is None else self.step_sync.wait_start_s

    @property
    def compute_s(self) -> float:
        """Time up to the end of the last action, without waits for other ranks."""
        collectives = [*self.collectives, *filter(None, [self.step_sync])]
        waited_s = sum(m.wait_end_s - m.wait_start_s for m in self.messages)
        waited_s += sum(c.wait_end_s - c.wait_start_s for c in collectives)
        return self.actions_end_s - self.start_s - waited_s

    def shifted(self, offset_s: float) -> EpochSpans:
        """The same times on a clock that is ``offset_s`` ahead."""
        sync = self.step_sync
        return replace(
            self,
            start_s=self.start_s + offset_s,
            end_s=self.end_s + offset_s,
            actions_end_s=self.actions_end_s + offset_s,
            messages=[_shifted(m, offset_s) for m in self.messages],
            send_times_s={key: time_s + offset_s for key, time_s in self.send_times_s.items()},
            collectives=[_shifted(c, offset_s) for c in self.collectives],
            actions=[
                (a, start_s + offset_s, end_s + offset_s) for a, start_s, end_s in self.actions
            ],
            step_sync=None if sync is None else _shifted(sync, offset_s),
        )


@dataclass(frozen=True)
class TimeShares:
    """Seconds of one epoch on one rank; all but the hidden ones add up to the epoch."""

    compute_s: float
    exposed_pipeline_s: float
    """Waiting for values of another stage that were already sent."""
    exposed_graph_s: float
    """Waiting for collectives that all shards had started."""
    bubble_s: float
    """Waiting for another stage to send."""
    imbalance_s: float
    """Waiting for another shard of the same stage to start a collective."""
    hidden_pipeline_s: float
    """Messages under compute: their bytes at the link's speed, at most the time between when they
    could start and when they were needed."""
    hidden_graph_s: float
    """Collectives under compute, from when the last shard had started to when they were needed."""

    @property
    def epoch_s(self) -> float:
        """Length of the epoch."""
        waited = self.exposed_pipeline_s + self.exposed_graph_s + self.bubble_s + self.imbalance_s
        return self.compute_s + waited


def time_shares(
    ranks: Sequence[EpochSpans], placement: Placement, link_bytes_per_s: Sequence[float]
) -> list[TimeShares]:
    """Return the shares of each rank; all times must be on one clock.

    ``link_bytes_per_s``: receive bandwidth of each rank.
    """
    all_actions_end_s = max(spans.actions_end_s for spans in ranks)
    found = []
    for rank, spans in enumerate(ranks):
        stage = [ranks[member] for member in placement.group(rank)]
        bubble = exposed = hidden = 0.0
        for m in spans.messages:
            way, source, position = m.key
            send_s = ranks[source].send_times_s[way, rank, position]
            late = min(max(send_s - m.wait_start_s, 0.0), m.wait_end_s - m.wait_start_s)
            bubble += late
            exposed += m.wait_end_s - m.wait_start_s - late
            under = m.wait_start_s - max(send_s, m.posted_s)
            hidden += min(max(under, 0.0), m.size_bytes / link_bytes_per_s[rank])
        imbalance = exposed_graph = hidden_graph = 0.0
        for i, c in enumerate(spans.collectives):
            last = max(other.collectives[i].start_s for other in stage)
            late = min(max(last - c.wait_start_s, 0.0), c.wait_end_s - c.wait_start_s)
            imbalance += late
            exposed_graph += c.wait_end_s - c.wait_start_s - late
            hidden_graph += max(c.wait_start_s - max(last, c.start_s), 0.0)
        if (sync := spans.step_sync) is not None:
            stage_s = min(max(other.before_sync_s for other in stage), sync.wait_end_s)
            all_s = min(max(other.before_sync_s for other in ranks), sync.wait_end_s)
            imbalance += stage_s - sync.wait_start_s
            bubble += max(all_s - stage_s, 0.0)
        stage_end_s = max(other.actions_end_s for other in stage)
        imbalance += stage_end_s - spans.actions_end_s
        bubble += max(min(all_actions_end_s, spans.end_s) - stage_end_s, 0.0)
        waited = exposed + exposed_graph + bubble + imbalance
        compute = spans.end_s - spans.start_s - waited
        times = compute, exposed, exposed_graph, bubble, imbalance, hidden, hidden_graph
        found.append(TimeShares(*(time_s / spans.count for time_s in times)))
    return found


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
    waits = [wait for wait in waits if wait[1] - wait[0] > SHORTEST_WAIT_S]
    critical_s = critical.overlaps_s([wait[:2] for wait in waits])
    for (start_s, end_s, chunk, peer, size), on_path_s in zip(waits, critical_s, strict=True):
        yield Span(
            rank,
            "WAIT",
            start_s,
            end_s,
            chunk,
            stage,
            peer=peer,
            size_bytes=size,
            is_critical=on_path_s > (end_s - start_s) / 2,
        )


def _action_spans(
    epoch: EpochSpans, rank: int, placement: Placement, sizes: MessageSizes, critical: _Intervals
) -> Iterator[Span]:
    stage = placement.stage(rank)
    waited = _Intervals(
        [*((m.wait_start_s, m.wait_end_s) for m in epoch.messages), *_collective_waits(epoch)]
    )
    times = [(start_s, end_s) for _, start_s, end_s in epoch.actions]
    overlaps = zip(waited.overlaps_s(times), critical.overlaps_s(times), strict=True)
    peers = {s: placement.counterparts(rank, s)[:1] for s in range(len(placement.stages))}
    for (action, start_s, end_s), (waited_s, on_path_s) in zip(
        epoch.actions, overlaps, strict=True
    ):
        peer, size = -1, 0
        if action.peer >= 0:
            (peer,), way = peers[action.peer], action.kind.removeprefix("SEND_")
            for each in placement.stages[action.peer]:
                size += sizes.get((way, rank, each, action.position), 0)
        yield Span(
            rank,
            action.kind,
            start_s,
            end_s,
            _chunk(epoch, action.position),
            stage,
            action.steps,
            peer,
            size,
            on_path_s > (end_s - start_s - waited_s) / 2,
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
        ordered = np.array(sorted(intervals), dtype=np.float64).reshape(-1, 2)
        # An empty interval before all others, so that every moment follows a start.
        self._starts = np.append(-np.inf, ordered[:, 0])
        self._lengths = np.append(0.0, np.maximum(ordered[:, 1] - ordered[:, 0], 0.0))
        self._before = np.append(0.0, np.cumsum(self._lengths[:-1]))

    def overlaps_s(self, times: Sequence[tuple[float, float]]) -> list[float]:
        """Return, for each (start, end), the seconds of the intervals that lie in between."""
        moments = np.array(times, dtype=np.float64).reshape(-1, 2)
        i = np.searchsorted(self._starts, moments, side="right") - 1
        until = self._before[i] + np.minimum(self._lengths[i], moments - self._starts[i])
        found: list[float] = np.maximum(until[:, 1] - until[:, 0], 0.0).tolist()
        return found


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
