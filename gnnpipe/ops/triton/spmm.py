"""Sparse rows times dense rows on a GPU, in Triton: what ``--kernel triton`` runs.

A warp sums one row, and asks for eight neighbours' rows of 128 numbers before the first is there. A
row of many entries (a hub) would be one warp's work for longer than all others take together, so
such rows are cut into pieces; their sums go to rows of their own and are added up afterwards, in a
fixed order: the bits are the same in every run. R rows, T columns, E entries, F features, P pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["product", "try_out"]

SHORTEST = 256
"""Entries of a piece, at least."""
MOST_PIECES = 16384
"""Twice the warps that a large GPU has at a time. No piece is a larger part of all entries than one
in so many, and so at most twice as many sums lie apart: 16 MiB of them for F = 128."""
WIDEST = 256
"""Features that a warp sums at a time."""
ASKED_FOR = 1024
"""Numbers of the neighbours' rows that a warp asks for at a time."""


@triton.jit
def _sum_pieces(
    starts,
    stops,
    targets,
    indices,
    values,
    dense,
    out,
    apart,
    num_apart,
    width,
    WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    ARE_ROWS: tl.constexpr,
    IS_RUN: tl.constexpr,
    TOTAL: tl.constexpr,
):
    """Sum piece by piece; the first ``num_apart`` go to rows of ``apart``, all others to ``out``.

    ``ARE_ROWS``: the pieces are the rows, in their order. ``IS_RUN``: rows of ``dense`` are summed
    as they stand, without indices and values.
    """
    piece = tl.program_id(0)
    first = tl.load(starts + piece)
    stop = tl.load(stops + piece)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = column < width
    total = tl.zeros([WIDTH], dtype=TOTAL)
    while first < stop:
        entry = first + tl.arange(0, ENTRIES)
        is_own = entry < stop
        index = entry
        if not IS_RUN:
            index = tl.load(indices + entry, mask=is_own, other=0)
        rows = tl.load(
            dense + index.to(tl.int64)[:, None] * width + column[None, :],
            mask=is_own[:, None] & within[None, :],
            other=0.0,
        ).to(TOTAL)
        if not IS_RUN:
            rows *= tl.load(values + entry, mask=is_own, other=0.0).to(TOTAL)[:, None]
        total += tl.sum(rows, axis=0)
        first += ENTRIES
    if ARE_ROWS:
        tl.store(out + piece.to(tl.int64) * width + column, total.to(out.dtype.element_ty), within)
    else:
        place = tl.load(targets + piece).to(tl.int64) * width + column
        if piece < num_apart:
            tl.store(apart + place, total.to(apart.dtype.element_ty), within)
        else:
            tl.store(out + place, total.to(out.dtype.element_ty), within)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Runs of entries, each of one row."""

    starts: Tensor
    """[P], the first entry of each."""
    stops: Tensor
    """[P], the one behind its last."""
    targets: Tensor | None = None
    """[P], the row that each is of; none: they are the rows."""
    num_apart: int = 0
    """So many of the first are parts of a row, and their targets places for their sums."""

    def sum(
        self,
        entries: tuple[Tensor, Tensor] | None,
        dense: Tensor,
        out: Tensor,
        apart: Tensor | None = None,
    ) -> None:
        """Fill the targets. ``entries``: indices and values; none: rows as they stand."""
        width = dense.shape[1]
        wide = min(triton.next_power_of_2(width), WIDEST)
        indices, values = (self.starts, dense) if entries is None else entries
        _sum_pieces[len(self.starts), triton.cdiv(width, wide)](
            self.starts,
            self.stops,
            self.starts if self.targets is None else self.targets,
            indices,
            values,
            dense,
            out,
            out if apart is None else apart,
            self.num_apart,
            width,
            WIDTH=wide,
            ENTRIES=min(max(ASKED_FOR // wide, 4), 32),
            ARE_ROWS=self.targets is None,
            IS_RUN=entries is None,
            num_warps=1,
            TOTAL=tl.float64 if dense.dtype == torch.float64 else tl.float32,
        )


def _cut(offsets: Tensor, longest: int) -> tuple[_Pieces, _Pieces | None]:
    """Pieces of at most ``longest`` entries of rows with these ``offsets`` [R + 1].

    The second, if any row has several: the runs of their sums.
    """
    count, kind = len(offsets) - 1, offsets.dtype
    sizes = offsets.diff().long()
    if int(sizes.max()) <= longest:
        return _Pieces(offsets[:-1], offsets[1:]), None
    parts = ((sizes + longest - 1) // longest).clamp_(min=1)
    row = torch.repeat_interleave(torch.arange(count, device=offsets.device), parts)
    number = torch.arange(len(row), device=offsets.device) - (parts.cumsum(0) - parts)[row]
    starts = offsets.long()[row] + number * longest
    stops = torch.minimum(starts + longest, offsets.long()[row + 1])
    is_part = parts[row] > 1
    several = (parts > 1).nonzero().squeeze(1)
    num_apart = int(is_part.sum())
    # Long ones first: what begins last is to be short.
    order = torch.argsort(is_part.int(), descending=True, stable=True)
    targets = row[order]
    targets[:num_apart] = torch.arange(num_apart, device=row.device)
    ends = parts[several].cumsum(0)
    return (
        _Pieces(starts[order].to(kind), stops[order].to(kind), targets.to(kind), num_apart),
        _Pieces((ends - parts[several]).to(kind), ends.to(kind), several.to(kind)),
    )


def product(
    offsets: Tensor, indices: Tensor, values: Tensor, longest: int | None = None
) -> Callable[[Tensor], Tensor]:
    """Rows [T, F] to [R, F], for offsets [R + 1], indices [E] and values [E]; R is not 0.

    Sums are made in float32, of float64 in float64. Rows of more than ``longest`` entries are cut,
    of ``max(SHORTEST, E / MOST_PIECES)`` if that is not given. To know whether there are any, the
    GPU is waited for.
    """
    if len(indices) > 2**31 - 64:
        offsets = offsets.long()  # an entry behind the last is counted, too
    pieces, runs = _cut(offsets, longest or max(SHORTEST, len(indices) // MOST_PIECES))
    count = len(offsets) - 1

    def times(dense: Tensor) -> Tensor:
        dense = dense.contiguous()
        out = dense.new_empty(count, dense.shape[1])
        if not dense.shape[1]:
            return out
        if runs is None:
            pieces.sum((indices, values), dense, out)
            return out
        kind = torch.float64 if dense.dtype == torch.float64 else torch.float32
        apart = dense.new_empty(pieces.num_apart, dense.shape[1], dtype=kind)
        pieces.sum((indices, values), dense, out, apart)
        runs.sum(None, apart, out)
        return out

    return times


def try_out(device: torch.device) -> None:
    """Multiply 2 by 3 on ``device``. ``RuntimeError`` and others if that is not 6 there."""
    index = torch.arange(2, dtype=torch.int32, device=device)
    numbers = torch.tensor([2.0, 3.0], device=device)
    found = product(index, index[:1], numbers[:1])(numbers[1:, None]).item()
    if found != 6.0:
        raise RuntimeError(f"2 x 3 is {found} there")
