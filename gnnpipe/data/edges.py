"""Checks raw edges and their data, and sorts them into CSR rows by target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnpipe.data.arrays import float32_array
from gnnpipe.data.messages import fail
from gnnpipe.graph.graph import EDGE_DATA, IntArray, chosen_edge_data

MAX_VERTICES = 1 << 31
"""Two vertex numbers share one int64 sort key."""

MAX_RELATIONS = 1_000_000
"""Each relation has weights of its own; a larger number is taken for a mistake."""


@dataclass(frozen=True, eq=False)
class Edges:
    """E edges sorted by target and then by source, as given: with self-loops and parallel edges."""

    indptr: npt.NDArray[np.int64]
    """[N + 1]"""
    indices: IntArray
    """[E] sources."""
    data: dict[str, Any]
    """Edge data [E, ...] in the same order, by the field of ``Graph``."""
    order: IntArray | None = None
    """[E], position of each edge in the list that was given; ``None``: ascending, or not asked."""


def clean_edge_data(given: Mapping[str, Any], name: str, edge_index: Any) -> dict[str, Any]:
    """Edge data in the number types of ``Graph``; ``InputError`` naming the faulty field."""
    e = _two_rows(edge_index, name).shape[1] if given else 0
    return {field: _clean_field(field, values, name, e) for field, values in given.items()}


def _two_rows(edge_index: Any, name: str) -> npt.NDArray[Any]:
    """``edge_index`` as an array [2, E]; ``InputError`` for another shape."""
    edges = np.asarray(edge_index)
    if edges.ndim != 2 or edges.shape[0] != 2:
        fail(
            name,
            f"edge_index has shape {list(edges.shape)}",
            "[2, E]: row 0 the sources, row 1 the targets",
        )
    return edges


def _clean_field(field: str, values: Any, name: str, e: int) -> npt.NDArray[Any]:
    if field not in EDGE_DATA:
        raise ValueError(f"edge_data: {field!r} is none of {', '.join(EDGE_DATA)}")
    raw = np.asarray(values)
    is_flat = field != "edge_attr"
    if raw.ndim == 2 and raw.shape[1] == 1 and is_flat:
        raw = raw[:, 0]
    if raw.ndim not in ((1,) if is_flat else (1, 2)) or len(raw) != e:
        shape = "[E]" if is_flat else "[E, D]"
        fail(
            name, f"{field} has shape {list(raw.shape)} for {e} edges", f"{shape}, one row an edge"
        )
    if field == "edge_type":
        if raw.dtype.kind not in "iu":
            fail(name, f"{field} is of type {raw.dtype}", "whole numbers from 0")
        if e and int(raw.min()) < 0:
            fail(name, f"{field} has numbers below 0", "whole numbers from 0")
        if e and int(raw.max()) >= MAX_RELATIONS:
            fail(name, f"{field} = {raw.max()}", f"relations 0..{MAX_RELATIONS - 1}, without gaps")
        return raw.astype(np.int64)
    if not is_flat and raw.dtype.kind in "iu":
        return raw.astype(np.int64)  # categories, such as types of bonds
    found = float32_array(raw, name, field)
    finite = np.isfinite(found if found.ndim == 2 else found[:, None]).all(axis=1)
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        fail(name, f"{field}[{at}] = {found[at].tolist()}", "finite numbers within float32")
    return found


def sorted_edges(
    edge_index: Any,
    name: str,
    n: int,
    symmetrize: bool,
    data: Mapping[str, npt.NDArray[Any]],
    keeps_order: bool = False,
) -> Edges:
    """Checked and sorted edges: those given, each as often as it was given.

    ``edge_index`` [2, E] of ``n`` vertices; ``data`` [E, ...] by field. ``symmetrize``: add the
    reverse edges and keep each edge once, as PyG's ``to_undirected``; where edges carry ``data``, a
    reverse gets the same data, is added only if no edge leads back, and all given edges are kept.
    ``keeps_order``: also return the order of the edges as they were given; symmetrized edges have
    none.
    """
    edges = _two_rows(edge_index, name)
    if edges.dtype.kind not in "iu":
        fail(name, f"edge_index is of type {edges.dtype}", "whole numbers such as int64")
    e = edges.shape[1]
    if e:
        for end in (int(edges.min()), int(edges.max())):
            if not 0 <= end < n:
                at = int(np.flatnonzero((edges == end).any(axis=0))[0])
                fail(
                    name,
                    f"edge_index[:, {at}] = {edges[:, at].tolist()} names vertex {end}, "
                    f"but the {n} vertices are 0..{n - 1}",
                    "drop the edge, or give y and x a row for every vertex",
                )
    source, target = edges
    if data or (keeps_order and not symmetrize):
        found = _sorted_with_data(source, target, n, symmetrize, data)
        return found if keeps_order else replace(found, order=None)
    # One int64 per edge, target above source, sorted in place: 30 M edges take half a second, and
    # there are no further arrays of that size (ogbn-papers100M has 1.6 billion edges).
    keys = np.empty(2 * e if symmetrize else e, dtype="<i8")
    _pack(source, target, keys[:e])
    if symmetrize:
        _pack(target, source, keys[e:])
    keys.sort()
    if symmetrize:
        is_first = np.ones(len(keys), dtype=bool)
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        keys = keys[is_first]
    return Edges(*_rows(keys, n), {})


def _sorted_with_data(
    source: IntArray,
    target: IntArray,
    n: int,
    symmetrize: bool,
    data: Mapping[str, npt.NDArray[Any]],
) -> Edges:
    keys = np.empty(len(source), dtype="<i8")
    _pack(source, target, keys)
    number = np.arange(len(keys))
    if symmetrize:
        back = np.empty_like(keys)
        _pack(target, source, back)
        is_new = ~np.isin(back, keys)
        keys, number = np.concatenate([keys, back[is_new]]), np.append(number, number[is_new])
    # Parallel edges stay in the order in which they were given.
    order = np.argsort(keys, kind="stable")
    place: IntArray = number[order].astype(np.int32 if len(keys) < 1 << 31 else np.int64)
    has_order = not symmetrize and bool((np.diff(place) != 1).any())
    rows = _rows(keys[order], n)
    return Edges(*rows, chosen_edge_data(data, place), place if has_order else None)


def _rows(keys: npt.NDArray[np.int64], n: int) -> tuple[npt.NDArray[np.int64], IntArray]:
    """Row pointers and columns of sorted keys."""
    pair = keys.view("<i4").reshape(-1, 2)
    indptr = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(np.bincount(pair[:, 1], minlength=n), out=indptr[1:])
    return indptr, np.ascontiguousarray(pair[:, 0], dtype=np.int32)


def _pack(source: IntArray, target: IntArray, out: npt.NDArray[np.int64]) -> None:
    """Write the sort key of each edge, target * 2^32 + source, to ``out``."""
    np.left_shift(target, 32, out=out, dtype=np.int64, casting="unsafe")
    np.bitwise_or(out, source, out=out, dtype=np.int64, casting="unsafe")
