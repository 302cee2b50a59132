"""Runs the epochs of a training run: train, evaluate, write metrics and checkpoints.

Ranks agree on every reason to leave the loop (a signal, a full disk, NaN), so that all of them
leave after the same epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gnnpipe.checkpoint.retention import IN_PYTHON, checkpoint_path, resume_advice
from gnnpipe.checkpoint.state import load_tensors, restore_generators, tensors_of
from gnnpipe.checkpoint.writer import write_checkpoint
from gnnpipe.config import TrainConfig
from gnnpipe.errors import FailedError, InputError, StoppedError
from gnnpipe.files import how_to_write
from gnnpipe.optim.lr_schedule import LearningRate, SchedulerFactory
from gnnpipe.run.early_stopping import BestEpoch, target_is_reached
from gnnpipe.run.exact_epochs import ExactEpochs
from gnnpipe.run.folder import RunFolder
from gnnpipe.run.metrics_csv import EpochRow, measure_staleness
from gnnpipe.run.progress import Progress
from gnnpipe.run.resume import METRICS, STATE, Start, cut_of, find_start, state_text, stopped_by
from gnnpipe.run.signals import SIGINT, Stopping
from gnnpipe.run.straggler import StragglerWatch
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.memory_use import free_holes
from gnnpipe.schedule import CheckedProgram
from gnnpipe.setup.build import RankRuntime
from gnnpipe.setup.inputs import check_rate_lasts, why_not_validated
from gnnpipe.setup.prepared import Prepared, epochs_to_flush
from gnnpipe.tasks.loss import ERRORS
from gnnpipe.tasks.scoring import Scores
from gnnpipe.train.diagnose import check_same_weights, find_fault
from gnnpipe.train.evaluate import evaluate, train_epochs

CHECKPOINT_AFTER_S = 600.0
"""Seconds from one checkpoint to the next, unless the config gives a number of epochs."""

CHECKPOINT_SHARE = 0.01
"""Largest share of a run's time for these checkpoints; slow writes are further apart."""

LEAST_LR_FACTOR = 2.0**-5
"""Smallest factor of the learning rate that ``--on-nan restore`` tries."""


@dataclass(eq=False)
class Loop:
    """One run on one rank; ``rows`` and ``best`` hold the results so far."""

    config: TrainConfig
    mesh: Mesh
    prepared: Prepared
    rank_runtime: RankRuntime
    folder: RunFolder | None
    """Writer of the run's folder, on rank 0; ``None`` with ``--out off``."""
    path: Path | None
    """The run's folder, on every rank; ``None`` with ``--out off``."""
    progress: Progress
    identity: Mapping[str, Any]
    last_epoch: int
    """Number of epochs, with those of a resumed run, after which training ends."""
    watch: StragglerWatch
    """Compares the compute times of the ranks."""
    scheduler: SchedulerFactory | None = None
    """The user's own learning-rate scheduler; ``None``: the one that the settings name."""
    epoch_end: Callable[[EpochRow], bool] = lambda row: False
    """Called after every epoch; ``True``: this rank wants training to end."""
    checkpoint_end: Callable[[Path], None] = lambda path: None
    """Called with the folder of every checkpoint that was written."""

    def __post_init__(self) -> None:
        config, executor = self.config, self.rank_runtime.executor
        assert executor.optimizer is not None
        self._check_rate(self.last_epoch)
        self.rows: list[EpochRow] = []
        self._weights = dict(executor.stage.stage_module.named_state())
        self._is_error = self.prepared.metric in ERRORS
        self.best = self._no_best()
        self._lr_factor = 1.0
        self._is_over = self._is_told_to_stop = False
        self.sent_bytes: list[int] = []
        """Bytes sent in the last epoch, over all ranks, by axis (see ``CommVolume``)."""
        self._learning_rate = LearningRate(
            executor.optimizer, config, self.scheduler, self._is_error, self._steps_per_epoch
        )
        if text := self._learning_rate.steps_text:
            self.progress.say(text)
        if self._learning_rate.reads_metric:
            reason = why_not_validated(self.prepared.graph, self.prepared.metric)
            if reason:
                raise InputError(f"scheduler: ReduceLROnPlateau follows the scores; {reason}")
        self._exact_epochs = ExactEpochs(self.prepared)
        self._saved_epoch = 0
        """Epoch of the newest checkpoint that this run can resume from; 0: none."""
        self._save_time_s = 0.0
        self._saved_at = self._met_at = time.monotonic()

    @property
    def _steps_per_epoch(self) -> int:
        return self.prepared.program.consistency.optimizer_steps or 1

    def _check_rate(self, last_epoch: int) -> None:
        """``InputError`` if the learning rate of the plan's schedule is 0 before ``last_epoch``."""
        if self.scheduler is None:
            check_rate_lasts(self.config, self._steps_per_epoch, last_epoch)

    def _no_best(self) -> BestEpoch:
        keeps = self.config.kept_epoch == "best"
        weights = list(self._weights.values())
        return BestEpoch(weights, keeps, self.config.patience, self._is_error)

    def take(self, start: Start) -> None:
        """Continues from a checkpoint."""
        start.check(self.identity)
        for message in start.changes(cut_of(self.prepared), self.identity):
            self.progress.say(message)
        kept = load_tensors(start.stored, self.prepared, self.rank_runtime, self.mesh)
        restore_generators(start.stored, self.mesh.rank, self.mesh.world_size)
        self.rows = list(start.rows)
        self.best = self._no_best()
        if start.best is not None and (kept or self.config.kept_epoch == "last"):
            in_order = [kept[name] for name in self._weights] if kept else []
            self.best.take(*start.best, in_order)
        self._set_learning_rate(start.lr_factor)
        self.sent_bytes = list(start.sent_bytes)
        # With other chunks other gradients are missing, so norms of earlier epochs do not apply.
        known = (start.lengths, start.was_faulty, start.has_jumped)
        if start.cut["chunks"] != cut_of(self.prepared)["chunks"]:
            known = ((), start.was_faulty, False)
        self._exact_epochs = ExactEpochs(self.prepared, *known)
        self._is_over = bool(stopped_by(self.config, self.rows, start.best))
        if start.stored.path.parents[1] == self.path:
            self._saved_epoch = start.epoch

    @property
    def stopped_by(self) -> str:
        """The setting that ends training after the epochs so far; '' if none does."""
        scores = self.best.scores
        best = None if scores is None else (self.best.epoch, scores)
        return stopped_by(self.config, self.rows, best)

    def extend(self, last_epoch: int, progress: Progress) -> None:
        """Makes this loop, which has ended, ready to train up to epoch ``last_epoch``."""
        self._check_rate(last_epoch)
        self.last_epoch, self.progress = last_epoch, progress
        self._is_over = self._is_told_to_stop = False
        self.best.swap()  # training continues with the weights of the last epoch

    def _set_learning_rate(self, factor: float) -> None:
        """Replays the learning rate schedule over the epochs so far, times ``factor``."""
        self._lr_factor = factor
        self._learning_rate.restart(factor, map(_val_metric, self.rows))

    def run(self, stopping: Stopping) -> None:
        """Trains up to the last epoch, to the target, or until patience runs out.

        Raises:
            StoppedError: SIGTERM or the time limit.
            KeyboardInterrupt: Ctrl-C.
            FailedError: A checkpoint cannot be written.
            FloatingPointError: Loss or gradients are NaN or infinite.
        """
        self._met_at = time.monotonic()
        while len(self.rows) < self.last_epoch and not self._is_over:
            self._is_over = self._train_to_flush(len(self.rows))
            sent = astuple(self.rank_runtime.executor.epoch_bytes)
            self.sent_bytes = [int(n) for n in self.mesh.sum([float(n) for n in sent])]
            self._save_or_stop(stopping)
        self._evaluate_last()  # a checkpoint may be of a later epoch than the last one
        self._tell_missed_target()

    def _train_to_flush(self, epoch: int) -> bool:
        """Trains from ``epoch`` (from 0) to the next flush, and evaluates if an evaluation is due.

        Usually this is one epoch. Returns whether the run ends before its last epoch.
        """
        config, mesh, executor = self.config, self.mesh, self.rank_runtime.executor
        start = time.perf_counter()
        program = self._exact_epochs.begin(epoch, executor.grad_clip)
        if program is self.prepared.program and self.prepared.spans_epochs:
            chunks = self.prepared.plan.chunks
            count = epochs_to_flush(config, chunks, epoch, self.last_epoch)
            program = self.prepared.program_over(count)
        numbers = range(epoch, epoch + program.epochs)
        rates = [self._learning_rate.value]

        def end_epoch() -> None:
            self._learning_rate.step(None)
            rates.append(self._learning_rate.value)

        every_pass = self.prepared.passes(epoch, program.epochs)
        if self.rank_runtime.rates is not None:
            coming = self._learning_rate.coming(program.epochs)
            self.rank_runtime.rates.begin(coming, program.consistency.optimizer_steps or 1)
        losses = train_epochs(self.rank_runtime, mesh, program, every_pass, epoch, end_epoch)
        self._exact_epochs.end(program, executor.grad_clip.norm, executor.has_stepped)
        stale = [
            measure_staleness(
                self.prepared,
                self.rank_runtime,
                mesh,
                self.prepared.chunk_order(number),
                program.is_exact,
            )
            for number in numbers
        ]
        time_s = (time.perf_counter() - start) / program.epochs
        if not executor.has_stepped and self._mend(epoch, losses):
            return False
        last = numbers[-1] + 1 == self.last_epoch
        due = config.eval_every and (numbers[-1] + 1) % config.eval_every == 0
        start = time.perf_counter()
        scores = self._evaluate(program, last) if last or due else None
        if scores and config.check_weights:
            check_same_weights(self.rank_runtime, mesh, numbers[-1])
        eval_time_s = time.perf_counter() - start if scores else 0.0
        self._is_told_to_stop = False
        for number, loss, rate, one in zip(numbers, losses, rates, stale, strict=True):
            at_flush = number == numbers[-1]
            of_scores = (scores, eval_time_s) if at_flush else (None, 0.0)
            self._add(EpochRow(number + 1, loss, of_scores[0], time_s, of_scores[1], rate, one))
        self._learning_rate.step(_val_metric(self.rows[-1]))
        return self._ends_early(scores) and not last

    def _ends_early(self, scores: Scores | None) -> bool:
        """Returns whether the evaluation of the last epoch, if there was one, ends the run."""
        row, reason = self.rows[-1], ""
        has_no_patience = scores is not None and self.best.see(row.epoch, scores)
        if target_is_reached(self.config, scores):
            reason = f"has reached --target-metric {self.config.target_metric:g}"
        elif has_no_patience:
            reason = f"has not become better since epoch {self.best.epoch}"
        if reason and row.epoch < self.last_epoch:
            what = f"validation {self.prepared.metric} {reason}"
            self.progress.say(f"stopped after epoch {row.epoch}: {what}")
        return bool(reason)

    def _add(self, row: EpochRow) -> None:
        """Adds and writes the row of an epoch that has ended, and calls the callbacks."""
        self.rows.append(row)
        if self.folder is not None:
            self.folder.add(row)
        self.progress.epoch(row)
        self._is_told_to_stop |= self.epoch_end(row)

    def _save_or_stop(self, stopping: Stopping) -> None:
        """Agrees with all ranks on writing a checkpoint and on stopping."""
        now = time.monotonic()
        time_s, self._met_at = now - self._met_at, now
        is_first = self.mesh.rank == 0
        is_told, is_due, saves_last, saves_now, *times_s = self.mesh.sum(
            [
                float(self._is_told_to_stop),
                float(stopping.is_due(time_s)),
                float(is_first and self._wants_checkpoint(True)),
                float(is_first and self._wants_checkpoint(False)),
                *self._times_s(),
            ]
        )
        self._name_stragglers(times_s)
        is_last = self._is_over or len(self.rows) >= self.last_epoch
        if is_told and not is_last:
            self._is_over = is_last = True
            self.progress.say(f"stopped after epoch {len(self.rows)}: a callback asked for it")
            self._evaluate_last()
        stops, saves = is_due and not is_last, saves_last if is_last else saves_now
        if (stops or saves) and self.rows and self._saved_epoch != len(self.rows):
            self._save()
        if stops:
            reasons = self.mesh.gather(stopping.reason)
            if SIGINT in reasons:
                raise KeyboardInterrupt
            reason = next(filter(None, reasons), "told to stop")
            where = "nothing was written (--out off)"
            if self.path is not None:
                where = f"go on with --resume {self.path}; {IN_PYTHON}"
            raise StoppedError(f"stopped after epoch {len(self.rows)} ({reason}); {where}")

    def _times_s(self) -> list[float]:
        """Returns this rank's part of a sum: rank 0's epoch time, and compute times by rank."""
        mesh, epochs = self.mesh, self.mesh.recorder.epochs
        found = [0.0] * (1 + mesh.world_size)
        if epochs and self.rows and epochs[-1].is_exact == self.prepared.program.is_exact:
            found[1 + mesh.rank] = epochs[-1].compute_s / epochs[-1].count
            found[0] = self.rows[-1].epoch_time_s * (mesh.rank == 0)
        return found

    def _name_stragglers(self, times_s: Sequence[float]) -> None:
        """Says which ranks compute longer than planned; ``times_s``: sum of ``_times_s``."""
        for one in self.watch.see(len(self.rows), times_s[1:], times_s[0]):
            self.progress.say(one.line(self.prepared.plan.placement, self.path))

    def _evaluate(self, program: CheckedProgram, is_last: bool) -> Scores:
        """Evaluates after the epochs of ``program``; no epoch follows if ``is_last``."""
        if program.steps_by_chunk or is_last:
            # Tables of an evaluation are larger than the holes that blocks of chunks leave. Before
            # each evaluation this would cost time: an epoch of all chunks reuses what it has freed.
            free_holes(self.mesh.device)
        return evaluate(self.rank_runtime, self.mesh)

    def _evaluate_last(self) -> None:
        """Evaluates the last epoch, as that of every run that has ended."""
        row, start = self.rows[-1], time.perf_counter()
        if row.scores is not None:
            return
        scores = evaluate(self.rank_runtime, self.mesh)
        self.rows[-1] = replace(row, scores=scores, eval_time_s=time.perf_counter() - start)
        self.best.see(row.epoch, scores)
        if self.folder is not None:
            self.folder.rewrite(self.rows)

    def _tell_missed_target(self) -> None:
        """Says so if a run that has ended did not reach its target."""
        target, best, row = self.config.target_metric, self.best, self.rows[-1]
        if target is None or best.scores is None or target_is_reached(self.config, row.scores):
            return
        self.progress.say(
            f"--target-metric {target:g}: not reached in {row.epoch} epochs; the best validation "
            f"{self.prepared.metric} is {best.scores.val_metric:.4g}, of epoch {best.epoch}"
        )

    def interrupted(self) -> str:
        """Returns how to continue after an interrupt."""
        if self.path is None:
            return "nothing was written (--out off)"
        return resume_advice(self.path)

    def _wants_checkpoint(self, is_last: bool) -> bool:
        every = self.config.checkpoint_every
        if self.path is None or every == 0:
            return False
        if is_last:
            # Runs with checkpoints can be resumed for more epochs.
            return every is not None or self._saved_epoch > 0
        if every is not None:
            return len(self.rows) % every == 0
        wait_s = max(CHECKPOINT_AFTER_S, self._save_time_s / CHECKPOINT_SHARE)
        return time.monotonic() - self._saved_at > wait_s

    def _save(self) -> None:
        """Writes a checkpoint, on every rank; nothing with ``--out off``."""
        if self.path is None:
            return
        start = time.monotonic()
        best = None if self.best.scores is None else (self.best.epoch, self.best.scores)
        texts = {}
        if self.folder is not None:
            state = state_text(
                best,
                self.identity,
                self._lr_factor,
                self.sent_bytes,
                cut_of(self.prepared),
                self._exact_epochs,
            )
            texts = {STATE: state, METRICS: self.folder.metrics_text(self.rows)}
        kept: dict[str, Tensor] = dict(zip(self._weights, self.best.kept, strict=False))
        tensors = tensors_of(
            self.prepared, self.rank_runtime, self.mesh, kept, self.config.checkpoint_tables
        )
        epoch = len(self.rows)
        try:
            write_checkpoint(self.path, epoch, tensors, texts, self.config.keep, self.mesh)
        except OSError as error:
            last = f"the last whole one is of epoch {self._saved_epoch}"
            raise FailedError(
                f"checkpoint of epoch {epoch} could not be written to "
                f"{self.path / 'checkpoints'}: {error.strerror}; "
                f"{last if self._saved_epoch else 'there is none before it'}; "
                f"{how_to_write(error.errno)} and {resume_advice(self.path)}"
            ) from None
        self._saved_epoch, self._saved_at = epoch, time.monotonic()
        self._save_time_s = self._saved_at - start
        self.checkpoint_end(checkpoint_path(self.path, epoch))

    def _mend(self, epoch: int, losses: Sequence[float]) -> bool:
        """Applies ``--on-nan`` on every rank; returns whether to train again from ``epoch`` on."""
        config = self.config
        where = find_fault(self.rank_runtime, self.mesh, epoch, losses)
        if config.on_nan == "skip":
            for history in self.rank_runtime.executor.stage.histories.values():
                history.forget_faults()
            has_many = self._steps_per_epoch > 1
            skipped = "steps that are not finite are skipped" if has_many else "its step is skipped"
            self.progress.say(f"{where}; {skipped}")
            return False
        if config.on_nan == "restore" and self.path is not None:
            start, _ = find_start(self.path, config, self.mesh, needs_one=False)
            factor = self._lr_factor / 2
            if start is not None and factor >= LEAST_LR_FACTOR:
                self.take(start)
                self._set_learning_rate(factor)
                if self.folder is not None:
                    self.folder.rewrite(self.rows)
                self.progress.say(
                    f"{where}; going on from epoch {start.epoch} with --lr x {factor:g}"
                )
                return True
            where += "; no checkpoint to go back to" if start is None else "; restored too often"
        raise FloatingPointError(
            f"{where}; try a smaller --lr (now {self._learning_rate.value:g}) or --clip-norm 1"
        )


def _val_metric(row: EpochRow) -> float | None:
    return None if row.scores is None else row.scores.val_metric
