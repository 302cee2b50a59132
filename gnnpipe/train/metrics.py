"""How good the model is: accuracy on the three parts of the split, and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gnnpipe.runtime.mesh import Mesh
from gnnpipe.schedule import Program
from gnnpipe.train.assemble import Assembly

__all__ = ["Scores", "evaluate", "logits_by_chunk", "train_epoch"]


@dataclass(frozen=True)
class Scores:
    """Share of the vertices of each part that are classified rightly; NaN for an empty part."""

    train_acc: float
    val_acc: float
    test_acc: float


def train_epoch(
    assembly: Assembly, mesh: Mesh, program: Program, order: Sequence[int], epoch: int
) -> float:
    """One epoch; its loss (mean over the train vertices, with dropout), on every rank."""
    results = assembly.executor.run(program, order, epoch=epoch, training=True)
    return mesh.sum([sum(float(r["loss"]) for r in results.values())])[0]


def logits_by_chunk(assembly: Assembly) -> dict[int, Tensor]:
    """Exact logits [C, classes] of this rank's own rows by chunk; empty before the last stage."""
    executor = assembly.executor
    order = range(executor.plan.chunks)
    results = executor.run(assembly.evaluation, order, epoch=0, training=False)
    return {chunk: values["x"] for chunk, values in results.items()}


def evaluate(assembly: Assembly, mesh: Mesh) -> Scores:
    """Exact accuracies with the current weights, layer by layer, on every rank."""
    counts = [0.0] * 6
    for chunk, logits in logits_by_chunk(assembly).items():
        right = logits.argmax(1) == assembly.labels[chunk]
        masks = assembly.masks[chunk]
        for i in range(3):
            counts[i] += float((right & masks[i]).sum())
            counts[3 + i] += float(masks[i].sum())
    totals = mesh.sum(counts)
    pairs = zip(totals[:3], totals[3:], strict=True)
    return Scores(*(a / b if b else float("nan") for a, b in pairs))
