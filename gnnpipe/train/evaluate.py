"""One epoch, and how good the model is after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.models import Values
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.schedule import CheckedProgram
from gnnpipe.setup.build import RankRuntime
from gnnpipe.tasks.loss import PARTS, REGRESSION
from gnnpipe.tasks.scoring import (
    Scores,
    accuracy,
    error_sums,
    f1,
    margin,
    regression_score,
    roc_auc,
    tally,
    target_sums,
)

__all__ = ["Scores", "evaluate", "results_by_chunk", "train_epoch"]


def train_epoch(
    rank_runtime: RankRuntime, mesh: Mesh, program: CheckedProgram, order: Sequence[int], epoch: int
) -> float:
    """One epoch; its loss (mean over the train vertices, with dropout), on every rank."""
    results = rank_runtime.executor.run(program, order, epoch=epoch, training=True)
    loss = mesh.sum([sum(float(r["loss"]) for r in results.values())])[0]
    mesh.recorder.end_epoch()
    return loss


def results_by_chunk(rank_runtime: RankRuntime) -> dict[int, Values]:
    """What the model gives, exactly, for this rank's own rows by chunk; none before the last stage.

    ``x``: logits [C, classes]; of pairs their scores [P_c, 1], and the rows [C, d] as ``rows``.
    """
    executor = rank_runtime.executor
    order = range(executor.plan.chunks)
    # In inference mode what is made on the way and kept would be of no use to training.
    with torch.inference_mode(False), torch.no_grad():
        return executor.run(rank_runtime.evaluation, order, epoch=0, training=False)


def evaluate(rank_runtime: RankRuntime, mesh: Mesh) -> Scores:
    """Exact scores with the current weights, layer by layer, on every rank."""
    logits = {chunk: values["x"] for chunk, values in results_by_chunk(rank_runtime).items()}
    several = rank_runtime.is_multi_label
    if rank_runtime.metric in REGRESSION:
        counts = _sums(rank_runtime, mesh, logits, lambda _x, y, _: target_sums(y), 2)
        means = torch.from_numpy(counts[..., 1] / np.maximum(counts[..., 0], 1.0))
        totals = _sums(
            rank_runtime, mesh, logits, lambda x, y, part: error_sums(x, y, means[part]), 5
        )
        return Scores(
            *[math.nan] * PARTS, *(regression_score(part, rank_runtime.metric) for part in totals)
        )
    totals = _sums(rank_runtime, mesh, logits, lambda x, y, _: tally(x, y), 4)
    right = [accuracy(part, several) for part in totals]
    if rank_runtime.metric == "accuracy":
        return Scores(*right, *right)
    if rank_runtime.metric == "rocauc":
        return Scores(*right, *_areas(rank_runtime, mesh, logits))
    average = rank_runtime.metric.removeprefix("f1-")
    return Scores(*right, *(f1(part, several, average) for part in totals))


def _sums(
    rank_runtime: RankRuntime,
    mesh: Mesh,
    logits: dict[int, Tensor],
    sums_of: Callable[[Tensor, Tensor, int], Tensor],
    count: int,
) -> npt.NDArray[np.float64]:
    """[3, C, count] ``sums_of(logits, labels, part)`` of each part of the split, over all ranks."""
    width = rank_runtime.num_classes
    sums = torch.zeros(PARTS, width, count, dtype=torch.float64)
    for chunk, found in logits.items():
        for part in range(PARTS):
            chosen = rank_runtime.targets.masks[chunk][part].nonzero().squeeze(1)
            labels = rank_runtime.targets.labels[chunk][chosen]
            sums[part] += sums_of(found[chosen], labels, part).cpu()
    return np.array(mesh.sum(sums.flatten().tolist())).reshape(PARTS, width, count)


def _areas(rank_runtime: RankRuntime, mesh: Mesh, logits: dict[int, Tensor]) -> list[float]:
    """ROC AUC of the three parts, which rank 0 finds from the scores of all ranks."""
    mine = []
    for part in range(PARTS):
        stage_modules = []
        for chunk, found in logits.items():
            chosen = rank_runtime.targets.masks[chunk][part].nonzero().squeeze(1)
            stage_modules.append(margin(found[chosen], rank_runtime.targets.labels[chunk][chosen]))
        mine.append(stage_modules)
    everyone = mesh.collect(mine)
    areas = []
    for part in range(PARTS if mesh.rank == 0 else 0):
        stage_modules = [stage_module for of_rank in everyone for stage_module in of_rank[part]]
        scores, labels = (np.concatenate(column) for column in zip(*stage_modules, strict=True))
        areas.append(roc_auc(scores, labels) if len(scores) else math.nan)
    shared: list[float] = mesh.share(areas)
    return shared
