"""What ends the row-wise work of a layer: LayerNorm, ReLU and dropout, of a block of rows.

Backward is one pass: what was dropped and what the ReLU cut off are both 0 in the result, so the
mask is not needed again. Of many rows every pass would go through memory, and every temporary be
taken from the system anew; so rows are walked in blocks that stay in a core's cache from the
product to the dropout (docs/adr/0026-row-wise-work-in-blocks.md). R rows, r of a block, F columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gnnpipe.ops import triton
from gnnpipe.ops.hashed_dropout import Mask

__all__ = ["KEPT", "Tail", "TailBackward", "blocks_of", "keep", "plus", "rows_at_once"]

_norm_backward = torch.ops.aten.native_layer_norm_backward
_relu_backward = torch.ops.aten.threshold_backward

_AT_ONCE, _LEAST = 1 << 20, 512
"""Bytes of a block's rows at the width of the result, a thread's share, that stay near the core
with what they are made of; and rows, for the sums of a weight's gradient are as wide as it is."""


def rows_at_once(x: Tensor, width: int) -> int:
    """Rows of a block; on a GPU all of them, for there the calls would cost more than is won."""
    if x.device.type != "cpu":
        return max(len(x), 1)
    return max(_AT_ONCE // (width * x.element_size()), _LEAST) * torch.get_num_threads()


def blocks_of(x: Tensor, width: int) -> list[slice]:
    """Of the rows of ``x``; one of them even where there are none."""
    step = rows_at_once(x, width)
    return [slice(start, start + step) for start in range(0, max(len(x), 1), step)]


def _kernels(rows: Tensor) -> ModuleType | None:
    """``gnnpipe.ops.triton.norm_relu``, if it is for these rows."""
    if not triton.works_on(rows.device):
        return None
    tails = importlib.import_module("gnnpipe.ops.triton.norm_relu")
    return tails if rows.shape[1] <= tails.WIDEST and rows.is_contiguous() else None


class Tail:
    """LayerNorm, ReLU and dropout of a block.

    What is kept is scaled through the norm's weights: the ReLU does not mind a positive factor.
    """

    def __init__(self, scale: Tensor, shift: Tensor, eps: float, mask: Mask | None) -> None:
        self.factor = 1.0 if mask is None else mask.scale
        self._scale, self._shift, self._eps = scale, shift, eps
        self._scaled: tuple[Tensor, Tensor] | None = None
        self._kept = None if mask is None else mask.kept

    def forward(self, total: Tensor, out: Tensor, block: slice) -> tuple[Tensor, Tensor]:
        """Fill the block of ``out``; mean and reciprocal deviation [r, 1] of its rows."""
        if (tails := _kernels(total)) is not None:  # the block is all rows
            found: tuple[Tensor, Tensor] = tails.tail_forward(
                total, self._scale, self._shift, self._eps, self._kept, self.factor, out
            )
            return found
        if self._scaled is None:
            plain = self._scale, self._shift
            self._scaled = (
                plain
                if self._kept is None
                else (self._scale * self.factor, self._shift * self.factor)
            )
        rows, mean, rstd = torch.native_layer_norm(
            total[block], total.shape[-1:], *self._scaled, self._eps
        )
        if self._kept is None:
            torch.clamp_min(rows, 0, out=out[block])
        else:
            torch.mul(rows.relu_(), self._kept[block], out=out[block])
        return mean, rstd


class TailBackward:
    """Its adjoint; the gradients of the norm's weights are added up over the blocks."""

    def __init__(self, saved: Sequence[Tensor], factor: float, wants: Sequence[bool]) -> None:
        """``saved``: what ``keep`` kept; ``wants``: gradients of the norm's scale, and shift."""
        self._scale, self._shift, self._total, self._out, self._mean, self._rstd = saved
        self._scaled: Tensor | None = None
        self._factor, self._wants = factor, [True, *wants]
        self._found: list[Tensor | None] = [None, None]
        self._sum: Tensor | None = None

    def rows(self, grad: Tensor, block: slice, into: Tensor | None = None) -> Tensor:
        """Gradient [r, F] of a block of what the norm read.

        ``into``: where they are to be; that may be where the norm read.
        """
        if (tails := _kernels(self._total)) is not None:  # the block is all rows
            rows, sums = tails.tail_backward(
                grad,
                self._out,
                self._total,
                self._scale,
                self._mean,
                self._rstd,
                self._factor,
                into,
            )
            *found, self._sum = sums.unbind()
            self._found = [
                one if wants else None for one, wants in zip(found, self._wants[1:], strict=True)
            ]
            return rows  # type: ignore[no-any-return]
        if self._scaled is None:
            self._scaled = self._scale if self._factor == 1.0 else self._scale * self._factor
        total = self._total[block]
        rows, *found = _norm_backward(
            _relu_backward(grad[block], self._out[block], 0),
            total,
            total.shape[-1:],
            self._mean[block],
            self._rstd[block],
            self._scaled,
            self._shift,
            self._wants,
        )
        if into is not None:
            into.copy_(rows)
        self._found = [plus(a, b) for a, b in zip(self._found, found, strict=True)]
        return rows  # type: ignore[no-any-return]

    def sum_of(self, rows: Tensor) -> Tensor:
        """The sum [F] of what ``rows`` has just given; it may be there already."""
        return rows.sum(0) if self._sum is None else self._sum

    def weights(self) -> list[Tensor | None]:
        """Gradients of the norm's scale and shift."""
        if self._factor == 1.0 or self._sum is not None:
            return self._found
        return [None if one is None else one.mul_(self._factor) for one in self._found]


def plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Their sum, in ``total``; what is not there adds nothing."""
    return part if total is None or part is None else total.add_(part)


def keep(
    scale: Tensor, shift: Tensor, total: Tensor, out: Tensor, stats: Sequence[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """What backward needs of a tail."""
    mean, rstd = stats[0] if len(stats) == 1 else (torch.cat(s) for s in zip(*stats, strict=True))
    return [scale, shift, total, out, mean, rstd]


KEPT = 6
"""Number of tensors that ``keep`` returns."""
