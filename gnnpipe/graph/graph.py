"""The data graph: one immutable value that holds structure, features, labels and split.

A ``Graph`` is never changed: data sources return raw arrays, ``clean`` builds a graph from them,
and ``renumber`` returns a new graph. Arrays are numpy (or scipy CSR for sparse features), so that a
graph can be hashed, sliced per rank and memory-mapped before any tensor exists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.errors import InputError
from gnnpipe.graph.pairs import PAIRS, Pairs
from gnnpipe.graph.saved import read_saved, save_graph
from gnnpipe.graph.types import AdjacencyForm, Relation, VertexTypes, relation_of
from gnnpipe.graph.vertex_data import VertexColumns, before_features

if TYPE_CHECKING:
    from torch_geometric.data import Data, Dataset, HeteroData

IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Features: TypeAlias = npt.NDArray[np.float32] | sp.csr_array


_BLOCK_EDGES = 1 << 20
"""Edges that are looked at in one step, so that temporaries stay small."""

EDGE_DATA = ("edge_weight", "edge_attr", "edge_type")
"""Fields of ``Graph`` with data of every edge, named as in PyG's ``Data``."""


def chosen_edge_data(
    edge_data: Mapping[str, npt.NDArray[Any]], edges: npt.NDArray[Any]
) -> dict[str, npt.NDArray[Any]]:
    """The data of some edges, given as their numbers [E'] or as a mask [E]."""
    found = {}
    for name, values in edge_data.items():
        number = relation_of(name)
        if number is None:
            found[name] = values[edges]
            continue
        is_own = edge_data["edge_type"] == number
        places = np.cumsum(is_own) - 1
        found[name] = values[places[edges][is_own[edges]]]
    return found


def bare(graph: Graph) -> Graph:
    """The graph without features."""
    return replace(graph, x=np.zeros((graph.num_vertices, 0), dtype=np.float32))


def have_same_pattern(a: sp.csr_array, b: sp.csr_array) -> bool:
    """Whether two matrices with sorted indices have the same shape and entries at equal places."""
    return bool(
        a.shape == b.shape
        and np.array_equal(a.indptr, b.indptr)
        and np.array_equal(a.indices, b.indices)
    )


def keep_order_of_parallel(numbered: sp.csr_array) -> None:
    """Put parallel edges in the order of their numbers, which sorting by column may have changed.

    ``numbered``: matrix with sorted columns whose values are the edges' numbers; changed in place.
    """
    is_equal = numbered.indices[1:] == numbered.indices[:-1]
    starts = numbered.indptr[1:-1]
    is_equal[starts[(starts > 0) & (starts < numbered.nnz)] - 1] = False
    again = np.flatnonzero(is_equal) + 1
    if not len(again):
        return
    places = np.union1d(again, again - 1)
    run = np.cumsum(~np.isin(places, again))
    order = np.lexsort((numbered.data[places], run))
    numbered.data[places] = numbered.data[places][order]


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
    """[E], int32 or int64, ascending within each row. Self-loops and parallel edges count as they
    were given."""
    x: Features
    """[N, F] float32, dense or ``scipy.sparse.csr_array``."""
    y: npt.NDArray[np.int64] | npt.NDArray[np.int8] | npt.NDArray[np.float32]
    """[N] int64, class of each vertex; multi-label: [N, T] int8, whether each of T labels applies
    (1) or not (0); -1 = not labelled. Regression: [N, T] float32, NaN = no target."""
    train_mask: BoolArray
    val_mask: BoolArray
    test_mask: BoolArray
    num_classes: int
    """C; T for multi-label and regression: the width of the model's output. 0 if it
    is not known, because there are no labels (``y`` is then -1): such a graph can be predicted for,
    and trained on by the user's own loss."""
    edge_weight: npt.NDArray[np.float32] | None = None
    """[E], in the order of ``indices``: read by PyG models whose forward takes ``edge_weight``, or
    the values of ``adj_t`` (see ``adjacency``)."""
    edge_attr: npt.NDArray[np.float32] | npt.NDArray[np.int64] | None = None
    """[E] or [E, D], likewise; int64 if the attributes were given as whole numbers."""
    edge_type: npt.NDArray[np.int64] | None = None
    """[E] from 0, the relation of each edge, likewise."""
    types: VertexTypes | None = None
    """For a heterogeneous graph; ``edge_type`` then numbers its relations, and ``x`` is empty."""
    pairs: Pairs | None = None
    """For link prediction: the pairs to be scored; ``y`` is then -1 and ``num_classes`` 0."""
    adjacency: AdjacencyForm = AdjacencyForm.EDGE_INDEX
    """The form in which the edges were given, and in which a model of PyG's gets them."""
    edge_order: IntArray | None = None
    """[E], position of each edge in the list of edges that was given, for several types in all
    relations' lists one after another; ``None`` if it is not known, or if the edges are in that
    order."""
    derived: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """By name [E, ...]: values of edges that a model's forward made (``capture.edge_work``);
    ``edge_type`` then numbers the sets of edges that it made. Or the data of relation r in a
    heterogeneous graph, 'edge_weight__r' [E_r], 'edge_attr__r' [E_r, ...] and 'edge_type__r' [E_r],
    in the order of ``indices``: it takes no memory for edges of other relations."""
    vertex_data: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """By name [N] or [N, D]: other data of the vertices, for models that take one ``Data``."""
    vertex_columns: tuple[VertexColumns, ...] = ()
    """The first columns of ``x``, which hold the ``vertex_data`` that the model reads."""

    @property
    def edge_data(self) -> dict[str, npt.NDArray[Any]]:
        """The edge data by field, in the order of ``EDGE_DATA``."""
        found = {field: getattr(self, field) for field in EDGE_DATA}
        return {field: v for field, v in found.items() if v is not None} | dict(self.derived)

    def with_edge_data(self, edge_data: Mapping[str, npt.NDArray[Any]]) -> Graph:
        """The graph with other ``edge_data``."""
        fields: dict[str, Any] = {field: edge_data.get(field) for field in EDGE_DATA}
        derived = {name: values for name, values in edge_data.items() if name not in fields}
        return replace(self, **fields, derived=derived)

    def reduced_to(self, edge_data: Collection[str]) -> Graph:
        """The graph with only this edge data; the relations of several types of vertices stay."""
        kept = {*edge_data, "edge_type"} if self.types is not None else set(edge_data)
        read = {field: values for field, values in self.edge_data.items() if field in kept}
        return self if len(read) == len(self.edge_data) else self.with_edge_data(read)

    def with_vertex_columns(self, read: Collection[str]) -> Graph:
        """The graph with its vertex data of these names in the first columns of ``x``.

        ``InputError`` for numbers that features cannot hold.
        """
        found = {name: values for name, values in self.vertex_data.items() if name in read}
        if not found:
            return replace(self, vertex_data={})
        x, columns = before_features(self.x, found, self.name)
        return replace(self, x=x, vertex_data={}, vertex_columns=columns)

    def as_given(self, field: str = "") -> IntArray | slice:
        """The index that puts edges, or their data ``field``, in the order that was given."""
        if self.edge_order is None:
            return slice(None)
        number = relation_of(field)
        is_all = number is None
        return np.argsort(self.edge_order if is_all else self.edge_order[self.edge_type == number])

    @property
    def has_matrix_form(self) -> bool:
        """Whether a model of PyG's gets the edges as a matrix ``adj_t``."""
        return self.adjacency is not AdjacencyForm.EDGE_INDEX

    @property
    def has_weighted_adjacency(self) -> bool:
        """Whether the edge weights are values of ``adj_t``, and no argument of their own."""
        return self.has_matrix_form and bool(self.weight_fields)

    @property
    def weight_fields(self) -> list[str]:
        """The fields with edge weights: 'edge_weight', or one for each relation that has them."""
        return [field for field in self.edge_data if field.partition("__")[0] == "edge_weight"]

    @cached_property
    def self_loops(self) -> npt.NDArray[np.int64]:
        """[L], positions in ``indices`` of the self-loops."""
        found, start = [], 0
        while start < self.num_vertices:
            first = self.indptr[start]
            stop = int(np.searchsorted(self.indptr, first + _BLOCK_EDGES, side="right")) - 1
            stop = max(stop, start + 1)
            rows = np.repeat(np.arange(start, stop), np.diff(self.indptr[start : stop + 1]))
            is_loop = self.indices[first : self.indptr[stop]] == rows
            found.append(first + np.flatnonzero(is_loop))
            start = stop
        return np.concatenate(found).astype(np.int64)

    @cached_property
    def parallel_edges(self) -> npt.NDArray[np.int64]:
        """Positions in ``indices`` of all edges that join the same two vertices as the edge before.

        Edges of different relations are not parallel.
        """
        is_equal = self.indices[1:] == self.indices[:-1]
        starts = self.indptr[1:-1]
        is_equal[starts[(starts > 0) & (starts < self.num_edges)] - 1] = False
        found = np.flatnonzero(is_equal) + 1
        if self.edge_type is not None and len(found):
            found = found[self.edge_type[found] == self.edge_type[found - 1]]
        return found

    def without_self_loops(self) -> Graph:
        """The graph without its self-loops."""
        return self._without(self.self_loops)

    def without_parallel_edges(self) -> Graph:
        """The graph with the first of all parallel edges, and its data."""
        return self._without(self.parallel_edges)

    def _without(self, edges: npt.NDArray[np.int64]) -> Graph:
        if not len(edges):
            return self
        is_kept = np.ones(self.num_edges, dtype=bool)
        is_kept[edges] = False
        return self.with_edges(is_kept)

    def with_edges(self, is_kept: BoolArray) -> Graph:
        """The graph with only some of its edges, ``is_kept`` [E]."""
        before = np.concatenate([[0], np.cumsum(is_kept)])
        order = None if self.edge_order is None else self.edge_order[is_kept]
        kept = replace(
            self, indptr=before[self.indptr], indices=self.indices[is_kept], edge_order=order
        )
        return kept.with_edge_data(chosen_edge_data(self.edge_data, is_kept))

    @cached_property
    def row_types(self) -> dict[str, BoolArray]:
        """Masks [N] of the vertices of each type, by its name; '' if there is only one type."""
        if self.types is None:
            return {"": np.ones(self.num_vertices, dtype=bool)}
        return {name: self.types.is_of(name) for name in self.types.names}

    @cached_property
    def table_rows(self) -> dict[str, BoolArray]:
        """Masks [N] of the vertices that push rows into each table, by its name.

        Tables have the names of the types; ``PAIRS`` is the table of all final rows, which are read
        over the pairs and not over the edges.
        """
        if self.pairs is None:
            return self.row_types
        return self.row_types | {PAIRS: np.ones(self.num_vertices, dtype=bool)}

    @property
    def vertex_counts(self) -> dict[str, int]:
        """N by the type of the vertices, '' if there is only one."""
        return {name: int(chosen.sum()) for name, chosen in self.row_types.items()}

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relations of a heterogeneous graph, by ``edge_type``."""
        return () if self.types is None else self.types.relations

    @property
    def target(self) -> str:
        """The type of the vertices that have labels."""
        return "" if self.types is None else self.types.target

    def features(self, vertex_type: str) -> Features:
        """[N_t, F_t] of a type's vertices, in their order."""
        return self.x if self.types is None else self.types.features[vertex_type]

    @property
    def is_multi_label(self) -> bool:
        """Whether a vertex has T labels that apply or not, instead of one class of C."""
        return self.y.ndim == 2 and not self.is_regression

    @property
    def is_regression(self) -> bool:
        """Whether a vertex has T numbers instead of labels."""
        return bool(self.y.dtype.kind == "f")

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
        matrix = sp.csr_array((ones, self.indices, self.indptr), shape=shape)
        transposed = matrix.T.tocsr()
        transposed.sort_indices()
        return have_same_pattern(matrix, transposed)

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r}, {self.num_vertices:,} vertices, {self.num_edges:,} edges, "
            f"{self.feature_text}, {self.label_text})"
        )

    @property
    def feature_text(self) -> str:
        """'500 features and pos', or those of every type with the number of its vertices."""
        if self.types is None:
            others = self.vertex_columns
            own = self.num_features - (others[-1].stop if others else 0)
            return " and ".join([f"{own:,} features", *(part.name for part in others)])
        parts = []
        for name, count in self.vertex_counts.items():
            x = self.types.features.get(name)
            width = "no" if x is None else f"{x.shape[1]:,}"
            parts.append(f"{count:,} {name} with {width} features")
        return f"{len(self.types.relations)} relations ({'; '.join(parts)})"

    @property
    def label_text(self) -> str:
        """'7 classes (no vertex is of 0)', '121 labels at once', '1 target' or '9 pairs ...'."""
        if self.pairs is not None:
            return f"{self.pairs.num_pairs:,} pairs of vertices"
        if not self.num_classes:
            return "no labels"
        if self.is_regression:
            return f"{self.num_classes} target{'s' * (self.num_classes > 1)}"
        if self.is_multi_label:
            return f"{self.num_classes} labels at once"
        # Often a slip: labels that begin at 1.
        counts = np.bincount(self.y[self.y >= 0], minlength=self.num_classes)
        unused = np.flatnonzero(counts[: self.num_classes] == 0)
        some = f"{', '.join(map(str, unused[:3]))}{', ...' if len(unused) > 3 else ''}"
        return f"{self.num_classes} classes" + (f" (no vertex is of {some})" if len(unused) else "")

    @property
    def edge_index(self) -> npt.NDArray[np.int64]:
        """[2, E] as in PyG: row 0 the sources, row 1 the targets (computed on each call)."""
        target = np.repeat(np.arange(self.num_vertices, dtype=np.int64), self.degrees)
        return np.stack([self.indices.astype(np.int64), target])

    def save(self, path: str | Path) -> None:
        """Write the graph to one file that ends in .npz, which ``load`` and ``--dataset`` read.

        Raises ``InputError`` if the file cannot be written.
        """
        save_graph(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """The graph in a file that ``save`` wrote, with its arrays memory-mapped.

        Raises ``InputError`` for any other file.
        """
        return cls(**read_saved(path))

    @classmethod
    def from_pyg(
        cls,
        data: Data | HeteroData | Dataset | Sequence[Data],
        name: str = "pyg",
        split: str = "given",
        seed: int = 0,
        symmetrize: bool = False,
        target: str = "",
        task: str = "classification",
        num_classes: int | None = None,
        split_idx: Mapping[str, Any] | None = None,
    ) -> Graph:
        """A checked ``Graph`` from a PyG ``Data`` with edge_index (or adj_t), x, y and masks.

        Or from a ``Dataset`` of one graph, with OGB's split where it has ``get_idx_split``; or from
        a ``HeteroData``, ``target`` being the type with the labels if several have y.
        ``task``: 'classification'; 'regression' where y holds numbers, [N] or [N, T]; or 'links':
        ``data`` is split here, or the (train, val, test) of PyG's ``RandomLinkSplit``, of which
        train's edges are read. ``split``, ``seed`` and ``symmetrize`` as in ``TrainConfig``. The
        edges are those of ``data``, self-loops, parallel edges and values of ``adj_t`` included.
        ``num_classes``: the number of classes, if not the largest in ``y`` + 1. ``split_idx``: the
        indices of the vertices in 'train', 'valid' and 'test', as OGB's ``get_idx_split`` returns
        them, in place of the masks. A graph without y can be predicted for, and trained on by a
        ``loss_fn`` without labels: on the vertices of ``train_mask``, or all. A graph with y and
        without masks can only be predicted for.
        Raises ``InputError`` naming the attribute that is missing or wrong.
        """
        from gnnpipe.data.pyg import from_pyg  # the one import that goes up (.importlinter)

        if split_idx is not None and split != "given":
            raise InputError(f"split {split!r} and split_idx: both give the split; try one of them")
        return from_pyg(
            data,
            name=name,
            split=split if split_idx is None else split_idx,
            seed=seed,
            symmetrize=symmetrize,
            target=target,
            task=task,
            num_classes=num_classes,
        )
