"""Segments of a stage's steps for activation checkpointing: inputs that are kept, steps run again.

Training deep nets with sublinear memory cost (arXiv 1604.06174), in one level or two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Segments:
    """T steps, of which backward runs ``every`` at a time again from the inputs of the first.

    With more than ``every`` segments there are two levels: forward keeps the inputs of every m-th
    segment, m the root of their number, and backward runs these m segments again to get the
    inputs of each, before the segments themselves. That is one more forward pass, and the inputs
    of about 2 m segments are kept in place of m x m. ``every`` = 1 keeps the inputs of all steps.
    """

    num_steps: int
    every: int

    @property
    def outer(self) -> int:
        """Steps from one input that forward keeps to the next."""
        count = math.ceil(self.num_steps / self.every)
        if self.every == 1 or count <= self.every:
            return self.every
        return self.every * math.ceil(math.sqrt(count))

    @property
    def passes_again(self) -> int:
        """Forward passes that backward adds, at most."""
        return 1 + (self.outer > self.every)

    def times_again(self, step: int) -> int:
        """Return how often backward computes a step again, 1 or 2.

        Twice if the step's segment is followed by another one before the next input that forward
        kept: then the step also runs to compute that segment's inputs.
        """
        segment_end, outer_end = (
            min((step // length + 1) * length, self.num_steps)
            for length in (self.every, self.outer)
        )
        return 1 + (segment_end < outer_end)

    def aggregations_again(self, step: int) -> int:
        """Return how often backward aggregates a step's inputs again, if no table keeps them."""
        if self.is_kept(step):
            return 0
        # The outer recomputation keeps the inputs of the first step of each segment.
        return 1 if step == self.start(step) else self.times_again(step)

    def start(self, step: int) -> int:
        """Return the first step of the segment of ``step``."""
        return step - step % self.every

    def is_kept(self, step: int) -> bool:
        """Whether forward keeps the inputs of ``step``."""
        return step % self.outer == 0

    @property
    def kept(self) -> range:
        """Steps whose inputs forward keeps."""
        return range(0, self.num_steps, self.outer)
