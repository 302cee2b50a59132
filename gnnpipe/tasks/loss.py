"""What the vertices are asked for: one class of C, T labels that apply or not, or T numbers.

The loss and the metric follow from the labels. OGB's conventions hold: a missing label (-1) takes
part in nothing, and ROC AUC is a mean over the labels that have both a positive and a negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnnpipe.data.labels import Labels, is_known
from gnnpipe.errors import InputError
from gnnpipe.graph.blocks import Blocks, EdgeData
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout

__all__ = [
    "ERRORS",
    "PARTS",
    "RARE",
    "REGRESSION",
    "Loss",
    "LossFn",
    "Targets",
    "check_loss",
    "choose_metric",
    "data_of_pairs",
    "has_both",
    "kept_by_loss",
    "labels_of",
    "loss_sum",
    "num_targets",
    "validation_labels",
]


PARTS = 3
"""Train, val and test."""


@dataclass(frozen=True, eq=False)
class Targets:
    """Of one rank, by chunk; R own vertices of a chunk, or pairs whose targets it owns."""

    labels: list[Tensor]
    """[R] classes, [R, T] labels or numbers, or [R, 1] whether an edge joins the pair."""
    masks: list[Tensor]
    """[3, R] bool: train, val, test."""
    are_pairs: bool

    @cached_property
    def to_train(self) -> list[tuple[Tensor, Tensor]]:
        """By chunk: numbers [r] of the rows that are trained on, and their labels."""
        rows = [mask[0].nonzero().squeeze(1) for mask in self.masks]
        return [(r, y[r]) for r, y in zip(rows, self.labels, strict=True)]

    @classmethod
    def of_vertices(
        cls, graph: Graph, layout: ShardLayout | None, dtype: torch.dtype, device: torch.device
    ) -> Targets:
        """Labels of a shard's vertices; none without a layout."""
        if layout is None:
            return cls([], [], False)
        pointer = zip(layout.own_ptr[:-1], layout.own_ptr[1:], strict=True)
        own = [layout.own[start:stop] for start, stop in pointer]
        split = np.stack([graph.train_mask, graph.val_mask, graph.test_mask])
        return cls(
            [labels_of(graph, part, dtype).to(device) for part in own],
            [torch.from_numpy(split[:, part]).to(device) for part in own],
            False,
        )

    @classmethod
    def of_pairs(cls, pairs: Blocks) -> Targets:
        """Of the pairs of a shard, in the order of its blocks."""
        data = [block.edge_data for block in pairs.chunks]
        return cls(
            [d["label"][:, None] for d in data],
            [torch.stack([d["part"] == i for i in range(PARTS)]) for d in data],
            True,
        )


def data_of_pairs(graph: Graph) -> EdgeData:
    """[P] int8 each, what blocks of pairs carry."""
    assert graph.pairs is not None
    return {
        "label": torch.from_numpy(graph.pairs.label),
        "part": torch.from_numpy(graph.pairs.part),
    }


@dataclass(frozen=True, eq=False)
class Loss:
    """A chunk's part of the loss, which is a mean over ``total`` answers."""

    targets: Targets
    loss_fn: LossFn | None
    """The user's own."""
    total: int
    loss_rows: Sequence[Tensor] | None = None
    """By chunk, numbers of the rows that the logits are of, ascending; None: of all."""

    @cached_property
    def _to_train(self) -> list[tuple[Tensor, Tensor]]:
        """By chunk: which logits are trained on, and their labels."""
        found = self.targets.to_train
        if self.loss_rows is None:
            return found
        pairs = zip(found, self.loss_rows, strict=True)
        return [(torch.searchsorted(made, rows), y) for (rows, y), made in pairs]

    def __call__(self, logits: Tensor, chunk: int) -> Tensor:
        """Of logits [R, C] of a chunk; a scalar."""
        chosen, y = self._to_train[chunk]
        found = logits.index_select(0, chosen)
        if self.loss_fn is None:
            return loss_sum(found, y) / self.total
        if not len(chosen):
            # Not every loss knows what to make of no rows.
            return logits.sum() * 0.0
        if self.targets.are_pairs:
            found, y = found.squeeze(1), y.squeeze(1).to(logits.dtype)
        loss = self.loss_fn(found, y) / self.total
        # A constant, of rows that the loss leaves out: the chunk still goes all the way back.
        return loss if loss.requires_grad or not logits.requires_grad else loss + logits.sum() * 0.0


LossFn = Callable[[Tensor, Tensor], Tensor]
"""Logits [R, C] and labels [R] (or [R, T]) of some training vertices to the sum of their losses; of
pairs scores [R] and labels [R] in the same number type, 1 or 0."""

ERRORS = ("mae", "rmse")
"""Metrics of which less is better."""

REGRESSION = ("r2", *ERRORS)
"""Metrics of numbers; all others are of classes or labels."""

RARE = 0.3
"""Share of the rarer of two classes below which accuracy says little: a model that never answers
with it looks good."""


def choose_metric(graph: Graph, wanted: str) -> str:
    """The metric of a graph: ``wanted``, or the one that befits the labels if that is 'auto'.

    Links: ROC AUC. Numbers: R2. Several labels: F1 (micro). Two classes of which one is rare: ROC
    AUC. Else accuracy.

    Raises:
        InputError: ROC AUC of more than two classes; a metric of numbers for classes, or the other
            way round.
    """
    if graph.pairs is not None:
        if wanted in REGRESSION:
            raise InputError(f"--metric {wanted}: links are there or not; try rocauc, f1-micro")
        return "rocauc" if wanted == "auto" else wanted
    if wanted != "auto" and graph.is_regression != (wanted in REGRESSION):
        fitting = ", ".join(REGRESSION) if graph.is_regression else "accuracy, f1-macro"
        raise InputError(
            f"--metric {wanted}: {graph.name} has {graph.label_text}; try one of {fitting}"
        )
    if graph.is_regression:
        return "r2" if wanted == "auto" else wanted
    if graph.is_multi_label:
        return "f1-micro" if wanted == "auto" else wanted
    if wanted == "rocauc" and graph.num_classes != 2:
        raise InputError(
            f"--metric rocauc: needs two classes or several labels at once, but {graph.name} has "
            f"{graph.num_classes} classes; try --metric f1-macro"
        )
    if wanted != "auto":
        return wanted
    if graph.num_classes == 2:
        counts = np.bincount(graph.y[graph.y >= 0], minlength=2)
        if counts.min() < RARE * counts.sum():
            return "rocauc"
    return "accuracy"


def has_both(y: Labels) -> bool:
    """Whether some label of y [R] or [R, T] has both a positive and a negative."""
    columns = y.reshape(len(y), -1)
    return bool(((columns == 1).any(axis=0) & (columns == 0).any(axis=0)).any())


def loss_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of logits [R, C] and classes [R], or binary cross entropy of [R, T] and [R, T].

    Of numbers [R, T] the squared error. Summed over what is labelled, a scalar.
    """
    if y.is_floating_point():
        known = ~y.isnan()
        return (logits[known] - y[known]).square().sum()
    if y.dim() == 1:
        return nn.functional.cross_entropy(logits, y, reduction="sum")
    return nn.functional.binary_cross_entropy_with_logits(
        logits, y.clamp(min=0).to(logits.dtype), weight=(y >= 0).to(logits.dtype), reduction="sum"
    )


def kept_by_loss(graph: Graph) -> int:
    """Numbers that ``loss_sum`` keeps of a row until backward; of pairs none."""
    if graph.pairs is not None:
        return 0
    # Of several labels the logits, the labels and which of them are known, as numbers.
    return graph.num_classes * (3 if graph.is_multi_label else 1)


def check_loss(loss_fn: LossFn, graph: Graph, dtype: torch.dtype) -> None:
    """``InputError`` unless a loss of the user's own is a sum over rows, as chunks need it."""
    if not callable(loss_fn):
        raise InputError(f"loss_fn: {loss_fn!r} is no function of logits and labels")
    generator = torch.Generator().manual_seed(0)
    if graph.pairs is not None:
        y = torch.tensor([1, 0, 0, 1, 0, 1], dtype=dtype)
        shape = [len(y)]
    else:
        y = labels_of(graph, np.flatnonzero(graph.train_mask)[:6], dtype)
        shape = [len(y), graph.num_classes]
    logits = torch.randn(shape, dtype=dtype, generator=generator)
    logits.requires_grad_(True)
    try:
        whole = loss_fn(logits, y)
    except Exception as error:
        raise InputError(f"loss_fn: fails on logits {list(logits.shape)}: {error}") from None
    if not isinstance(whole, Tensor) or whole.numel() != 1 or not whole.requires_grad:
        raise InputError("loss_fn: must return one number with a gradient; try reduction='sum'")
    if len(y) < 2:
        return
    parts = float(loss_fn(logits[:1], y[:1]).detach() + loss_fn(logits[1:], y[1:]).detach())
    if abs(parts - float(whole.detach())) > 1e-4 * abs(parts):
        raise InputError(
            f"loss_fn: of {len(y)} rows it is {float(whole.detach()):.4f}, of the same in two "
            f"parts {parts:.4f}; it must be a sum over rows: try reduction='sum'"
        )


def labels_of(graph: Graph, rows: Any, dtype: torch.dtype) -> Tensor:
    """Labels of some rows: classes int64, labels int8, or numbers in ``dtype``."""
    y = torch.from_numpy(graph.y[rows])
    return y.to(dtype) if y.is_floating_point() else y


def validation_labels(graph: Graph) -> Labels:
    """[R] or [R, T], what is to be answered rightly in the validation part."""
    found: Labels = graph.y[graph.val_mask]
    if graph.pairs is not None:
        found = graph.pairs.label[graph.pairs.part == 1]
    return found


def num_targets(graph: Graph) -> int:
    """How many answers the training part holds: what the loss is a mean over."""
    if graph.pairs is not None:
        return graph.pairs.counts[0]
    return int(is_known(graph.y[graph.train_mask]).sum())
