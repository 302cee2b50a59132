"""Types of vertices and relations of a heterogeneous graph, and the forms of an adjacency matrix.

A heterogeneous graph is stored as one graph with its vertices numbered type after type, so that it
is partitioned and cleaned like any other; ``edge_type`` is the relation of each edge. The features
of each type, and the number of a vertex within its type, are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

Relation: TypeAlias = tuple[str, str, str]
"""(source type, name, target type), as in PyG."""

RELATION_DATA = ("edge_weight", "edge_attr", "edge_type")
"""Kinds of data that single relations' edges may have."""


def numbered_name(name: str, number: int) -> str:
    """Name of what belongs to one of several vertex types or relations: 'edge_attr__0'."""
    return f"{name}__{number}"


def relation_of(field: str) -> int | None:
    """The number of the relation whose edges alone have this data; None if all edges have it."""
    kind, _, number = field.partition("__")
    return int(number) if kind in RELATION_DATA and number.isdigit() else None


class AdjacencyForm(StrEnum):
    """The forms in which PyG's models take the edges."""

    EDGE_INDEX = "edge_index"
    """[2, E], sources and targets."""
    SPARSE_TENSOR = "SparseTensor"
    """``adj_t`` [N, N] as a ``torch_sparse.SparseTensor``."""
    CSR = "torch.sparse_csr"
    """``adj_t`` [N, N] as a torch CSR tensor."""
    COO = "torch.sparse_coo"
    """``adj_t`` [N, N] as a torch COO tensor."""
    CSC = "torch.sparse_csc"
    """``adj_t`` [N, N] as a torch CSC tensor."""


@dataclass(frozen=True, eq=False)
class VertexTypes:
    """The types of N vertices and the relations between them."""

    names: tuple[str, ...]
    of_vertex: npt.NDArray[np.int64]
    """[N], index of the vertex's type in ``names``."""
    number: npt.NDArray[np.int64]
    """[N], the number of each vertex within its type, as it was read."""
    features: Mapping[str, npt.NDArray[np.float32] | sp.csr_array]
    """By type [N_t, F_t], in the order of the vertices."""
    relations: tuple[Relation, ...]
    """By ``edge_type``."""
    target: str
    """The type that has labels."""

    @classmethod
    def in_order(
        cls,
        counts: Mapping[str, int],
        features: Mapping[str, npt.NDArray[np.float32] | sp.csr_array],
        relations: tuple[Relation, ...],
        target: str,
    ) -> VertexTypes:
        """The types of vertices numbered type after type; ``counts``: N_t by type."""
        of_vertex = np.repeat(np.arange(len(counts)), list(counts.values()))
        number = np.concatenate([np.arange(count) for count in counts.values()])
        return cls(tuple(counts), of_vertex, number, features, relations, target)

    def is_of(self, name: str) -> npt.NDArray[np.bool_]:
        """[N], which vertices are of a type."""
        return np.asarray(self.of_vertex == self.names.index(name))

    def renumbered(self, perm: npt.NDArray[np.int64]) -> VertexTypes:
        """The types after renumbering the vertices: ``perm[new]`` = old."""
        features: dict[str, Any] = {}
        place = np.empty(len(perm), dtype=np.int64)
        for name in self.names:
            is_old = self.is_of(name)
            place[is_old] = np.arange(is_old.sum())
            if name in self.features:
                features[name] = self.features[name][place[perm[is_old[perm]]]]
        of_vertex, number = self.of_vertex[perm], self.number[perm]
        return replace(self, of_vertex=of_vertex, number=number, features=features)
