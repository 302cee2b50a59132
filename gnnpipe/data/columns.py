"""Reads the columns of a table: CSV with pyarrow or Python's csv module, Parquet with pyarrow."""

from __future__ import annotations

import csv
import gzip
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

import numpy as np

from gnnpipe.errors import InputError
from gnnpipe.files import open_plain
from gnnpipe.graph.npz_archive import UNREADABLE

EMPTY = ("", "NA", "N/A", "NaN", "nan", "None", "null", "NULL")
"""Cells of a CSV file that hold no number."""

_DELIMITERS = ",\t;"

_MOST_LINE_BYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file with R rows."""

    path: Path
    columns: dict[str, Any]
    """By name: numbers [R] of any real type, NaN where a cell is empty; text [R] as objects, ''
    where a cell is empty; or the lists of numbers of a Parquet file, [R, D]."""
    first_line: int | None = None
    """Line of the first row in a CSV file."""

    def fail(self, wrong: str, hint: str, column: str = "", row: int | None = None) -> NoReturn:
        """Raise ``InputError`` that names the file, and where given the column and the line."""
        place = f", column {column!r}" if column else ""
        if row is not None:
            first = self.first_line
            place += f", row {row}" if first is None else f", line {first + row}"
        raise InputError(f"--dataset {str(self.path)!r}{place}: {wrong}; try: {hint}") from None

    def column_named(self, names: Collection[str]) -> str | None:
        """The first column with one of these names, in any case."""
        return next((c for c in self.columns if c.strip().lower() in names), None)

    def numbers(self, column: str) -> Any:
        """A column's numbers [R] or [R, D]; ``None`` if it holds text.

        Raises ``InputError`` for an empty cell, and for text in a column that begins with a number.
        """
        values = self.columns[column]
        if values.dtype == object:
            if not len(values) or not _is_number(values[0]):
                return None
            row = next(r for r, text in enumerate(values) if not _is_number(text))
            wrong = f"{values[row]!r} is no number" if values[row] else "no number"
            self.fail(wrong, "mend it, or remove the column", column, row)
        is_empty = np.isnan(values) if values.dtype.kind == "f" else np.zeros(1, bool)
        if is_empty.any():
            row = int(np.argwhere(is_empty)[0, 0])
            self.fail("no number", "a number such as 0, or remove the column", column, row)
        return values


def read_table(path: Path, as_text: Collection[str] = ()) -> Table:
    """The table in a .parquet file, or in a .csv or .tsv file that may be packed with gzip.

    The first line of a CSV file names the columns, unless all its cells are numbers: the columns
    are then named '1', '2', ... Lines above it that begin with # are skipped. Columns are separated
    by commas, tabs or semicolons.

    Args:
        path: of the file.
        as_text: columns that are text even if all cells are numbers.

    Raises:
        InputError: naming the file, and the line where it can be told.
    """
    try:
        with open_plain(path) as file:
            if path.name.endswith(".parquet"):
                return _read_parquet(path, file, as_text)
            unpacked: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            return _read_csv(path, unpacked, as_text)
    except InputError:  # a ``ValueError``, like many of the others below
        raise
    except FileNotFoundError:
        Table(path, {}).fail("no such file", "the path of a table, or of a folder with edges.csv")
    except UnicodeDecodeError as error:
        Table(path, {}).fail(f"not a text in UTF-8 ({error})", "write the table anew")
    except (*UNREADABLE, csv.Error) as error:
        why = " ".join(str(error).split())[:200]
        Table(path, {}).fail(f"not readable ({why})", "write the table anew")


def _arrow() -> ModuleType | None:
    """The module pyarrow, if it is installed."""
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        return None
    module: ModuleType = pyarrow
    return module


def _read_parquet(path: Path, file: IO[bytes], as_text: Collection[str]) -> Table:
    arrow = _arrow()
    if arrow is None:
        Table(path, {}).fail("Parquet needs pyarrow", "pip install 'gnnpipe[tables]'")
    found = arrow.parquet.read_table(file)
    return _from_arrow(path, found, as_text, None)


def _read_csv(path: Path, file: Any, as_text: Collection[str]) -> Table:
    names, delimiter, skipped = _header(path, file)
    arrow = _arrow()
    if arrow is not None:
        file.seek(0)
        try:
            found = arrow.csv.read_csv(
                file,
                arrow.csv.ReadOptions(column_names=names, skip_rows=skipped),
                arrow.csv.ParseOptions(delimiter=delimiter),
                arrow.csv.ConvertOptions(
                    null_values=list(EMPTY),
                    timestamp_parsers=[],
                    column_types=dict.fromkeys(as_text, arrow.string()),
                ),
            )
            return _from_arrow(path, found, as_text, skipped + 1)
        except arrow.ArrowInvalid:
            pass  # read once more below, for the line of the fault
    file.seek(0)
    numbers = None if as_text else _numbers_alone(file, delimiter, skipped, len(names))
    if numbers is not None:
        return Table(path, dict(zip(names, numbers, strict=True)), skipped + 1)
    file.seek(0)
    rows = []
    lines = (line.decode("utf-8-sig") for line in islice(file, skipped, None))
    reader = csv.reader(lines, delimiter=delimiter)
    for row in filter(None, reader):  # pyarrow, too, skips lines without a character
        if len(row) != len(names):
            wrong = f"{len(row)} cells for {len(names)} columns"
            Table(path, {}, skipped).fail(wrong, "a cell for each", row=reader.line_num)
        rows.append(row)
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return Table(
        path,
        {
            name: _text_array(cells) if name in as_text else _typed(cells)
            for name, cells in zip(names, columns, strict=True)
        },
        skipped + 1,
    )


def _numbers_alone(file: Any, delimiter: str, skipped: int, count: int) -> list[Any] | None:
    """The columns of a CSV file that holds nothing but numbers, else ``None``.

    numpy reads them many times faster than Python's csv module.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no rows
            found = np.loadtxt(file, delimiter=delimiter, skiprows=skipped, comments=None, ndmin=2)
    except (ValueError, OverflowError):
        return None
    # Beyond 2^53 a float is no exact integer.
    if found.shape[1] != count or not (np.abs(found) < 2.0**53).all():
        return None
    columns = [np.ascontiguousarray(column) for column in found.T]
    return [c.astype(np.int64) if (c == np.floor(c)).all() else c for c in columns]


def _header(path: Path, file: Any) -> tuple[list[str], str, int]:
    """The names of the columns, the delimiter, and the number of lines above the first row."""
    comments = 0
    while True:
        line = file.readline(_MOST_LINE_BYTES).decode("utf-8-sig").rstrip("\r\n")
        if not line.startswith("#"):
            break
        comments += 1
    delimiter = max(_DELIMITERS, key=line.count)
    cells = [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    if not cells:
        Table(path, {}).fail("empty", "a line with the names of the columns, and a row in each")
    if all(map(_is_number, cells)):
        return [str(i + 1) for i in range(len(cells))], delimiter, comments
    repeated = next((cell for cell in cells if cells.count(cell) > 1), None)
    if repeated is not None:
        Table(path, {}).fail("two columns have this name", "a name for each", column=repeated)
    return cells, delimiter, comments + 1


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _typed(cells: Sequence[str]) -> Any:
    """The cells of a column as numbers if all are, else as text."""
    filled = ["nan" if cell in EMPTY else cell for cell in cells]
    if all(cell.lower() in ("true", "false") for cell in filled):
        return np.array([cell.lower() == "true" for cell in filled], dtype=bool)
    for dtype in (np.int64, np.float64):
        try:
            return np.array(filled).astype(dtype)
        except (ValueError, OverflowError):
            continue
    return _text_array(cells)


def _text_array(cells: Sequence[str]) -> Any:
    found = np.empty(len(cells), dtype=object)
    found[:] = cells
    return found


def _from_arrow(path: Path, found: Any, as_text: Collection[str], first_line: int | None) -> Table:
    columns = {}
    for name, column in zip(found.column_names, found.columns, strict=True):
        if name in columns:
            Table(path, {}).fail("two columns have this name", "a name for each", column=name)
        columns[name] = _array(column, name in as_text)
    if not columns:
        Table(path, {}).fail("no columns", "write the table anew")
    return Table(path, columns, first_line)


def _array(column: Any, is_text: bool) -> Any:
    """A column of pyarrow's as numpy: numbers, text as objects, or lists of numbers [R, D]."""
    import pyarrow
    import pyarrow.compute

    kind = pyarrow.types
    if kind.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    is_list = (kind.is_list, kind.is_large_list, kind.is_fixed_size_list)
    is_number = (kind.is_integer, kind.is_floating, kind.is_boolean)
    if any(is_kind(column.type) for is_kind in is_list):
        lengths = pyarrow.compute.list_value_length(column).to_numpy()
        values = pyarrow.compute.list_flatten(column).to_numpy()
        if values.dtype.kind in "fiub" and len(lengths) and (lengths == lengths[0]).all():
            return values.reshape(len(lengths), -1)
    elif not is_text and (kind.is_null(column.type) or kind.is_decimal(column.type)):
        return column.cast(pyarrow.float64()).to_numpy()
    elif not is_text and any(is_kind(column.type) for is_kind in is_number):
        return (column.cast(pyarrow.float64()) if column.null_count else column).to_numpy()
    if kind.is_nested(column.type) or kind.is_binary(column.type):
        texts = [repr(value) for value in column.to_pylist()]
    else:
        texts = [value or "" for value in column.cast(pyarrow.string()).to_pylist()]
    return _text_array(texts)
