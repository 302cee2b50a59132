"""Best epoch by the validation metric, its weights, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnpipe.config import TrainConfig
from gnnpipe.tasks.loss import ERRORS
from gnnpipe.tasks.scoring import Scores


def target_is_reached(config: TrainConfig, scores: Scores | None) -> bool:
    """Return whether an evaluation has reached ``--target-metric``; ``scores``: ``None``: none."""
    if config.target_metric is None or scores is None:
        return False
    if config.metric in ERRORS:
        return scores.val_metric <= config.target_metric
    return scores.val_metric >= config.target_metric


class BestEpoch:
    """Tracks the best epoch; each rank keeps a copy of its own weights.

    Of equal scores the earlier epoch is kept. NaN (no validation vertices) is worse than any
    number.
    """

    def __init__(
        self, weights: Sequence[Tensor], keeps: bool, patience: int, less_is_better: bool = False
    ) -> None:
        """Track the best epoch of a run.

        Args:
            weights: The parameters of this rank.
            keeps: Whether to keep a copy of the best weights.
            patience: Epochs without improvement before the run stops; 0: no limit.
            less_is_better: The metric is an error.
        """
        self._sign = -1.0 if less_is_better else 1.0
        self._weights, self._keeps, self._patience = weights, keeps, patience
        self.kept: list[Tensor] = []
        """Weights of the best epoch, in the order of ``weights``; empty if none are kept."""
        self.epoch = 0
        """The best epoch, counted from 1; 0 before the first evaluation."""
        self.scores: Scores | None = None

    def see(self, epoch: int, scores: Scores) -> bool:
        """Record the scores of an epoch; return whether patience has run out."""
        if self.scores is None or self._goodness(scores) > self._goodness(self.scores):
            self.epoch, self.scores = epoch, scores
            if self._keeps:
                self.kept = [p.detach().clone() for p in self._weights]
        return bool(self._patience) and epoch - self.epoch >= self._patience

    def take(self, epoch: int, scores: Scores, kept: Sequence[Tensor]) -> None:
        """Continue from the best epoch of a resumed run, with its weights ``kept``."""
        self.epoch, self.scores = epoch, scores
        self.kept = list(kept) if self._keeps else []

    def _goodness(self, scores: Scores) -> float:
        return -math.inf if math.isnan(scores.val_metric) else self._sign * scores.val_metric

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the current weights with the kept ones, if there are any.

        Before training continues, a second call undoes the first.
        """
        for parameter, kept in zip(self._weights, self.kept, strict=self._keeps):
            current = parameter.clone()
            parameter.copy_(kept)
            kept.copy_(current)
