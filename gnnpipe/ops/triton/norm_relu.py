"""Triton kernels of LayerNorm + ReLU + dropout on a GPU: one forward, one backward.

Rows are read once and written once; separate kernels would pass over them six times forward and
nine times backward. Sums over all rows (gradients of the norm's weights and of a bias before the
norm) are made by each program over its own rows, then over the programs, in a fixed order.
R rows, F columns, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 2048
"""Columns; a program processes whole rows."""
_BLOCK_SIZE = 1024
"""Entries that a program processes at a time."""
_MAX_PROGRAMS = 528
"""Programs of the backward kernel: four for each multiprocessor of an H100."""


@triton.jit
def _forward(
    total,
    scale,
    shift,
    kept,
    out,
    means,
    rstds,
    num_rows,
    width,
    kept_stride,
    EPS: tl.constexpr,
    FACTOR: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Process ``ROWS`` rows of ``width`` columns, padded to ``WIDTH`` (``norm_relu_forward``)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(total + place, mask=inside, other=0.0).to(TYPE)
    mean = tl.sum(x, axis=1) / width
    x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + EPS)
    by = tl.load(scale + column, mask=column < width, other=0.0).to(TYPE)
    plus = tl.load(shift + column, mask=column < width, other=0.0).to(TYPE)
    y = x * rstd[:, None] * by[None, :] + plus[None, :]
    y = tl.where(y <= 0.0, 0.0, y)  # unlike maximum(y, 0), this keeps NaN
    if HAS_MASK:
        at = row.to(tl.int64)[:, None] * kept_stride + column[None, :]
        y = y * FACTOR * tl.load(kept + at, mask=inside, other=0).to(TYPE)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)
    tl.store(means + row, mean.to(means.dtype.element_ty), mask=row < num_rows)
    tl.store(rstds + row, rstd.to(rstds.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _backward(
    grad,
    out,
    total,
    scale,
    means,
    rstds,
    found,
    sums,
    num_rows,
    width,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Process every P-th block of rows, and fill the program's part of ``sums`` [3, P, F]."""
    column = tl.arange(0, WIDTH)
    within = column < width
    by = tl.load(scale + column, mask=within, other=0.0).to(TYPE)
    to_scale = tl.zeros([WIDTH], dtype=TYPE)
    to_shift = tl.zeros([WIDTH], dtype=TYPE)
    to_bias = tl.zeros([WIDTH], dtype=TYPE)
    step = tl.num_programs(0) * ROWS
    first = tl.program_id(0) * ROWS
    while first < num_rows:
        row = first + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & within[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        g = tl.load(grad + place, mask=inside, other=0.0).to(TYPE)
        y = tl.load(out + place, mask=inside, other=0.0)
        x = tl.load(total + place, mask=inside, other=0.0).to(TYPE)
        mean = tl.load(means + row, mask=row < num_rows, other=0.0).to(TYPE)
        rstd = tl.load(rstds + row, mask=row < num_rows, other=0.0).to(TYPE)
        g = tl.where(y <= 0.0, 0.0, g) * FACTOR
        x = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        to_scale += tl.sum(g * x, axis=0)
        to_shift += tl.sum(g, axis=0)
        g = g * by[None, :]
        along = tl.sum(g * x, axis=1) / width
        level = tl.sum(g, axis=1) / width
        g = (g - x * along[:, None] - level[:, None]) * rstd[:, None]
        g = tl.where(inside, g, 0.0)
        to_bias += tl.sum(g, axis=0)
        tl.store(found + place, g.to(found.dtype.element_ty), mask=inside)
        first += step
    at = tl.program_id(0) * width + column
    apart = tl.num_programs(0) * width
    tl.store(sums + at, to_scale, mask=within)
    tl.store(sums + apart + at, to_shift, mask=within)
    tl.store(sums + 2 * apart + at, to_bias, mask=within)


def norm_relu_forward(
    total: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    kept: Tensor | None,
    factor: float,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill ``out`` [R, F] with ``factor * kept * relu(LayerNorm(total))``.

    ``total`` [R, F] is contiguous, F <= ``MAX_WIDTH``; scale and shift [F]; the dropout mask
    ``kept`` [R, F] int8, ``None`` without dropout and factor.

    Returns:
        Mean and reciprocal standard deviation of the rows, [R, 1] each.
    """
    count, width = total.shape
    means, rstds = total.new_empty(2, count, 1)
    constants = _constants(total) | {"EPS": eps, "FACTOR": factor, "HAS_MASK": kept is not None}
    mask, stride = (total, 0) if kept is None else (kept, kept.stride(0))
    if count:
        _forward[(triton.cdiv(count, constants["ROWS"]),)](
            total, scale, shift, mask, out, means, rstds, count, width, stride, **constants
        )
    return means, rstds


def norm_relu_backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    factor: float,
    out: Tensor | None = None,
    programs: int = _MAX_PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``norm_relu_forward`` from the gradient [R, F] of its result.

    Args:
        grad: Gradient of the result.
        saved: Scale, shift, input and result, mean and reciprocal standard deviation.
        factor: Of the dropout, 1 without dropout.
        out: Memory for the gradient of the input; it may be the input itself.
        programs: Programs at most.

    Returns:
        The gradient [R, F] of the input; the gradients of scale and shift and the sum over the
        rows of the former, together [3, F].
    """
    scale, _, total, result, mean, rstd = saved
    count, width = total.shape
    out = torch.empty_like(total) if out is None else out
    if not count:
        return out, total.new_zeros(3, width)
    constants = _constants(total) | {"FACTOR": factor}
    programs = min(programs, triton.cdiv(count, constants["ROWS"]))
    sums = total.new_empty(3, programs, width)
    grad = grad.contiguous()
    _backward[(programs,)](
        grad, result, total, scale, mean, rstd, out, sums, count, width, **constants
    )
    return out, sums.sum(1)


def _constants(x: Tensor) -> dict[str, Any]:
    """Return the padded width, the rows that a program processes at a time, and their type."""
    padded = triton.next_power_of_2(x.shape[1])
    dtype = tl.float64 if x.dtype == torch.float64 else tl.float32
    return {"WIDTH": padded, "ROWS": max(1, _BLOCK_SIZE // padded), "TYPE": dtype}
