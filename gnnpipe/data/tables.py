"""Data source of tables: a file with a row for each edge, and beside it one with the vertices.

    edges.csv       source,target,weight     vertices.csv    id,label,split,age,height
                    ada,bob,0.5                              ada,blue,train,31,1.71
                    bob,eve,2                                bob,red,test,44,1.80

Both may be .csv, .csv.gz, .tsv or .parquet files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnpipe.data.clean import RawGraph
from gnnpipe.data.columns import EMPTY, Table, read_table
from gnnpipe.data.source import DataRequest, Source
from gnnpipe.errors import InputError

ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")

EDGE_FILE = "edges"
VERTEX_FILES = ("vertices", "nodes")

SOURCE_NAMES = ("source", "src", "from", "u", "source_id", "src_id")
TARGET_NAMES = ("target", "dst", "to", "v", "target_id", "dst_id")
WEIGHT_NAMES = ("weight", "edge_weight")
ID_NAMES = ("id", "vertex", "node", "vertex_id", "node_id")
LABEL_NAMES = ("y", "label", "class")
MASK_NAMES = (("train_mask",), ("val_mask", "valid_mask"), ("test_mask",))

PARTS = (("train", "training"), ("val", "valid", "validation"), ("test", "testing"))
"""Values of the column 'split'; 'none' or an empty cell: the vertex is in no part."""


def _read(request: DataRequest) -> RawGraph:
    """The graph of the edge table ``request.dataset``, or of the tables in a folder.

    Columns of the edges: two ids (named as in ``SOURCE_NAMES`` and ``TARGET_NAMES``, or else the
    first two columns), a weight, ``edge_type``; other numbers become ``edge_attr``. Columns of the
    vertices: an id, a label (a whole number or text), ``split`` or the three masks; other numbers
    become the features. ``InputError`` names file, column and line.
    """
    edge_path = _edge_path(request.dataset)
    assert edge_path is not None, "``handles`` is called first"
    vertices = read_table(_vertex_path(edge_path))
    edges = read_table(edge_path)
    notes: list[str] = []
    id_column = _id_column(vertices, notes)
    ends = _end_columns(edges, notes)
    is_text = any(
        table.columns[c].dtype.kind not in "fiu"
        for table, names in ((vertices, [id_column]), (edges, ends))
        for c in names
    )
    if is_text:  # '007' must not be read as 7 in one table only
        vertices, edges = read_table(vertices.path, [id_column]), read_table(edges.path, ends)
    ids = _ids(vertices, id_column)
    numbers = _Numbers(ids, vertices, id_column)
    edge_index = np.stack([numbers.of(edges, column) for column in ends])
    label = vertices.column_named(LABEL_NAMES)
    if label is None and request.needs_labels:
        found = ", ".join(map(repr, list(vertices.columns)[:9]))
        vertices.fail(
            f"no column of labels among {found}",
            "one named 'label'; or in Python Trainer(..., loss_fn=...)",
        )
    masks, used = _masks(vertices, request.needs_split)
    x = _matrix(vertices, {id_column, *([label] if label else []), *used}, notes)
    return RawGraph(
        name=_name(edge_path),
        edge_index=edge_index,
        x=x,
        y=None if label is None else _labels(vertices.columns[label]),
        masks=masks,
        num_vertices=len(ids),
        edge_data=_edge_data(edges, ends, notes),
        is_own_data=True,
        notes=notes,
    )


def _edge_path(name: str) -> Path | None:
    """The file with the edges, in the folder ``name`` or ``name`` itself; ``None`` if neither."""
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return _file_named(path, [EDGE_FILE])
    return path if name.endswith(ENDINGS) else None


def _vertex_path(edge_path: Path) -> Path:
    """The file with the vertices beside that with the edges, if this exists."""
    if not os.path.lexists(edge_path):
        return edge_path  # which ``read_table`` reports
    stem = _stem(edge_path)
    names = [*VERTEX_FILES]
    if EDGE_FILE in stem:
        names = [stem.replace(EDGE_FILE, name) for name in VERTEX_FILES] + names
    found = _file_named(edge_path.parent, names)
    if found is None or found == edge_path:
        what = "is not the table of the edges" if found else f"no {names[0]}.csv beside it"
        raise InputError(
            f"--dataset {str(edge_path)!r}: {what}; try: a folder with edges.csv (source, target) "
            "and vertices.csv (id, label, features)"
        )
    return found


def _file_named(folder: Path, stems: Sequence[str]) -> Path | None:
    candidates = (folder / f"{stem}{ending}" for stem in stems for ending in ENDINGS)
    return next((path for path in candidates if path.exists()), None)


def _stem(path: Path) -> str:
    return path.name.removesuffix(next(e for e in ENDINGS if path.name.endswith(e)))


def _name(edge_path: Path) -> str:
    stem = _stem(edge_path)
    return edge_path.absolute().parent.name if stem == EDGE_FILE else stem


def _id_column(vertices: Table, notes: list[str]) -> str:
    named = vertices.column_named(ID_NAMES)
    first = next(iter(vertices.columns))
    if named is None:
        notes.append(f"{vertices.path.name}: the first column, {first!r}, is read as the id")
    return named or first


def _end_columns(edges: Table, notes: list[str]) -> list[str]:
    """The columns with the source and the target of each edge."""
    named = edges.column_named(SOURCE_NAMES), edges.column_named(TARGET_NAMES)
    if named[0] is not None and named[1] is not None:
        return [named[0], named[1]]
    first = list(edges.columns)[:2]
    if len(first) < 2:
        edges.fail("one column alone", "columns named 'source' and 'target'")
    if any(named):
        there = named[0] or named[1]
        edges.fail(f"a column {there!r} and no other end", "columns named 'source' and 'target'")
    if first != ["1", "2"]:
        text = (
            f"{edges.path.name}: {first[0]!r} is read as the source and {first[1]!r} as the target"
        )
        notes.append(text)
    return first


def _ids(table: Table, column: str) -> npt.NDArray[Any]:
    """The ids of a column: int64, or text as objects."""
    ids = table.columns[column]
    if ids.ndim != 1:
        table.fail("holds lists", "an id in each row", column)
    is_empty = ids == "" if ids.dtype == object else np.isnan(ids)
    if is_empty.any():
        table.fail("no id", "an id in each row", column, int(np.argmax(is_empty)))
    if ids.dtype == object:
        return np.asarray(ids)
    with np.errstate(invalid="ignore"):  # infinity, refused below
        whole = ids.astype(np.int64)
    if (whole != ids).any():
        row = int(np.argmax(whole != ids))
        table.fail(f"{ids[row]} is no id", "whole numbers or text", column, row)
    return np.asarray(whole)


class _Numbers:
    """The numbers 0..N-1 of the vertices by id, in the order of their table."""

    def __init__(self, ids: npt.NDArray[Any], vertices: Table, column: str) -> None:
        """Raise ``InputError`` if an id is there twice."""
        self._vertices = vertices
        # Text is numbered by a dict: numpy would pad every id to the longest.
        self._of_text: dict[str, int] | None = None
        if ids.dtype == object:
            backwards = range(len(ids) - 1, -1, -1)  # of repeated ids the first row counts
            self._of_text = dict(zip(ids[::-1], backwards, strict=True))
        self._order = (
            np.arange(len(ids)) if self._of_text is not None else np.argsort(ids, kind="stable")
        )
        self._sorted = ids[self._order]
        if self._of_text is not None:
            repeated = np.array([self._of_text[name] != i for i, name in enumerate(ids)], bool)
        else:
            repeated = np.zeros(len(ids), bool)
            repeated[self._order[1:]] = self._sorted[1:] == self._sorted[:-1]
        if repeated.any():
            row = int(np.argmax(repeated))
            vertices.fail(f"id {ids[row]!s} is there twice", "one row for each", column, row)

    def of(self, edges: Table, column: str) -> npt.NDArray[np.int64]:
        """[E] numbers of the vertices in a column; ``InputError`` for an id that has no row."""
        wanted = _ids(edges, column)
        if self._of_text is not None:
            found = np.array([self._of_text.get(name, -1) for name in wanted], dtype=np.int64)
        elif not len(self._sorted):
            found = np.full(len(wanted), -1)
        else:
            at = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
            found = np.where(self._sorted[at] == wanted, self._order[at], -1)
        if (found < 0).any():
            row = int(np.argmax(found < 0))
            edges.fail(
                f"vertex {wanted[row]!s} is not in {str(self._vertices.path)!r}",
                "a row for it there, or drop the edge",
                column,
                row,
            )
        return found


def _labels(given: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Classes: whole numbers as they are; text is numbered in alphabetical order."""
    if given.dtype != object:
        return given
    names = sorted({name for name in given if name not in EMPTY})
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(name, -1) for name in given], dtype=np.int64)


def _masks(vertices: Table, is_needed: bool) -> tuple[list[Any] | None, list[str]]:
    """The train, val and test masks, and the columns that they are in."""
    columns = [vertices.column_named(names) for names in MASK_NAMES]
    used = [column for column in columns if column is not None]
    split = vertices.column_named(("split",))
    if used and split is not None:
        vertices.fail(f"{split!r} and {used[0]!r} both give the split", "one of them")
    if split is None:
        masks = [None if column is None else vertices.columns[column] for column in columns]
        return (masks if used else None), used
    if not is_needed:
        return None, [split]
    part_of = {name: part for part, names in enumerate(PARTS) for name in names}
    part_of |= {name.lower(): -1 for name in EMPTY}
    given = [str(value).strip().lower() for value in vertices.columns[split]]
    row = next((r for r, value in enumerate(given) if value not in part_of), None)
    if row is not None:
        vertices.fail(f"{given[row]!r}", "train, val, test or an empty cell", split, row)
    part = np.array([part_of[value] for value in given])
    return [part == i for i in range(len(PARTS))], [split]


def _edge_data(edges: Table, ends: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Edge data by the field of ``Graph``."""
    data: dict[str, Any] = {}
    used = {*ends}
    for field, names in (("edge_weight", WEIGHT_NAMES), ("edge_type", ("edge_type",))):
        column = edges.column_named(names)
        if column is not None:
            data[field] = edges.numbers(column)
            used.add(column)
            if data[field] is None:
                edges.fail("holds text", "numbers, or another name for the column", column)
    attributes = _matrix(edges, used, notes)
    return data if attributes is None else data | {"edge_attr": attributes}


def _matrix(table: Table, used: set[str], notes: list[str]) -> npt.NDArray[np.float32] | None:
    """[R, D] float32 from the columns of numbers that have no other use; ``None`` if none has."""
    rest = [name for name in table.columns if name not in used]
    given = {name: table.numbers(name) for name in rest}
    texts = [name for name, values in given.items() if values is None]
    if texts:
        some = f"{', '.join(map(repr, texts[:5]))}{', ...' if len(texts) > 5 else ''}"
        notes.append(f"{table.path.name}: {some} not read, because not all cells are numbers")
    blocks = [v.reshape(len(v), *v.shape[1:] or (1,)) for v in given.values() if v is not None]
    if not blocks:
        return None
    with np.errstate(over="ignore"):  # ``clean`` reports the infinity
        return np.concatenate(blocks, axis=1, dtype=np.float32, casting="unsafe")


SOURCE = Source(
    handles=lambda name: _edge_path(name) is not None,
    read=_read,
    listing=(
        ("<path>.csv|.csv.gz|.parquet", "edges: source, target, weight; vertices.csv is beside it"),
        ("<folder of tables>", "a folder with edges.csv and vertices.csv (or .parquet)"),
    ),
)
