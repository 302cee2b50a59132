"""Which epochs are walked layer by layer, so that nothing in them is stale.

Those at the start, for there is nothing yet that stale readers could read. And those behind a jump:
where the gradients are suddenly much longer than they were, the rows have moved too far for stale
readers, or for a forecast, and a step along such gradients moves them further still. One epoch
without stale reads ends that loop (docs/benchmarks/staleness.md). It costs no more than another one
in work and bytes, but its stages hardly overlap.
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


class ExactEpochs:
    """Of one run; every rank comes to the same answers, for the length is summed over all."""

    def __init__(self, prepared: Prepared, lengths: Sequence[float] = ()) -> None:
        """``lengths`` of the gradients of the last epochs."""
        self._prepared = prepared
        self.lengths = deque(lengths, maxlen=WINDOW)

    def program(self, epoch: int) -> Program:
        """What an epoch (from 0) runs."""
        if self.has_jumped and not self._prepared.report.exact:
            return self._prepared.exact_program
        return self._prepared.program_of(epoch)

    def note(self, length: float) -> None:
        """Of an epoch's gradients (2-norm), before clipping; one that is no number is left out."""
        if math.isfinite(length):
            self.lengths.append(length)

    @property
    def has_jumped(self) -> bool:
        """Whether the last gradients were more than ``exact_above`` times as long as usual."""
        factor = self._prepared.config.techniques.exact_above
        if factor == 0 or len(self.lengths) < LEAST:
            return False
        return self.lengths[-1] > factor * statistics.median(self.lengths)
