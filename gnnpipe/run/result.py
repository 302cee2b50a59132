"""Result of a run: the fields of result.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gnnpipe.graph.quality import CutQuality
from gnnpipe.perf import (
    CommVolume,
    EpochSpans,
    MemoryEstimate,
    Span,
    TimeShares,
    measured_spans,
    time_shares,
)
from gnnpipe.plan import ModelGraph
from gnnpipe.profiling.predict import Predictor
from gnnpipe.run.early_stopping import BestEpoch
from gnnpipe.run.epoch_times import gather_epoch
from gnnpipe.run.folder import versions
from gnnpipe.run.metrics_csv import EpochRow, Staleness
from gnnpipe.run.straggler import Straggler
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.memory_use import code_bytes, peak_bytes
from gnnpipe.setup.build import RankRuntime
from gnnpipe.setup.memory_estimate import memory_of_rank
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.scoring import Scores

WARM_UP = 3
"""Number of first epochs that the median epoch time leaves out, if there are more epochs."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run, as in result.json; scores are those of the last epoch unless stated."""

    dataset: str
    model: str
    layers: int
    """Aggregations of the model, those of the features included."""
    hidden: int
    """Largest width of the rows that are aggregated, or made of aggregated features."""
    num_classes: int
    """Classes, labels or targets of a vertex; 0 for links."""
    multi_label: bool
    """Whether a vertex has several labels at once."""
    stages: int
    shards: int
    """Of the stage with the most shards."""
    chunks: int
    world_size: int
    epochs: int
    """Number of epochs trained; less than ``--epochs`` if patience ran out or
    the target was reached."""
    seed: int
    exact: bool
    """Whether no epoch of the run read a stale row."""
    loss: float
    train_acc: float
    val_acc: float
    test_acc: float
    best_val_acc: float
    """Validation accuracy of the best epoch by the validation metric."""
    test_acc_at_best_val: float
    best_epoch: int
    metric: str
    """Name of the metric that selects the best epoch."""
    train_metric: float
    val_metric: float
    test_metric: float
    best_val_metric: float
    test_metric_at_best_val: float
    weights_of_epoch: int
    """Epoch whose weights the model and model.pt have."""
    epoch_time_s: float
    """Median training time of an epoch; without the first three epochs (warm-up) if there are
    more."""
    predicted_epoch_time_s: float | None
    """Epoch time that was predicted from a profile before training, for the chunk order of the
    epoch of ``time_shares``; null if nothing was predicted."""
    exact_epochs: int
    """Number of epochs without stale reads."""
    stale_reads: float
    """Share of the edges that read a stale row, mean over the epochs."""
    drift: list[float]
    """By layer that pushes rows, in the last epoch with stale reads: relative error of the stale
    rows, as in metrics.csv; empty if nothing is stale."""
    moved: list[float]
    """By layer, in the epoch of ``drift``, with a forecast: relative change of the rows by the
    optimizer step, as in metrics.csv."""
    missed: list[float]
    """By layer, in the epoch of ``drift``: relative error of the forecast, as in metrics.csv."""
    comm_bytes_per_epoch: dict[str, int]
    comm_bytes_closed_form: dict[str, int]
    time_shares: list[TimeShares]
    """By rank: how the time of one epoch was spent. It is the epoch of median length among the last
    five after warm-up; empty on a GPU."""
    predicted_time_shares: list[TimeShares]
    """By rank: how the time of the predicted epoch is spent."""
    link_bytes_per_s: list[float]
    """By rank: bandwidth of receiving from other stages, measured before the first epoch; null with
    one stage."""
    stragglers: list[Straggler]
    """Ranks that computed longer than planned, relative to the others; none on a GPU."""
    peak_memory_bytes: list[int]
    """By rank: peak memory in training. On a CPU it is that of the process, on a GPU that of
    torch's allocations."""
    memory_before_bytes: list[int]
    """By rank: memory before training: the interpreter, torch, the graph as read, and the code
    pages of torch that training loads. The estimate predicts the peak minus this."""
    memory_estimate_bytes: list[MemoryEstimate]
    """By rank: the estimate of `gnnpipe info` by part; without the interpreter and torch."""
    cut: CutQuality
    """Quality of the partition: edge cut, halo rows and balance of chunks and shards."""
    versions: dict[str, str]
    history: list[EpochRow] = field(default_factory=list, repr=False)
    """The rows of metrics.csv."""
    timeline: tuple[Span, ...] = field(default=(), repr=False)
    """The epoch of ``time_shares``, as in trace.json; on rank 0, and empty on a GPU."""
    predicted_timeline: tuple[Span, ...] = field(default=(), repr=False)
    """The predicted epoch, as in trace.json; on rank 0."""
    path: Path | None = None
    """The run folder."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of result.json: all fields but history, timelines and path."""
        kept = asdict(replace(self, history=[], timeline=(), predicted_timeline=()))
        out = ("history", "timeline", "predicted_timeline", "path")
        return {k: v for k, v in kept.items() if k not in out}


@dataclass(frozen=True)
class TrainingRecord:
    """Outcome of the training loop: rows, best epoch and bytes sent in the last epoch."""

    rows: Sequence[EpochRow]
    best: BestEpoch
    sent_bytes: Sequence[int]
    """By axis, over all ranks."""
    stragglers: Sequence[Straggler] = ()

    def comm_bytes(self) -> dict[str, int]:
        """Return the bytes sent in the last epoch by axis, and their total."""
        return CommVolume(*self.sent_bytes).to_dict()

    @property
    def counted_epochs(self) -> int:
        """Number of last epochs that are not warm-up."""
        return len(self.rows) - min(WARM_UP, len(self.rows) - 1)

    @property
    def is_exact(self) -> list[bool]:
        """Whether nothing was stale, by epoch."""
        return [r.staleness is None or r.staleness.is_exact for r in self.rows]

    @property
    def last_scores(self) -> Scores:
        """Scores of the last epoch, which is always evaluated."""
        assert self.rows[-1].scores is not None
        return self.rows[-1].scores

    @property
    def best_scores(self) -> Scores:
        """Scores of the best epoch."""
        assert self.best.scores is not None
        return self.best.scores

    @property
    def last_staleness(self) -> Staleness:
        """Staleness of the last epoch with stale reads; without values if there is none."""
        found = [row.staleness for row in self.rows if row.staleness is not None]
        stale = [staleness for staleness in found if not staleness.is_exact]
        return (stale or found or [Staleness(0.0, (), (), ())])[-1]


def _timeline(mesh: Mesh, prepared: Prepared, spans: Sequence[EpochSpans]) -> tuple[Span, ...]:
    """Return the spans of all ranks, on rank 0 alone: many spans take a while."""
    if mesh.rank or not spans:
        return ()
    return measured_spans(spans, prepared.plan.placement)


def gather_result(
    mesh: Mesh,
    prepared: Prepared,
    rank_runtime: RankRuntime,
    record: TrainingRecord,
    path: Path | None,
    link_bytes_per_s: float,
    predictor: Predictor | None,
) -> RunResult:
    """Return the result of a run that has ended, on every rank."""
    config, rows, best = prepared.config, record.rows, record.best_scores
    peaks = mesh.gather(peak_bytes(mesh.device))  # first: the estimate allocates memory
    spans, links = gather_epoch(mesh, record.counted_epochs), mesh.gather(link_bytes_per_s)
    predicted = predictor and predictor.epoch(spans[0].order if spans else None)
    return RunResult(
        dataset=prepared.graph.name,
        model=prepared.model.name,
        layers=sum(op.aggregates or op.is_given for op in prepared.model_graph.ops),
        hidden=_hidden_width(prepared.model_graph),
        num_classes=prepared.graph.num_classes,
        multi_label=prepared.graph.is_multi_label,
        stages=prepared.plan.num_stages,
        shards=prepared.plan.most_shards,
        chunks=prepared.quality.chunks,
        world_size=mesh.world_size,
        epochs=len(rows),
        seed=config.seed,
        exact=prepared.program.is_exact and all(record.is_exact),
        loss=rows[-1].loss,
        **asdict(record.last_scores),
        best_val_acc=best.val_acc,
        test_acc_at_best_val=best.test_acc,
        best_epoch=record.best.epoch,
        metric=prepared.metric,
        best_val_metric=best.val_metric,
        test_metric_at_best_val=best.test_metric,
        weights_of_epoch=record.best.epoch if config.kept_epoch == "best" else len(rows),
        epoch_time_s=statistics.median(r.epoch_time_s for r in rows[-record.counted_epochs :]),
        predicted_epoch_time_s=predicted.epoch_time_s if predicted else None,
        exact_epochs=sum(record.is_exact),
        stale_reads=statistics.fmean(r.staleness.stale_reads if r.staleness else 0.0 for r in rows),
        drift=list(record.last_staleness.drift),
        moved=list(record.last_staleness.moved),
        missed=list(record.last_staleness.missed),
        comm_bytes_per_epoch=record.comm_bytes(),
        comm_bytes_closed_form=prepared.volume_of(record.is_exact[-1]).to_dict(),
        time_shares=time_shares(spans, prepared.plan.placement, links) if spans else [],
        predicted_time_shares=predicted.time_shares if predicted else [],
        link_bytes_per_s=links,
        stragglers=list(record.stragglers),
        peak_memory_bytes=peaks,
        memory_before_bytes=mesh.gather(rank_runtime.memory_before_bytes + code_bytes(mesh.device)),
        memory_estimate_bytes=mesh.gather(memory_of_rank(prepared, mesh.stage, mesh.shard)),
        cut=prepared.quality,
        versions=versions(),
        history=list(rows),
        timeline=_timeline(mesh, prepared, spans),
        predicted_timeline=predicted.timeline if predicted else (),
        path=path,
    )


def _hidden_width(model: ModelGraph) -> int:
    """Return ``RunResult.hidden``."""
    given = {value for op in model.ops if op.is_given for value in op.outputs}
    made = [op.outputs.values() for op in model.ops if given.intersection(op.inputs)]
    pushed = [op.push_width for op in model.aggregations]
    return max([*pushed, *(width for widths in made for width in widths)], default=0)
