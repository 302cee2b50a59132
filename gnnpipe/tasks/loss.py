"""Targets, the loss and the choice of the metric.

A vertex has one class of C, T binary labels, or T numbers; a pair of vertices has a binary label.
Loss and metric follow from the kind of the labels. As in OGB, missing labels (-1, NaN) are ignored,
and ROC AUC is a mean over the labels that have both a positive and a negative.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gnnpipe.data.labels import Labels, is_known
from gnnpipe.errors import InputError
from gnnpipe.graph.blocks import Blocks, EdgeData
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.ops.hashed_dropout import drawn_labels
from gnnpipe.tasks.scoring import is_ranking, ranks_links

PARTS = 3
"""Train, val and test."""


@dataclass(frozen=True, eq=False)
class Targets:
    """Labels and split of one rank, by chunk; R own vertices, or pairs whose target is own."""

    labels: list[Tensor]
    """[R] classes, [R, T] labels or numbers, or [R, 1] for pairs: 1 if an edge joins the pair."""
    masks: list[Tensor]
    """[3, R] bool: train, val, test."""
    are_pairs: bool
    has_labels: bool = True

    def of_part(self, chunk: int, part: int) -> tuple[Tensor, Tensor]:
        """Returns the rows [r] of a part of the split (0: train), as indices, and their labels."""
        rows = self.masks[chunk][part].nonzero().squeeze(1)
        return rows, self.labels[chunk][rows]

    @classmethod
    def of_vertices(
        cls, graph: Graph, layout: ShardLayout | None, dtype: torch.dtype, device: torch.device
    ) -> Targets:
        """Returns the targets of a shard's vertices; empty without a layout."""
        if layout is None:
            return cls([], [], False, has_labels(graph))
        pointer = zip(layout.own_ptr[:-1], layout.own_ptr[1:], strict=True)
        own = [layout.own[start:stop] for start, stop in pointer]
        split = np.stack([graph.train_mask, graph.val_mask, graph.test_mask])
        return cls(
            [labels_of(graph, part, dtype).to(device) for part in own],
            [torch.from_numpy(split[:, part]).to(device) for part in own],
            False,
            has_labels(graph),
        )

    @classmethod
    def of_pairs(cls, pairs: Blocks) -> Targets:
        """Returns the targets of a shard's pairs, in the order of its blocks."""
        data = [block.edge_data for block in pairs.chunks]
        return cls(
            [d["label"][:, None] for d in data],
            [torch.stack([d["part"] == i for i in range(PARTS)]) for d in data],
            True,
        )


def data_of_pairs(graph: Graph) -> EdgeData:
    """Returns label and part of the split of every pair, [P] int8 each."""
    assert graph.pairs is not None
    return {
        "label": torch.from_numpy(graph.pairs.label),
        "part": torch.from_numpy(graph.pairs.part),
    }


@dataclass(eq=False)
class TrainedLabels:
    """Training labels that are trained on in an epoch, because they are not inputs.

    T training vertices of the whole graph; r own ones of a chunk, in the order of ``Targets``.
    """

    share: float
    """Probability that a label is an input in an epoch."""
    seed: int
    keys: Sequence[Tensor]
    """By chunk [r] int32, dropout keys of the own training vertices."""
    all_keys: Tensor
    """[T] int32"""
    counts: Tensor
    """[T], number of known labels of each vertex."""
    _total: tuple[int, int] = (-1, 0)
    """An epoch and its total."""

    def rows(self, chunk: int, epoch: int) -> Tensor:
        """Returns which of a chunk's training vertices are trained on, as indices [r']."""
        is_input = drawn_labels(self.keys[chunk], self.share, self.seed, epoch)
        return (~is_input).nonzero().squeeze(1)

    def total(self, epoch: int) -> int:
        """Returns the number of labels trained on by all chunks and shards, at least 1."""
        if self._total[0] != epoch:
            is_input = drawn_labels(self.all_keys, self.share, self.seed, epoch)
            self._total = epoch, int(self.counts[~is_input].sum())
        return max(self._total[1], 1)


@dataclass(frozen=True, eq=False)
class Loss:
    """A chunk's part of the loss: the sum over its training labels, divided by their number.

    Without labels: the sum over the training vertices.
    """

    targets: Targets
    loss_fn: LossFn | None
    """The user's own loss."""
    by_chunk: Sequence[int]
    """Training labels, or without labels training vertices, of each chunk on all ranks."""
    loss_rows: Sequence[Tensor] | None = None
    """Rows of each chunk that the logits belong to, ascending; ``None``: all rows."""

    @cached_property
    def total(self) -> int:
        """Number of training labels, or of training vertices without labels, of all chunks."""
        return sum(self.by_chunk)

    def step_scale(self, chunks: Sequence[int]) -> float:
        """Returns the factor that makes the sum of these chunks' losses a mean over their labels.

        It is 1 for all chunks, and for chunks without training labels.
        """
        count = sum(self.by_chunk[chunk] for chunk in chunks)
        return self.total / count if count else 1.0

    @cached_property
    def _to_train(self) -> list[tuple[Tensor, Tensor]]:
        """Logits of each chunk that are trained on, as indices, and their labels."""
        found = [self.targets.of_part(chunk, 0) for chunk in range(len(self.targets.masks))]
        if self.loss_rows is None:
            return found
        pairs = zip(found, self.loss_rows, strict=True)
        return [(torch.searchsorted(made, rows), y) for (rows, y), made in pairs]

    vertices: Sequence[Tensor] = ()
    """Number of each own vertex in the graph as given, by chunk, if ``loss_fn`` takes them."""
    trained: TrainedLabels | None = None
    """The labels that are trained on in each epoch; ``None``: all training labels."""

    def __call__(self, logits: Tensor, chunk: int, epoch: int) -> Tensor:
        """Returns the loss of a chunk's logits [R, C] in an epoch (from 0), a scalar."""
        chosen, y = self._to_train[chunk]
        total, some = self.total, None
        if self.trained is not None:
            total, some = self.trained.total(epoch), self.trained.rows(chunk, epoch)
            chosen, y = chosen[some], y[some]
        found = logits.index_select(0, chosen)
        if self.loss_fn is None:
            return loss_sum(found, y) / total
        if not len(chosen):
            # A user's loss may fail for an empty batch.
            return logits.sum() * 0.0
        if self.targets.are_pairs:
            found, y = found.squeeze(1), y.squeeze(1)
        vertices = None
        if self.vertices:
            vertices = self.vertices[chunk][self.targets.of_part(chunk, 0)[0]]
            vertices = vertices if some is None else vertices[some]
        labels = [_labels_for_user(y, logits.dtype)] if self.targets.has_labels else []
        loss = self.loss_fn(found, *labels, **wanted_by(self.loss_fn, vertices, epoch)) / total
        # A loss that ignores all rows is a constant; backward of the chunk still needs a graph.
        return loss if loss.requires_grad or not logits.requires_grad else loss + logits.sum() * 0.0


LossFn = Callable[..., Tensor]
"""Maps logits [R, C] and classes [R] (int64) of training vertices to the sum of their losses.
Several labels or numbers [R, T] have the type of the logits, NaN where missing; for pairs scores
[R] and labels [R] (1 or 0) of the same number type. Without labels, maps the rows [R, d] alone.

A function with parameters of these names also gets ``vertices`` [R] int64, the numbers of the
vertices in the graph as given (within their type), and ``epoch``, the number of the epoch from 0.
"""


def takes(loss_fn: LossFn, name: str) -> bool:
    """Returns whether a loss has a parameter ``name``."""
    try:
        return name in inspect.signature(loss_fn).parameters
    except ValueError:  # a function that is not written in Python
        return False


def wanted_by(loss_fn: LossFn, vertices: Tensor | None, epoch: int) -> dict[str, Any]:
    """Returns the further arguments of a loss, by name."""
    given = {"vertices": vertices, "epoch": epoch}
    return {name: value for name, value in given.items() if takes(loss_fn, name)}


ERRORS = ("mae", "rmse")
"""Metrics for which smaller is better."""

REGRESSION = ("r2", *ERRORS)
"""Metrics of numbers; all other metrics are of classes or labels."""

RARE = 0.3
"""If the smaller of two classes has a smaller share than this, the metric is ROC AUC: accuracy
would be high for a model that never predicts that class."""


def choose_metric(graph: Graph, wanted: str) -> str:
    """Returns ``wanted``, or for 'auto' the metric that fits the labels.

    'auto' is ROC AUC for links and for two classes of which one is rare, R2 for numbers, micro F1
    for several labels, else accuracy.

    Raises:
        InputError: A ranking metric for more than two classes; a metric of pairs for vertices; a
            metric of numbers for classes, or of classes for numbers.
    """
    if graph.pairs is not None:
        if wanted in REGRESSION:
            raise InputError(f"--metric {wanted}: links are there or not; try rocauc, mrr")
        return "rocauc" if wanted == "auto" else wanted
    if ranks_links(wanted):
        raise InputError(f"--metric {wanted}: ranks pairs of vertices; try --task links, or rocauc")
    if not has_labels(graph):
        return "accuracy" if wanted == "auto" else wanted  # nothing can be evaluated
    if wanted != "auto" and graph.is_regression != (wanted in REGRESSION):
        fitting = ", ".join(REGRESSION) if graph.is_regression else "accuracy, f1-macro"
        raise InputError(
            f"--metric {wanted}: {graph.name} has {graph.label_text}; try one of {fitting}"
        )
    if graph.is_regression:
        return "r2" if wanted == "auto" else wanted
    if graph.is_multi_label:
        return "f1-micro" if wanted == "auto" else wanted
    if is_ranking(wanted) and graph.num_classes != 2:
        raise InputError(
            f"--metric {wanted}: needs two classes or several labels at once, but {graph.name} has "
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
    """Whether any label of y, [R] or [R, T], has both a positive and a negative."""
    columns = y.reshape(len(y), -1)
    return bool(((columns == 1).any(axis=0) & (columns == 0).any(axis=0)).any())


def loss_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Returns the loss summed over the known labels, a scalar.

    Cross entropy for classes y [R] and logits [R, C], binary cross entropy for labels y [R, T],
    squared error for numbers y [R, T].
    """
    if y.is_floating_point():
        known = ~y.isnan()
        return (logits[known] - y[known]).square().sum()
    if y.dim() == 1:
        return nn.functional.cross_entropy(logits, y, reduction="sum", ignore_index=-1)
    return nn.functional.binary_cross_entropy_with_logits(
        logits, y.clamp(min=0).to(logits.dtype), weight=(y >= 0).to(logits.dtype), reduction="sum"
    )


def kept_by_loss(graph: Graph, width: int) -> int:
    """Numbers per row of this width that ``loss_sum`` keeps until backward; 0 for pairs."""
    if graph.pairs is not None:
        return 0
    # For several labels: the logits, the labels and the mask of known labels.
    return width * (3 if graph.is_multi_label else 1)


def check_loss(loss_fn: LossFn, graph: Graph, width: int, dtype: torch.dtype) -> None:
    """``InputError`` unless the user's loss is a sum over rows, so that chunks can be added.

    ``width``: numbers of a row that the model returns; 0: not known, and nothing is tried.
    """
    if not callable(loss_fn):
        raise InputError(f"loss_fn: {loss_fn!r} is not a function of logits and labels")
    if graph.pairs is not None and takes(loss_fn, "vertices"):
        raise InputError("loss_fn: takes 'vertices', but scores are of pairs of vertices")
    if not width:
        return
    rows, y, vertices = _tried_rows(graph, width, dtype)

    def loss_of(part: slice) -> Any:
        some = None if vertices is None else vertices[part]
        labels = [] if y is None else [y[part]]
        return loss_fn(rows[part], *labels, **wanted_by(loss_fn, some, 0))

    try:
        whole = loss_of(slice(None))
    except Exception as error:
        shape = list(rows.shape)
        what = f"logits {shape}, a logit for each class: {error}"
        if y is None:
            what = f"rows {shape}; {graph.name!r} has no labels, so it is called as (rows): {error}"
        raise InputError(f"loss_fn: fails on {what}") from None
    if not isinstance(whole, Tensor) or whole.numel() != 1 or not whole.requires_grad:
        raise InputError("loss_fn: must return one number with a gradient; try reduction='sum'")
    is_any_missing = y is not None and y.is_floating_point() and bool(y.isnan().any())
    if is_any_missing and not bool(whole.isfinite().all()):
        raise InputError(
            f"loss_fn: returns {float(whole.detach())} where labels are missing (NaN); "
            "leave them out: known = ~y.isnan()"
        )
    if len(rows) < 2:
        return
    parts = float(loss_of(slice(1)).detach() + loss_of(slice(1, None)).detach())
    if abs(parts - float(whole.detach())) > 1e-4 * abs(parts):
        raise InputError(
            f"loss_fn: returns {float(whole.detach()):.4f} for {len(rows)} rows, but {parts:.4f} "
            "for the same rows in two parts; it must be a sum over rows: try reduction='sum'"
        )


def _tried_rows(
    graph: Graph, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns random rows for a user's loss, with labels and numbers of vertices of the graph.

    Without labels the numbers are in 0..1, because the rows may be probabilities.
    """
    generator = torch.Generator().manual_seed(0)
    if graph.pairs is not None:
        y = torch.tensor([1, 0, 0, 1, 0, 1], dtype=dtype)
        rows = torch.randn(len(y), dtype=dtype, generator=generator)
        return rows.requires_grad_(True), y, None
    train = np.flatnonzero(graph.train_mask)
    known = is_known(graph.y[train]).reshape(len(train), -1)
    # Rows with missing labels first, for losses that do not mask them.
    chosen = train[np.sort(np.argsort(known.all(axis=1), kind="stable")[:6])]
    number = np.arange(graph.num_vertices) if graph.types is None else graph.types.number
    vertices = torch.from_numpy(number[chosen])
    if not has_labels(graph):
        rows = torch.rand(len(chosen), width, dtype=dtype, generator=generator)
        return rows.requires_grad_(True), None, vertices
    rows = torch.randn(len(chosen), width, dtype=dtype, generator=generator)
    return (
        rows.requires_grad_(True),
        _labels_for_user(labels_of(graph, chosen, dtype), dtype),
        vertices,
    )


def _labels_for_user(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns labels of 0 and 1 (int8) as numbers, NaN for -1 (as in OGB); others unchanged."""
    return y.to(dtype).masked_fill_(y < 0, math.nan) if y.dtype == torch.int8 else y


def labels_of(graph: Graph, rows: Any, dtype: torch.dtype) -> Tensor:
    """Returns the labels of some rows: classes int64, labels int8, or numbers in ``dtype``."""
    y = torch.from_numpy(graph.y[rows])
    return y.to(dtype) if y.is_floating_point() else y


def validation_labels(graph: Graph) -> Labels:
    """Returns the labels of the validation part, [R] or [R, T]."""
    found: Labels = graph.y[graph.val_mask]
    if graph.pairs is not None:
        found = graph.pairs.label[graph.pairs.part == 1]
    return found


def has_labels(graph: Graph) -> bool:
    """Returns whether anything can be scored: some vertex has a label, or pairs are predicted."""
    return graph.pairs is not None or bool(is_known(graph.y).any())


def targets_by_chunk(graph: Graph, chunk_of_row: npt.NDArray[np.int32]) -> list[int]:
    """Returns the number of known training labels of each chunk; the loss is divided by their sum.

    For a graph without labels: the number of training vertices. A pair is in its target's chunk.

    ``chunk_of_row`` [N], ascending.
    """
    chunks = int(chunk_of_row[-1]) + 1
    if graph.pairs is not None:
        chunk_of_row = chunk_of_row[graph.pairs.ends[1]]
        counts = (graph.pairs.part == 0).astype(np.int64)
    elif has_labels(graph):
        counts = known_labels(graph.y) * graph.train_mask
    else:
        counts = graph.train_mask.astype(np.int64)
    found: list[int] = np.bincount(chunk_of_row, counts, chunks).astype(np.int64).tolist()
    return found


def known_labels(y: Labels) -> npt.NDArray[np.int64]:
    """Returns the number of known labels of each vertex, [R], for y [R] or [R, T]."""
    return np.asarray(is_known(y).reshape(len(y), math.prod(y.shape[1:])).sum(axis=1))
