"""Train, validation and test masks from all the forms in which data sets store them.

Indices and masks are both whole numbers to numpy, and confusing them trains on the wrong vertices
without an error. ``given_mask`` alone decides between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gnnpipe.data.arrays import array_of
from gnnpipe.data.messages import fail
from gnnpipe.graph.graph import BoolArray, IntArray

Masks = tuple[BoolArray, BoolArray, BoolArray]
"""Train, val and test, each [N]."""

STANDARD_SPLIT = (0.6, 0.2, 0.2)
"""The split 'given' of data sets that have none of their own."""

SPLIT_NAMES = ("train_mask", "val_mask", "test_mask")


def split_masks(usable: BoolArray, fractions: tuple[float, float, float], seed: int) -> Masks:
    """Train, val and test masks [N]: a seeded permutation of the usable vertices in three parts.

    >>> [int(m.sum()) for m in split_masks(np.ones(10, bool), (0.6, 0.2, 0.2), seed=0)]
    [6, 2, 2]
    """
    order = np.random.default_rng(seed).permutation(np.flatnonzero(usable))
    ends = [round(sum(fractions[:i]) * len(order)) for i in (1, 2)]
    train, val, test = np.split(order, ends)
    n = len(usable)
    return index_mask(train, n), index_mask(val, n), index_mask(test, n)


def index_mask(index: IntArray, n: int) -> BoolArray:
    """A mask [N] that is true at ``index``, whose entries lie in 0..N-1."""
    mask = np.zeros(n, dtype=np.bool_)
    mask[index] = True
    return mask


def given_mask(value: Any, field: str, name: str, n: int, seed: int = 0) -> BoolArray:
    """The mask [N] in ``value``: bool, 0 and 1, several splits [N, T] or [T, N], or indices.

    N whole numbers that are all 0 or 1 are a mask; other whole numbers are indices, each once. With
    T splits, split number ``seed`` modulo T is used.

    Raises:
        InputError: naming the dataset and ``field``.
    """
    if value is None:
        fail(name, f"no {field}", "--split 60/20/20, or give all three masks")
    mask = np.asarray(value)
    if mask.ndim not in (1, 2) or (mask.ndim == 2 and (n not in mask.shape or not mask.size)):
        fail(name, f"{field} has shape {list(mask.shape)}", f"[{n}], or [{n}, T] for T splits")
    if mask.ndim == 2:
        at = seed % num_splits(mask, n)
        mask = mask[:, at] if mask.shape[0] == n else mask[at]
    if mask.dtype.kind in "iu" and len(mask) == n and ((mask == 0) | (mask == 1)).all():
        mask = mask.astype(np.bool_)
    if mask.dtype == np.bool_:
        if len(mask) != n:
            fail(name, f"{field} has {len(mask)} entries for {n} vertices", "one for each vertex")
        return mask
    if mask.dtype.kind not in "iu":
        fail(name, f"{field} is of type {mask.dtype}", "bool, or whole numbers as indices")
    bad = np.flatnonzero((mask < 0) | (mask >= n))
    if len(bad):
        fail(
            name,
            f"{field}[{bad[0]}] = {mask[bad[0]]} is out of range",
            f"indices 0..{n - 1}, or bool with {n} entries",
        )
    vertices, count = np.unique(mask, return_counts=True)
    if len(vertices) < len(mask):
        at = int(count.argmax())
        fail(
            name,
            f"{field}, taken as indices, names vertex {vertices[at]} {count[at]} times",
            f"each index once (numpy.unique), or bool with {n} entries",
        )
    return index_mask(mask, n)


def split_in(store: Any) -> list[Any] | None:
    """Train, val and test in a ``Data`` or a store of a ``HeteroData``; ``None`` if there is none.

    Each is as ``given_mask`` takes it: ``train_mask``, ``val_mask``, ``test_mask``, or else
    ``train_idx``, ``val_idx`` (or ``valid_idx``), ``test_idx``.
    """
    masks = [store.get(field) for field in SPLIT_NAMES]
    if all(mask is None for mask in masks):
        val = store.get("val_idx")
        masks = [store.get("train_idx"), store.get("valid_idx") if val is None else val]
        masks.append(store.get("test_idx"))
    if all(mask is None for mask in masks):
        return None
    return [None if mask is None else array_of(mask) for mask in masks]


def parts_of_split_idx(split_idx: Any, name: str, target: str) -> list[Any]:
    """Train, val and test in OGB's form, a dict with train, valid (or val) and test.

    Each is a tensor of indices or, for several types of vertices, a dict with that of ``target``.
    Raises ``InputError``.
    """
    example = "{'train': ..., 'valid': ..., 'test': ...}, as dataset.get_idx_split() gives it"
    if not isinstance(split_idx, Mapping):
        fail(name, f"split_idx is a {type(split_idx).__name__}", example)
    parts = []
    for keys in (("train",), ("valid", "val"), ("test",)):
        found = next((split_idx[key] for key in keys if split_idx.get(key) is not None), None)
        if isinstance(found, Mapping):
            found = found.get(target)
        if found is None:
            fail(name, f"split_idx has no {keys[0]!r}", example)
        parts.append(array_of(found))
    return parts


def num_splits(value: Any, n: int) -> int:
    """The number of splits of N vertices in a mask, as ``given_mask`` reads it."""
    shape = np.shape(value)
    return 1 if len(shape) < 2 else int(shape[1] if shape[0] == n else shape[0])


def overlap_warning(masks: Masks) -> str:
    """Text about vertices that are in two of the masks, and the consequence; '' if none are."""
    pairs = (
        (0, 2, "test accuracy would include vertices trained on"),
        (0, 1, "validation accuracy would include vertices trained on"),
        (1, 2, "the best epoch would be chosen on vertices of the test"),
    )
    found = []
    for a, b, meaning in pairs:
        count = int((masks[a] & masks[b]).sum())
        if count:
            vertices = "1 vertex is" if count == 1 else f"{count} vertices are"
            found.append(f"{vertices} in both {SPLIT_NAMES[a]} and {SPLIT_NAMES[b]} ({meaning})")
    return "; ".join(found)
