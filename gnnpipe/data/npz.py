"""Data source of .npz files, by path.

Anyone can write such a file with ``numpy.savez``, and no content of it can run code (see
``npz_archive``).
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import scipy.sparse as sp

from gnnpipe.data.clean import RawGraph
from gnnpipe.data.labels import clean_num_classes
from gnnpipe.data.source import DataRequest, Source
from gnnpipe.data.split import SPLIT_NAMES
from gnnpipe.errors import InputError
from gnnpipe.files import open_plain
from gnnpipe.graph.graph import EDGE_DATA, Graph
from gnnpipe.graph.npz_archive import UNREADABLE, opened, read_arrays
from gnnpipe.graph.saved import FORMAT_KEY
from gnnpipe.registry import nearest

Arrays = dict[str, Any]

SPARSE_KEYS = ("x_data", "x_indices", "x_indptr", "x_shape")
"""Features as CSR."""

OTHER_FILES = (".pkl", ".npy", ".txt", ".json", ".mat", ".gz", ".zip")
"""Endings of files that look like data sets and are none; no data set has such a name."""


def _read(request: DataRequest) -> RawGraph:
    """The arrays in the .npz file ``request.dataset``, named after the file.

    Keys: ``edge_index`` [2, E]; ``x`` [N, F] or its CSR form ``x_data``, ``x_indices``,
    ``x_indptr``, ``x_shape``; ``y`` [N], or [N, T] for several labels at once, -1 = no label;
    ``train_mask``, ``val_mask``, ``test_mask`` bool [N] (or the same in plural with T splits in
    rows or columns, of which number ``seed`` modulo T is used), not needed if ``split`` gives
    percentages; ``num_classes`` if some class has no vertex; ``edge_weight`` [E], ``edge_attr``
    [E, D], ``edge_type`` [E] if the edges carry data; ``task`` = 'regression' if y holds numbers,
    [N] or [N, T], and not classes. Link prediction needs the edges and features only.

    A file of ``Graph.save`` is recognised by its keys.
    ``InputError``: file missing or unreadable, key missing.
    """
    path = Path(os.path.expanduser(request.dataset))
    if path.is_dir():
        _fail(
            request.dataset,
            "is a folder without a graph; give a file such as graph.npz, or a folder with "
            "edges.csv, with PyG's processed/data.pt or in OGB's layout",
        )
    if _is_other(request.dataset, path):
        _fail(
            request.dataset,
            f"is no .npz file; {_HOW_TO_WRITE}, or pass a PyG Data from Python: "
            "Graph.from_pyg(data)",
        )
    if _is_saved(path):
        return _saved_graph(path)
    arrays = _load(path)
    for key in ("edge_index", "y") if request.needs_labels else ("edge_index",):
        if key not in arrays:
            hint = nearest(key, arrays)
            end = "" if hint.endswith("?") else "."
            needed = "Training needs edge_index, x, y and the masks."
            _fail(path, f"no key {key!r}; {hint}{end} {needed}")
    masks = [arrays.get(field, arrays.get(field + "s")) for field in SPLIT_NAMES]
    return RawGraph(
        name=path.stem,
        edge_index=arrays["edge_index"],
        x=_features(arrays, path),
        y=arrays.get("y"),
        masks=None if all(m is None for m in masks) else masks,
        num_vertices=None if request.needs_labels else _count(arrays),
        num_classes=clean_num_classes(arrays.get("num_classes"), path.stem),
        edge_data={k: arrays[k] for k in EDGE_DATA if k in arrays},
        task=str(arrays.get("task", "classification")),
        is_own_data=True,
    )


def _handles(name: str) -> bool:
    is_folder = os.path.isdir(os.path.expanduser(name))
    return is_folder or os.sep in name or name.endswith((".npz", *OTHER_FILES))


def _is_other(dataset: str, path: Path) -> bool:
    """Whether the file has another ending than .npz, and is no ZIP archive as .npz files are."""
    if not dataset.endswith(OTHER_FILES):
        return False
    return os.sep not in dataset or (path.is_file() and not zipfile.is_zipfile(path))


_HOW_TO_WRITE = "write it with numpy.savez(path, edge_index=..., x=..., y=..., train_mask=..., ...)"


def _fail(path: str | Path, wrong: str) -> NoReturn:
    raise InputError(f"--dataset {str(path)!r}: {wrong}") from None


def _is_saved(path: Path) -> bool:
    """Whether ``Graph.save`` wrote the file."""
    try:
        with open_plain(path) as file, opened(file) as entries:
            return FORMAT_KEY in entries.names
    except UNREADABLE:
        return False


def _saved_graph(path: Path) -> RawGraph:
    """The arrays of a file of ``Graph.save``, the features memory-mapped."""
    graph = Graph.load(path)
    if graph.pairs is not None:
        _fail(path, "holds pairs of vertices; try Trainer(config, graph=Graph.load(path))")
    masks = [graph.train_mask, graph.val_mask, graph.test_mask]
    edge_data = {field: values[graph.as_given(field)] for field, values in graph.edge_data.items()}
    return RawGraph(
        name=graph.name,
        edge_index=graph.edge_index[:, graph.as_given()],
        x=graph.x,
        y=graph.y if graph.num_classes else None,
        masks=masks if any(mask.any() for mask in masks) else None,
        num_vertices=graph.num_vertices,
        num_classes=graph.num_classes or None,
        edge_data={field: edge_data.pop(field) for field in EDGE_DATA if field in edge_data},
        relation_data=edge_data,
        vertex_data=graph.vertex_data,
        adjacency=graph.adjacency,
        task="regression" if graph.is_regression else "classification",
        types=graph.types,
        is_own_data=True,
    )


def _count(arrays: Arrays) -> int:
    """N by the features; 1 if there are none, which ``clean`` then reports."""
    if arrays.get("x_shape") is not None:
        return int(np.asarray(arrays["x_shape"]).ravel()[0])
    return len(np.atleast_1d(arrays["x"])) if arrays.get("x") is not None else 1


def _load(path: Path) -> Arrays:
    wanted = {"edge_index", "x", *SPARSE_KEYS, "y", "num_classes", "task", *EDGE_DATA}
    wanted |= {field + ending for field in SPLIT_NAMES for ending in ("", "s")}
    try:
        with open_plain(path) as file:
            if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
                raise ValueError("a single array, not an .npz file")
            return dict(read_arrays(file, wanted))
    except FileNotFoundError:
        hint = "give the path of an .npz file or a name from `gnnpipe info --list`"
        _fail(path, f"no such file; {hint}")
    except UNREADABLE as error:
        _fail(path, f"not a readable .npz file ({' '.join(str(error).split())}); {_HOW_TO_WRITE}")


def _features(arrays: Arrays, path: Path) -> Any:
    if "x" in arrays:
        return arrays["x"]
    missing = [k for k in SPARSE_KEYS if k not in arrays]
    if len(missing) == len(SPARSE_KEYS):
        _fail(
            path,
            "no features, neither key 'x' nor 'x_data'; for a graph without features try the "
            "identity as CSR: x_data ones(N), x_indices arange(N), x_indptr arange(N + 1), x_shape "
            "[N, N]",
        )
    if missing:
        _fail(path, f"no key {missing[0]!r}; sparse features need all of {', '.join(SPARSE_KEYS)}")
    for key, kinds, wanted in (
        ("x_data", "fiub", "real numbers such as float32"),
        ("x_indices", "iu", "whole numbers such as int64"),
        ("x_indptr", "iu", "whole numbers such as int64"),
    ):
        if arrays[key].dtype.kind not in kinds:
            _fail(path, f"{key} is of type {arrays[key].dtype}; try {wanted}")
    data, indices, indptr, shape = (arrays[k] for k in SPARSE_KEYS)
    try:
        x = sp.csr_array((data, indices, indptr), shape=tuple(int(s) for s in shape))
        x.check_format(full_check=True)
    except (ValueError, TypeError, OverflowError) as error:
        _fail(
            path,
            f"x_data, x_indices, x_indptr and x_shape are no CSR matrix ({error}); try the "
            "attributes of scipy.sparse.csr_array(x)",
        )
    return x


SOURCE = Source(
    handles=_handles,
    read=_read,
    listing=(
        ("<path>.npz", "a file with edge_index, x (or x_data, ...), y, train_mask, ..."),
        ("<path>.npz", "or a graph that Graph.save wrote"),
    ),
)
