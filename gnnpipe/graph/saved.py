"""The file of a saved graph: an uncompressed .npz whose arrays are memory-mapped when it is read.

Every array begins at a multiple of 64 bytes, so that it can be mapped and used in place: pages are
read when they are needed, and the processes of a machine share them. ``numpy.load`` reads the file
too.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.errors import InputError
from gnnpipe.files import how_to_write, open_plain
from gnnpipe.graph.npz_archive import UNREADABLE, opened
from gnnpipe.graph.pairs import Pairs
from gnnpipe.graph.types import AdjacencyForm, VertexTypes, relation_of
from gnnpipe.graph.vertex_data import vertex_data_in

FORMAT_KEY = "gnnpipe_graph"
"""The array that marks the file; it holds the version of the format."""

VERSION = 1

_ALIGNMENT = 64

_VERTEX_DATA = "vertex_data_"
"""Start of the names of arrays with other data of the vertices."""

_PADDING_ID = 0xD935
"""Kind of the extra field that aligns an entry, as Android's zipalign writes it."""

_HEADER_BYTES = 30 + 20 + 4
"""Fixed part of an entry's header, its sizes in 64 bits, and the head of the padding field."""

_BLOCK = 1 << 24
"""Edges that are checked in one step, so that temporaries stay small."""

Arrays = dict[str, Any]


def save_graph(graph: Any, path: str | Path) -> None:
    """Write a ``Graph`` to the file ``path``, which ends in .npz; an existing file is replaced."""
    target = Path(os.path.expanduser(path))
    if target.suffix != ".npz":
        _fail(target, "does not end in .npz", f"{str(target.with_suffix('.npz'))!r}")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(part, "w") as packed:
            for name, array in _arrays_of(graph).items():
                _write(packed, name, np.asarray(array))
        os.replace(part, target)
    except OSError as error:
        _fail(target, f"cannot be written ({error.strerror})", how_to_write(error.errno))
    finally:
        part.unlink(missing_ok=True)


def read_saved(path: str | Path) -> Arrays:
    """The fields of the ``Graph`` in a file that ``save_graph`` wrote, its arrays memory-mapped.

    The structure is checked, but not the numbers in the features and the edge data.
    Raises ``InputError``.
    """
    source = Path(os.path.expanduser(path))
    try:
        with open_plain(source) as file, opened(file) as entries:
            if FORMAT_KEY not in entries.names:
                raise ValueError(f"no key {FORMAT_KEY!r}")
            arrays = {name: entries.mapped(name, file) for name in entries.names}
        version = arrays[FORMAT_KEY].item()
        if version != VERSION:
            raise ValueError(f"format {version}, and this version of gnnpipe reads {VERSION}")
        return _fields_of(arrays)
    except FileNotFoundError:
        _fail(source, "no such file", "graph.save(path)")
    except UNREADABLE as error:
        why = " ".join(str(error).split())
        _fail(source, f"not a file that Graph.save wrote ({why})", "graph.save(path) anew")


def _fail(path: Path, wrong: str, hint: str) -> NoReturn:
    raise InputError(f"graph file {str(path)!r}: {wrong}; try: {hint}") from None


def _write(packed: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    """Append an array; its numbers begin at a multiple of ``_ALIGNMENT``, as .npy headers do."""
    entry = zipfile.ZipInfo(f"{name}.npy")
    start = packed.start_dir + _HEADER_BYTES + len(entry.filename)
    padding = -start % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    with packed.open(entry, "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)


def _arrays_of(graph: Any) -> Arrays:
    arrays: Arrays = {
        FORMAT_KEY: VERSION,
        "name": graph.name,
        "num_classes": graph.num_classes,
        "adjacency": str(graph.adjacency),
        **{key: getattr(graph, key) for key in ("indptr", "indices", "y")},
        **{key: getattr(graph, key) for key in ("train_mask", "val_mask", "test_mask")},
        **graph.edge_data,
        **_features_to_arrays("x", graph.x),
    }
    if graph.edge_order is not None:
        arrays["edge_order"] = graph.edge_order
    arrays |= {f"{_VERTEX_DATA}{name}": array for name, array in graph.vertex_data.items()}
    if graph.pairs is not None:
        for key in ("indptr", "indices", "label", "part"):
            arrays[f"pairs_{key}"] = getattr(graph.pairs, key)
    if graph.types is not None:
        types = graph.types
        arrays["types_names"] = np.array(types.names)
        arrays["types_relations"] = np.array(types.relations)
        arrays["types_target"] = types.target
        arrays["types_of_vertex"], arrays["types_number"] = types.of_vertex, types.number
        for name, x in types.features.items():
            arrays |= _features_to_arrays(f"types_x{types.names.index(name)}", x)
    return arrays


def _features_to_arrays(key: str, x: Any) -> Arrays:
    if not sp.issparse(x):
        return {key: x}
    parts = {"data": x.data, "indices": x.indices, "indptr": x.indptr, "shape": x.shape}
    return {f"{key}_{part}": array for part, array in parts.items()}


def _fields_of(arrays: Arrays) -> Arrays:
    """The fields of ``Graph``; ``ValueError`` for arrays that are no graph."""
    n = len(arrays["indptr"]) - 1
    types = _types(arrays, n) if "types_names" in arrays else None
    indptr, indices = _rows(arrays, "", n)
    e = len(indices)
    num_classes = int(arrays["num_classes"].item())
    _check_labels(arrays["y"], n, num_classes)
    for key in ("train_mask", "val_mask", "test_mask"):
        _check(arrays[key].dtype == bool and arrays[key].shape == (n,), key)
    for key in _EDGE_DATA:
        if key in arrays:
            _check_edge_data(key, arrays[key], e)
    if "edge_type" in arrays and e:
        most = np.inf if types is None else len(types.relations)
        _check(0 <= arrays["edge_type"].min() <= arrays["edge_type"].max() < most, "edge_type")
    _check(types is None or "edge_type" in arrays, "edge_type")
    order = arrays.get("edge_order")
    _check(order is None or (order.shape == (e,) and order.dtype.kind == "i"), "edge_order")
    return {
        "name": str(arrays["name"].item()),
        "indptr": indptr,
        "indices": indices,
        "x": _features(arrays, "x", n),
        "y": arrays["y"],
        **{key: arrays[key] for key in ("train_mask", "val_mask", "test_mask")},
        "num_classes": num_classes,
        **{key: arrays.get(key) for key in _EDGE_DATA},
        "edge_order": order,
        "derived": _relation_data(arrays),
        "vertex_data": _vertex_data(arrays, n),
        "types": types,
        "pairs": _pairs(arrays, n) if "pairs_indptr" in arrays else None,
        "adjacency": AdjacencyForm(str(arrays["adjacency"].item())),
    }


def _vertex_data(arrays: Arrays, n: int) -> Arrays:
    """Other data of the vertices."""
    own = [key for key in arrays if key.startswith(_VERTEX_DATA)]
    found = {key.removeprefix(_VERTEX_DATA): arrays[key] for key in own}
    _check(len(vertex_data_in(found, n)) == len(found), _VERTEX_DATA)
    return found


def _relation_data(arrays: Arrays) -> Arrays:
    """The data of single relations' edges."""
    found = {key: arrays[key] for key in arrays if relation_of(key) is not None}
    counts = np.bincount(arrays["edge_type"]) if found else np.zeros(0)
    for key, array in found.items():
        number = relation_of(key) or 0
        count = counts[number] if number < len(counts) else 0
        _check_edge_data(key, array, count)
    return found


_EDGE_DATA: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "edge_weight": ((np.float32,), (1,)),
    "edge_attr": ((np.float32, np.int64), (1, 2)),
    "edge_type": ((np.int64,), (1,)),
}
"""Number types and numbers of dimensions of edge data."""


def _check_edge_data(key: str, array: npt.NDArray[Any], count: int) -> None:
    kinds, dims = _EDGE_DATA[key.partition("__")[0]]
    _check(array.dtype in kinds and array.ndim in dims and len(array) == count, key)


def _check(is_sound: bool | np.bool_, key: str) -> None:
    if not is_sound:
        raise ValueError(f"{key} does not fit the rest")


def _check_labels(y: npt.NDArray[Any], n: int, num_classes: int) -> None:
    is_class, is_target = y.dtype == np.int64, y.dtype == np.float32
    _check(y.shape == ((n,) if is_class else (n, num_classes)), "y")
    _check(is_class or is_target or y.dtype == np.int8, "y")
    most = max(num_classes, 0) - 1 if is_class else 1
    _check(is_target or -1 <= y.min() <= y.max() <= most, "y")


def _rows(arrays: Arrays, prefix: str, n: int) -> tuple[Any, Any]:
    """Row pointers and columns of N sorted CSR rows over N columns."""
    indptr, indices = arrays[f"{prefix}indptr"], arrays[f"{prefix}indices"]
    _check(indptr.dtype == np.int64 and indptr.shape == (n + 1,) and n > 0, f"{prefix}indptr")
    _check(indices.dtype.kind == "i" and indices.ndim == 1, f"{prefix}indices")
    _check(indptr[0] == 0 and indptr[-1] == len(indices), f"{prefix}indptr")
    _check((np.diff(indptr) >= 0).all(), f"{prefix}indptr")
    is_start = np.zeros(len(indices) + 1, dtype=bool)
    is_start[indptr] = True
    for first in range(0, len(indices), _BLOCK):
        block = indices[max(first - 1, 0) : first + _BLOCK]
        _check(block.min() >= 0 and block.max() < n, f"{prefix}indices")
        is_falling = block[1:] < block[:-1]
        starts = is_start[max(first - 1, 0) + 1 : first + _BLOCK][: len(is_falling)]
        _check(not (is_falling & ~starts).any(), f"{prefix}indices")
    return indptr, indices


def _features(arrays: Arrays, key: str, rows: int) -> Any:
    if key in arrays:
        x = arrays[key]
        _check(x.dtype == np.float32 and x.ndim == 2 and len(x) == rows, key)
        return x
    data, indices, indptr, shape = (
        arrays[f"{key}_{part}"] for part in ("data", "indices", "indptr", "shape")
    )
    _check(data.dtype == np.float32 and shape.tolist()[:1] == [rows], key)
    x = sp.csr_array((data, indices, indptr), shape=tuple(shape.tolist()))
    x.check_format(full_check=True)
    return x


def _pairs(arrays: Arrays, n: int) -> Pairs:
    indptr, indices = _rows(arrays, "pairs_", n)
    label, part = arrays["pairs_label"], arrays["pairs_part"]
    for array, most, key in ((label, 1, "pairs_label"), (part, 2, "pairs_part")):
        _check(array.dtype == np.int8 and array.shape == indices.shape, key)
        _check(not len(array) or 0 <= array.min() <= array.max() <= most, key)
    return Pairs(indptr, indices, label, part)


def _types(arrays: Arrays, n: int) -> VertexTypes:
    names = tuple(arrays["types_names"].tolist())
    of_vertex, number = arrays["types_of_vertex"], arrays["types_number"]
    for array, key in ((of_vertex, "types_of_vertex"), (number, "types_number")):
        _check(array.dtype == np.int64 and array.shape == (n,), key)
    _check(0 <= of_vertex.min() <= of_vertex.max() < len(names), "types_of_vertex")
    counts = np.bincount(of_vertex, minlength=len(names)).tolist()
    features = {}
    for i, (name, count) in enumerate(zip(names, counts, strict=True)):
        own = np.sort(number[of_vertex == i])
        _check(np.array_equal(own, np.arange(count)), "types_number")
        if {f"types_x{i}", f"types_x{i}_data"} & arrays.keys():
            features[name] = _features(arrays, f"types_x{i}", count)
    relations = tuple((str(a), str(b), str(c)) for a, b, c in arrays["types_relations"].tolist())
    target = str(arrays["types_target"].item())
    _check({target, *(end for a, _, b in relations for end in (a, b))} <= {*names}, "types_names")
    return VertexTypes(names, of_vertex, number, features, relations, target)
