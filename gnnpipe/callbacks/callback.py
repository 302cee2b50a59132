"""Callbacks: code of the user's own that runs at certain moments of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.output import warn
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

    @property
    def path(self) -> Path | None:
        """The run folder; ``None`` with ``out="off"``."""

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

    def __init__(self) -> None:
        """Takes nothing; a subclass may take what it needs."""

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Before the first epoch, or before the first one after a resume."""

    def on_evaluate(self, trainer: RunningTrainer, row: EpochRow) -> None:
        """After an epoch that was evaluated, before ``on_epoch_end``; ``row.scores`` is set."""

    def on_epoch_end(self, trainer: RunningTrainer, row: EpochRow) -> bool | None:
        """After every epoch; return ``True`` to end training. One rank's ``True`` ends it.

        The last epoch is then evaluated if it was not; ``on_fit_end`` gets these scores.
        """

    def on_checkpoint(self, trainer: RunningTrainer, path: Path) -> None:
        """After the checkpoint in the folder ``path`` was written by all ranks."""

    def on_fit_end(self, trainer: RunningTrainer, result: RunResult) -> None:
        """After training; ``trainer.model`` has the weights that are kept."""

    def on_exception(self, trainer: RunningTrainer, error: BaseException) -> None:
        """After ``fit`` was ended by an error or a signal, in place of ``on_fit_end``.

        ``fit`` then raises ``error``. Other ranks may be lost, so nothing that needs them works.
        """


class Callbacks:
    """Runs the callbacks of one rank."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for number, callback in enumerate(callbacks):
            if not isinstance(callback, Callback):
                is_class = isinstance(callback, type)
                name = callback.__name__ if is_class else type(callback).__name__
                raise InputError(
                    f"callbacks: number {number} is {'the class' if is_class else 'of type'} "
                    f"{name}, not a gnnpipe.Callback; derive its class from gnnpipe.Callback and "
                    "pass an instance"
                )
        self._callbacks = list(callbacks)
        self.is_alone = False
        """Whether a callback runs that the other ranks do not run."""

    def fit_start(self, trainer: RunningTrainer) -> None:
        """Call ``on_fit_start``."""
        self._call(lambda callback: callback.on_fit_start(trainer))

    def epoch_end(self, trainer: RunningTrainer, row: EpochRow) -> bool:
        """Return whether a callback of this rank wants training to end after the epoch."""
        if row.scores is not None:
            self._call(lambda callback: callback.on_evaluate(trainer, row))
        return True in self._call(lambda callback: callback.on_epoch_end(trainer, row))

    def checkpoint(self, trainer: RunningTrainer, path: Path) -> None:
        """Call ``on_checkpoint``."""
        self._call(lambda callback: callback.on_checkpoint(trainer, path))

    def fit_end(self, trainer: RunningTrainer, result: RunResult) -> None:
        """Call ``on_fit_end``."""
        self._call(lambda callback: callback.on_fit_end(trainer, result))

    @contextmanager
    def of_rank(self, trainer: RunningTrainer, rank: int) -> Iterator[None]:
        """Keep the callbacks of this rank, and call ``on_exception`` if the block raises.

        Warns if ``on_exception`` itself fails.
        """
        self._callbacks = [c for c in self._callbacks if rank == 0 or c.on_all_ranks]
        try:
            yield
        except BaseException as error:
            for callback in self._callbacks:
                self.is_alone = not callback.on_all_ranks
                try:
                    callback.on_exception(trainer, error)
                except Exception as fault:
                    name = type(callback).__name__
                    warn(f"callbacks: {name}.on_exception fails ({type(fault).__name__}: {fault})")
                finally:
                    self.is_alone = False
            raise

    def _call(self, call: Callable[[Callback], bool | None]) -> list[bool | None]:
        answers = []
        for callback in self._callbacks:
            self.is_alone = not callback.on_all_ranks
            try:
                answers.append(call(callback))
            finally:
                self.is_alone = False
        return answers
