"""What is known of one epoch: a row of metrics.csv, written and read."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gnnpipe.tasks.scoring import Scores
from gnnpipe.train.staleness import Staleness

__all__ = ["EpochRow", "rows_of"]


@dataclass(frozen=True)
class EpochRow:
    """What is known of one epoch."""

    epoch: int
    """From 1."""
    loss: float
    """Over the train vertices, with dropout."""
    scores: Scores | None
    """Where the epoch was evaluated."""
    epoch_time_s: float
    """Training alone."""
    eval_time_s: float
    lr: float
    """Learning rate of its step."""
    staleness: Staleness | None = None
    """Where the shape has stale reads."""

    def cells(self) -> dict[str, Any]:
        """The row of metrics.csv; empty cells where the epoch was not evaluated."""
        s = self.scores
        return {
            "epoch": self.epoch,
            "loss": repr(self.loss),
            **{f.name: _cell(getattr(s, f.name)) if s else "" for f in fields(Scores)},
            "lr": repr(self.lr),
            "epoch_time_s": f"{self.epoch_time_s:.6f}",
            "eval_time_s": f"{self.eval_time_s:.6f}" if s else "",
            **{k: _cell(v) for k, v in (self.staleness.cells() if self.staleness else {}).items()},
        }


def rows_of(text: str) -> list[EpochRow]:
    """The rows of a metrics.csv; ``ValueError`` if it is none, or if an epoch is missing."""
    rows = []
    try:
        for number, cells in enumerate(csv.DictReader(io.StringIO(text, newline="")), start=1):
            row = _row_of(cells)
            if row.epoch != number or not math.isfinite(row.lr):
                raise ValueError(f"row {number} is of epoch {row.epoch}, lr {row.lr}")
            rows.append(row)
    except (KeyError, TypeError, AttributeError, csv.Error) as error:
        raise ValueError(f"row {len(rows) + 1}: {error!r}") from None
    return rows


def _row_of(cells: Mapping[str, str]) -> EpochRow:
    scores = staleness = None
    if cells["eval_time_s"]:
        scores = Scores(*(_number(cells[f.name]) for f in fields(Scores)))
    if cells.get("stale_reads"):
        layers = {
            kind: tuple(_number(cells[name]) for name in cells if name.startswith(f"{kind}_"))
            for kind in ("drift", "moved", "missed")
        }
        staleness = Staleness(float(cells["stale_reads"]), **layers)
    return EpochRow(
        int(cells["epoch"]), float(cells["loss"]), scores, float(cells["epoch_time_s"]),
        float(cells["eval_time_s"] or 0), float(cells["lr"]), staleness,
    )  # fmt: skip


def _number(cell: str) -> float:
    return float(cell) if cell else math.nan


def _cell(value: float) -> str:
    """Every digit; nothing where there is no such figure."""
    return "" if math.isnan(value) else repr(value)
