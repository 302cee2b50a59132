"""Reads PyG's ``HeteroData``, which has several types of vertices and edges.

The vertices are numbered type after type; the properties of single types go to ``VertexTypes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnpipe.data.arrays import array_of, edges_of
from gnnpipe.data.clean import RawGraph, clean_features
from gnnpipe.data.edges import clean_edge_data
from gnnpipe.data.labels import Labels, clean_labels, clean_targets
from gnnpipe.data.messages import fail
from gnnpipe.data.split import SPLIT_NAMES, given_mask, parts_of_split_idx, split_in
from gnnpipe.graph.graph import Features
from gnnpipe.graph.types import RELATION_DATA, AdjacencyForm, VertexTypes, numbered_name


def raw_hetero_graph(
    data: Any, name: str, target: str, seed: int, task: str, split_idx: Any = None
) -> RawGraph:
    """The arrays of a ``HeteroData``.

    Args:
        data: with ``edge_index`` (or ``adj_t``) for every relation, ``x`` for the types that have
            features, and ``y`` and the masks for one type (optional if no labels are needed);
            optionally, for single relations r, ``edge_weight`` [E_r], ``edge_attr`` [E_r] or
            [E_r, D] and ``edge_type`` [E_r].
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
    edges, form, values = _edges(data, name)
    edge_index, edge_type = _joined(edges, data.edge_types, name, counts, first)
    n = sum(counts.values())
    given = split_in(data[target])
    parts = given if split_idx is None else parts_of_split_idx(split_idx, name, target)
    y = data[target].get("y")
    own = slice(first[target], first[target] + counts[target])
    unused = [f"the values of {data.edge_types[number][1]}.adj_t" for number in values]
    note = f"{', '.join(unused)} not read: give all relations as adj_t, or weights in edge_weight"
    is_unused = bool(unused) and form is AdjacencyForm.EDGE_INDEX
    return RawGraph(
        name=name,
        edge_index=edge_index,
        x=sp.csr_array((n, 1), dtype=np.float32),
        y=None if y is None else _labels(y, name, target, task, own, n),
        masks=None if parts is None else _masks(parts, name, own, n, seed, y is not None),
        num_vertices=n,
        edge_data={"edge_type": edge_type},
        relation_data=_relation_data(data, name, {} if is_unused else values),
        adjacency=form,
        task=task,
        types=_vertex_types(data, name, counts, target),
        notes=[note] if is_unused else [],
    )


def _target(data: Any, name: str, wanted: str) -> str:
    """The type whose vertices are classified."""
    labelled = [t for t in data.node_types if data[t].get("y") is not None]
    if wanted and not labelled and wanted in data.node_types:
        return wanted
    if wanted and wanted not in labelled:
        fail(name, f"target {wanted!r} has no y", f"one of {', '.join(labelled) or 'none'}")
    if not labelled:
        hint = f"data['type'].y, classes from 0, or target={str(data.node_types[0])!r}, to train "
        hint += "without labels or to predict"
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


def _edges(data: Any, name: str) -> tuple[list[Any], AdjacencyForm, dict[int, Any]]:
    """The edges [2, E_r] of each relation, their form, and the values of ``adj_t`` by relation.

    Relations in several forms are given to a model as ``edge_index``.
    """
    given = [edges_of(data[one], f"{name}: {', '.join(map(str, one))}") for one in data.edge_types]
    forms = {one.form for one in given}
    form = forms.pop() if len(forms) == 1 else AdjacencyForm.EDGE_INDEX
    values = {i: one.weights for i, one in enumerate(given) if one.weights is not None}
    for i, weights in values.items():
        place = f"{name}: {', '.join(map(str, data.edge_types[i]))}"
        cleaned = clean_edge_data({"edge_weight": weights}, place, given[i].edge_index)
        values[i] = cleaned["edge_weight"]
    return [one.edge_index for one in given], form, values


def _joined(
    edges: Sequence[Any],
    relations: Sequence[Any],
    name: str,
    counts: Mapping[str, int],
    first: Mapping[str, int],
) -> tuple[Any, Any]:
    """All edges [2, E], and the relation of each [E].

    ``counts``, ``first``: number of vertices and first vertex by type.
    """
    found, kinds = [], []
    for number, (source, relation, target) in enumerate(relations):
        place = f"{name}: {source}, {relation}, {target}"
        checked = _checked(edges[number], place, counts[source], counts[target])
        found.append(checked + np.array([[first[source]], [first[target]]]))
        kinds.append(np.full(checked.shape[1], number))
    return np.concatenate(found, axis=1), np.concatenate(kinds)


def _relation_data(data: Any, name: str, values: Mapping[int, Any]) -> dict[str, Any]:
    """Data of single relations' edges, by the names of ``Graph.derived``.

    ``values``: the values of ``adj_t`` by relation.
    """
    found = {numbered_name("edge_weight", number): v for number, v in values.items()}
    for number, relation in enumerate(data.edge_types):
        store, place = data[relation], f"{name}: {', '.join(relation)}"
        for field in RELATION_DATA:
            if store.get(field) is None:
                continue
            if store.get("edge_index") is None:
                wrong = f"{field} beside adj_t, whose edges may be in another order"
                fail(place, wrong, "edge_index = ...")
            given = {field: array_of(store[field])}
            cleaned = clean_edge_data(given, place, array_of(store.edge_index))
            found[numbered_name(field, number)] = cleaned[field]
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


def _masks(
    parts: Sequence[Any], name: str, own: slice, n: int, seed: int, needs_all: bool
) -> list[Any]:
    """The masks over all N vertices from those of the target type."""
    masks = [np.zeros(n, dtype=np.bool_) for _ in SPLIT_NAMES]
    for field, mask, given in zip(SPLIT_NAMES, masks, parts, strict=True):
        if given is not None or needs_all:
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
