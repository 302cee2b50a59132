"""Fused row-wise work of normalisations over all vertices (C rows, F columns).

Mean and variance are single rows [1, F]. As separate calls, a dozen steps would each allocate
[C, F] in forward and again in backward; here both directions are one pass over blocks of rows, and
only x is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnpipe.capture.markers import recorded
from gnnpipe.ops.norm_relu_blocks import blocks_of


@recorded
def squares(x: Any, mean: Any) -> Any:
    """``(x - mean)^2`` [C, F]; mean [1, F] or [C, F]."""
    if not _is_one_row(x, mean):
        return (x - mean).square()
    return _Squares.apply(x, mean)  # type: ignore[no-untyped-call]


@recorded
def normalise(x: Any, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> Any:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` [C, F].

    Mean and variance are [1, F] or [C, F]; weight and bias [F], or both None.
    """
    if not _is_one_row(x, mean, variance):
        found = (x - mean) * torch.rsqrt(positive(variance) + eps)
        return found if weight is None else found * weight + bias
    return _Normalise.apply(x, mean, variance, weight, bias, eps)  # type: ignore[no-untyped-call]


def positive(variance: Any) -> Any:
    """The variance, at least 0; a forecast of the stale part may be negative."""
    return torch.clamp(variance, min=0.0)


def _is_one_row(x: Tensor, *given: Tensor) -> bool:
    """Whether each tensor is a single row [1, F] for x [C, F]."""
    return x.dim() == 2 and all(one.shape == (1, x.shape[1]) for one in given)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        row, out = mean[0], torch.empty_like(x)
        for block in blocks_of(x, x.shape[1]):
            torch.sub(x[block], row, out=out[block]).square_()
        ctx.save_for_backward(x, row)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, row = ctx.saved_tensors
        to_x, total = torch.empty_like(x), torch.zeros_like(row)
        for block in blocks_of(x, x.shape[1]):
            part = torch.sub(x[block], row, out=to_x[block]).mul_(grad[block]).mul_(2.0)
            total -= part.sum(0)
        return to_x, total[None]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        row, out = mean[0], torch.empty_like(x)
        root = torch.rsqrt(positive(variance[0]) + eps)
        scale = root if weight is None else root * weight
        for block in blocks_of(x, x.shape[1]):
            torch.sub(x[block], row, out=out[block]).mul_(scale)
            if bias is not None:
                out[block].add_(bias)
        ctx.save_for_backward(x, row, variance[0], root, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, row, variance, root, weight = ctx.saved_tensors
        scale = root if weight is None else root * weight
        to_x, total, with_rows = torch.empty_like(x), torch.zeros_like(row), torch.zeros_like(row)
        for block in blocks_of(x, x.shape[1]):
            part = grad[block]
            total += part.sum(0)
            with_rows += torch.sub(x[block], row, out=to_x[block]).mul_(part).sum(0)
            torch.mul(part, scale, out=to_x[block])
        # A negative variance is clamped and has no gradient.
        to_variance = with_rows * scale * root * root * -0.5 * (variance >= 0)
        return (
            to_x,
            (-total * scale)[None],
            to_variance[None],
            None if weight is None else with_rows * root,
            None if weight is None else total,
            None,
        )
