"""LayerNorm, ReLU and dropout of a block of rows, forward and backward.

    y = mask * relu(LayerNorm(z)),  the mask holds 0 or 1 / (share of entries that are kept)

Backward reads no mask: dropped and negative entries are both 0 in y. On a CPU the rows are
processed in blocks that stay in a core's cache from the matrix product to the dropout
(docs/adr/0026-row-wise-work-in-blocks.md). On a GPU with Triton the three operations are one
kernel. R rows, r rows of a block, F columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gnnpipe.ops import triton
from gnnpipe.ops.hashed_dropout import Mask

_BLOCK_BYTES = 1 << 20
"""Size per thread of a block's result: block and inputs fit into a core's cache."""
_MIN_BLOCK_ROWS = 512
"""With fewer rows, adding up weight gradients [F, F] would cost as much as the products."""

NUM_SAVED = 6
"""Number of tensors that ``to_save`` returns."""


def rows_at_once(x: Tensor, width: int) -> int:
    """Return the rows of a block; on a GPU all rows, because kernel launches cost more there."""
    if x.device.type != "cpu":
        return max(len(x), 1)
    rows = max(_BLOCK_BYTES // (width * x.element_size()), _MIN_BLOCK_ROWS)
    return rows * torch.get_num_threads()


def blocks_of(x: Tensor, width: int) -> list[slice]:
    """Return the blocks of the rows of ``x``; one empty block if ``x`` has no rows."""
    step = rows_at_once(x, width)
    return [slice(start, start + step) for start in range(0, max(len(x), 1), step)]


def norm_relu_block(
    z: Tensor, y: Tensor, block: slice, scale: Tensor, shift: Tensor, eps: float, mask: Mask | None
) -> tuple[Tensor, Tensor]:
    """Fill a block of ``y`` [R, F] from ``z`` [R, F].

    The dropout factor is multiplied into scale and shift: c relu(x) = relu(c x) for c > 0.

    Returns:
        Mean and reciprocal standard deviation of the block's rows, [r, 1] each.
    """
    kept, factor = (None, 1.0) if mask is None else (mask.kept, mask.scale)
    if (kernels := _triton_kernels(z)) is not None:  # the block is all rows
        stats: tuple[Tensor, Tensor] = kernels.norm_relu_forward(
            z, scale, shift, eps, kept, factor, y
        )
        return stats
    if kept is not None:
        scale, shift = scale * factor, shift * factor
    rows, mean, rstd = torch.native_layer_norm(z[block], z.shape[-1:], scale, shift, eps)
    if kept is None:
        torch.clamp_min(rows, 0, out=y[block])
    else:
        torch.mul(rows.relu_(), kept[block], out=y[block])
    return mean, rstd


def to_save(
    scale: Tensor, shift: Tensor, z: Tensor, y: Tensor, stats: Sequence[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Return the tensors that ``NormReluBackward`` needs; ``stats``: results of each block."""
    mean, rstd = stats[0] if len(stats) == 1 else (torch.cat(s) for s in zip(*stats, strict=True))
    return [scale, shift, z, y, mean, rstd]


class NormReluBackward:
    """Gradients of z by block, and of the norm's scale and shift as sums over the blocks."""

    def __init__(self, saved: Sequence[Tensor], factor: float, wants: Sequence[bool]) -> None:
        """Prepare the backward pass.

        Args:
            saved: Tensors from ``to_save``.
            factor: ``Mask.scale`` of the dropout, 1 without dropout.
            wants: Whether the gradients of scale and shift are needed.
        """
        self._saved, self._factor, self._wants = saved, factor, list(wants)
        self._to_weights: list[Tensor | None] = [None, None]
        self._column_sums: Tensor | None = None

    def rows(self, grad: Tensor, block: slice, out: Tensor | None = None) -> Tensor:
        """Return the gradient [r, F] of a block of z, from ``grad`` [R, F] of y.

        ``out`` [r, F]: memory for the result; it may be the block of z.
        """
        scale, shift, z, y, mean, rstd = self._saved
        found: Tensor
        if (kernels := _triton_kernels(z)) is not None:  # the block is all rows
            found, sums = kernels.norm_relu_backward(grad, self._saved, self._factor, out)
            *to_weights, self._column_sums = sums.unbind()
            self._to_weights = [
                one if wants else None for one, wants in zip(to_weights, self._wants, strict=True)
            ]
            return found
        found, *parts = torch.ops.aten.native_layer_norm_backward(
            torch.ops.aten.threshold_backward(grad[block], y[block], 0),
            z[block],
            z.shape[-1:],
            mean[block],
            rstd[block],
            scale if self._factor == 1.0 else scale * self._factor,
            shift,
            [True, *self._wants],
        )
        if out is not None:
            out.copy_(found)
        self._to_weights = [
            add_optional(a, b) for a, b in zip(self._to_weights, parts, strict=True)
        ]
        return found

    def column_sums(self, rows: Tensor) -> Tensor:
        """Return the sums [F] of ``rows``, the last result of ``rows``: the gradient of a bias."""
        return rows.sum(0) if self._column_sums is None else self._column_sums

    def weights(self) -> list[Tensor | None]:
        """Return the gradients of scale and shift, after the last block."""
        if self._factor == 1.0 or self._column_sums is not None:
            return self._to_weights
        return [None if one is None else one.mul_(self._factor) for one in self._to_weights]


def add_optional(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return ``total + part``, computed in ``total``; ``None`` counts as 0."""
    return part if total is None or part is None else total.add_(part)


def _triton_kernels(rows: Tensor) -> ModuleType | None:
    """Return ``gnnpipe.ops.triton.norm_relu`` if its kernels can process these rows."""
    if not triton.works_on(rows.device):
        return None
    kernels = importlib.import_module("gnnpipe.ops.triton.norm_relu")
    return kernels if rows.shape[1] <= kernels.MAX_WIDTH and rows.is_contiguous() else None
