"""Pairs of vertices for link prediction, each joined by an edge or not.

The chunk of the target scores a pair and reads the final row of the source, as a layer reads its
neighbours. So pairs are a second set of edges over the same vertices, used after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

PAIRS = "pairs"
"""Name of the pairs' matrix, and of the table of final rows that they read."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """P pairs in CSR by their target, as a ``Graph`` keeps its edges."""

    indptr: npt.NDArray[np.int64]
    """[N + 1], start of each target's pairs."""
    indices: npt.NDArray[np.integer[Any]]
    """[P], the sources, ascending for each target; a pair may be there twice."""
    label: npt.NDArray[np.int8]
    """[P], 1 where an edge joins them, else 0."""
    part: npt.NDArray[np.int8]
    """[P], 0 to train on, 1 to validate, 2 to test."""

    @classmethod
    def build(
        cls,
        ends: npt.NDArray[np.int64],
        label: npt.NDArray[np.int8],
        part: npt.NDArray[np.int8],
        num_vertices: int,
    ) -> Pairs:
        """From ``ends`` [2, P], row 0 the sources, in any order."""
        order = np.lexsort((ends[0], ends[1]))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(ends[1], minlength=num_vertices))])
        return cls(indptr.astype(np.int64), ends[0, order], label[order], part[order])

    @property
    def num_vertices(self) -> int:
        """N."""
        return len(self.indptr) - 1

    @property
    def num_pairs(self) -> int:
        """P."""
        return len(self.indices)

    @property
    def degrees(self) -> npt.NDArray[np.int64]:
        """[N], pairs of each target."""
        return np.diff(self.indptr)

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """[2, P], sources and targets."""
        target = np.repeat(np.arange(self.num_vertices, dtype=np.int64), self.degrees)
        return np.stack([self.indices.astype(np.int64), target])

    @property
    def matrix(self) -> sp.csr_array:
        """[N, N] float64, the number of each pair at (target, source)."""
        numbers = np.arange(self.num_pairs, dtype=np.float64)
        return sp.csr_array(
            (numbers, self.indices, self.indptr), shape=(self.num_vertices, self.num_vertices)
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pairs to train on, to validate and to test."""
        train, val, test = np.bincount(self.part, minlength=3).tolist()
        return train, val, test

    def renumbered(self, inverse: npt.NDArray[np.int64]) -> Pairs:
        """The pairs after renumbering the vertices: ``inverse[old]`` = new."""
        return Pairs.build(inverse[self.ends], self.label, self.part, self.num_vertices)
