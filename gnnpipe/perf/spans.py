"""Where an epoch's time went, from what every rank noted while it ran.

A rank can only note how long it waited; whether the other side was late or the wire was slow shows
beside the other rank's notes. So notes are plain data, gathered once, and split here:

- a wait for a message, up to the moment it was sent, is bubble: the stage before had not come so
  far; the rest of it is exposed communication;
- a wait inside an exchange among shards, until the last of them came, is imbalance; the rest is
  exposed;
- before the optimizer's step and at the end, waiting for the other shards of one's stage is
  imbalance, for other stages bubble;
- everything else the rank did itself: compute. So the four add up to the epoch.

Hidden is what passed over the wire while the rank computed; it is part of no other figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from gnnpipe.schedule import Action

__all__ = ["ActionTimes", "Collective", "EpochSpans", "Message", "TimeShares", "time_shares"]


ActionTimes = tuple[Action, float, float]
"""An action, when it began and when it was over, waits inside it included. A bare tuple: the making
of anything else would take longer than the reading of both clocks."""


@dataclass(frozen=True)
class Message:
    """Values of one chunk that a rank received; times in seconds of its own clock."""

    key: tuple[str, int, int]
    """(way 'F' or 'B', rank they came from, position of the chunk)."""
    size_bytes: int
    posted_s: float
    """When there was room for them."""
    asked_s: float
    """When they were needed."""
    taken_s: float
    """When the rank went on."""


@dataclass(frozen=True)
class Collective:
    """An exchange among the shards of a stage; all of them have the same list of these."""

    started_s: float
    asked_s: float
    """When its result was needed; the start, if the rank waited at once."""
    left_s: float


@dataclass
class EpochSpans:
    """What one rank noted in one epoch."""

    start_s: float
    end_s: float = 0.0
    done_s: float = 0.0
    """When its last action was over."""
    messages: list[Message] = field(default_factory=list)
    sent_s: dict[tuple[str, int, int], float] = field(default_factory=dict)
    """By (way, rank that it went to, position)."""
    collectives: list[Collective] = field(default_factory=list)
    actions: list[ActionTimes] = field(default_factory=list)
    order: Sequence[int] = ()
    """The chunk at each position of the walk."""
    meeting: Collective | None = None
    """Where all ranks met before the step; none where there is but one rank."""
    is_exact: bool = False
    """Whether it was walked layer by layer."""

    def shifted(self, offset_s: float) -> EpochSpans:
        """The same notes on a clock that shows ``offset_s`` more."""
        o = offset_s
        return EpochSpans(
            self.start_s + o,
            self.end_s + o,
            self.done_s + o,
            [
                Message(m.key, m.size_bytes, m.posted_s + o, m.asked_s + o, m.taken_s + o)
                for m in self.messages
            ],
            {key: at + o for key, at in self.sent_s.items()},
            [Collective(c.started_s + o, c.asked_s + o, c.left_s + o) for c in self.collectives],
            [(action, start_s + o, end_s + o) for action, start_s, end_s in self.actions],
            self.order,
            None if self.meeting is None else Collective(*(at + o for at in astuple(self.meeting))),
            self.is_exact,
        )


@dataclass(frozen=True)
class TimeShares:
    """Seconds of one epoch on one rank; all but the hidden ones add up to the epoch."""

    compute_s: float
    exposed_pipeline_s: float
    """Waiting for values of another stage that were on their way."""
    exposed_graph_s: float
    """Inside exchanges among shards, once all of them were there."""
    bubble_s: float
    """Waiting for another stage to come so far."""
    imbalance_s: float
    """Waiting for another shard of the same stage to come so far."""
    hidden_pipeline_s: float
    """Transfers under compute: the bytes at the link's speed, at most from when they could start
    to when they were needed."""
    hidden_graph_s: float
    """Exchanges under compute, from when the last shard had begun to when they were needed."""

    @property
    def epoch_s(self) -> float:
        """From the first action to where all ranks have met."""
        waited = self.exposed_pipeline_s + self.exposed_graph_s + self.bubble_s + self.imbalance_s
        return self.compute_s + waited


def _there(spans: EpochSpans) -> float:
    """When a rank came to the meeting."""
    return spans.meeting.asked_s if spans.meeting is not None else spans.done_s


def time_shares(
    ranks: Sequence[EpochSpans], shards: int, link_bytes_per_s: Sequence[float]
) -> list[TimeShares]:
    """By rank (stage * ``shards`` + shard); all times on one clock.

    ``link_bytes_per_s``: how fast each rank receives.
    """
    everyone_done = max(spans.done_s for spans in ranks)
    found = []
    for rank, spans in enumerate(ranks):
        first = rank // shards * shards
        stage = ranks[first : first + shards]
        bubble = exposed = hidden = 0.0
        for m in spans.messages:
            way, source, position = m.key
            sent = ranks[source].sent_s[way, rank, position]
            late = min(max(sent - m.asked_s, 0.0), m.taken_s - m.asked_s)
            bubble += late
            exposed += m.taken_s - m.asked_s - late
            under = m.asked_s - max(sent, m.posted_s)
            hidden += min(max(under, 0.0), m.size_bytes / link_bytes_per_s[rank])
        imbalance = exposed_graph = hidden_graph = 0.0
        for i, c in enumerate(spans.collectives):
            last = max(other.collectives[i].started_s for other in stage)
            late = min(max(last - c.asked_s, 0.0), c.left_s - c.asked_s)
            imbalance += late
            exposed_graph += c.left_s - c.asked_s - late
            hidden_graph += max(c.asked_s - max(last, c.started_s), 0.0)
        if spans.meeting is not None:
            loss_rows, left = spans.meeting.asked_s, spans.meeting.left_s
            stage_there = min(max(_there(other) for other in stage), left)
            imbalance += stage_there - loss_rows
            bubble += max(min(max(map(_there, ranks)), left) - stage_there, 0.0)
        stage_done = max(other.done_s for other in stage)
        imbalance += stage_done - spans.done_s
        bubble += max(min(everyone_done, spans.end_s) - stage_done, 0.0)
        waited = exposed + exposed_graph + bubble + imbalance
        found.append(
            TimeShares(
                spans.end_s - spans.start_s - waited,
                exposed,
                exposed_graph,
                bubble,
                imbalance,
                hidden,
                hidden_graph,
            )
        )
    return found
