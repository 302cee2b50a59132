"""Reads PyG's ``HeteroData``, which has several types of vertices and edges.

The vertices are numbered type after type; the properties of single types go to ``VertexTypes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnpipe.data.arrays import array_of, edges_of
from gnnpipe.data.clean import RawGraph, clean_features
from gnnpipe.data.edges import clean_edge_data
from gnnpipe.data.labels import Labels, clean_labels, clean_targets
from gnnpipe.data.messages import fail
from gnnpipe.data.split import SPLIT_NAMES, given_mask, parts_of_split_idx, split_in
from gnnpipe.graph.graph import EDGE_DATA, Features
from gnnpipe.graph.types import RELATION_DATA, VertexTypes, numbered_name


def raw_hetero_graph(
    data: Any, name: str, target: str, seed: int, task: str, split_idx: Any = None
) -> RawGraph:
    """The arrays of a ``HeteroData``.

    Args:
        data: with ``edge_index`` (or ``adj_t``) for every relation, ``x`` for the types that have
            features, and ``y`` and the masks for one type (not for a graph to predict for);
            optionally ``edge_weight`` [E_r] and ``edge_attr`` [E_r] or [E_r, D] for single
            relations r.
        name: for messages and for the graph.
        target: the type whose vertices are classified, if several types have ``y``; else ''.
        seed: number of the split, if the masks hold several.
        task: 'classification' or 'regression': the meaning of ``y``.
        split_idx: the split in OGB's form, in place of the masks.

    Raises:
        InputError: naming the type or relation and the attribute that is missing or wrong.
    """
    if not data.node_types or not data.edge_types:
        fail(name, "a HeteroData without vertices or without edges", "data['type'].x, ...")
    target = _target(data, name, target)
    counts = {str(t): _count(data, t, name) for t in data.node_types}
    first = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    edge_index, edge_type, unused = _edges(data, name, counts, first)
    n = sum(counts.values())
    given = split_in(data[target])
    parts = given if split_idx is None else parts_of_split_idx(split_idx, name, target)
    y = data[target].get("y")
    own = slice(first[target], first[target] + counts[target])
    note = f"{', '.join(unused)} not read: put numbers of the edges into edge_weight or edge_attr"
    return RawGraph(
        name=name,
        edge_index=edge_index,
        x=sp.csr_array((n, 1), dtype=np.float32),
        y=None if y is None else _labels(y, name, target, task, own, n),
        masks=None if parts is None else _masks(parts, name, own, n, seed),
        num_vertices=n,
        edge_data={"edge_type": edge_type},
        relation_data=_relation_data(data, name),
        task=task,
        types=_vertex_types(data, name, counts, target),
        notes=[note] if unused else [],
    )


def _target(data: Any, name: str, wanted: str) -> str:
    """The type whose vertices are classified."""
    labelled = [t for t in data.node_types if data[t].get("y") is not None]
    if wanted and not labelled and wanted in data.node_types:
        return wanted  # a graph to predict for
    if wanted and wanted not in labelled:
        fail(name, f"target {wanted!r} has no y", f"one of {', '.join(labelled) or 'none'}")
    if not labelled:
        hint = f"data['type'].y, classes from 0, or to predict target={str(data.node_types[0])!r}"
        fail(name, "no type of vertices has y", hint)
    if not wanted and len(labelled) > 1:
        fail(name, f"{', '.join(labelled)} have y", f"target={labelled[0]!r}, or another")
    return wanted or str(labelled[0])


def _count(data: Any, vertex_type: str, name: str) -> int:
    count = data[vertex_type].num_nodes
    if not count:
        fail(
            name,
            f"the number of {vertex_type!r} vertices is not known",
            f"data[{vertex_type!r}].num_nodes = ... (or x)",
        )
    return int(count)


def _edges(
    data: Any, name: str, counts: dict[str, int], first: dict[str, int]
) -> tuple[Any, Any, list[str]]:
    """All edges [2, E], the relation of each [E], and the names of edge data that is not read.

    ``counts``, ``first``: number of vertices and first vertex by type.
    """
    edges, kinds, unused = [], [], []
    for number, (source, relation, target) in enumerate(data.edge_types):
        store = data[source, relation, target]
        place = f"{name}: {source}, {relation}, {target}"
        given = edges_of(store, place)
        found = _checked(given.edge_index, place, counts[source], counts[target])
        edges.append(found + np.array([[first[source]], [first[target]]]))
        kinds.append(np.full(found.shape[1], number))
        unused += [f"{relation}.{k}" for k in EDGE_DATA if k in store and k not in RELATION_DATA]
        if given.weights is not None:
            unused.append(f"the values of {relation}.adj_t")
    return np.concatenate(edges, axis=1), np.concatenate(kinds), unused


def _relation_data(data: Any, name: str) -> dict[str, Any]:
    """Weights and attributes of single relations' edges, by the names of ``Graph.derived``."""
    found = {}
    for number, relation in enumerate(data.edge_types):
        store, place = data[relation], f"{name}: {', '.join(relation)}"
        for field in RELATION_DATA:
            if store.get(field) is None:
                continue
            if store.get("edge_index") is None:
                wrong = f"{field} beside adj_t, whose edges may be in another order"
                fail(place, wrong, "edge_index = ...")
            given = array_of(store[field])
            edges = array_of(store.edge_index)
            values = clean_edge_data({field: given}, place, edges)[field]
            # A convolution may read [E] and [E, 1] in different ways.
            is_flat = np.ndim(given) == 1
            found[numbered_name(field, number)] = values.reshape(-1) if is_flat else values
    return found


def _checked(given: Any, place: str, num_sources: int, num_targets: int) -> Any:
    """The edges [2, E] of one relation, in range."""
    edges = np.asarray(given)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        fail(place, f"edge_index is {edges.dtype} of shape {list(edges.shape)}", "int64 [2, E]")
    for row, end, count in ((0, "source", num_sources), (1, "target", num_targets)):
        bad = np.flatnonzero((edges[row] < 0) | (edges[row] >= count))
        if len(bad):
            fail(
                place,
                f"edge_index[{row}, {bad[0]}] = {edges[row, bad[0]]}, but its {end} type has "
                f"{count} vertices",
                f"0..{count - 1}",
            )
    return edges.astype(np.int64)


def _labels(given: Any, name: str, target: str, task: str, own: slice, n: int) -> Labels:
    """The labels [N, ...] of all vertices: none outside of ``own``, the vertices of the target."""
    y = array_of(given)
    y = clean_targets(y, name) if task == "regression" else clean_labels(y, name, None)
    num_own = own.stop - own.start
    if len(y) != num_own:
        fail(name, f"{target}.y has {len(y)} labels for {num_own} vertices", "one for each")
    labels = np.full((n, *y.shape[1:]), np.nan if y.dtype.kind == "f" else -1, dtype=y.dtype)
    labels[own] = y
    return labels


def _masks(parts: Sequence[Any], name: str, own: slice, n: int, seed: int) -> list[Any]:
    """The masks over all N vertices from those of the target type."""
    masks = [np.zeros(n, dtype=np.bool_) for _ in SPLIT_NAMES]
    for field, mask, given in zip(SPLIT_NAMES, masks, parts, strict=True):
        mask[own] = given_mask(given, field, name, own.stop - own.start, seed)
    return masks


def _vertex_types(data: Any, name: str, counts: dict[str, int], target: str) -> VertexTypes:
    features: dict[str, Features] = {
        t: clean_features(array_of(data[t].x), f"{name}: {t}", count)
        for t, count in counts.items()
        if data[t].get("x") is not None
    }
    relations = tuple((str(a), str(b), str(c)) for a, b, c in data.edge_types)
    return VertexTypes.in_order(counts, features, relations, target)
