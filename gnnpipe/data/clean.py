"""Checks raw arrays and builds a ``Graph`` from them; every data source ends here.

Files from outside contain labels beyond the classes, NaN features and masks over unlabelled
vertices. Each of these either crashes much later on some rank or trains on
wrong data without an error. A graph that ``clean`` returns satisfies the contract of ``Graph``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.config import parse_split
from gnnpipe.data.arrays import check_real, float32_array
from gnnpipe.data.edges import MAX_VERTICES, clean_edge_data, sorted_edges
from gnnpipe.data.labels import (
    TASKS,
    Labels,
    clean_labels,
    clean_targets,
    is_known,
    one_hot_warning,
)
from gnnpipe.data.messages import fail, warn
from gnnpipe.data.split import (
    SPLIT_NAMES,
    STANDARD_SPLIT,
    Masks,
    given_mask,
    num_splits,
    overlap_warning,
    split_masks,
)
from gnnpipe.graph.graph import BoolArray, Features, Graph
from gnnpipe.graph.types import AdjacencyForm, VertexTypes
from gnnpipe.graph.vertex_data import vertex_data_in


@dataclass(frozen=True, kw_only=True, eq=False)
class RawGraph:
    """The arrays of a graph as they were read, not yet checked. N vertices, E edges."""

    name: str
    """The data set's name, for messages and for the graph."""
    edge_index: Any
    """[2, E], any integer type; row 0 the sources, row 1 the targets."""
    x: Any
    """[N, F] features, dense of any real type, or scipy sparse."""
    y: Any
    """Classification: [N] or [N, 1], classes from 0; or [N, T], 1 where a label applies, else 0;
    -1 or NaN where there is no label. Regression: numbers, [N] or [N, T], NaN where none."""
    masks: Sequence[Any] | None = None
    """Train, val and test: each bool [N], [N, T] or [T, N] for T splits (0 and 1 count as bool), or
    the indices of its vertices; ``None`` if the data set has none."""
    split_seed: int | None = None
    """Seed of the 60/20/20 split that 'given' means if there are no masks; ``None``: refused."""
    num_vertices: int | None = None
    """N, if not the length of ``y``."""
    num_classes: int | None = None
    """If not the largest label + 1; T if ``y`` is [N, T]."""
    edge_data: Mapping[str, Any] = field(default_factory=dict)
    """Any of 'edge_weight' [E], 'edge_attr' [E] or [E, D] and 'edge_type' [E]."""
    relation_data: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Data of single relations' edges by the names of ``Graph.derived``, already checked."""
    vertex_data: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Other arrays by name, of which [N] or [N, D] numbers are kept for models that read them."""
    adjacency: AdjacencyForm = AdjacencyForm.EDGE_INDEX
    """The form in which a model of PyG's gets the edges."""
    task: str = "classification"
    """'classification' or 'regression': the meaning of ``y``."""
    types: VertexTypes | None = None
    """Types of the vertices of a heterogeneous graph."""
    has_one_direction: bool = False
    """Each undirected edge is listed once; its reverse is added."""
    is_own_data: bool = False
    """The user's own data, not a published data set: warn about content that is left out."""
    notes: Sequence[str] = ()
    """Further warnings about content that is left out."""

    @property
    def has_given_order(self) -> bool:
        """Whether a model may get the edges in the order in which the user has them."""
        return self.is_own_data and self.adjacency is AdjacencyForm.EDGE_INDEX


def clean(
    raw: RawGraph,
    *,
    split: str = "given",
    seed: int = 0,
    symmetrize: bool = False,
    needs_labels: bool = True,
    needs_split: bool = True,
) -> Graph:
    """A checked ``Graph`` with the edges as given: self-loops and parallel edges stay.

    Args:
        raw: the arrays.
        split: 'given' for the masks of ``raw``, or percentages such as '60/20/20'.
        seed: of the split by percentages; with masks of T splits, split ``seed`` modulo T is used.
        symmetrize: add the reverse of every edge and keep each edge once; where edges carry data,
            the reverse gets the same data, is added only if no edge leads back, and all given edges
            are kept.
        needs_labels: refuse a graph without labels (else it trains on its train mask, or all).
        needs_split: refuse a graph with labels and no split (else no vertex is in the split).

    Warns:
        UserWarning: masks of several splits or that overlap; ``notes`` of the user's own data.

    Raises:
        InputError: one line with the data set, the field, the value and a remedy to try.
    """
    is_unlabelled = raw.y is None
    if is_unlabelled:
        raw = _unlabelled(raw, needs_labels)
    labels = _labels(raw)
    n = _num_vertices(raw, labels)
    usable = _target_vertices(raw) if is_unlabelled else _has_label(raw, labels, needs_split)
    counted = "" if raw.num_vertices else " (y has one entry for each)"
    features = clean_features(raw.x, raw.name, n, counted)
    masks = _masks(raw, usable, split, seed, needs_split)
    data = clean_edge_data(raw.edge_data, raw.name, raw.edge_index) | dict(raw.relation_data)
    if symmetrize and raw.types is not None:
        hint = "torch_geometric.transforms.ToUndirected()"
        fail(raw.name, "symmetrize has no meaning for relations between types", hint)
    symmetrize |= raw.has_one_direction
    edges = sorted_edges(raw.edge_index, raw.name, n, symmetrize, data, raw.has_given_order)
    # Last, so that data which is refused is not warned about as well.
    several_splits = _several_splits_warning(raw, n, seed) if split == "given" else ""
    _warn(raw, labels, (several_splits, overlap_warning(masks)))
    return Graph(
        name=raw.name,
        indptr=edges.indptr,
        indices=edges.indices,
        x=features,
        y=labels,
        train_mask=masks[0],
        val_mask=masks[1],
        test_mask=masks[2],
        num_classes=_num_classes(labels, raw.num_classes),
        types=raw.types,
        adjacency=raw.adjacency,
        edge_order=edges.order,
        vertex_data=vertex_data_in(raw.vertex_data, n),
    ).with_edge_data(edges.data)


def _warn(raw: RawGraph, labels: Labels, notes: Sequence[str]) -> None:
    """Warn of each of ``notes`` that has text, and of the user's own data."""
    own = (one_hot_warning(labels), *raw.notes) if raw.is_own_data else ()
    for note in filter(None, (*notes, *own)):
        warn(raw.name, note)


def without_labels(raw: RawGraph) -> RawGraph:
    """The graph with placeholders for labels and masks, for link prediction."""
    n = raw.num_vertices or (1 if raw.y is None else len(raw.y))
    none = np.zeros(n, dtype=bool)
    return replace(
        raw, y=np.zeros(n, dtype=np.int64), masks=(~none, none, none), task="classification"
    )


def _labels(raw: RawGraph) -> Labels:
    if raw.task not in TASKS:
        fail(raw.name, f"task {raw.task!r}", " or ".join(map(repr, TASKS)))
    if raw.task == "regression":
        return clean_targets(raw.y, raw.name)
    return clean_labels(raw.y, raw.name, raw.num_classes)


def _num_vertices(raw: RawGraph, labels: Labels) -> int:
    n = len(labels) if raw.num_vertices is None else raw.num_vertices
    if n == 0:
        fail(raw.name, "no vertices", "check that y has one entry for each vertex")
    if n > MAX_VERTICES:
        fail(raw.name, f"{n} vertices", f"at most {MAX_VERTICES} are supported")
    if len(labels) != n:
        wrong = f"y has {len(labels)} labels for {n} vertices"
        if raw.x is not None and np.shape(raw.x)[:1] == (n,):
            wrong = f"y has {len(labels)} labels, and x has {n} rows"
        fail(raw.name, wrong, "give each vertex a row of x, and a label or -1")
    return n


def _unlabelled(raw: RawGraph, needs_labels: bool) -> RawGraph:
    """The graph with no label for any vertex, as many as x has rows; refused if labels are needed.

    Its training vertices are those of its train mask, or all.
    """
    if needs_labels:
        fail(
            raw.name,
            "no labels y",
            "y, a class for each vertex, or T labels of 0 and 1; or in Python Trainer(..., "
            "loss_fn=...), to train without labels",
        )
    if raw.num_vertices is None:
        fail(raw.name, "neither x nor y", "[N, F] features x")
    none = np.zeros(raw.num_vertices, dtype=np.bool_)
    train, val, test = raw.masks or (_target_vertices(raw), None, None)
    return replace(
        raw,
        y=np.full(raw.num_vertices, -1),
        masks=(train, none if val is None else val, none if test is None else test),
        num_classes=raw.num_classes or 0,
        task="classification",
    )


def _target_vertices(raw: RawGraph) -> BoolArray:
    """Whether a vertex is of the type that is trained on, [N]."""
    if raw.types is None:
        return np.ones(raw.num_vertices or 0, dtype=np.bool_)
    return raw.types.is_of(raw.types.target)


def _has_label(raw: RawGraph, labels: Labels, needs_split: bool) -> BoolArray:
    """Whether a vertex has any label, [N]; ``InputError`` if none has and a split needs one."""
    has_label: BoolArray = np.any(is_known(labels).reshape(len(labels), -1), axis=1)
    if (needs_split or raw.masks is not None) and not has_label.any():
        none, some = ("NaN", "numbers") if raw.task == "regression" else ("-1", "classes 0..C-1")
        fail(raw.name, f"y: no vertex is labelled (all are {none})", f"give {some} to some")
    return has_label


def _masks(raw: RawGraph, usable: BoolArray, split: str, seed: int, needs_split: bool) -> Masks:
    """The train, val and test masks, each [N].

    ``usable`` [N]: whether a vertex can be in the split. In a graph with labels only labelled
    vertices can.
    """
    n = len(usable)
    fractions = parse_split(split)
    if fractions is not None:
        masks = split_masks(usable, fractions, seed)
    elif raw.masks is None and raw.split_seed is not None:
        masks = split_masks(usable, STANDARD_SPLIT, raw.split_seed)
    elif raw.masks is None and not needs_split:
        masks = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
    elif raw.masks is None:
        fail(
            raw.name,
            "no split (train_mask, val_mask, test_mask)",
            "--split 60/20/20, or Graph.from_pyg(data, split='60/20/20') in Python",
        )
    else:
        train, val, test = raw.masks
        masks = (
            given_mask(train, "train_mask", raw.name, n, seed),
            given_mask(val, "val_mask", raw.name, n, seed),
            given_mask(test, "test_mask", raw.name, n, seed),
        )
    if needs_split and not masks[0].any():
        fail(raw.name, "train_mask: no vertex to train on", "--split 60/20/20")
    for name, mask in zip(SPLIT_NAMES, masks, strict=True):
        bad = np.flatnonzero(mask & ~usable)
        if len(bad):
            fail(
                raw.name,
                f"{name}: {len(bad)} of its vertices have no label, the first is {bad[0]}",
                "take them out of the mask, or --split 60/20/20",
            )
    return masks


def _several_splits_warning(raw: RawGraph, n: int, seed: int) -> str:
    splits = 1 if raw.masks is None else num_splits(raw.masks[0], n)
    if splits == 1:
        return ""
    return f"the masks hold {splits} splits, and --seed {seed} takes number {seed % splits}"


def _num_classes(labels: Labels, given: int | None) -> int:
    if labels.ndim == 2:
        return int(labels.shape[1])
    return int(labels.max()) + 1 if given is None else given


def clean_features(x: Any, name: str, n: int, counted: str = "") -> Features:
    """Features [N, F] as float32, dense or CSR; ``InputError`` if ``x`` is none.

    ``counted``: the origin of N, for the error.
    """
    if x is None:
        fail(name, "no features x", "the one-hot degrees or the identity (sparse) as x")
    features: Any = _float32_csr(x, name) if sp.issparse(x) else float32_array(x, name, "x")
    if features.ndim == 1:
        features = features[:, None]
    if features.ndim != 2 or features.shape[0] != n or features.shape[1] == 0:
        fail(
            name,
            f"x has shape {list(features.shape)} for {n} vertices{counted}",
            f"[{n}, F] with F >= 1",
        )
    if sp.issparse(features):
        bad = _first_not_finite(features.data[:, None])
        if bad is not None:
            row = int(np.searchsorted(features.indptr, bad[0], side="right")) - 1
            bad = row, int(features.indices[bad[0]])
    else:
        bad = _first_not_finite(features)
    if bad is not None:
        hint = "finite features within float32 (numpy.nan_to_num)"
        fail(name, f"x{list(bad)} = {float(features[bad])}", hint)
    return cast(Features, features)


def _float32_csr(x: Any, name: str) -> Any:
    check_real(x, name, "x")
    features = sp.csr_array(x, dtype=np.float32)
    if not features.has_canonical_format:
        features = features.copy()
        features.sum_duplicates()
    return features


def _first_not_finite(values: npt.NDArray[np.float32]) -> tuple[int, int] | None:
    """The place of the first NaN or infinity in an array [R, F].

    The array may be larger than memory (memory-mapped), so blocks of rows are compared in turn.
    """
    rows = max(1, (1 << 24) // values.shape[1])
    for start in range(0, len(values), rows):
        finite = np.isfinite(values[start : start + rows])
        if not finite.all():
            row, column = np.argwhere(~finite)[0].tolist()
            return start + row, column
    return None
