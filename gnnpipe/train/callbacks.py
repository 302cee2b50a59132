"""Callbacks: code of the user's own that runs at certain moments of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan
from gnnpipe.run.metrics_csv import EpochRow
from gnnpipe.run.result import RunResult
from gnnpipe.tasks.scoring import Scores


class RunningTrainer(Protocol):
    """The parts of ``Trainer`` that a callback can use."""

    config: TrainConfig

    @property
    def model(self) -> nn.Module:
        """The model; before the end of training, with the current weights of this rank's stage."""

    @property
    def plan(self) -> Plan:
        """The plan of the run."""

    def evaluate(self) -> Scores:
        """Return exact scores with the current weights."""

    def predict(self) -> Tensor:
        """Return logits [N, classes]."""


class Callback:
    """Base class of callbacks: override the methods that you need.

    Methods run on rank 0, or on every rank where ``on_all_ranks`` is true. An exception in a
    callback ends the run. ``Trainer.evaluate`` and ``Trainer.predict`` need all ranks, so with
    several ranks only a callback on all of them can call these two.
    """

    on_all_ranks = False

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Before the first epoch, or before the first one after a resume."""

    def on_evaluate(self, trainer: RunningTrainer, row: EpochRow) -> None:
        """After an epoch that was evaluated, before ``on_epoch_end``; ``row.scores`` is set."""

    def on_epoch_end(self, trainer: RunningTrainer, row: EpochRow) -> bool | None:
        """After every epoch; return ``True`` to end training. One rank's ``True`` ends it."""

    def on_checkpoint(self, trainer: RunningTrainer, path: Path) -> None:
        """After the checkpoint in the folder ``path`` was written by all ranks."""

    def on_fit_end(self, trainer: RunningTrainer, result: RunResult) -> None:
        """After training; ``trainer.model`` has the weights that are kept."""


class Callbacks:
    """Runs the callbacks of one rank."""

    def __init__(self, every: Sequence[Callback] = ()) -> None:
        for number, one in enumerate(every):
            if not isinstance(one, Callback):
                what = f"class {one.__name__}" if isinstance(one, type) else type(one).__name__
                raise InputError(
                    f"callbacks: number {number} is a {what}, not a gnnpipe.Callback; derive its "
                    "class from gnnpipe.Callback and pass an instance"
                )
        self._every = list(every)
        self.is_alone = False
        """Whether a callback runs that the other ranks do not run."""

    def fit_start(self, trainer: RunningTrainer, rank: int) -> None:
        """Start a run, on this rank."""
        self._every = [one for one in self._every if rank == 0 or one.on_all_ranks]
        for one in self._running():
            one.on_fit_start(trainer)

    def epoch_end(self, trainer: RunningTrainer, row: EpochRow) -> bool:
        """End an epoch; return whether a callback of this rank wants training to end."""
        if row.scores is not None:
            for one in self._running():
                one.on_evaluate(trainer, row)
        answers = [one.on_epoch_end(trainer, row) for one in self._running()]
        return True in answers

    def checkpoint(self, trainer: RunningTrainer, path: Path) -> None:
        """Tell of a checkpoint."""
        for one in self._running():
            one.on_checkpoint(trainer, path)

    def fit_end(self, trainer: RunningTrainer, result: RunResult) -> None:
        """End a run."""
        for one in self._running():
            one.on_fit_end(trainer, result)

    def _running(self) -> Iterator[Callback]:
        for one in self._every:
            self.is_alone = not one.on_all_ranks
            try:
                yield one
            finally:
                self.is_alone = False
