"""Notes of what a rank does and waits for while it trains, for ``perf.time_shares`` and trace.json.

A few clock readings for a message and two for an action, each well under a microsecond; the last
epochs are kept. On a
GPU actions only start work, so there is nothing to note.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from gnnpipe.perf import Collective, EpochSpans, Message
from gnnpipe.schedule import Action

__all__ = ["Recorder"]

KEPT = 5
"""Epochs; enough for a median."""


class Recorder:
    """Of one rank. Between ``begin`` and ``end`` everything is noted, otherwise nothing."""

    clock = staticmethod(time.perf_counter)
    """Seconds."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.epochs: deque[EpochSpans] = deque(maxlen=KEPT)
        self._now: EpochSpans | None = None

    def forget(self) -> None:
        """A new run begins."""
        self.epochs.clear()
        self.drop()

    def drop(self) -> None:
        """The epoch was ended by an error, or is none to be noted."""
        self._now = None

    def begin(self, order: Sequence[int], is_exact: bool = False) -> None:
        """An epoch begins, in which the chunks are walked in ``order``."""
        if self.is_on:
            self._now = EpochSpans(self.clock(), order=tuple(order), is_exact=is_exact)

    def acted(self, action: Action, started_s: float) -> None:
        """An action is over."""
        if self._now is not None:
            self._now.actions.append((action, started_s, self.clock()))

    def sent(self, way: str, target: int, position: int) -> None:
        """Values are on their way to a rank."""
        if self._now is not None:
            self._now.sent_s[way, target, position] = self.clock()

    def taken(
        self, way: str, source: int, position: int, size_bytes: int, posted_s: float, asked_s: float
    ) -> None:
        """Values of a rank are here."""
        if self._now is not None:
            key = way, source, position
            self._now.messages.append(Message(key, size_bytes, posted_s, asked_s, self.clock()))

    def met(self, started_s: float, asked_s: float) -> None:
        """An exchange among the shards is over."""
        if self._now is not None:
            self._now.collectives.append(Collective(started_s, asked_s, self.clock()))

    def met_all(self, asked_s: float) -> None:
        """All ranks have met, before the end."""
        if self._now is not None:
            self._now.meeting = Collective(asked_s, asked_s, self.clock())

    def done(self) -> None:
        """The last action is over; what follows is waiting for the others."""
        if self._now is not None:
            self._now.done_s = self.clock()

    def end(self) -> None:
        """All ranks have met; the epoch is kept."""
        if self._now is not None:
            self._now.end_s = self.clock()
            self.epochs.append(self._now)
            self._now = None
