"""Learning-rate schedule over the epochs, built from torch's schedulers."""

from __future__ import annotations

import math

import torch
from torch.optim import lr_scheduler

from gnnpipe.config import TrainConfig


class LearningRate:
    """Learning rate of one optimizer; every rank has one, and all get the same scores.

    A linear warm-up from lr / (warm-up epochs + 1), then one of: constant; a half cosine down to 0
    over the remaining epochs; halved whenever the validation metric has not risen for
    ``lr_patience`` epochs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        self._optimizer, self._warmup, self._epoch = optimizer, config.warmup_epochs, 0
        self._early: lr_scheduler.LRScheduler | None = None
        self._late: lr_scheduler.LRScheduler | None = None
        if self._warmup:
            self._early = lr_scheduler.LinearLR(
                optimizer, start_factor=1 / (self._warmup + 1), total_iters=self._warmup
            )
        if config.lr_schedule == "cosine":
            # Starts from the rate at the end of the warm-up, where it is first stepped.
            left = config.epochs - self._warmup
            self._late = lr_scheduler.CosineAnnealingLR(optimizer, T_max=left)
        elif config.lr_schedule == "plateau":
            self._late = lr_scheduler.ReduceLROnPlateau(
                optimizer,
                mode="max",
                factor=0.5,
                threshold=0.0,
                patience=math.ceil(config.lr_patience / max(config.eval_every, 1)) - 1,
            )

    @property
    def value(self) -> float:
        """Learning rate of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self, score: float | None) -> None:
        """End an epoch; ``score``: the validation metric, if it was evaluated."""
        self._epoch += 1
        if self._early is not None and self._epoch <= self._warmup:
            self._early.step()
        elif isinstance(self._late, lr_scheduler.ReduceLROnPlateau):
            if score is not None:
                self._late.step(score)
        elif self._late is not None:
            self._late.step()
