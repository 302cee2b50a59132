"""Dropout that depends on WHICH vertex is dropped, not on who computes it or when.

The usual generator hands out numbers in the order they are asked for, so a mask would change with
the number of chunks, shards and stages, and no two shapes could be compared. Here the mask is a
hash of (seed, epoch, site, vertex, feature): every shape, and every device, drops the same entries
(docs/adr/0002-dropout-by-a-hash-of-the-vertex.md). Four entries share one 32-bit hash; a mask of a
million entries takes about a millisecond on one core.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnpipe.ops import triton

__all__ = ["KeptMasks", "Mask", "edge_keys", "keyed_dropout", "keyed_mask", "row_keys"]

# Odd multipliers of two published 32-bit mixers (MurmurHash3's finaliser and the golden ratio), as
# signed numbers because torch's int32 is signed.
_GOLDEN = -1640531527
_MULTIPLIERS = (-2048144789, -1028477387)
_AT_ONCE = 65536
"""Hashes; twice as many numbers of 32 bits as fit a second-level cache of 512 KiB."""


@dataclass(frozen=True, eq=False)
class Mask:
    """What one dropout keeps of rows [C, F]."""

    kept: Tensor
    """[C, F] int8, 1 or 0: multiplied three times as fast as bool."""
    scale: float
    """Factor on what is kept."""


def _mix(state: Tensor, shifted: Tensor | None = None) -> Tensor:
    """Scramble int32 in place: two rounds of multiply, then xor with the logically shifted.

    ``shifted``: room of the same size.
    """
    shifted = torch.empty_like(state) if shifted is None else shifted
    for multiplier, shift in zip(_MULTIPLIERS, (15, 16), strict=True):
        state *= multiplier
        torch.bitwise_right_shift(state, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1
        state ^= shifted
    return state


def row_keys(vertices: Tensor) -> Tensor:
    """Key [C] int32 of each vertex, from its number [C] int64 in the graph as it was read."""
    low = (vertices & 0xFFFFFFFF).to(torch.int64)
    high = (vertices >> 32).to(torch.int64)
    folded = (low ^ (high * 0x5BD1E995)) & 0xFFFFFFFF
    signed = torch.where(folded >= 2**31, folded - 2**32, folded).to(torch.int32)
    return _mix(_mix(signed * _GOLDEN + 1))


def edge_keys(source: Tensor, target: Tensor) -> Tensor:
    """Key [E] int32 of each edge, from the row keys [E] of its two ends."""
    return _mix(_mix(source * _GOLDEN) ^ target)


@functools.lru_cache(maxsize=64)
def _column_keys(count: int, device: torch.device) -> Tensor:
    """Key [count] int32 of each group of features; a function of its arguments, so remembered."""
    return _mix(torch.arange(count, dtype=torch.int32, device=device) * _GOLDEN + 99)


def _scalar_key(*parts: int) -> int:
    """One signed 32-bit number from several, in plain integers."""
    state = 0x9E3779B9
    for part in parts:
        state ^= part & 0xFFFFFFFF
        for multiplier, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
            state = (state * multiplier) & 0xFFFFFFFF
            state ^= state >> shift
    return state - 2**32 if state >= 2**31 else state


def _keep_mask(
    keys: Tensor, width: int, probability: float, key: int, room: Tensor | None = None
) -> tuple[Tensor, float]:
    """Mask [C, width] int8 of the entries kept (1), and the share of entries that are kept.

    ``room``: a mask of the same size that is no longer needed.

    The hash gives bytes where the probability is a whole number of 256ths, else 16-bit numbers, so
    the share that is dropped is the one asked for to 1/65,536.
    """
    per_hash, least, kept = _levels(probability)
    if keys.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the mask of one epoch would be that of all that repeat it")
    if triton.works_on(keys.device):
        size = len(keys), -(-width // per_hash) * per_hash
        if room is None:
            made = keys.new_empty(size, dtype=torch.int8)
        else:
            made = room.as_strided(size, (size[1], 1))
        _fill(keys, [key], made[None], per_hash, least)
        return made[:, :width], kept
    unit = torch.uint8 if per_hash == 4 else torch.int16
    columns = _column_keys(-(-width // per_hash), keys.device)
    rows = _mix(keys ^ key)
    full = len(columns) * per_hash
    is_cpu = keys.device.type == "cpu"
    # CPUs take twenty times as long for a comparison that fills bools.
    kind = torch.uint8 if is_cpu else torch.bool
    if room is None:
        mask = torch.empty(len(rows), full, dtype=kind, device=keys.device)
    else:
        mask = room.as_strided((len(rows), full), (full, 1)).view(kind)
    # On a CPU the dozen passes of the hash stay in the cache, a run of rows at a time.
    run = max(1, _AT_ONCE // len(columns)) if is_cpu else max(1, len(rows))
    scratch = columns.new_empty(2, min(run, len(rows)), len(columns))
    for start in range(0, len(rows), run):
        some = rows[start : start + run, None]
        state, shifted = scratch[0, : len(some)], scratch[1, : len(some)]
        torch.bitwise_xor(some, columns[None, :], out=state)
        drawn = _mix(state, shifted).view(unit)
        torch.ge(drawn, least, out=mask[start : start + run])
    return mask.view(torch.int8)[:, :width], kept


def _levels(probability: float) -> tuple[int, int, float]:
    """Numbers that a hash gives, the least one that is kept, and the share that is."""
    whole = float(probability * 256).is_integer()
    levels = 256 if whole else 65536
    # Neither nothing nor everything: the rest is scaled by one over the share that is kept.
    threshold = min(max(round(probability * levels), 1), levels - 1)
    # Those of 16 bits have a sign.
    least = threshold if whole else threshold - 32768
    return 4 if whole else 2, least, 1.0 - threshold / levels


def _fill(keys: Tensor, epoch_keys: list[int], masks: Tensor, per_hash: int, least: int) -> None:
    """``masks`` [S, R, full] of some sites, on a GPU."""
    fill = importlib.import_module("gnnpipe.ops.triton.dropout").fill_masks
    fill(keys, torch.tensor(epoch_keys, dtype=torch.int32).to(keys.device), masks, least, per_hash)


class KeptMasks:
    """The masks of all rows of a shard, each made at once and handed out by chunk.

    With many small chunks the calls for each would cost more than the hash. A training pass needs
    all of them until its last chunk has gone forward, and some until it is back; the next epoch's
    are written over them. They are
    made where the pass begins: a later stage has nothing to do then but to wait for an earlier one,
    and in its first chunk all others would wait for it.
    """

    def __init__(self, keys: Tensor) -> None:
        """``keys`` [n] from ``row_keys``."""
        self._keys = keys
        self._made: dict[tuple[int, int, float], tuple[int, Tensor, float]] = {}
        self._lying: list[tuple[int, int, float]] = []
        """Those that a pass has begun with, in their order."""
        self._together: dict[tuple[int, float], Tensor] = {}
        """By width and probability, where a GPU has the masks of all sites."""

    def rows(
        self,
        start: int,
        count: int,
        width: int,
        probability: float,
        seed: int,
        epoch: int,
        site: int,
    ) -> tuple[Tensor, float]:
        """Mask [count, width] int8 of the rows from ``start`` on, and the share that is kept."""
        what = site, width, probability
        if what not in self._made or self._made[what][0] != _scalar_key(seed, epoch, site):
            self._make(what, seed, epoch)
        _, mask, kept = self._made[what]
        return mask[start : start + count], kept

    @property
    def masks(self) -> list[Tensor]:
        """The masks that have been made, [n, width] int8 each."""
        return [mask for _, mask, _ in self._made.values()]

    def begin(self, seed: int, epoch: int) -> None:
        """A training pass begins: make those that the last one used."""
        if triton.works_on(self._keys.device):
            self._make_together(seed, epoch)
            return
        made = list(self._made)
        if made != self._lying:
            # Those of the first pass were made between the rows of its layers, and would keep the
            # heap in pieces when those have gone (docs/adr/0018). Now they come to lie together.
            self._made.clear()
            self._lying = made
        for what in made:
            self._make(what, seed, epoch)

    def _make(self, what: tuple[int, int, float], seed: int, epoch: int) -> None:
        site, width, probability = what
        room = self._made[what][1] if what in self._made else None
        key = _scalar_key(seed, epoch, site)
        self._made[what] = key, *_keep_mask(self._keys, width, probability, key, room)

    def _make_together(self, seed: int, epoch: int) -> None:
        """On a GPU: one kernel for all masks of a shape, always in the same place."""
        shapes: dict[tuple[int, float], list[int]] = {}
        for site, width, probability in self._made:
            shapes.setdefault((width, probability), []).append(site)
        for (width, probability), sites in shapes.items():
            per_hash, least, kept = _levels(probability)
            masks = self._together.get((width, probability))
            if masks is None or len(masks) != len(sites):  # sites of a piece are the same each time
                for site in sites:
                    del self._made[site, width, probability]  # first, so that it is not there twice
                full = -(-width // per_hash) * per_hash
                masks = self._keys.new_empty(len(sites), len(self._keys), full, dtype=torch.int8)
                self._together[width, probability] = masks
            keys = [_scalar_key(seed, epoch, site) for site in sites]
            _fill(self._keys, keys, masks, per_hash, least)
            for site, key, mask in zip(sites, keys, masks, strict=True):
                self._made[site, width, probability] = key, mask[:, :width], kept


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, mask: Mask) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(mask.kept)
        ctx.scale = mask.scale
        return (x * mask.kept).mul_(mask.scale)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (kept,) = ctx.saved_tensors
        return (grad * kept).mul_(ctx.scale), None


def keyed_mask(
    keys: Tensor,
    width: int,
    probability: float,
    *,
    seed: int,
    epoch: int,
    site: int,
    masks: KeptMasks | None = None,
    start: int = 0,
) -> Mask | None:
    """What is kept of rows [C, ``width``] with ``keys`` [C] (from ``row_keys``); None: all.

    ``site`` tells the dropouts of one model apart. The rows may be those from ``start`` on of some
    whose ``masks`` are made together.
    """
    if probability == 0.0 or not len(keys) * width:
        return None
    if masks is None:
        mask, kept = _keep_mask(keys, width, probability, _scalar_key(seed, epoch, site))
    else:
        mask, kept = masks.rows(start, len(keys), width, probability, seed, epoch, site)
    return Mask(mask, 1.0 / kept)


def keyed_dropout(x: Tensor, mask: Mask | None) -> Tensor:
    """``x`` [C, F] with entries dropped and the rest scaled; ``x`` itself without a mask."""
    if mask is None:
        return x
    result: Tensor = _Dropout.apply(x, mask)  # type: ignore[no-untyped-call]
    return result
