"""What is to be learned of each chunk, and the loss: labels of vertices, or of pairs.

Both are rows to whoever scores them: a chunk's logits or scores stand beside labels of as many rows
and a mask for each part of the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gnnpipe.graph.blocks import Blocks, EdgeData
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout
from gnnpipe.tasks.loss import LossFn, labels_of, loss_sum

__all__ = ["PARTS", "Answers", "Loss", "data_of_pairs"]

PARTS = 3
"""Train, val and test."""


@dataclass(frozen=True, eq=False)
class Answers:
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
    ) -> Answers:
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
    def of_pairs(cls, pairs: Blocks) -> Answers:
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
        "label": torch.from_numpy(graph.pairs.label), "part": torch.from_numpy(graph.pairs.part)
    }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Loss:
    """A chunk's part of the loss, which is a mean over ``total`` answers."""

    answers: Answers
    loss_fn: LossFn | None
    """The user's own."""
    total: int
    asked: Sequence[Tensor] | None = None
    """By chunk, numbers of the rows that the logits are of, ascending; None: of all."""

    @cached_property
    def _to_train(self) -> list[tuple[Tensor, Tensor]]:
        """By chunk: which logits are trained on, and their labels."""
        found = self.answers.to_train
        if self.asked is None:
            return found
        pairs = zip(found, self.asked, strict=True)
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
        if self.answers.are_pairs:
            found, y = found.squeeze(1), y.squeeze(1).to(logits.dtype)
        loss = self.loss_fn(found, y) / self.total
        # A constant, of rows that the loss leaves out: the chunk still goes all the way back.
        return loss if loss.requires_grad or not logits.requires_grad else loss + logits.sum() * 0.0
