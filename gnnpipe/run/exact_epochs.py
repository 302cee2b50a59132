"""Chooses the epochs that run layer by layer, without stale reads, and the clipping norm of all.

The first epochs are exact, because the history tables are still empty. One more follows each jump
of the gradient norm: the rows have then moved too far for stale reads and for the forecast, and a
step along such gradients moves them further. An exact epoch breaks this loop
(docs/benchmarks/staleness.md). It takes the same work and bytes, but its stages hardly overlap.

Gradients of an exact epoch are complete, and their norm is several times that of other epochs.
Adam divides by the gradients that it has seen, so its step would be several times as large. The
gradients of exact epochs are therefore clipped to the median norm, those of other epochs to twice
the median.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.schedule import CheckedProgram
from gnnpipe.setup.prepared import Prepared

WINDOW, LEAST = 20, 5
"""Epochs in the median, and epochs needed before it is used."""

LONGEST = 2.0
"""Clipping norm of epochs with stale reads, in multiples of the median norm."""


class ExactEpochs:
    """Exact epochs of one run; equal on every rank, because the norm is over all ranks."""

    def __init__(
        self,
        prepared: Prepared,
        lengths: Sequence[float] = (),
        was_faulty: bool = False,
        has_jumped: bool = False,
    ) -> None:
        """Start with the state of a checkpoint, or without any.

        Args:
            prepared: The run.
            lengths: Gradient norms of the last epochs with stale reads.
            was_faulty: The last epoch made no step; the next one is exact.
            has_jumped: The gradient norm of the last epoch jumped; the next one is exact.
        """
        self._prepared = prepared
        self.lengths = deque(lengths, maxlen=WINDOW)
        self.was_faulty, self.has_jumped = was_faulty, has_jumped

    def begin(self, epoch: int, grad_clip: GradClip) -> CheckedProgram:
        """Return the program of an epoch (from 0) and set the clipping norm of ``grad_clip``."""
        program = self._prepared.program_of(epoch)
        if (self.was_faulty or self.has_jumped) and self._factor:
            program = self._prepared.exact_program
        usual = self._usual
        grad_clip.step_limit = usual * (1.0 if program.is_exact else LONGEST) if usual else math.inf
        return program

    def end(self, program: CheckedProgram, length: float, has_stepped: bool) -> None:
        """Record the end of an epoch; ``length``: gradient norm before clipping."""
        # After a fault the tables may hold zeros.
        self.was_faulty, self.has_jumped = not has_stepped, False
        if not has_stepped or program.is_exact:
            return
        # Jumps enter the median, too: if large norms are usual, they are no jumps.
        self.lengths.append(length)
        self.has_jumped = 0 < self._factor * self._usual < length

    @property
    def _factor(self) -> float:
        """Norm of a jump in multiples of the median; 0: no exact epochs after jumps."""
        exact = self._prepared.program.is_exact
        return 0.0 if exact else self._prepared.staleness.exact_above

    @property
    def _usual(self) -> float:
        """The median norm; 0 if there are too few epochs."""
        if not self._factor or len(self.lengths) < LEAST:
            return 0.0
        return statistics.median(self.lengths)
