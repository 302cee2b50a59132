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
from gnnpipe.files import Fields, like_run_in
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

    def columns(self, prefix: str) -> list[Column]:
        """Return the columns ``prefix``0, ``prefix``1, ... in the order of the layers."""
        found: list[Column] = []
        while (name := f"{prefix}{len(found)}") in self.metrics:
            found.append(self.metrics[name])
        return found


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
    plan, trace, metrics, result = (
        path / name for name in ("plan.json", "trace.json", "metrics.csv", "result.json")
    )
    return Run(
        path=path,
        config=_parse(path / "config.toml", tomllib.loads),
        plan=_parse(plan, lambda text: Plan.from_json(text, str(plan))),
        program=_parse(path / "program.txt", str),
        metrics=_metrics(metrics) if metrics.exists() else {},
        result=Fields(_parse(result, json.loads), str(result)) if result.exists() else None,
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
