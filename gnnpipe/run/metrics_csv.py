"""Rows of metrics.csv: measured, written and read."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gnnpipe.graph.quality import stale_share
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import RankRuntime
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.scoring import Scores


@dataclass(frozen=True)
class Staleness:
    """Staleness of one epoch.

    Changes of rows are Frobenius norms over a sample of rows, relative to the norm of the rows.
    """

    stale_reads: float
    """Share of the edges that read a stale row, the same in every layer; 0 in an exact epoch."""
    drift: tuple[float, ...]
    """By layer that pushes rows: difference between the rows pushed in this epoch and the rows that
    stale reads saw; NaN in an exact epoch. Most of the difference is dropout, which changes in
    every epoch. Empty if epochs follow each other without a flush."""
    moved: tuple[float, ...]
    """By layer, with a forecast: change of the probe rows by the optimizer step; NaN in an exact
    epoch."""
    missed: tuple[float, ...]
    """By layer, with a forecast: error of the forecast of these changes."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing was stale."""
        return self.stale_reads == 0 and all(map(math.isnan, self.drift))

    def cells(self) -> dict[str, float]:
        """Return the columns of metrics.csv."""
        found = {"stale_reads": self.stale_reads}
        for name in ("drift", "moved", "missed"):
            found |= {f"{name}_{i}": v for i, v in enumerate(getattr(self, name))}
        return found


def measure_staleness(
    prepared: Prepared, rank_runtime: RankRuntime, mesh: Mesh, order: Sequence[int], exact: bool
) -> Staleness | None:
    """Return the staleness of the last epoch, on every rank; ``None`` without stale reads.

    ``order``: of the chunks in the epoch. ``exact``: whether the epoch was exact.
    """
    if prepared.chunk_edges is None:
        return None
    if prepared.spans_epochs and not exact:
        return Staleness(stale_share(prepared.chunk_edges, order), (), (), ())
    places = {op.name: i for i, op in enumerate(prepared.model_graph.aggregations)}
    num_layers = len(places)
    columns = [[0.0] * num_layers for _ in range(4)]
    for name, history in rank_runtime.executor.stage.histories.items():
        index = places[name]
        assert history.drift is not None
        columns[0][index], columns[1][index] = history.drift.sums.tolist()
    forecaster = rank_runtime.executor.forecaster
    if forecaster is not None and not exact and mesh.shard == 0:
        for name, found in forecaster.maps.items():
            index = places[name]
            columns[2][index], columns[3][index] = found.moved, found.missed
    totals = mesh.sum([value for column in columns for value in column])
    change, size, moved, missed = (totals[i * num_layers : (i + 1) * num_layers] for i in range(4))
    if exact:
        moved = missed = [math.nan] * num_layers
    drift = [(c / s) ** 0.5 if s else 0.0 for c, s in zip(change, size, strict=True)]
    return Staleness(
        0.0 if exact else stale_share(prepared.chunk_edges, order),
        tuple([math.nan] * num_layers if exact else drift),
        tuple(moved) if forecaster is not None else (),
        tuple(missed) if forecaster is not None else (),
    )


@dataclass(frozen=True)
class EpochRow:
    """Loss, scores, times and staleness of one epoch."""

    epoch: int
    """Counted from 1."""
    loss: float
    """Mean over the training vertices, with dropout."""
    scores: Scores | None
    """``None`` if the epoch was not evaluated."""
    epoch_time_s: float
    """Time of training, without evaluation."""
    eval_time_s: float
    lr: float
    """Learning rate of the optimizer step."""
    staleness: Staleness | None = None
    """``None`` if the run has no stale reads."""

    def cells(self) -> dict[str, Any]:
        """Return the cells of metrics.csv; scores are empty if the epoch was not evaluated."""
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
    """Parse metrics.csv; ``ValueError`` if the text is malformed or an epoch is missing."""
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
        int(cells["epoch"]),
        float(cells["loss"]),
        scores,
        float(cells["epoch_time_s"]),
        float(cells["eval_time_s"] or 0),
        float(cells["lr"]),
        staleness,
    )


def _number(cell: str) -> float:
    return float(cell) if cell else math.nan


def _cell(value: float) -> str:
    """Return all digits of a number, or '' for NaN."""
    return "" if math.isnan(value) else repr(value)
