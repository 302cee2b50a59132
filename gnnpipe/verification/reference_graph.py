"""Reads the whole graph for the reference: straight from ``Graph``, without renumbering.

Shapes: N vertices, E edges, P pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnpipe.graph.graph import Features, Graph
from gnnpipe.graph.vertex_data import VertexColumns


@dataclass(frozen=True, eq=False)
class WholeGraph:
    """Features, edges, targets and split, in the order of the given graph."""

    num_vertices: int
    x: dict[str, Tensor]
    """Features [N_t, F] by vertex type ('' for a graph with one type)."""
    edges: dict[tuple[str, str, str], Tensor]
    """Sources and targets [2, E] by relation (('', '', '') for a graph with one type), numbered
    within their types."""
    edge_data: dict[str, Tensor]
    """[E, ...] by field of ``Graph``."""
    relation_data: dict[str, dict[tuple[str, str, str], Tensor]]
    """Edge data [E_r, ...] by relation, for the fields of a graph with several vertex types."""
    counts: dict[str, int]
    """Numbers of vertices by type."""
    adjacency: str
    """Form in which a user's model gets the edges (``AdjacencyForm``)."""
    pairs: Tensor | None
    """[2, P], sources and targets of the pairs of link prediction."""
    y: Tensor
    """Classes [N], labels or numbers [N, T] of the (target type's) vertices; for pairs [P, 1], 1 if
    an edge joins the pair."""
    is_train: Tensor
    """[N] or [P], mask of the training rows of ``y``."""
    columns: Mapping[str, VertexColumns]
    """The first columns of the features, which hold other data of the vertices by name."""

    @classmethod
    def read(cls, graph: Graph, edge_fields: Collection[str], dtype: torch.dtype) -> WholeGraph:
        """Reads a graph; ``edge_fields``: the edge data that the model reads."""
        if graph.types is None:
            x = {"": _dense(graph.x, dtype)}
            edges, data = _read_edges(graph, edge_fields, dtype)
            relations, of_relations = {("", "", ""): edges}, {}
            is_target = np.ones(graph.num_vertices, dtype=bool)
        else:
            x = {name: _dense(found, dtype) for name, found in graph.types.features.items()}
            relations, data = _read_relations(graph), {}
            of_relations = _read_relation_data(graph, edge_fields, dtype)
            is_target = graph.types.of_vertex == graph.types.names.index(graph.types.target)
        if graph.pairs is None:
            pairs, y = None, torch.from_numpy(graph.y[is_target])
            is_train = torch.from_numpy(graph.train_mask[is_target])
        else:
            target = np.repeat(np.arange(graph.num_vertices), np.diff(graph.pairs.indptr))
            pairs = torch.from_numpy(np.stack([graph.pairs.indices.astype(np.int64), target]))
            y = torch.from_numpy(graph.pairs.label)[:, None]
            is_train = torch.from_numpy(graph.pairs.part) == 0
        y = y.to(dtype) if y.is_floating_point() else y
        form = str(graph.adjacency)
        counts = {name: int(chosen.sum()) for name, chosen in graph.row_types.items()}
        n = graph.num_vertices
        columns = {c.name: c for c in graph.vertex_columns}
        return cls(n, x, relations, data, of_relations, counts, form, pairs, y, is_train, columns)

    @property
    def features(self) -> Tensor:
        """Features [N, F] of a graph with one vertex type."""
        return self.x[""]

    @property
    def edge_index(self) -> Tensor:
        """Edges [2, E] of a graph with one vertex type."""
        return self.edges["", "", ""]


def _dense(x: Features, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(x if isinstance(x, np.ndarray) else x.toarray()).to(dtype)


def _read_edges(
    graph: Graph, fields: Collection[str], dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns edges [2, E] and their data."""
    target = np.repeat(np.arange(graph.num_vertices), np.diff(graph.indptr))
    edges = np.stack([graph.indices.astype(np.int64), target])
    data = {name: torch.from_numpy(graph.edge_data[name]) for name in fields}
    data = {name: v.to(dtype) if v.is_floating_point() else v for name, v in data.items()}
    return torch.from_numpy(edges), data


def _read_relations(graph: Graph) -> dict[tuple[str, str, str], Tensor]:
    """Returns the edges [2, E] of every relation, numbered within the types of their ends."""
    assert graph.types is not None
    assert graph.edge_type is not None
    number = np.empty(graph.num_vertices, dtype=np.int64)
    for kind in range(len(graph.types.names)):
        is_of_kind = graph.types.of_vertex == kind
        number[is_of_kind] = np.arange(is_of_kind.sum())
    target = np.repeat(np.arange(graph.num_vertices), np.diff(graph.indptr))
    ends = number[np.stack([graph.indices.astype(np.int64), target])]
    return {
        relation: torch.from_numpy(ends[:, graph.edge_type == place])
        for place, relation in enumerate(graph.types.relations)
    }


def _read_relation_data(
    graph: Graph, fields: Collection[str], dtype: torch.dtype
) -> dict[str, dict[tuple[str, str, str], Tensor]]:
    """Returns the data of the relations' edges by the kind of the data."""
    assert graph.types is not None
    found: dict[str, dict[tuple[str, str, str], Tensor]] = {}
    for name in sorted(set(fields) & set(graph.derived)):
        kind, _, number = name.partition("__")
        values = torch.from_numpy(graph.derived[name])
        values = values.to(dtype) if values.is_floating_point() else values
        found.setdefault(kind, {})[graph.types.relations[int(number)]] = values
    return found
