"""Graphs from PyG's ``HeteroData``: several types of vertices and edges become one ``Graph``.

The vertices stand type after type, so that an edge list of a relation only needs its ends moved;
what belongs to one type goes to ``VertexTypes``.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from gnnpipe.data.clean import clean, clean_features
from gnnpipe.data.labels import clean_labels, clean_targets
from gnnpipe.data.ogb_arrays import array_of, edges_of
from gnnpipe.data.split import SPLIT_NAMES, fail, given_mask
from gnnpipe.graph.graph import EDGE_DATA, Features, Graph
from gnnpipe.graph.types import VertexTypes

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

__all__ = ["graph_from_hetero"]


def graph_from_hetero(
    data: HeteroData,
    *,
    name: str,
    target: str = "",
    split: str = "given",
    seed: int = 0,
    task: str = "classification",
) -> Graph:
    """A cleaned ``Graph`` of several types.

    Args:
        data: with ``edge_index`` (or ``adj_t``) for every relation, ``x`` for the types that have
            features, and ``y`` and the masks for one type.
        name: for messages and for the graph.
        target: the type that is classified, if several have ``y``.
        split: 'given' or percentages such as '60/20/20'.
        seed: of that split.
        task: 'classification', or 'regression': what ``y`` means.

    Warns:
        UserWarning: masks that overlap; loops, which are removed; edge weights and attributes,
            which are not read.

    Raises:
        InputError: naming the type or relation and the attribute that is missing or wrong.
    """
    names = tuple(str(t) for t in data.node_types)
    if not names or not data.edge_types:
        fail(name, "a HeteroData without vertices or without edges", "data['type'].x, ...")
    target = _target(data, name, target)
    counts = {t: _count(data, t, name) for t in names}
    first = dict(zip(names, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    n, n_target = sum(counts.values()), counts[target]
    edges, kinds, unread = [], [], []
    for number, (source, relation, reading) in enumerate(data.edge_types):
        store = data[source, relation, reading]
        where = f"{name}: {source}, {relation}, {reading}"
        found, has_values = edges_of(store, where)
        found = _checked(found, where, counts[source], counts[reading])
        edges.append(found + np.array([[first[source]], [first[reading]]]))
        kinds.append(np.full(found.shape[1], number))
        unread += [f"{relation}.{k}" for k in EDGE_DATA if k in store]
        if has_values:
            unread.append(f"the values of {relation}.adj_t")
    own = slice(first[target], first[target] + n_target)
    given = array_of(data[target].y)
    y = clean_targets(given, name) if task == "regression" else clean_labels(given, name, None)
    if len(y) != n_target:
        fail(name, f"{target}.y has {len(y)} labels for {n_target} vertices", "one for each")
    labels = np.full((n, *y.shape[1:]), np.nan if y.dtype.kind == "f" else -1, dtype=y.dtype)
    labels[own] = y
    graph = clean(
        np.concatenate(edges, axis=1),
        name=name,
        x=sp.csr_array((n, 1), dtype=np.float32),
        y=labels,
        masks=_masks(data[target], name, own, n, seed),
        num_vertices=n,
        split=split,
        seed=seed,
        report=True,
        task=task,
        edge_data={"edge_type": np.concatenate(kinds)},
    )
    if unread:
        warnings.warn(
            f"graph {name!r}: {', '.join(unread)} not read: of several types of vertices only the "
            "edges themselves are",
            UserWarning,
            stacklevel=3,
        )
    features: dict[str, Features] = {}
    for t in names:
        if data[t].get("x") is not None:
            features[t] = clean_features(array_of(data[t].x), f"{name}: {t}", counts[t])
    types = VertexTypes(
        names,
        np.repeat(np.arange(len(names)), list(counts.values())),
        np.concatenate([np.arange(count) for count in counts.values()]),
        features,
        tuple((str(a), str(b), str(c)) for a, b, c in data.edge_types),
        target,
    )
    return replace(graph, types=types)


def _target(data: Any, name: str, wanted: str) -> str:
    """The type that is classified."""
    labelled = [t for t in data.node_types if data[t].get("y") is not None]
    if wanted and wanted not in labelled:
        fail(name, f"target {wanted!r} has no y", f"one of {', '.join(labelled) or 'none'}")
    if not labelled:
        fail(name, "no type of vertices has y", "data['type'].y, classes from 0")
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


def _checked(given: Any, where: str, num_source: int, num_target: int) -> Any:
    """The edges [2, E] of one relation, in range."""
    edges = np.asarray(given)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        fail(where, f"edge_index is {edges.dtype} of shape {list(edges.shape)}", "int64 [2, E]")
    for row, end, count in ((0, "source", num_source), (1, "target", num_target)):
        bad = np.flatnonzero((edges[row] < 0) | (edges[row] >= count))
        if len(bad):
            fail(
                where,
                f"edge_index[{row}, {bad[0]}] = {edges[row, bad[0]]}, but its {end} type has "
                f"{count} vertices",
                f"0..{count - 1}",
            )
    return edges.astype(np.int64)


def _masks(store: Any, name: str, own: slice, n: int, seed: int) -> list[Any] | None:
    """The split of the target type, over all vertices."""
    if all(store.get(field) is None for field in SPLIT_NAMES):
        return None
    masks = []
    for field in SPLIT_NAMES:
        value = store.get(field)
        mask = np.zeros(n, dtype=np.bool_)
        given = None if value is None else array_of(value)
        mask[own] = given_mask(given, field, name, own.stop - own.start, seed)
        masks.append(mask)
    return masks
