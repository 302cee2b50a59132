"""The links of a graph as pairs to learn: held out, with as many pairs that no edge joins.

The counterpart of ``split_masks`` for link prediction, and of PyG's ``RandomLinkSplit``: edges that
are held out to validate and to test are taken out of the graph, in both directions if it is
undirected, and for every edge that is asked for one pair is drawn that none joins. All is drawn
once, from a seed, so that every shape and every epoch asks for the same pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gnnpipe.config import parse_split
from gnnpipe.data.ogb_arrays import array_of, shape_of
from gnnpipe.data.pyg import graph_from_data
from gnnpipe.data.split import fail
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.pairs import Pairs

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["graph_of_links", "split_links"]

Int64 = npt.NDArray[np.int64]

STANDARD_LINKS = (0.85, 0.05, 0.1)
"""What 'given' means for links: PyG's examples hold out as much."""


def graph_of_links(
    data: Any, *, name: str, split: str, seed: int, symmetrize: bool = False
) -> Graph:
    """A ``Graph`` whose links are learned, from a ``Data``, or from three of ``RandomLinkSplit``.

    Neither y nor masks are read. ``InputError`` names what is missing or wrong.
    """
    given = isinstance(data, list | tuple)
    if given and not data:
        fail(name, "no graphs", "(train, val, test), as RandomLinkSplit gives them")
    if given and (split != "given" or symmetrize):
        raise InputError(
            f"dataset {name!r}: split and symmetrize have no meaning for pairs that are given; "
            "leave them out"
        )
    first = data[0] if given else data
    for one in data if given else [data]:
        if not hasattr(one, "get"):
            fail(name, f"a {type(one).__name__}", "a Data, or the three of RandomLinkSplit")
    if hasattr(first, "edge_types"):
        fail(name, "links of several types of vertices", "data.to_homogeneous()")
    x = first.get("x")
    if x is None:
        fail(name, "no features x", "the one-hot degrees or the identity (sparse) as x")
    n = int(shape_of(x)[0])
    bare = copy.copy(first)
    bare.y, bare.train_mask = np.zeros(n, dtype=np.int64), np.ones(n, dtype=bool)
    bare.val_mask = bare.test_mask = np.zeros(n, dtype=bool)
    graph = graph_from_data(bare, name=name, symmetrize=symmetrize)
    if given:
        return _given_links(graph, data, seed)
    return split_links(graph, split, seed)


def split_links(graph: Graph, split: str, seed: int) -> Graph:
    """The graph without the links that are held out, and with all links as pairs to learn.

    What joins two vertices is held out together, in both directions and however often it is there:
    the reverse of a link would tell of it. If every edge has its reverse, a link is asked for once.

    ``split``: percentages such as '60/20/20', or 'given' for 85/5/10. ``InputError`` if there are
    too few edges, or too few pairs that no edge joins.
    """
    if graph.types is not None:
        fail(graph.name, "links of several types of vertices", "data.to_homogeneous()")
    fractions = parse_split(split) or STANDARD_LINKS
    rng = np.random.default_rng([seed, _STREAM])
    n = graph.num_vertices
    source, target = graph.edge_index
    joined = np.minimum(source, target) * n + np.maximum(source, target)
    every = rng.permutation(np.unique(joined))
    cuts = [round(sum(fractions[:i]) * len(every)) for i in (1, 2)]
    if not cuts[0]:
        fail(graph.name, f"{len(every)} links, none to train on", "another --split")
    part_of = np.repeat(np.arange(3), np.diff([0, *cuts, len(every)])).astype(np.int8)
    order = np.argsort(every)
    part_of_edge = part_of[order][np.searchsorted(every[order], joined)]
    directed = np.unique(source * n + target)
    undirected = np.array_equal(directed, np.unique(target * n + source))
    if undirected:
        ends, part = np.stack(np.divmod(every, n)), part_of
        # Either end may be the target; a coin decides, so that no chunk gets them all.
        turned = rng.random(ends.shape[1]) < 0.5
        ends[:, turned] = ends[::-1, turned]
    else:
        ends = np.stack(np.divmod(directed, n))
        key = np.minimum(*ends) * n + np.maximum(*ends)
        part = part_of[order][np.searchsorted(every[order], key)]
    none = _negatives(graph.name, directed, n, len(part), undirected, rng)
    label = np.repeat([1, 0], len(part)).astype(np.int8)
    pairs = Pairs.build(
        np.concatenate([ends, none], axis=1), label, np.concatenate([part, part]), n
    )
    return _loss_rows(_without(graph, part_of_edge > 0), pairs)


def _given_links(graph: Graph, parts: Sequence[Data], seed: int) -> Graph:
    """The graph with pairs as PyG's ``RandomLinkSplit`` gives them: train, val and test ``Data``.

    Each has ``edge_label_index`` [2, P] and ``edge_label`` [P], 1 where an edge joins the pair and
    0 where none does. Where a part has no pair that none joins (PyG's examples draw those anew in
    every epoch), as many are drawn here, from ``seed``. ``InputError`` names what is wrong.
    """
    n, name = graph.num_vertices, graph.name
    rng = np.random.default_rng([seed, _STREAM])
    if len(parts) != 3:
        fail(name, f"{len(parts)} parts", "(train, val, test), as RandomLinkSplit gives them")
    given = [
        _labelled(data, n, f"{which}.edge_label", name)
        for which, data in zip(("train", "val", "test"), parts, strict=True)
    ]
    # Nor is a pair drawn that another part asks for.
    source, target = np.concatenate([graph.edge_index, *(ends for ends, _ in given)], axis=1)
    taken = np.unique(np.concatenate([source * n + target, target * n + source]))
    ends, labels, part = [], [], []
    for i, (found, label) in enumerate(given):
        if len(label) and label.all():
            drawn = _negatives(name, taken, n, len(label), True, rng)
            source, target = drawn
            taken = np.union1d(taken, np.concatenate([source * n + target, target * n + source]))
            found = np.concatenate([found, drawn], axis=1)
            label = np.repeat([1, 0], len(label)).astype(np.int8)
        ends.append(found)
        labels.append(label)
        part.append(np.full(len(label), i, dtype=np.int8))
    if not len(labels[0]):
        fail(name, "train.edge_label: no pair to train on", "a larger part to train")
    pairs = Pairs.build(
        np.concatenate(ends, axis=1), np.concatenate(labels), np.concatenate(part), n
    )
    return _loss_rows(graph, pairs)


_STREAM = 0x11A7
"""Keeps the draw apart from others with the same seed."""


def _labelled(data: Any, n: int, where: str, name: str) -> tuple[Int64, npt.NDArray[np.int8]]:
    """Pairs [2, P] and labels [P] of one part."""
    given, labels = data.get("edge_label_index"), data.get("edge_label")
    if given is None or labels is None:
        hint = "RandomLinkSplit(...)(data), with key='edge_label' and without split_labels"
        fail(name, f"no {where} or {where}_index", hint)
    ends, label = np.asarray(array_of(given)), np.asarray(array_of(labels)).reshape(-1)
    if ends.ndim != 2 or ends.shape[0] != 2 or ends.dtype.kind not in "iu":
        fail(name, f"{where}_index is {ends.dtype} of shape {list(ends.shape)}", "int64 [2, P]")
    if ends.shape[1] != len(label):
        fail(name, f"{where} has {len(label)} entries for {ends.shape[1]} pairs", "one for each")
    bad = np.flatnonzero(((ends < 0) | (ends >= n)).any(axis=0))
    if len(bad):
        fail(name, f"{where}_index[:, {bad[0]}] = {ends[:, bad[0]].tolist()}", f"0..{n - 1}")
    wrong = np.flatnonzero((label != 0) & (label != 1))
    if len(wrong):
        fail(name, f"{where}[{wrong[0]}] = {label[wrong[0]]}", "1 = joined by an edge, 0 = not")
    return ends.astype(np.int64), label.astype(np.int8)


def _negatives(
    name: str, taken: Int64, n: int, count: int, undirected: bool, rng: np.random.Generator
) -> Int64:
    """``count`` different pairs [2, count] that are not among ``taken``, source * N + target.

    ``undirected``: of a pair and its reverse at most one, and neither is taken.
    """
    if len(taken) + count * (2 if undirected else 1) > 0.9 * n * (n - 1):
        fail(
            name,
            f"{len(taken):,} edges among {n:,} vertices leave too few pairs that none joins",
            "given pairs: Graph.from_pyg((train, val, test), task='links')",
        )
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        drawn = rng.integers(0, n, (2, count - len(found) + 16))
        if undirected:
            drawn.sort(axis=0)
        key = drawn[0] * n + drawn[1]
        key = key[(drawn[0] != drawn[1]) & ~np.isin(key, taken)]
        _, first = np.unique(np.concatenate([found, key]), return_index=True)
        found = np.concatenate([found, key])[np.sort(first)]
    ends = np.stack(np.divmod(found[:count], n))
    if undirected:
        turned = rng.random(count) < 0.5
        ends[:, turned] = ends[::-1, turned]
    return ends


def _without(graph: Graph, gone: npt.NDArray[np.bool_]) -> Graph:
    """Without some edges."""
    before = np.concatenate([[0], np.cumsum(~gone)])
    data: dict[str, Any] = {name: values[~gone] for name, values in graph.edge_data.items()}
    return replace(graph, indptr=before[graph.indptr], indices=graph.indices[~gone], **data)


def _loss_rows(graph: Graph, pairs: Pairs) -> Graph:
    """The graph with pairs in the place of labels."""
    none = np.zeros(graph.num_vertices, dtype=bool)
    return replace(
        graph,
        y=np.full(graph.num_vertices, -1),
        train_mask=none,
        val_mask=none,
        test_mask=none,
        num_classes=0,
        pairs=pairs,
    )
