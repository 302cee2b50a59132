"""Trains the epochs up to a flush; evaluates a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.models import Values
from gnnpipe.run.predictions import Part
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.memory_use import held_memory
from gnnpipe.schedule import CheckedProgram
from gnnpipe.setup.build import RankRuntime
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.loss import PARTS, REGRESSION
from gnnpipe.tasks.scoring import (
    Scores,
    accuracy,
    error_sums,
    f1,
    is_ranking,
    margin,
    ranking_score,
    regression_score,
    tally,
    target_sums,
)


def train_epoch(
    rank_runtime: RankRuntime, mesh: Mesh, program: CheckedProgram, order: Sequence[int], epoch: int
) -> float:
    """Trains one epoch; returns the mean loss over the training labels, on every rank."""
    return train_epochs(rank_runtime, mesh, program, order, epoch)[-1]


def train_epochs(
    rank_runtime: RankRuntime,
    mesh: Mesh,
    program: CheckedProgram,
    order: Sequence[int],
    epoch: int,
    epoch_end: Callable[[], None] | None = None,
) -> list[float]:
    """Trains the epochs of a program; returns the mean loss of each, on every rank.

    Args:
        rank_runtime: This rank's part.
        mesh: The ranks.
        program: The program, which ends with a flush.
        order: The chunk of every pass.
        epoch: Number of the first epoch.
        epoch_end: Called at the end of each epoch but the last, when this stage has stepped.
    """
    results = rank_runtime.executor.run(
        program, order, epoch=epoch, training=True, epoch_end=epoch_end
    )
    losses = [0.0] * program.epochs
    for position, found in results.items():
        losses[position // program.chunks] += float(found["loss"])
    losses = mesh.sum(losses)
    mesh.recorder.end_epoch()
    return losses


def results_by_chunk(rank_runtime: RankRuntime) -> dict[int, Values]:
    """Computes exact outputs of this rank's own rows by chunk; empty before the last stage.

    ``x``: logits [C, classes], or scores [P_c, 1] of pairs with the final rows [C, d] as ``rows``.
    """
    executor = rank_runtime.executor
    order = range(executor.num_chunks)
    # Tensors cached in inference mode could not be used in training.
    with torch.inference_mode(False), torch.no_grad():
        return executor.run(rank_runtime.evaluation, order, epoch=0, training=False)


def evaluate(rank_runtime: RankRuntime, mesh: Mesh) -> Scores:
    """Returns exact scores with the current weights, on every rank; NaN without labels."""
    if not rank_runtime.targets.has_labels:
        return Scores(*[math.nan] * (2 * PARTS))
    logits = {chunk: values["x"] for chunk, values in results_by_chunk(rank_runtime).items()}
    metric, is_multi_label = rank_runtime.metric, rank_runtime.is_multi_label
    if metric in REGRESSION:
        counts = _sums(rank_runtime, mesh, logits, lambda _x, y, _: target_sums(y), 2)
        means = torch.from_numpy(counts[..., 1] / np.maximum(counts[..., 0], 1.0))
        totals = _sums(
            rank_runtime, mesh, logits, lambda x, y, part: error_sums(x, y, means[part]), 5
        )
        return Scores(*[math.nan] * PARTS, *(regression_score(part, metric) for part in totals))
    totals = _sums(rank_runtime, mesh, logits, lambda x, y, _: tally(x, y), 4)
    accuracies = [accuracy(part, is_multi_label) for part in totals]
    if metric == "accuracy":
        return Scores(*accuracies, *accuracies)
    if is_ranking(metric):
        return Scores(*accuracies, *_ranking_scores(rank_runtime, mesh, logits))
    average = metric.removeprefix("f1-")
    return Scores(*accuracies, *(f1(part, is_multi_label, average) for part in totals))


def _sums(
    rank_runtime: RankRuntime,
    mesh: Mesh,
    logits: dict[int, Tensor],
    sums_of: Callable[[Tensor, Tensor, int], Tensor],
    count: int,
) -> npt.NDArray[np.float64]:
    """Sums ``sums_of(logits, labels, part)`` over all ranks, for each part: [3, C, count]."""
    width = rank_runtime.num_classes
    sums = torch.zeros(PARTS, width, count, dtype=torch.float64)
    for chunk, found in logits.items():
        for part in range(PARTS):
            rows, labels = rank_runtime.targets.of_part(chunk, part)
            sums[part] += sums_of(found[rows], labels, part).cpu()
    return np.array(mesh.sum(sums.flatten().tolist())).reshape(PARTS, width, count)


def _ranking_scores(
    rank_runtime: RankRuntime, mesh: Mesh, logits: dict[int, Tensor]
) -> list[float]:
    """Returns the metric of each part; rank 0 computes them from the scores of all ranks."""
    own: list[list[tuple[npt.NDArray[Any], npt.NDArray[np.int8]]]] = [[] for _ in range(PARTS)]
    for part in range(PARTS):
        for chunk, found in logits.items():
            rows, labels = rank_runtime.targets.of_part(chunk, part)
            own[part].append(margin(found[rows], labels))
    by_rank = mesh.collect(own)
    computed = []
    for part in range(PARTS if mesh.rank == 0 else 0):
        pairs = [pair for of_rank in by_rank for pair in of_rank[part]]
        scores, truth = (np.concatenate(column) for column in zip(*pairs, strict=True))
        computed.append(ranking_score(scores, truth, rank_runtime.metric))
    shared: list[float] = mesh.share(computed)
    return shared


def predicted_rows(prepared: Prepared, rank_runtime: RankRuntime) -> list[Part]:
    """Computes this rank's rows by chunk; their numbers are those of the given graph."""
    with held_memory(rank_runtime.executor.mesh.device):
        results = results_by_chunk(rank_runtime)
    layout, graph = rank_runtime.target, prepared.graph
    number = prepared.chunking.perm if graph.types is None else graph.types.number
    found = []
    for chunk, values in results.items():
        own = layout.own[layout.own_ptr[chunk] : layout.own_ptr[chunk + 1]]
        found.append((number[own], values.get("rows", values["x"]).cpu().numpy()))
    return found
