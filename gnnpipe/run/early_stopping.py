"""The best epoch by the validation metric: its weights, and whether it is long ago."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnpipe.tasks.scoring import Scores

__all__ = ["BestEpoch"]


class BestEpoch:
    """Sees every evaluation; each rank keeps the best of its own weights.

    Ties go to the earlier epoch, as everywhere in this field. NaN (no validation vertices) is below
    everything, so that the first evaluation stays the best.
    """

    def __init__(
        self, weights: Sequence[Tensor], keeps: bool, patience: int, less_is_better: bool = False
    ) -> None:
        """``keeps`` whether to keep weights; ``patience`` in epochs, 0 = never out of it.

        ``less_is_better``: the metric is an error.
        """
        self._sign = -1.0 if less_is_better else 1.0
        self._weights, self._keeps, self._patience = weights, keeps, patience
        self.kept: list[Tensor] = []
        """Weights of the best epoch, in order; empty if none are kept."""
        self.epoch = 0
        """From 1; 0 before the first evaluation."""
        self.scores: Scores | None = None

    def see(self, epoch: int, scores: Scores) -> bool:
        """Note the scores of an epoch; whether patience has run out."""
        if self.scores is None or self._height(scores) > self._height(self.scores):
            self.epoch, self.scores = epoch, scores
            if self._keeps:
                self.kept = [p.detach().clone() for p in self._weights]
        return bool(self._patience) and epoch - self.epoch >= self._patience

    def take(self, epoch: int, scores: Scores, kept: Sequence[Tensor]) -> None:
        """Start from the best of a run so far; ``kept``: its weights, if they are to be kept."""
        self.epoch, self.scores = epoch, scores
        self.kept = list(kept) if self._keeps else []

    def _height(self, scores: Scores) -> float:
        return -math.inf if math.isnan(scores.val_metric) else self._sign * scores.val_metric

    @torch.no_grad()
    def restore(self) -> None:
        """Put the kept weights back, if any were kept."""
        for parameter, kept in zip(self._weights, self.kept, strict=self._keeps):
            parameter.copy_(kept)
