"""LayerNorm, ReLU and dropout on a GPU as one kernel, and their adjoint as another, in Triton.

As kernels of their own they go through all rows in memory six times forward and nine times
backward. Here rows are read once and written once; backward reads the three things that it needs
and writes one. A sum over all rows (gradients of the norm's weights, and of a bias in front of it)
is made by each program over its own rows, and then over the programs: in a fixed order.
R rows, F columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["WIDEST", "tail_backward", "tail_forward"]

WIDEST = 2048
"""Columns; a program has whole rows."""
_NUMBERS = 1024
"""Of the rows of a program."""
_PROGRAMS = 528
"""Of backward, four for each multiprocessor of an H100."""


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
    """``ROWS`` whole rows, of ``width`` padded to ``WIDTH``: see ``tail_forward``."""
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
    y = tl.where(y <= 0.0, 0.0, y)  # and not the larger of both: what is no number stays none
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
    """Every P-th block of rows, and the program's own part of ``sums`` [3, P, F] over them."""
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


def _shape(width: int) -> tuple[int, int]:
    """Padded width, and rows of a program."""
    wide = triton.next_power_of_2(width)
    return wide, max(1, _NUMBERS // wide)


def _type(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def tail_forward(
    total: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    kept: Tensor | None,
    factor: float,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill ``out`` [R, F] from ``total`` [R, F]; mean and reciprocal deviation [R, 1].

    ``kept`` [R, F] int8: what dropout keeps, which is multiplied by ``factor``; none: all, as it
    is. Rows are contiguous, at most ``WIDEST`` wide.
    """
    count, width = total.shape
    wide, rows = _shape(width)
    means, rstds = total.new_empty(2, count, 1)
    if count:
        mask, stride = (total, 0) if kept is None else (kept, kept.stride(0))
        _forward[(triton.cdiv(count, rows),)](
            total,
            scale,
            shift,
            mask,
            out,
            means,
            rstds,
            count,
            width,
            stride,
            EPS=eps,
            FACTOR=factor,
            HAS_MASK=kept is not None,
            WIDTH=wide,
            ROWS=rows,
            TYPE=_type(total),
        )
    return means, rstds


def tail_backward(
    grad: Tensor,
    out: Tensor,
    total: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    factor: float,
    into: Tensor | None = None,
    programs: int = _PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Gradient [R, F] of ``total`` from that of ``out``, and of scale, of shift, its sum: [3, F].

    ``into``: where to make the first; it may be ``total`` itself.
    """
    count, width = total.shape
    wide, rows = _shape(width)
    found = torch.empty_like(total) if into is None else into
    if not count:
        return found, total.new_zeros(3, width)
    programs = min(programs, triton.cdiv(count, rows))
    sums = total.new_empty(3, programs, width)
    _backward[(programs,)](
        grad.contiguous(),
        out,
        total,
        scale,
        mean,
        rstd,
        found,
        sums,
        count,
        width,
        FACTOR=factor,
        WIDTH=wide,
        ROWS=rows,
        TYPE=_type(total),
    )
    return found, sums.sum(1)
