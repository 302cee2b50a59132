"""Progress of training: a live progress bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from gnnpipe.output import LOGGER, is_shown
from gnnpipe.run.metrics_csv import EpochRow
from gnnpipe.run.summary import score


class Progress:
    """Logs and prints progress on rank 0; a context manager around the training loop.

    The other ranks have a ``Progress`` that does neither.
    """

    def __init__(self, epochs: int, metric: str, is_first: bool, is_quiet: bool) -> None:
        self.epochs = epochs
        self._is_first = is_first
        self.metric = "" if metric == "accuracy" else f"{metric}: "
        self.is_visible = is_first and not is_quiet and not is_shown(logging.INFO)
        self.console = Console(highlight=False, soft_wrap=True)
        self._done = 0
        self._live: RichProgress | None = None
        self._last = 0.0
        self._scores = ""
        self._update: Callable[[int, str], None] = lambda n, text: None

    def say(self, text: str) -> None:
        """Log a line, and print it."""
        if self._is_first:
            LOGGER.info(text)
        if self.is_visible:
            self.console.print(text, markup=False)

    def start_at(self, epoch: int) -> None:
        """Start the progress bar at this number of epochs."""
        self._done = epoch

    def __enter__(self) -> Progress:
        if self.is_visible and self.console.is_terminal:
            live = RichProgress(
                TextColumn("epoch"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            task = live.add_task("", total=self.epochs, completed=self._done)
            # A restored run repeats epochs.
            self._update = lambda n, text: live.update(task, completed=n, description=text)
            self._live = live
            live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def epoch(self, row: EpochRow) -> None:
        """Show an epoch; a log shows evaluated epochs and one epoch every ten seconds."""
        if not self._is_first:
            return
        text = f"loss {row.loss:.4f}"
        if row.scores is not None:
            s = row.scores
            self._scores = (
                f"  {self.metric}train {score(s.train_metric)}  val {score(s.val_metric)}  "
                f"test {score(s.test_metric)}"
            )
        if self._live is not None:
            self._update(row.epoch, text + self._scores)
        now = time.monotonic()
        if row.scores is not None or row.epoch in (1, self.epochs) or now - self._last > 10:
            self._last = now
            scores = self._scores if row.scores is not None else ""
            line = f"epoch {row.epoch}/{self.epochs}  {text}{scores}  {row.epoch_time_s:.3f} s"
            if self._live is None:
                self.say(line)
            else:
                LOGGER.info(line)
