"""Splits the links of a graph for link prediction, and draws negative pairs.

Like PyG's ``RandomLinkSplit``: edges held out for validation and test are removed from the graph,
in both directions if it is undirected, and for every positive pair one negative pair (joined by no
edge) is drawn. The draw happens once, from a seed, so that every shape of ranks and every epoch
scores the same pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gnnpipe.config import parse_split
from gnnpipe.data.arrays import array_of
from gnnpipe.data.messages import fail
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.pairs import Pairs

if TYPE_CHECKING:
    from torch_geometric.data import Data

Int64 = npt.NDArray[np.int64]

STANDARD_LINKS = (0.85, 0.05, 0.1)
"""The split 'given' of links, as in PyG's examples."""

_STREAM = 0x11A7
"""Separates the random draw from others with the same seed."""


def split_links(graph: Graph, split: str, seed: int) -> Graph:
    """The graph without the held-out links, and with all links as pairs to be predicted.

    Self-loops and repetitions of an edge are dropped. All edges between two vertices, in both
    directions, are held out together, because one would reveal the other. If every
    edge has its reverse, a link is one pair, else each direction is one.

    ``split``: percentages such as '60/20/20', or 'given' for 85/5/10. ``InputError`` if there are
    too few edges, or too few pairs that no edge joins.
    """
    if graph.types is not None:
        fail(graph.name, "links of several types of vertices", "data.to_homogeneous()")
    graph = graph.without_self_loops().without_parallel_edges()
    fractions = parse_split(split) or STANDARD_LINKS
    rng = np.random.default_rng([seed, _STREAM])
    n = graph.num_vertices
    source, target = graph.edge_index
    link_of_edge = np.minimum(source, target) * n + np.maximum(source, target)
    links = rng.permutation(np.unique(link_of_edge))
    ends_of_parts = [round(sum(fractions[:i]) * len(links)) for i in (1, 2)]
    if not ends_of_parts[0]:
        fail(graph.name, f"{len(links)} links, none to train on", "another --split")
    part_of = np.repeat(np.arange(3), np.diff([0, *ends_of_parts, len(links)])).astype(np.int8)
    order = np.argsort(links)
    part_of_edge = part_of[order][np.searchsorted(links[order], link_of_edge)]
    directed = np.unique(source * n + target)
    undirected = np.array_equal(directed, np.unique(target * n + source))
    if undirected:
        ends, part = np.stack(np.divmod(links, n)), part_of
        _swap_half(ends, rng)
    else:
        ends = np.stack(np.divmod(directed, n))
        key = np.minimum(*ends) * n + np.maximum(*ends)
        part = part_of[order][np.searchsorted(links[order], key)]
    none = _negatives(graph.name, directed, n, len(part), undirected, rng)
    label = np.repeat([1, 0], len(part)).astype(np.int8)
    pairs = Pairs.build(
        np.concatenate([ends, none], axis=1), label, np.concatenate([part, part]), n
    )
    return _with_pairs(graph.with_edges(part_of_edge == 0), pairs)


def with_given_links(graph: Graph, parts: Sequence[Data], seed: int) -> Graph:
    """The graph with the pairs of ``RandomLinkSplit``: a train, a val and a test ``Data``.

    Each has ``edge_label_index`` [2, P] and ``edge_label`` [P], 1 for a positive pair (joined by an
    edge), 0 for a negative one. A part without negative pairs (PyG's examples draw them in every
    epoch) gets as many as it has positive ones, from ``seed``. ``InputError`` names the fault.
    """
    n, name = graph.num_vertices, graph.name
    rng = np.random.default_rng([seed, _STREAM])
    if len(parts) != 3:
        fail(name, f"{len(parts)} parts", "(train, val, test), as RandomLinkSplit gives them")
    given = [
        _labelled(data, n, f"{which}.edge_label", name)
        for which, data in zip(("train", "val", "test"), parts, strict=True)
    ]
    # Positive pairs of all parts, so that none is drawn as a negative pair.
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
    return _with_pairs(graph, pairs)


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
    """Different negative pairs [2, count], none of them in ``taken`` (source * N + target).

    ``undirected``: at most one of a pair and its reverse, and neither of them in ``taken``.
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
        _swap_half(ends, rng)
    return ends


def _swap_half(ends: Int64, rng: np.random.Generator) -> None:
    """Swap source and target of about half of the pairs [2, P], in place.

    Either end of an undirected pair may be its target; at random, so that no chunk gets them all.
    """
    is_swapped = rng.random(ends.shape[1]) < 0.5
    ends[:, is_swapped] = ends[::-1, is_swapped]


def _with_pairs(graph: Graph, pairs: Pairs) -> Graph:
    """The graph with pairs instead of labels."""
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
