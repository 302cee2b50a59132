"""Dropout keyed by the vertex: its mask does not depend on chunks, shards, stages or the device.

A usual generator draws numbers in the order of the calls, so the mask would change with the number
of chunks, and runs of different shapes could not be compared. Here the mask is a hash of (seed,
epoch, site, vertex, feature), where a site is one dropout of the model
(docs/adr/0002-dropout-by-a-hash-of-the-vertex.md). Four entries share one 32-bit hash; a mask with
a million entries takes about a millisecond on one core.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gnnpipe.ops import triton

# Odd multipliers of two published 32-bit mixers (MurmurHash3's finaliser and the golden ratio),
# written as signed numbers for torch's int32.
_GOLDEN = -1640531527
_MULTIPLIERS = (-2048144789, -1028477387)
_BLOCK_HASHES = 65536
"""Hashes computed at a time on a CPU: with the temporary, 512 KiB, a second-level cache."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Mask of one dropout over rows [C, F]."""

    kept: Tensor
    """[C, F] int8, 1 for kept entries. A product with int8 is three times as fast as with bool."""
    scale: float
    """Factor on kept entries: one over their share; 0 if all entries are dropped."""


def _mix(state: Tensor, shifted: Tensor | None = None) -> Tensor:
    """Scramble int32 in place: twice multiply, then xor with the logically shifted number.

    ``shifted``: memory of the same size.
    """
    shifted = torch.empty_like(state) if shifted is None else shifted
    for multiplier, shift in zip(_MULTIPLIERS, (15, 16), strict=True):
        state *= multiplier
        torch.bitwise_right_shift(state, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1
        state ^= shifted
    return state


def row_keys(vertices: Tensor) -> Tensor:
    """Return the key [C] int32 of each vertex, from its number [C] int64 in the graph as read."""
    low = (vertices & 0xFFFFFFFF).to(torch.int64)
    high = (vertices >> 32).to(torch.int64)
    folded = (low ^ (high * 0x5BD1E995)) & 0xFFFFFFFF
    signed = torch.where(folded >= 2**31, folded - 2**32, folded).to(torch.int32)
    return _mix(_mix(signed * _GOLDEN + 1))


def edge_keys(source: Tensor, target: Tensor) -> Tensor:
    """Return the key [E] int32 of each edge, from the row keys [E] of its two ends."""
    return _mix(_mix(source * _GOLDEN) ^ target)


@functools.lru_cache(maxsize=64)
def _column_keys(count: int, device: torch.device) -> Tensor:
    """Return the key [count] int32 of each group of features."""
    return _mix(torch.arange(count, dtype=torch.int32, device=device) * _GOLDEN + 99)


def _scalar_key(*parts: int) -> int:
    """Hash several integers to one signed 32-bit integer."""
    state = 0x9E3779B9
    for part in parts:
        state ^= part & 0xFFFFFFFF
        for multiplier, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
            state = (state * multiplier) & 0xFFFFFFFF
            state ^= state >> shift
    return state - 2**32 if state >= 2**31 else state


def _keep_mask(keys: Tensor, width: int, probability: float, key: int) -> tuple[Tensor, float]:
    """Return a mask [C, width] int8 (1: kept), and the share of entries that are kept.

    The share differs from 1 - ``probability`` by at most 1 / 65,536; it is 0 for probability 1.
    """
    per_hash, least, share = _levels(probability)
    if keys.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph would repeat the dropout mask of one epoch")
    masks = keys.new_empty(1, len(keys), -(-width // per_hash) * per_hash, dtype=torch.int8)
    _fill(keys, [key], masks, per_hash, least)
    return masks[0, :, :width], share


@functools.lru_cache(maxsize=64)
def _levels(probability: float) -> tuple[int, int, float]:
    """Return the numbers in a hash, the smallest number that is kept, and the share that is kept.

    A hash holds four bytes if the probability is a multiple of 1 / 256, else two 16-bit numbers.
    For probability 1 the share is 0, though the mask keeps some.
    """
    is_byte = float(probability * 256).is_integer()
    levels = 256 if is_byte else 65536
    # Never all and never none, because kept entries are scaled by one over their share.
    threshold = min(max(round(probability * levels), 1), levels - 1)
    least = threshold if is_byte else threshold - 32768  # 16-bit numbers are signed
    share = 0.0 if probability == 1.0 else 1.0 - threshold / levels
    return 4 if is_byte else 2, least, share


def _fill(
    keys: Tensor, epoch_keys: Sequence[int], masks: Tensor, per_hash: int, least: int
) -> None:
    """Fill ``masks`` [S, C, full] of S sites from row keys [C] and the sites' keys in the epoch."""
    if triton.works_on(keys.device):
        fill = importlib.import_module("gnnpipe.ops.triton.dropout").fill_masks
        of_sites = torch.tensor(epoch_keys, dtype=torch.int32).to(keys.device)
        fill(keys, of_sites, masks, least, per_hash)
        return
    of_sites = torch.tensor(epoch_keys, dtype=torch.int32, device=keys.device)
    rows = _mix(keys[None, :] ^ of_sites[:, None])
    _fill_by_torch(rows.flatten(), masks.flatten(0, 1), per_hash, least)


def _fill_by_torch(rows: Tensor, mask: Tensor, per_hash: int, least: int) -> None:
    """Fill ``mask`` [C, full] from the rows' keys [C] in this epoch."""
    columns = _column_keys(mask.shape[1] // per_hash, rows.device)
    numbers = torch.uint8 if per_hash == 4 else torch.int16
    is_cpu = rows.device.type == "cpu"
    # Comparisons that fill bools take twenty times as long on CPUs.
    mask = mask.view(torch.uint8 if is_cpu else torch.bool)
    # On a CPU, the dozen passes of the hash stay in the cache: some rows at a time.
    step = max(1, _BLOCK_HASHES // len(columns)) if is_cpu else max(1, len(rows))
    scratch = columns.new_empty(2, min(step, len(rows)), len(columns))
    for start in range(0, len(rows), step):
        some = rows[start : start + step, None]
        state, shifted = scratch[0, : len(some)], scratch[1, : len(some)]
        torch.bitwise_xor(some, columns[None, :], out=state)
        drawn = _mix(state, shifted).view(numbers)
        torch.ge(drawn, least, out=mask[start : start + step])


class MaskKey(NamedTuple):
    """All that decides the mask of given rows."""

    width: int
    probability: float
    seed: int
    epoch: int
    site: int


class MaskSource(Protocol):
    """Makes the masks of a shard's rows for many sites at once."""

    def begin(self, seed: int, epoch: int, order: Sequence[int]) -> None:
        """Begin passes over all chunks.

        ``order``: the chunk of every pass, of ``epoch`` first and then of the epochs after it.
        """

    def rows(self, start: int, count: int, key: MaskKey) -> tuple[Tensor, float]:
        """Return the mask [count, width] int8 of rows from ``start`` on, and the share kept."""


class KeptMasks:
    """Masks of all rows of a shard, kept during a training pass.

    Each mask is made once for all chunks: with many small chunks the calls would cost more than the
    hash. Masks of later epochs are written into the same memory, when a pass begins: later stages
    have nothing to do then, and in the first chunk all other stages would wait for them.
    """

    def __init__(self, keys: Tensor) -> None:
        """``keys`` [n] from ``row_keys``."""
        self._keys = keys
        self._made: dict[tuple[int, int, float], tuple[int, Tensor, float]] = {}
        """By site, width and probability: key in the epoch, mask [n, width], share kept."""
        self._stacks: dict[tuple[int, float], Tensor] = {}
        """By width and probability: the masks of all sites in one tensor."""

    def rows(self, start: int, count: int, key: MaskKey) -> tuple[Tensor, float]:
        """Return the mask [count, width] int8 of rows from ``start`` on, and the share kept."""
        width, probability, seed, epoch, site = key
        kind, in_epoch = (site, width, probability), _scalar_key(seed, epoch, site)
        if kind not in self._made or self._made[kind][0] != in_epoch:
            self._made[kind] = in_epoch, *_keep_mask(self._keys, width, probability, in_epoch)
        _, mask, share = self._made[kind]
        return mask[start : start + count], share

    @property
    def masks(self) -> list[Tensor]:
        """All masks, [n, width] int8 each."""
        return [mask for _, mask, _ in self._made.values()]

    def begin(self, seed: int, epoch: int, order: Sequence[int]) -> None:
        """Make all masks that the last training pass used, for a new pass of one epoch."""
        del order  # the masks of all chunks are made
        sites_by_shape: dict[tuple[int, float], list[int]] = {}
        for site, width, probability in self._made:
            sites_by_shape.setdefault((width, probability), []).append(site)
        counts = {shape: len(sites) for shape, sites in sites_by_shape.items()}
        if counts != {shape: len(masks) for shape, masks in self._stacks.items()}:
            self._allocate(counts)
        for (width, probability), sites in sites_by_shape.items():
            per_hash, least, share = _levels(probability)
            masks = self._stacks[width, probability]
            keys = [_scalar_key(seed, epoch, site) for site in sites]
            _fill(self._keys, keys, masks, per_hash, least)
            for site, key, mask in zip(sites, keys, masks, strict=True):
                self._made[site, width, probability] = key, mask[:, :width], share

    def _allocate(self, counts: dict[tuple[int, float], int]) -> None:
        """Allocate masks of ``counts`` sites by width and probability."""
        # The first pass allocated masks between the rows of its layers, which would fragment the
        # heap (docs/adr/0018); they are freed first.
        self._made.clear()
        self._stacks.clear()
        for (width, probability), count in counts.items():
            per_hash, *_ = _levels(probability)
            size = count, len(self._keys), -(-width // per_hash) * per_hash
            self._stacks[width, probability] = self._keys.new_empty(size, dtype=torch.int8)


GROUP_BYTES = 4 * _BLOCK_HASHES
"""Most bytes of masks that ``ChunkMasks`` draws at once for several chunks: those of one block of
hashes. With more, little time is saved."""


class ChunkMasks:
    """Masks of a few chunks at a time, for programs that hold the rows of a few chunks only.

    With small chunks the calls cost more than the hash. So the first dropout of a chunk draws the
    masks of all sites that the chunks before used, for a group of chunks: this one and those that
    pass next in the epoch, up to ``GROUP_BYTES``. Rows that are no chunk of the order are drawn
    alone. Autograd keeps the masks of a chunk until its backward, and not those of its group.
    """

    def __init__(self, keys: Tensor, ends: Sequence[int]) -> None:
        """Set up without masks.

        Args:
            keys: Row keys [n] from ``row_keys``.
            ends: Start of every chunk among the rows, and n.
        """
        self._keys, self._ends = keys, list(ends)
        self._order: Sequence[int] = ()
        self._pass_of: dict[tuple[int, int, int, int], int] = {}
        """By seed, epoch and rows of a chunk: its pass, an index of ``_order``."""
        self._sites: dict[tuple[int, float], dict[int, None]] = {}
        """Sites that were used, by width and probability, in order."""
        self._made: dict[tuple[int, int, MaskKey], Tensor] = {}
        """Masks [C, width] of the last group."""

    def begin(self, seed: int, epoch: int, order: Sequence[int]) -> None:
        """Begin passes over all chunks; masks are made group by group."""
        self._order = order
        self._made.clear()
        self._pass_of = {
            (seed, epoch + i // self._num_chunks, *self._range(chunk)): i
            for i, chunk in enumerate(order)
        }

    def rows(self, start: int, count: int, key: MaskKey) -> tuple[Tensor, float]:
        """Return the mask [count, width] int8 of rows from ``start`` on, and the share kept."""
        mask = self._made.get((start, count, key))
        if mask is None:
            shape = key.width, key.probability
            if key.site in self._sites.get(shape, ()):
                self._made.clear()
                self._draw(self._group(start, count, key), self._sites, key)
            else:
                self._sites.setdefault(shape, {})[key.site] = None
                self._draw([(start, count)], {shape: [key.site]}, key)
            mask = self._made[start, count, key]
        return mask, _levels(key.probability)[2]

    def _group(self, start: int, count: int, key: MaskKey) -> list[tuple[int, int]]:
        """Return start and count of the rows to draw at once, the given ones first."""
        first = self._pass_of.get((key.seed, key.epoch, start, count))
        if first is None:
            return [(start, count)]
        row_bytes = sum(width * len(sites) for (width, _), sites in self._sites.items())
        group: list[tuple[int, int]] = []
        num_rows = 0
        next_epoch = first - first % self._num_chunks + self._num_chunks
        for chunk in self._order[first:next_epoch]:
            rows = self._range(chunk)
            num_rows += rows[1]
            if group and num_rows * row_bytes > GROUP_BYTES:
                break
            group.append(rows)
        return group

    def _draw(
        self,
        group: Sequence[tuple[int, int]],
        sites_by_shape: Mapping[tuple[int, float], Iterable[int]],
        key: MaskKey,
    ) -> None:
        """Make the masks of ``sites_by_shape`` for a ``group`` of rows, in the epoch of ``key``."""
        parts = [self._keys[start : start + count] for start, count in group]
        keys = parts[0] if len(parts) == 1 else torch.cat(parts)
        counts = [count for _, count in group]
        for (width, probability), sites in sites_by_shape.items():
            of_sites = [key._replace(width=width, probability=probability, site=s) for s in sites]
            per_hash, least, _ = _levels(probability)
            size = len(of_sites), len(keys), -(-width // per_hash) * per_hash
            masks = keys.new_empty(size, dtype=torch.int8)
            epoch_keys = [_scalar_key(key.seed, key.epoch, one.site) for one in of_sites]
            _fill(keys, epoch_keys, masks, per_hash, least)
            for (start, count), of_chunk in zip(group, torch.split(masks, counts, 1), strict=True):
                # A copy, because a view would keep the masks of the whole group.
                own = of_chunk.clone() if len(group) > 1 else of_chunk
                for one, mask in zip(of_sites, own[..., :width], strict=True):
                    self._made[start, count, one] = mask

    @property
    def _num_chunks(self) -> int:
        return len(self._ends) - 1

    def _range(self, chunk: int) -> tuple[int, int]:
        """Return start and count of the rows of a chunk."""
        start, end = self._ends[chunk : chunk + 2]
        return start, end - start


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask) -> Tensor:
        ctx.save_for_backward(mask.kept)
        ctx.scale = mask.scale
        return (x * mask.kept).mul_(mask.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
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
    masks: MaskSource | None = None,
    start: int = 0,
) -> Mask | None:
    """Return the mask of a dropout; ``None`` if nothing is dropped.

    Args:
        keys: Row keys [C] from ``row_keys``.
        width: Columns of the rows.
        probability: Share of entries to drop.
        seed: Of the run.
        epoch: Number of the epoch.
        site: Number of the dropout, unique in the model.
        masks: Masks of the rows of the shard; the rows are those from ``start`` on.
        start: First row in ``masks``.
    """
    if probability == 0.0 or not len(keys) * width:
        return None
    if masks is None:
        mask, share = _keep_mask(keys, width, probability, _scalar_key(seed, epoch, site))
    else:
        mask, share = masks.rows(start, len(keys), MaskKey(width, probability, seed, epoch, site))
    return Mask(mask, 1.0 / share if share else 0.0)


_LABEL_SITE = -1
"""Site of ``drawn_labels``; dropouts have sites from 0."""


def drawn_labels(keys: Tensor, share: float, seed: int, epoch: int) -> Tensor:
    """Draw the vertices whose labels are inputs in an epoch (``--label-inputs``), [C] bool.

    Each vertex is drawn with probability ``share``, up to 1 / 65,536, by its row key alone.

    Args:
        keys: Row keys [C] from ``row_keys``.
        share: Probability, above 0 and below 1.
        seed: Of the run.
        epoch: Number of the epoch, from 0.
    """
    mask, _ = _keep_mask(keys, 1, 1.0 - share, _scalar_key(seed, epoch, _LABEL_SITE))
    return mask[:, 0].bool()


def keyed_dropout(x: Tensor, mask: Mask | None) -> Tensor:
    """Return ``x`` [C, F] with entries dropped and the rest scaled; ``x`` itself without mask."""
    if mask is None:
        return x
    result: Tensor = _Dropout.apply(x, mask)  # type: ignore[no-untyped-call]
    return result
