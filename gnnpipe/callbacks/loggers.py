"""Loggers: callbacks that send the columns of metrics.csv to TensorBoard or Weights & Biases.

Both packages are optional. They are imported on rank 0, which writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gnnpipe.callbacks.callback import Callback, RunningTrainer
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.run.metrics_csv import EpochRow
from gnnpipe.run.result import RunResult

FLUSH_EVERY_S = 5.0


class Logger(Callback):
    """Base class of loggers: a subclass opens a log, writes numbers to it and closes it."""

    def __init__(self, name: str) -> None:
        """Takes the name of the package; raises ``InputError`` if it is not installed."""
        if find_spec(name) is None:
            raise InputError(
                f"--log {name}: needs the package {name}; try `pip install 'gnnpipe[{name}]'`, or "
                "leave it out"
            )
        self._row: EpochRow | None = None
        """The newest row in the log; ``None``: the log is not open."""

    def check(self, config: TrainConfig) -> None:
        """Raises ``InputError`` if a run of this config cannot be logged."""

    def open_log(self, trainer: RunningTrainer, epoch: int) -> None:
        """Opens the log for rows from ``epoch`` on; the log may have rows of earlier epochs."""
        raise NotImplementedError

    def write(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Adds numbers to an epoch, by their names in metrics.csv."""
        raise NotImplementedError

    def close_log(self) -> None:
        """Closes the log."""
        raise NotImplementedError

    def on_epoch_end(self, trainer: RunningTrainer, row: EpochRow) -> None:
        """Writes the row."""
        # --on-nan restore goes back to the epoch of a checkpoint.
        if self._row is None or row.epoch <= self._row.epoch:
            self.open_log(trainer, row.epoch)
        self._row = row
        self.write(row.epoch, _numbers(row))

    def on_fit_end(self, trainer: RunningTrainer, result: RunResult) -> None:
        """Writes scores that were measured after the last epoch's end, and closes the log."""
        if self._row is None:
            return
        last = result.history[-1]
        if last.scores != self._row.scores:
            before = _numbers(self._row)
            new = {name: v for name, v in _numbers(last).items() if name not in before}
            self.write(last.epoch, new)
        self.close_log()
        self._row = None

    def on_exception(self, trainer: RunningTrainer, error: BaseException) -> None:
        """Closes the log."""
        if self._row is not None:
            self.close_log()
            self._row = None


class TensorBoardLogger(Logger):
    """Writes TensorBoard event files; ``tensorboard --logdir runs`` shows all runs.

    >>> from gnnpipe import TensorBoardLogger, TrainConfig, Trainer
    >>> trainer = Trainer(TrainConfig(), callbacks=[TensorBoardLogger("logs")])
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """Raises ``InputError`` if the package tensorboard is not installed.

        Args:
            folder: Where to write; ``None``: tensorboard/ in the run folder.
        """
        super().__init__("tensorboard")
        self._folder, self._writer = folder, None
        self._flushed_at = 0.0

    def check(self, config: TrainConfig) -> None:
        """Raises ``InputError`` if there is no folder to write to."""
        if self._folder is None and config.out == "off":
            raise InputError(
                "--log tensorboard: writes to the run folder, and --out off writes none; give "
                "--out a folder (in Python also TensorBoardLogger(folder))"
            )

    def open_log(self, trainer: RunningTrainer, epoch: int) -> None:
        """Opens a new event file; TensorBoard then ignores older rows from ``epoch`` on."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self.close_log()
        folder = self._folder
        if folder is None:
            assert trainer.path is not None
            folder = trainer.path / "tensorboard"
        make: Any = SummaryWriter
        self._writer = make(str(folder), purge_step=epoch)

    def write(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Adds a scalar for each number."""
        writer: Any = self._writer
        for name, value in numbers.items():
            writer.add_scalar(name, value, epoch)
        if time.monotonic() - self._flushed_at > FLUSH_EVERY_S:
            self._flush()

    def on_checkpoint(self, trainer: RunningTrainer, path: Path) -> None:
        """Writes the file to disk: the run may be about to stop."""
        self._flush()

    def _flush(self) -> None:
        writer: Any = self._writer
        if writer is not None:
            writer.flush()
            self._flushed_at = time.monotonic()

    def close_log(self) -> None:
        """Closes the event file."""
        writer: Any = self._writer
        writer.close()
        self._writer = None


class WandbLogger(Logger):
    """Sends a run to Weights & Biases; with ``WANDB_MODE=offline`` into the run folder alone."""

    def __init__(self, **settings: Any) -> None:
        """Raises ``InputError`` if the package wandb is not installed.

        Args:
            settings: Arguments of ``wandb.init``, such as ``project``.
        """
        super().__init__("wandb")
        self._settings, self._run = settings, None

    def open_log(self, trainer: RunningTrainer, epoch: int) -> None:
        """Starts a run, or continues the one of an earlier ``fit``."""
        if self._row is not None:
            return  # wandb ignores steps that it has seen
        import wandb

        again: Any = self._run
        own = {} if again is None else {"id": again.id, "resume": "allow"}
        folder = {} if trainer.path is None else {"dir": str(trainer.path)}
        self._run = wandb.init(**{"config": asdict(trainer.config)} | folder | own | self._settings)

    def write(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Logs the numbers with the epoch as the step."""
        run: Any = self._run
        run.log(dict(numbers), step=epoch)

    def close_log(self) -> None:
        """Finishes the run."""
        run: Any = self._run
        run.finish()


LOGGERS: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}
"""Logger by its name in ``--log``."""


def with_loggers(config: TrainConfig, callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks and the loggers of ``config.log``, all checked.

    Raises ``InputError`` if a package or a folder is missing.
    """
    made: list[Callback] = [LOGGERS[name]() for name in config.loggers]
    found = [*callbacks, *made]
    for callback in found:
        if isinstance(callback, Logger):
            callback.check(config)
    return found


def _numbers(row: EpochRow) -> dict[str, float]:
    """Return the filled cells of metrics.csv, by column."""
    cells = row.cells()
    return {name: float(v) for name, v in cells.items() if name != "epoch" and v != ""}
