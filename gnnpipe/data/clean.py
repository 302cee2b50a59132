"""The one gate through which every graph enters.

Files from outside hold loops, duplicate edges, labels beyond the classes, NaN among the features,
masks over unlabelled vertices. Each of these either crashes much later on some rank or, worse,
trains without a word on the wrong thing. So every reader hands its raw arrays to ``clean``, and
what comes out satisfies the contract of ``Graph``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.config import parse_split
from gnnpipe.data.edges import MAX_VERTICES, clean_edge_data, sorted_edges
from gnnpipe.data.labels import TASKS, Labels, clean_labels, clean_targets, is_known, one_hot
from gnnpipe.data.split import SPLIT_NAMES, fail, given_mask, num_splits, overlap, split_masks
from gnnpipe.graph.graph import BoolArray, Features, Graph

__all__ = ["clean", "clean_features"]


def clean(
    edge_index: Any,
    *,
    name: str,
    x: Any,
    y: Any,
    masks: Sequence[Any] | None,
    num_vertices: int | None = None,
    num_classes: int | None = None,
    split: str = "given",
    seed: int = 0,
    symmetrize: bool = False,
    report: bool = False,
    edge_data: Mapping[str, Any] | None = None,
    task: str = "classification",
) -> Graph:
    """A ``Graph`` from raw arrays, checked, without loops, and without duplicates of bare edges.

    Args:
        edge_index: [2, E], any integer type; row 0 the sources, row 1 the targets.
        name: the dataset's name, for messages and for the graph.
        x: [N, F], dense of any real type, or scipy sparse.
        y: [N] or [N, 1], classes from 0; or [N, T], 1 where a label applies and 0 where not; -1
            (or NaN) where there is no label. Of a regression real numbers, [N] or [N, T], NaN where
            there is none.
        masks: train, val and test, each bool [N], [N, T] or [T, N] (the first of the T splits is
            taken; 0 and 1 will do for bool) or the indices of its vertices, each once; ``None`` if
            the dataset has none.
        num_vertices: N, if it is not the length of ``y``.
        num_classes: if it is not the largest label + 1; T if y is [N, T].
        split: 'given' for ``masks``, or percentages such as '60/20/20'.
        seed: of the split by percentages.
        symmetrize: add the reverse of every edge.
        report: warn of loops and duplicate edges, as befits data of the user's own. The reverse
            edges that ``symmetrize`` adds are never reported.
        edge_data: 'edge_weight' [E], 'edge_attr' [E] or [E, D] and 'edge_type' [E], as far as there
            are such. Edges that carry data are kept each for itself, and ``symmetrize`` adds the
            reverse, with the same data, only where no edge leads back.
        task: 'classification', or 'regression': what ``y`` means.

    Warns:
        UserWarning: masks of several splits, of which one is taken; masks that overlap; edges
            removed, if ``report``.

    Raises:
        InputError: one line naming the dataset and field, the value and what to try.
    """
    if task not in TASKS:
        fail(name, f"task {task!r}", " or ".join(map(repr, TASKS)))
    is_regression = task == "regression"
    labels = clean_targets(y, name) if is_regression else clean_labels(y, name, num_classes)
    n = len(labels) if num_vertices is None else num_vertices
    if n == 0:
        fail(name, "no vertices", "check that y has one entry for each vertex")
    if n > MAX_VERTICES:
        fail(name, f"{n} vertices", f"at most {MAX_VERTICES} are supported")
    if len(labels) != n:
        fail(
            name,
            f"y has {len(labels)} labels for {n} vertices",
            "give one label for each, -1 = none",
        )
    has_label: BoolArray = np.any(is_known(labels).reshape(n, -1), axis=1)
    if not has_label.any():
        none, some = ("NaN", "numbers") if is_regression else ("-1", "classes 0..C-1")
        fail(name, f"y: no vertex is labelled (all are {none})", f"give {some} to some")
    features = clean_features(x, name, n, "" if num_vertices else " (y has one entry for each)")
    fractions = parse_split(split)
    if fractions is not None:
        train, val, test = split_masks(has_label, fractions, seed)
    elif masks is None:
        fail(
            name,
            "no split (train_mask, val_mask, test_mask)",
            "--split 60/20/20, or Graph.from_pyg(data, split='60/20/20') in Python",
        )
    else:
        train, val, test = (
            given_mask(m, field, name, n, seed) for m, field in zip(masks, SPLIT_NAMES, strict=True)
        )
    if not train.any():
        fail(name, "train_mask: no vertex to train on", "--split 60/20/20")
    for field, mask in zip(SPLIT_NAMES, (train, val, test), strict=True):
        bad = np.flatnonzero(mask & ~has_label)
        if len(bad):
            fail(
                name,
                f"{field}: {len(bad)} of its vertices have no label, the first is {bad[0]}",
                "take them out of the mask, or --split 60/20/20",
            )
    splits = 1 if masks is None or fractions is not None else num_splits(masks[0], n)
    chosen = f"the masks hold {splits} splits, and --seed {seed} takes number {seed % splits}"
    edges = sorted_edges(
        edge_index, name, n, symmetrize, report, clean_edge_data(edge_data or {}, name, edge_index)
    )
    # Last, so that data which is refused is not commented on as well. The level is the line that
    # calls ``load_graph`` or ``Graph.from_pyg``.
    for note in (
        chosen if splits > 1 else "",
        overlap((train, val, test)),
        edges.removed,
        one_hot(labels) if report else "",
    ):
        if note:
            warnings.warn(f"graph {name!r}: {note}", UserWarning, stacklevel=4)
    return Graph(
        name=name,
        indptr=edges.indptr,
        indices=edges.indices,
        x=features,
        y=labels,
        train_mask=train,
        val_mask=val,
        test_mask=test,
        num_classes=_num_classes(labels, num_classes),
        **edges.data,
    )


def _num_classes(labels: Labels, given: int | None) -> int:
    if labels.ndim == 2:
        return int(labels.shape[1])
    return int(labels.max()) + 1 if given is None else given


def clean_features(x: Any, name: str, n: int, counted: str = "") -> Features:
    """Features [N, F] as float32, dense or CSR; ``InputError`` for what is none.

    ``counted``: how N is known, for the error.
    """
    if x is None:
        fail(name, "no features x", "the one-hot degrees or the identity (sparse) as x")
    if sp.issparse(x):
        if x.dtype.kind not in "fiub":
            fail(name, f"x is of type {x.dtype}", "real numbers such as float32")
        features: Any = sp.csr_array(x, dtype=np.float32)
        if not features.has_canonical_format:
            features = features.copy()
            features.sum_duplicates()
    else:
        raw = np.asarray(x)
        if raw.dtype.kind not in "fiub":
            fail(name, f"x is of type {raw.dtype}", "real numbers such as float32")
        if raw.ndim == 1:
            raw = raw[:, None]
        # asarray keeps a memory-mapped float32 file on disk; float64 beyond float32 turns to inf
        # here and is reported below.
        with np.errstate(over="ignore"):
            features = np.asarray(raw, dtype=np.float32)
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


def _first_not_finite(values: npt.NDArray[np.float32]) -> tuple[int, int] | None:
    """Where NaN or infinity is in an array [R, F], looking at a block at a time.

    The features may be larger than memory, and so must not be compared all at once.
    """
    rows = max(1, (1 << 24) // values.shape[1])
    for start in range(0, len(values), rows):
        finite = np.isfinite(values[start : start + rows])
        if not finite.all():
            row, column = np.argwhere(~finite)[0].tolist()
            return start + row, column
    return None
