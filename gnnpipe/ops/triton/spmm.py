"""Triton kernel of sparse times dense rows on a GPU (``--kernel triton``).

One warp sums one row of the result, with the loads of eight neighbours' rows (of 128 features) in
flight. A row with many entries (a hub) would keep one warp busy after all others are done, so long
rows are cut into pieces, whose sums are added afterwards. The order is fixed: every run gives the
same bits. R rows, T columns, E entries, F features, P pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_PIECE = 256
"""Entries of a piece, at least, before a row is cut."""
MAX_PIECES = 16384
"""Twice the warps that a large GPU runs at a time. A piece has at least 1 / ``MAX_PIECES`` of all
entries, so the sums of pieces take little memory: 16 MiB for F = 128."""
_MAX_WIDTH = 256
"""Features that a warp sums at a time."""
_IN_FLIGHT = 1024
"""Numbers that a warp loads at a time."""


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
    """Sum one piece; the sums of the first ``num_apart`` go to ``apart``, all others to ``out``.

    ``ARE_ROWS``: piece i is row i. ``IS_RUN``: sum consecutive rows of ``dense``, without indices
    and values.
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
    """Ranges of entries, each inside one row."""

    starts: Tensor
    """[P], first entry of each piece."""
    stops: Tensor
    """[P], end of each piece (exclusive)."""
    targets: Tensor | None = None
    """[P], row of each piece's sum; ``None``: piece i is row i."""
    num_apart: int = 0
    """The first ``num_apart`` pieces are parts of a row; their targets are rows of ``apart``."""

    def sum(
        self,
        entries: tuple[Tensor, Tensor] | None,
        dense: Tensor,
        out: Tensor,
        apart: Tensor | None = None,
    ) -> None:
        """Fill the targets in ``out`` and ``apart``.

        ``entries``: indices and values; ``None``: sum consecutive rows of ``dense``.
        """
        width = dense.shape[1]
        wide = min(triton.next_power_of_2(width), _MAX_WIDTH)
        indices, values = (self.starts, dense) if entries is None else entries
        targets = self.starts if self.targets is None else self.targets
        apart = out if apart is None else apart
        constants = {
            "WIDTH": wide,
            "ENTRIES": min(max(_IN_FLIGHT // wide, 4), 32),
            "ARE_ROWS": self.targets is None,
            "IS_RUN": entries is None,
            "TOTAL": tl.float64 if dense.dtype == torch.float64 else tl.float32,
        }
        grid = len(self.starts), triton.cdiv(width, wide)
        tensors = self.starts, self.stops, targets, indices, values, dense, out, apart
        _sum_pieces[grid](*tensors, self.num_apart, width, **constants, num_warps=1)


def _cut(offsets: Tensor, longest: int) -> tuple[_Pieces, _Pieces | None]:
    """Cut rows with these ``offsets`` [R + 1] into pieces of at most ``longest`` entries.

    Returns:
        The pieces; and if any row has several, the ranges of their sums in ``apart``.
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
    # Parts of long rows first: work that starts last should be short.
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
    """Return the product with a matrix of R > 0 rows: dense rows [T, F] to [R, F].

    Sums are made in float32, for float64 rows in float64. Waits for the GPU once, to find out
    whether there are long rows. Rows with more than ``longest`` entries are cut, by default
    ``max(MIN_PIECE, E / MAX_PIECES)``.
    """
    if len(indices) > 2**31 - 64:
        offsets = offsets.long()  # loops count up to 32 entries beyond the last
    pieces, runs = _cut(offsets, longest or max(MIN_PIECE, len(indices) // MAX_PIECES))
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
    """Multiply 2 by 3 on ``device``; raise an exception if that fails or is not 6."""
    index = torch.arange(2, dtype=torch.int32, device=device)
    numbers = torch.tensor([2.0, 3.0], device=device)
    found = product(index, index[:1], numbers[:1])(numbers[1:, None]).item()
    if found != 6.0:
        raise RuntimeError(f"2 x 3 is {found} there")
