"""Which epochs are walked layer by layer, so that nothing in them is stale.

Those at the start, for there is nothing yet that stale readers could read. And one behind each
jump: where the gradients are suddenly much longer than they were, the rows have moved too far for
stale readers, or for a forecast, and a step along such gradients moves them further still. An epoch
without stale reads ends that loop (docs/benchmarks/staleness.md). It costs no more than another one
in work and bytes, but its stages hardly overlap.

Its gradients are whole, and so several times as long as those that the optimizer has seen: Adam,
which divides by what it has seen, would make a step several times as long. They are cut to the
usual length. So that a jump itself does less harm, all others are cut to twice the usual length.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from gnnpipe.schedule import Program
from gnnpipe.train.prepare import Prepared

__all__ = ["ExactEpochs"]

WINDOW, LEAST = 20, 5
"""Epochs that the median is of, and how many there must be."""

LONGEST = 2.0
"""Times the median, which gradients of epochs with stale reads are cut to."""


class ExactEpochs:
    """Of one run; every rank comes to the same answers, for the length is summed over all."""

    def __init__(self, prepared: Prepared, lengths: Sequence[float] = ()) -> None:
        """``lengths`` of the gradients of the last epochs that were not exact."""
        self._prepared = prepared
        self.lengths = deque(lengths, maxlen=WINDOW)

    def program(self, epoch: int) -> Program:
        """What an epoch (from 0) runs."""
        if self.has_jumped:
            return self._prepared.exact_program
        return self._prepared.program_of(epoch)

    @property
    def longest(self) -> float:
        """What the gradients of the coming epoch are cut to."""
        if not self._usual:
            return math.inf
        return self._usual if self.has_jumped else LONGEST * self._usual

    def note(self, length: float, is_exact: bool) -> None:
        """An epoch was walked; ``length`` (2-norm) of its gradients, before clipping."""
        if is_exact:
            if self.has_jumped:
                self.lengths.pop()  # It has been answered.
        elif math.isfinite(length):
            self.lengths.append(length)

    @property
    def has_jumped(self) -> bool:
        """Whether the last gradients were more than ``exact_above`` times as long as usual."""
        factor = self._prepared.config.techniques.exact_above
        return 0 < factor * self._usual < self.lengths[-1]

    @property
    def _usual(self) -> float:
        """The median length; 0 where it says nothing."""
        never = self._prepared.report.exact or not self._prepared.config.techniques.exact_above
        if never or len(self.lengths) < LEAST:
            return 0.0
        return statistics.median(self.lengths)
