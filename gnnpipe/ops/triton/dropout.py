"""Triton kernel of keyed dropout's masks on a GPU, equal to the CPU's masks bit by bit.

With torch's operations the hash would take about twenty kernels over all 32-bit hashes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix(state):
    """``gnnpipe.ops.hashed_dropout._mix``."""
    state = state * 2246822507
    state = state ^ (state >> 15)
    state = state * 3266489909
    return state ^ (state >> 16)


@triton.jit
def _fill(
    keys,
    epoch_keys,
    masks,
    num_rows,
    full,
    least,
    PER_HASH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Fill a block of rows and columns of one site's mask (``fill_masks``)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    site = tl.program_id(2).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < full)[None, :]
    epoch_key = tl.load(epoch_keys + site).to(tl.uint32, bitcast=True)
    of_row = tl.load(keys + row, mask=row < num_rows, other=0).to(tl.uint32, bitcast=True)
    group = (column // PER_HASH).to(tl.uint32)
    of_column = _mix(group * 2654435769 + 99)
    drawn = _mix(_mix(of_row ^ epoch_key)[:, None] ^ of_column[None, :])
    part = (column % PER_HASH).to(tl.uint32)[None, :]
    if PER_HASH == 4:
        number = ((drawn >> (part * 8)) & 255).to(tl.int32)
    else:  # signed 16 bits
        number = (((drawn >> (part * 16)) & 65535) ^ 32768).to(tl.int32) - 32768
    at = (site * num_rows + row)[:, None] * full + column[None, :]
    tl.store(masks + at, (number >= least).to(tl.int8), mask=inside)


def fill_masks(keys: Tensor, epoch_keys: Tensor, masks: Tensor, least: int, per_hash: int) -> None:
    """Fill ``masks`` [S, R, full] int8 of S sites; 1 for entries that are kept.

    From row keys [R] int32 and the keys [S] int32 of the sites in this epoch. A 32-bit hash gives
    ``per_hash`` (4 or 2) numbers, which divides ``full``; ``least`` is the smallest kept number.
    """
    sites, count, full = masks.shape
    if not masks.numel():
        return
    wide = min(triton.next_power_of_2(full), 256)
    rows = max(1, 2048 // wide)
    grid = triton.cdiv(count, rows), triton.cdiv(full, wide), sites
    _fill[grid](
        keys, epoch_keys, masks, count, full, least, PER_HASH=per_hash, ROWS=rows, WIDTH=wide
    )
