"""The data graph: one immutable value that holds structure, features, labels and split.

Everything above reads a ``Graph`` and nothing changes one: readers build it, ``clean`` checks it,
a partition renumbers it into a new one. Arrays are numpy (or scipy CSR for sparse features), so
that a graph can be hashed, sliced per rank and memory-mapped before any tensor exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["BoolArray", "Features", "Graph", "IntArray"]

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Features: TypeAlias = npt.NDArray[np.float32] | sp.csr_array


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph for vertex classification, in CSR by the READING vertex.

    Row v of the CSR lists the vertices that v aggregates: PyG's edge (source j, target i) is entry
    j of row i. N vertices, E edges, F features.
    """

    name: str
    indptr: npt.NDArray[np.int64]
    """[N + 1], start of each row in ``indices``."""
    indices: IntArray
    """[E], int32 or int64, ascending within each row, without duplicates or loops."""
    x: Features
    """[N, F] float32, dense or ``scipy.sparse.csr_array``."""
    y: npt.NDArray[np.int64] | npt.NDArray[np.int8]
    """[N] int64, class of each vertex; or, multi-label, [N, T] int8, whether each of T labels
    applies (1) or not (0). -1 = not labelled."""
    train_mask: BoolArray
    val_mask: BoolArray
    test_mask: BoolArray
    num_classes: int
    """C; T if multi-label."""

    @property
    def is_multi_label(self) -> bool:
        """Whether a vertex has T labels that apply or not, in place of one class of C."""
        return self.y.ndim == 2

    @property
    def num_vertices(self) -> int:
        """N."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """E: directed edges, so an undirected edge counts twice."""
        return len(self.indices)

    @property
    def num_features(self) -> int:
        """F."""
        return int(self.x.shape[1])

    @property
    def degrees(self) -> npt.NDArray[np.int64]:
        """[N], how many vertices each vertex reads."""
        return np.diff(self.indptr)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether every edge has its reverse."""
        shape = (self.num_vertices, self.num_vertices)
        ones = np.ones(self.num_edges, dtype=np.int8)
        turned = sp.csr_array((ones, self.indices, self.indptr), shape=shape).T.tocsr()
        turned.sort_indices()
        return bool(
            np.array_equal(turned.indptr, self.indptr)
            and np.array_equal(turned.indices, self.indices)
        )

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r}, {self.num_vertices:,} vertices, {self.num_edges:,} edges, "
            f"{self.num_features:,} features, {self.label_text})"
        )

    @property
    def label_text(self) -> str:
        """'7 classes', or '121 labels at once'."""
        return f"{self.num_classes} {'labels at once' if self.is_multi_label else 'classes'}"

    @property
    def edge_index(self) -> npt.NDArray[np.int64]:
        """[2, E] as in PyG: row 0 the sources, row 1 the targets (built anew on each call)."""
        target = np.repeat(np.arange(self.num_vertices, dtype=np.int64), self.degrees)
        return np.stack([self.indices.astype(np.int64), target])

    @classmethod
    def from_pyg(
        cls,
        data: Data,
        name: str = "pyg",
        split: str = "given",
        seed: int = 0,
        symmetrize: bool = False,
    ) -> Graph:
        """A cleaned ``Graph`` from a PyG ``Data`` with edge_index (or adj_t), x, y and masks.

        ``split``, ``seed`` and ``symmetrize`` as in ``TrainConfig``. Raises ``InputError`` naming
        the attribute that is missing or wrong.
        """
        from gnnpipe.graph.pyg import graph_from_data

        return graph_from_data(data, name=name, split=split, seed=seed, symmetrize=symmetrize)
