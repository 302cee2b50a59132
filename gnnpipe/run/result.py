"""What came out of a run: the fields of result.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gnnpipe.graph.quality import CutQuality
from gnnpipe.perf import MemoryEstimate, Span, TimeShares, measured_spans, time_shares
from gnnpipe.profile.predict import Predictor
from gnnpipe.run.early_stopping import BestEpoch
from gnnpipe.run.epoch_times import gather_epoch
from gnnpipe.run.folder import versions
from gnnpipe.run.metrics_csv import EpochRow
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.executor import CommBytes
from gnnpipe.runtime.memory_use import code_bytes, peak_bytes
from gnnpipe.setup.build import RankRuntime
from gnnpipe.setup.memory_estimate import memory_of_rank
from gnnpipe.setup.prepare import Prepared

__all__ = ["RunResult", "gather_result"]

WARM_UP = 3
"""Epochs whose time is left out of the median, where there are others."""


@dataclass(frozen=True)
class RunResult:
    """What came out; the fields are those of result.json. Accuracies of the last epoch."""

    dataset: str
    model: str
    layers: int
    hidden: int
    stages: int
    shards: int
    chunks: int
    world_size: int
    epochs: int
    """Epochs trained: fewer than asked for if patience ran out."""
    seed: int
    exact: bool
    """No epoch of the run could read a stale row."""
    loss: float
    train_acc: float
    val_acc: float
    test_acc: float
    best_val_acc: float
    """Of the best epoch by the validation metric, which is accuracy unless ``metric`` differs."""
    test_acc_at_best_val: float
    best_epoch: int
    metric: str
    """accuracy, rocauc, f1-micro or f1-macro."""
    train_metric: float
    val_metric: float
    test_metric: float
    best_val_metric: float
    test_metric_at_best_val: float
    weights_of_epoch: int
    """The epoch that the weights of the model (and model.pt) are from."""
    epoch_time_s: float
    """Median, without the first epochs (warm-up) where there are others."""
    predicted_epoch_time_s: float | None
    """From a profile, before the run; none where nothing was predicted. As the shares below, of the
    order of chunks that the epoch of the time shares had."""
    exact_epochs: int
    """Epochs in which nothing was stale."""
    stale_reads: float
    """Share of the edges read stale, mean over the epochs."""
    drift: list[float]
    """By layer, of the last epoch that read stale rows: their error relative to their size; empty
    where nothing is stale. This and the next two as in metrics.csv."""
    moved: list[float]
    """By layer, of the same epoch, with a forecast: how far the weights moved the rows."""
    missed: list[float]
    """By layer, of the same epoch: what the forecast left of it."""
    comm_bytes_per_epoch: dict[str, int]
    comm_bytes_closed_form: dict[str, int]
    time_shares: list[TimeShares]
    """By rank: where the time of an epoch went (the median of the last five, warm-up left out as
    above); empty on a GPU."""
    predicted_time_shares: list[TimeShares]
    """The same of the predicted epoch."""
    link_bytes_per_s: list[float]
    """By rank: how fast it receives from other stages, measured before the first epoch; infinite
    (null) with one stage."""
    peak_memory_bytes: list[int]
    """Per rank, in training; on a CPU of the whole process, on a GPU of torch's allocations."""
    memory_before_bytes: list[int]
    """Per rank, the same before its part was allocated: the interpreter, torch, the graph as read.
    Pages of torch's code that training was the first to use are among it. What the peak is above it
    can be set beside the estimate."""
    memory_estimate_bytes: list[MemoryEstimate]
    """Per rank what `gnnpipe info` foretells, by part; without the interpreter and torch."""
    cut: CutQuality
    """What the chunks and shards cost: edges that they cut, rows that are read across, balance."""
    versions: dict[str, str]
    history: list[EpochRow] = field(default_factory=list, repr=False)
    """The rows of metrics.csv."""
    timeline: tuple[Span, ...] = field(default=(), repr=False)
    """What trace.json holds: the epoch that the time shares are of; empty on a GPU."""
    predicted_timeline: tuple[Span, ...] = field(default=(), repr=False)
    """What trace.json holds beside it; on rank 0."""
    path: Path | None = None
    """The run's folder."""

    def to_dict(self) -> dict[str, Any]:
        """As it stands in result.json: without history, timelines and path."""
        kept = asdict(replace(self, history=[], timeline=(), predicted_timeline=()))
        out = ("history", "timeline", "predicted_timeline", "path")
        return {k: v for k, v in kept.items() if k not in out}


def gather_result(
    mesh: Mesh,
    prepared: Prepared,
    rank_runtime: RankRuntime,
    rows: Sequence[EpochRow],
    best: BestEpoch,
    path: Path | None,
    link_bytes_per_s: float,
    sent_bytes: Sequence[int],
    predictor: Predictor | None,
) -> RunResult:
    """The result of a run that has ended, on every rank; ``sent_bytes`` of its last epoch."""
    config = prepared.config
    names = [f.name for f in fields(CommBytes)]
    last, chosen = rows[-1].scores, best.scores
    assert last is not None, "the last epoch is always evaluated"
    assert chosen is not None
    times = [r.epoch_time_s for r in rows]
    counted_epochs = len(times) - min(WARM_UP, len(times) - 1)
    stale = [r.staleness for r in rows if r.staleness is not None]
    # Exact epochs have none of it, but for a run of nothing else.
    measured = [s for s in stale if not s.is_exact] or stale
    exact = [r.staleness is None or r.staleness.is_exact for r in rows]
    # The peak first: the estimate needs memory of its own.
    peaks = mesh.gather(peak_bytes(mesh.device))
    estimate = memory_of_rank(prepared, mesh.stage, mesh.shard)
    epoch, links = gather_epoch(mesh, counted_epochs), mesh.gather(link_bytes_per_s)
    predicted = predictor and predictor.epoch(epoch[0].order if epoch else None)
    return RunResult(
        dataset=prepared.graph.name,
        model=prepared.model.name,
        layers=len(prepared.model_graph.aggregations),
        hidden=max((op.push_width for op in prepared.model_graph.aggregations), default=0),
        stages=config.stages,
        shards=config.shards,
        chunks=prepared.quality.chunks,
        world_size=mesh.world_size,
        epochs=len(rows),
        seed=config.seed,
        exact=prepared.report.exact and all(exact),
        loss=rows[-1].loss,
        train_acc=last.train_acc,
        val_acc=last.val_acc,
        test_acc=last.test_acc,
        best_val_acc=chosen.val_acc,
        test_acc_at_best_val=chosen.test_acc,
        best_epoch=best.epoch,
        metric=prepared.metric,
        train_metric=last.train_metric,
        val_metric=last.val_metric,
        test_metric=last.test_metric,
        best_val_metric=chosen.val_metric,
        test_metric_at_best_val=chosen.test_metric,
        weights_of_epoch=best.epoch if config.kept_epoch == "best" else len(rows),
        epoch_time_s=statistics.median(times[-counted_epochs:]),
        predicted_epoch_time_s=predicted.epoch_time_s if predicted else None,
        exact_epochs=sum(exact),
        stale_reads=sum(s.stale_reads for s in stale) / len(rows),
        drift=list(measured[-1].drift) if measured else [],
        moved=list(measured[-1].moved) if measured else [],
        missed=list(measured[-1].missed) if measured else [],
        comm_bytes_per_epoch=dict(zip(names, sent_bytes, strict=True)) | {"total": sum(sent_bytes)},
        comm_bytes_closed_form=prepared.volume_of(exact[-1]).to_dict(),
        time_shares=time_shares(epoch, config.shards, links) if epoch else [],
        predicted_time_shares=predicted.time_shares if predicted else [],
        link_bytes_per_s=links,
        peak_memory_bytes=peaks,
        memory_before_bytes=mesh.gather(rank_runtime.memory_before_bytes + code_bytes(mesh.device)),
        memory_estimate_bytes=mesh.gather(estimate),
        cut=prepared.quality,
        versions=versions(),
        history=list(rows),
        timeline=measured_spans(epoch, config.shards) if epoch else (),
        predicted_timeline=predicted.timeline if predicted else (),
        path=path,
    )
