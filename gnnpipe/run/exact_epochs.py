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

from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.schedule import CheckedProgram
from gnnpipe.setup.prepared import Prepared

__all__ = ["LONGEST", "ExactEpochs"]

WINDOW, LEAST = 20, 5
"""Epochs that the median is of, and how many there must be."""

LONGEST = 2.0
"""Times the median, which gradients of epochs with stale reads are cut to."""


class ExactEpochs:
    """Of one run; every rank comes to the same answers, for the length is summed over all."""

    def __init__(
        self,
        prepared: Prepared,
        lengths: Sequence[float] = (),
        was_faulty: bool = False,
        has_jumped: bool = False,
    ) -> None:
        """``lengths`` of the gradients of the last epochs that were not exact.

        The last epoch made no step (``was_faulty``) or was a jump: the next one is to be exact.
        """
        self._prepared = prepared
        self.lengths = deque(lengths, maxlen=WINDOW)
        self.was_faulty, self.has_jumped = was_faulty, has_jumped

    def begin(self, epoch: int, grad_clip: GradClip) -> CheckedProgram:
        """What an epoch (from 0) runs; ``grad_clip`` is told how long its gradients may be."""
        program = self._prepared.program_of(epoch)
        if (self.was_faulty or self.has_jumped) and self._factor:
            program = self._prepared.exact_program
        usual = self._usual
        grad_clip.longest = usual * (1.0 if program.is_exact else LONGEST) if usual else math.inf
        return program

    def end(self, program: CheckedProgram, length: float, has_stepped: bool) -> None:
        """An epoch was walked; ``length`` (2-norm) of its gradients, before they were cut."""
        # Behind a fault there may be zeros in the tables.
        self.was_faulty, self.has_jumped = not has_stepped, False
        if not has_stepped or program.is_exact:
            return
        # Jumps are counted too: where they are usual, they are none.
        self.lengths.append(length)
        self.has_jumped = 0 < self._factor * self._usual < length

    @property
    def _factor(self) -> float:
        """0: nothing is done."""
        exact = self._prepared.program.is_exact
        return 0.0 if exact else self._prepared.staleness.exact_above

    @property
    def _usual(self) -> float:
        """The median length; 0 where it says nothing."""
        if not self._factor or len(self.lengths) < LEAST:
            return 0.0
        return statistics.median(self.lengths)
