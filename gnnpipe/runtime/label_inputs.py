"""Labels that are inputs: writes the label columns of one rank's features before every pass.

In a training epoch the labels of some training vertices, drawn at random, are inputs; in evaluation
the labels of all training vertices are. The columns of all other vertices are 0, or with label
iterations the predictions of the pass before (arXiv 2103.13355, label reuse).

Shapes: n rows of a table, C classes or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpipe.ops.hashed_dropout import drawn_labels
from gnnpipe.schedule import CheckedProgram


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Rows of features with label columns."""

    columns: Tensor
    """[n, C], the columns, written in place."""
    labels: Tensor
    """[n, C] int8, the labels of training vertices; 0 for others."""
    is_train: Tensor
    """[n] bool, whether a row has a training label."""
    keys: Tensor
    """[n] int32, dropout keys of the vertices."""
    places: Tensor | None = None
    """[n] int64, the rows among all own rows of the shard; ``None``: all own rows."""


@dataclass(frozen=True)
class LabelIterations:
    """Passes that predict label inputs before a pass of training or evaluation."""

    count: int
    """Number of passes."""
    program: CheckedProgram
    """An exact forward pass."""
    vertex_type: str
    """Type of the vertices with labels."""
    width: int
    """Number of columns: C classes, or T labels."""
    is_multi_label: bool
    """Whether each of T labels has a probability of its own."""
    readers: Sequence[int]
    """Stages that read features."""

    def dropout_epoch(self, epoch: int, number: int) -> int:
        """Returns the number that keys dropout and random edges of a pass in training.

        Epochs have numbers from 0, and the edges of evaluation have -1.
        """
        return -2 - (epoch * self.count + number)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probabilities [n, C] of logits [n, C]."""
        return logits.sigmoid() if self.is_multi_label else logits.softmax(-1)


class LabelInputs:
    """The label columns of one rank; without tables on a stage that reads no features."""

    def __init__(
        self,
        share: float,
        seed: int,
        tables: Sequence[LabelTable],
        iterations: LabelIterations | None,
    ) -> None:
        """``share``: probability that a training label is an input in an epoch."""
        self._share, self._seed, self._tables = share, seed, list(tables)
        self.iterations = iterations
        self._has_input: list[Tensor] = []
        """By table [n] bool: the label of the row is an input in this pass."""

    def begin(self, epoch: int | None) -> None:
        """Writes the labels of a training epoch (from 0); ``None``: of evaluation."""
        self._has_input = [self._inputs(table, epoch) for table in self._tables]
        for table, has_input in zip(self._tables, self._has_input, strict=True):
            table.columns.copy_(table.labels * has_input[:, None])

    def _inputs(self, table: LabelTable, epoch: int | None) -> Tensor:
        if epoch is None:
            return table.is_train
        return table.is_train & drawn_labels(table.keys, self._share, self._seed, epoch)

    def write(self, predicted: Tensor) -> None:
        """Writes predictions [n, C] of all own rows of the shard where no label is an input."""
        for table, has_input in zip(self._tables, self._has_input, strict=True):
            rows = predicted if table.places is None else predicted[table.places]
            table.columns.copy_(torch.where(has_input[:, None], table.columns, rows))
