"""Splits an epoch's time into compute, communication and waiting, from the times each rank records.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gnnpipe.plan.placement import Placement
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

    def shifted(self, offset_s: float) -> Message:
        """The message on a clock that is ``offset_s`` ahead."""
        times = (self.posted_s, self.wait_start_s, self.wait_end_s)
        return Message(self.key, self.size_bytes, *(t + offset_s for t in times))


@dataclass(frozen=True)
class Collective:
    """A collective of the shards of a stage; all shards record the same list of collectives."""

    start_s: float
    wait_start_s: float
    """When its result was needed; ``start_s`` if the rank waited at once."""
    wait_end_s: float

    def shifted(self, offset_s: float) -> Collective:
        """The collective on a clock that is ``offset_s`` ahead."""
        times = (self.start_s, self.wait_start_s, self.wait_end_s)
        return Collective(*(t + offset_s for t in times))


@dataclass
class EpochSpans:
    """Times that one rank recorded in one epoch."""

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

    @property
    def before_sync_s(self) -> float:
        """When the rank reached the all-reduce before the optimizer's step."""
        return self.actions_end_s if self.step_sync is None else self.step_sync.wait_start_s

    def shifted(self, offset_s: float) -> EpochSpans:
        """The same times on a clock that is ``offset_s`` ahead."""
        sync = self.step_sync
        return EpochSpans(
            self.start_s + offset_s,
            self.end_s + offset_s,
            self.actions_end_s + offset_s,
            [m.shifted(offset_s) for m in self.messages],
            {key: time_s + offset_s for key, time_s in self.send_times_s.items()},
            [c.shifted(offset_s) for c in self.collectives],
            [(action, start + offset_s, end + offset_s) for action, start, end in self.actions],
            self.order,
            None if sync is None else sync.shifted(offset_s),
            self.is_exact,
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
        found.append(
            TimeShares(compute, exposed, exposed_graph, bubble, imbalance, hidden, hidden_graph)
        )
    return found
