"""Reads and checks a run folder.

The folder may come from an untrusted source: wrong types and huge or missing files raise
``InputError``. A run that was interrupted or is still running has no result.json; the config and
the plan, which are written before the first epoch, must exist.
"""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gnnpipe.errors import InputError
from gnnpipe.files import like_run_in
from gnnpipe.perf import Trace, read_trace
from gnnpipe.plan import Plan

T = TypeVar("T")

MOST_BYTES = 256 << 20
"""Size limit of one file; a browser could not display more."""

MOST_EPOCHS = 10**9
"""Largest epoch number; larger numbers cannot be told apart in a chart."""

Column = Sequence[float | None]
"""One value per epoch; None if the epoch has none."""


@dataclass(frozen=True)
class Run:
    """The contents of a run folder."""

    path: Path
    config: Mapping[str, Any]
    plan: Plan
    program: str
    metrics: Mapping[str, Column]
    """Columns of metrics.csv by name; empty before the first epoch."""
    result: Fields | None
    """``None`` if the run has not ended."""
    trace: Trace
    """Empty if the run has written none."""

    @property
    def epochs(self) -> int:
        """Number of epochs trained."""
        return len(self.metrics.get("epoch", ()))

    def columns(self, prefix: str) -> list[tuple[str, Column]]:
        """Return the columns ``prefix``0, ``prefix``1, ... in the order of the layers."""
        found: list[tuple[str, Column]] = []
        while (name := f"{prefix}{len(found)}") in self.metrics:
            found.append((name, self.metrics[name]))
        return found


class Fields:
    """A JSON object with checked access by name and type; an ``InputError`` names the field."""

    def __init__(self, values: Any, where: str) -> None:
        """``where``: the file and the field that contain the object."""
        if not isinstance(values, dict):
            raise InputError(f"{where}: is not a JSON object; try another run")
        self._values, self._where = values, where

    def _as(self, name: str, is_kind: Callable[[Any], bool], kind: str) -> Any:
        if name not in self._values:
            raise InputError(
                f"{self._where}: has no {name}; another version of gnnpipe wrote it, run again"
            )
        value = self._values[name]
        if not is_kind(value):
            shown = repr(value)
            shown = shown if len(shown) < 60 else shown[:57] + "..."
            raise InputError(f"{self._where}: {name} {shown}; must be {kind}")
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        found: str = self._as(name, lambda v: isinstance(v, str), "text")
        return found

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        found: bool = self._as(name, lambda v: isinstance(v, bool), "true or false")
        return found

    def number(self, name: str) -> float:
        """Return a finite number."""
        return float(self._as(name, _is_number, "a number"))

    def whole(self, name: str) -> int:
        """Return a whole number that is not negative."""
        found: int = self._as(
            name, lambda v: _is_number(v) and isinstance(v, int) and v >= 0, "a whole number"
        )
        return found

    def optional_number(self, name: str) -> float | None:
        """Return a number, or ``None`` for null."""
        found = self._as(name, lambda v: v is None or _is_number(v), "a number or null")
        return None if found is None else float(found)

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers."""
        found = self._as(
            name, lambda v: isinstance(v, list) and all(map(_is_number, v)), "a list of numbers"
        )
        return [float(v) for v in found]

    def fields(self, name: str) -> Fields:
        """Return a nested object."""
        found = self._as(name, lambda v: isinstance(v, dict), "a JSON object")
        return Fields(found, f"{self._where}: {name}")

    def list_of_fields(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        found = self._as(name, lambda v: isinstance(v, list), "a list")
        return [Fields(v, f"{self._where}: {name} {i}") for i, v in enumerate(found)]


def _is_number(value: Any) -> bool:
    # The limit also excludes NaN and whole numbers that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def read_run(path: Path) -> Run:
    """Read the run in a folder; an ``InputError`` names the file and the fault."""
    if path.is_file():
        raise InputError(f"{str(path)!r}: is a file; give the folder of a run, as runs/NAME")
    if not path.is_dir():
        raise InputError(f"{str(path)!r}: no such folder; give the folder of a run, as runs/NAME")
    if not (path / "config.toml").exists():
        raise InputError(
            f"{str(path)!r}: contains no config.toml; give the folder of a run{like_run_in(path)}"
        )
    trace = path / "trace.json"
    return Run(
        path=path,
        config=_parse(path / "config.toml", tomllib.loads),
        plan=_parse(path / "plan.json", lambda text: Plan.from_json(text, str(path / "plan.json"))),
        program=_parse(path / "program.txt", str),
        metrics=_metrics(path / "metrics.csv") if (path / "metrics.csv").exists() else {},
        result=_result(path / "result.json") if (path / "result.json").exists() else None,
        trace=read_trace(_checked(trace)) if trace.exists() else Trace(),
    )


def _checked(file: Path) -> Path:
    """Return ``file``; ``InputError`` if it is missing, too large, or a pipe or device."""
    try:
        is_plain, size_bytes = file.is_file(), file.stat().st_size
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); try another run") from None
    if not is_plain:
        raise InputError(f"{file}: is not a regular file; give the folder of a run")
    if size_bytes > MOST_BYTES:
        raise InputError(
            f"{file}: has {size_bytes:,} bytes, more than {MOST_BYTES:,}; try a shorter run"
        )
    return file


def _parse(file: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(_checked(file).read_text(encoding="utf-8"))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); try another run") from None
    except (ValueError, RecursionError, csv.Error) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{file}: cannot be understood ({reason}); make the run again") from None


def _result(file: Path) -> Fields:
    return Fields(_parse(file, json.loads), str(file))


def _metrics(file: Path) -> dict[str, Column]:
    rows = _parse(file, lambda text: list(csv.reader(text.splitlines())))
    if not rows or not rows[0]:
        return {}
    names, *lines = rows
    if "epoch" not in names or "loss" not in names or len(set(names)) < len(names):
        raise InputError(f"{file}: columns {names[:3]}...; must have one epoch and one loss")
    columns: dict[str, list[float | None]] = {name: [] for name in names}
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(names):
            if number == len(lines) + 1:
                break  # the run is still writing this line
            raise InputError(f"{file}: line {number} has {len(cells)} cells, not {len(names)}")
        for name, cell in zip(names, cells, strict=True):
            columns[name].append(_value(cell, f"{file}: line {number}: {name}"))
    if None in columns["loss"]:
        raise InputError(f"{file}: an epoch without a loss; make the run again")
    for epoch in columns["epoch"]:
        if epoch is None or not 1 <= epoch <= MOST_EPOCHS or epoch != int(epoch):
            raise InputError(f"{file}: epoch {epoch}; must be a whole number from 1 on")
    return dict(columns)


def _value(cell: str, where: str) -> float | None:
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        raise InputError(f"{where} {cell[:40]!r}; must be a number or empty") from None
    return value if math.isfinite(value) and abs(value) < 1e300 else None
