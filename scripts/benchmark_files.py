"""Reads the rows of a benchmark; writes its page, and the csv and the picture beside the page."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"


def read_rows(data: Path) -> list[dict[str, Any]]:
    """The rows of a file with one JSON object in each line; empty if there is no file yet."""
    if not data.exists():
        return []
    return [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]


def read_cells(data: Path) -> dict[str, dict[str, Any]]:
    """The rows by cell; of several rows of a cell the last one."""
    return {row["cell"]: row for row in read_rows(data)}


def write_page(path: Path, text: str) -> int:
    """Write a generated page; with --check only compare it. Returns the script's exit code."""
    if "--check" in sys.argv[1:]:
        return int(not path.exists() or path.read_text(encoding="utf-8") != text)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path.relative_to(FOLDER.parents[1])}")
    return 0


def write_csv(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """``name``.csv, with a column for every key of the first row; units are in the keys."""
    if not rows:
        return
    with (FOLDER / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def bars(
    name: str, groups: Mapping[str, Mapping[str, float]], what: str, aim: float | None = None
) -> str:
    """``name``.png, bars of each series in each group, and the line of a page that shows it.

    ``aim``: a line across at what was to be reached. A value that is missing, or no number, has no
    bar.
    """
    series = list(dict.fromkeys(key for values in groups.values() for key in values))
    figure, axis = _canvas(max(5.0, 0.28 * len(groups) * max(len(series), 2)))
    wide = 0.8 / len(series)
    for i, key in enumerate(series):
        there = [(g, v[key]) for g, v in enumerate(groups.values()) if v.get(key) == v.get(key, 0)]
        places = [g + (i - (len(series) - 1) / 2) * wide for g, _ in there]
        axis.bar(places, [value for _, value in there], wide, label=key)
    if aim is not None:
        axis.axhline(aim, color="black", lw=0.8, ls="--", label=f"{aim:.4g}")
    axis.set_xticks(range(len(groups)), list(groups), rotation=40, ha="right", fontsize=6)
    axis.set_ylabel(what, fontsize=7)
    return _saved(figure, axis, name, what)


def curves(
    name: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, what: str
) -> str:
    """``name``.png, curves over a logarithmic x, and the line of a page that shows it."""
    figure, axis = _canvas(5.0)
    for key, (xs, ys) in series.items():
        axis.plot(xs, ys, marker="o", ms=3, lw=1, label=key)
    axis.set_xscale("log", base=2 if x.startswith("K") else 10)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(x, fontsize=7)
    axis.set_ylabel(what, fontsize=7)
    return _saved(figure, axis, name, what)


def _canvas(width: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(min(width, 11.0), 3.2))
    axis.tick_params(labelsize=6)
    return figure, axis


def _saved(figure: Any, axis: Any, name: str, what: str) -> str:
    axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(FOLDER / f"{name}.png", dpi=120, metadata={"Software": None})
    figure.clear()
    return f"![{what}]({name}.png)"
