"""Functions that generated steps call for markers and inputs, on the C rows of a chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnpipe.capture.markers import drop, in_training, of_vertices
from gnnpipe.graph.blocks import Block
from gnnpipe.models.layer import Rows


def edge_data_of(block: Block, name: str) -> Tensor:
    """Edge features or weights of a block [E, ...]."""
    return block.edge_data[name]


def dense_features(rows: Rows) -> Tensor:
    """Features of the rows [C, F]."""
    assert rows.features is not None
    return rows.features.dense()


def _drop(rows: Rows, x: Tensor, probability: float, site: int) -> Tensor:
    return rows.dropout(x.flatten(1), probability, site).reshape(x.shape)


def _in_training(rows: Rows, now: Tensor, kept: Tensor) -> Tensor:
    return now if rows.training or rows.is_probe else kept.to(now.dtype).expand_as(now)


class _RowsOfWeight(torch.autograd.Function):
    """Rows of a weight. The backward of torch would allocate all N rows for every chunk."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.weight, ctx.rows = weight, rows
        return weight.detach()[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        if ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(ctx.weight)
        ctx.weight.grad.index_add_(0, ctx.rows, grad)
        return None, None


def _of_vertices(rows: Rows, weight: Tensor) -> Tensor:
    assert rows.vertices is not None
    found: Tensor = _RowsOfWeight.apply(weight, rows.vertices)  # type: ignore[no-untyped-call]
    return found


OF_ROWS = {drop: _drop, in_training: _in_training, of_vertices: _of_vertices}
"""Implementations of the markers that take the chunk's ``Rows`` as first argument."""


def first_row(mean: Tensor) -> Tensor:
    """The first row, [1, ...], of rows that are all equal."""
    return mean[:1]


def for_all(mean: Tensor, rows: Rows) -> Tensor:
    """A single row [1, ...] expanded to all rows [C, ...]."""
    return mean.expand(len(rows.keys), *mean.shape[1:])


def flattened(x: Tensor) -> Tensor:
    """Rows [C, ...] as they are pushed or sent, [C, F]."""
    return x.flatten(1)


def shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows [C, F] in the shape that the model uses, [C, ...]."""
    return x.reshape(len(x), *shape)
