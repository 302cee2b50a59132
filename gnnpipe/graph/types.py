"""Several kinds of vertices and edges in one graph.

A heterogeneous graph is kept as one: its vertices stand type after type in one numbering, so that
it is cut, cleaned and measured like any other, and ``edge_type`` numbers the relation of each edge.
What belongs to one type alone, its features and the number of a vertex within it, is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

__all__ = ["Relation", "VertexTypes"]

Relation: TypeAlias = tuple[str, str, str]
"""(type read, name, type that reads), as PyG has it."""


@dataclass(frozen=True, eq=False)
class VertexTypes:
    """The types of N vertices and the relations between them."""

    names: tuple[str, ...]
    of_vertex: npt.NDArray[np.int64]
    """[N], the place of its type in ``names``."""
    number: npt.NDArray[np.int64]
    """[N], the number of each vertex within its type, as it was read."""
    features: Mapping[str, npt.NDArray[np.float32] | sp.csr_array]
    """By type [N_t, F_t], in the order of the vertices."""
    relations: tuple[Relation, ...]
    """By ``edge_type``."""
    target: str
    """The type that has labels."""

    def is_of(self, name: str) -> npt.NDArray[np.bool_]:
        """[N], which vertices are of a type."""
        return np.asarray(self.of_vertex == self.names.index(name))

    def renumbered(self, perm: npt.NDArray[np.int64]) -> VertexTypes:
        """Of vertices in another order: ``perm[new]`` = old."""
        features: dict[str, Any] = {}
        place = np.empty(len(perm), dtype=np.int64)
        for name in self.names:
            is_old = self.is_of(name)
            place[is_old] = np.arange(is_old.sum())
            if name in self.features:
                features[name] = self.features[name][place[perm[is_old[perm]]]]
        return VertexTypes(
            self.names,
            self.of_vertex[perm],
            self.number[perm],
            features,
            self.relations,
            self.target,
        )
