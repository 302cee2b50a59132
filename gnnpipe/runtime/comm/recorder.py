"""Records when a rank starts and ends actions, messages and collectives during training.

``perf.time_shares`` and trace.json are made from these times. A message costs a few clock readings
and an action two, each well under a microsecond. The last ``KEPT`` epochs are kept. On a GPU
actions only launch kernels, so the recorder is off there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from gnnpipe.perf import Collective, EpochSpans, Message
from gnnpipe.schedule import Action

KEPT = 5
"""Epochs that are kept: enough for a median."""


class Recorder:
    """Recorder of one rank; it records only between ``begin_epoch`` and ``end_epoch``."""

    def __init__(self, is_on: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` returns seconds."""
        self.is_on = is_on
        self.clock = clock
        self.epochs: deque[EpochSpans] = deque(maxlen=KEPT)
        self._epoch: EpochSpans | None = None

    def clear(self) -> None:
        """Drop all epochs, before a new run."""
        self.epochs.clear()
        self.discard_epoch()

    def discard_epoch(self) -> None:
        """Drop the current epoch: an error ended it, or it is an evaluation."""
        self._epoch = None

    def begin_epoch(self, order: Sequence[int], is_exact: bool = False, count: int = 1) -> None:
        """Start an epoch, or ``count`` of them, whose chunks are processed in ``order``."""
        if self.is_on:
            self._epoch = EpochSpans(
                self.clock(), order=tuple(order), is_exact=is_exact, count=count
            )

    def add_action(self, action: Action, start_s: float) -> None:
        """Record an action that ends now."""
        if self._epoch is not None:
            self._epoch.actions.append((action, start_s, self.clock()))

    def add_send(self, way: str, target: int, position: int) -> None:
        """Record that values leave now for rank ``target``."""
        if self._epoch is not None:
            self._epoch.send_times_s[way, target, position] = self.clock()

    def add_message(
        self,
        way: str,
        source: int,
        position: int,
        size_bytes: int,
        posted_s: float,
        wait_start_s: float,
    ) -> None:
        """Record that the wait for values of rank ``source`` ends now."""
        if self._epoch is not None:
            key = way, source, position
            message = Message(key, size_bytes, posted_s, wait_start_s, self.clock())
            self._epoch.messages.append(message)

    def add_collective(self, start_s: float, wait_start_s: float) -> None:
        """Record that the wait for a collective of the stage's shards ends now."""
        if self._epoch is not None:
            self._epoch.collectives.append(Collective(start_s, wait_start_s, self.clock()))

    def add_step_sync(self, wait_start_s: float) -> None:
        """Record that the all-reduce over all ranks before the optimizer's step ends now."""
        if self._epoch is not None:
            self._epoch.step_sync = Collective(wait_start_s, wait_start_s, self.clock())

    def end_actions(self) -> None:
        """Record that the last action has ended; the rest of the epoch is waiting for others."""
        if self._epoch is not None:
            self._epoch.actions_end_s = self.clock()

    def end_epoch(self) -> None:
        """Keep the epoch: all ranks have ended it."""
        if self._epoch is not None:
            self._epoch.end_s = self.clock()
            self.epochs.append(self._epoch)
            self._epoch = None
