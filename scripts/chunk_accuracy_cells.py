"""The training runs of the accuracy benchmark of steps by chunk, in the order of their worth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

Rows = Mapping[str, Mapping[str, Any]]
"""Finished runs by ``Cell.key``."""

GRAPHS: dict[str, dict[str, Any]] = {
    "pubmed": {"split": "10/20/70"},
    "amazon_photo": {"split": "10/20/70"},
    "squirrel": {"split": "60/20/20", "symmetrize": True},
    "coauthor_cs": {"split": "10/20/70"},
    "debian_deps": {"split": "60/20/20"},
}
"""Splits are drawn with the seed of the run. Squirrel is stored directed."""

SHALLOW, DEEP = ("gcn", "sage"), ("gcnii", "resgcn")
LAYERS = {"gcn": 4, "sage": 4, "gcnii": 16, "resgcn": 16}
CHUNKS, SEEDS = 32, (0, 1, 2)
RATES, SCHEDULES = (0.003, 0.01, 0.03), ("constant", "cosine")
DEFAULT = (0.01, "constant")
"""Learning rate and schedule of a full batch without flags."""
CHUNKED = (0.01, "cosine")
"""The same with several steps an epoch; the rate of a step follows from ``--lr`` by a rule."""
OTHERS = ("stash", "spectrain", "latest", "2bw", "predict by S")
"""Policies beside predict. 2bw has a step every S chunks; so has ``predict by S``, to compare."""


@dataclass(frozen=True)
class Cell:
    """One training run: hidden 64, dropout 0.5, Adam."""

    graph: str
    model: str
    kind: str
    """full, sequential (steps by chunk on one rank), or the weight policy of an async pipeline."""
    stages: int
    lr: float
    schedule: str
    seed: int

    def key(self) -> str:
        return "|".join(str(value) for value in vars(self).values())

    @property
    def epochs(self) -> int:
        """GCN and SAGE with steps by chunk have half the epochs of the full batch."""
        if self.model in DEEP:
            return 100
        return 200 if self.kind == "full" else 100

    def settings(self, root: Path) -> dict[str, Any]:
        """Arguments of ``TrainConfig``."""
        found = {
            **GRAPHS[self.graph],
            "dataset": str(root / f"{self.graph}.npz"),
            "model": self.model,
            "layers": LAYERS[self.model],
            "hidden": 64,
            "dropout": 0.5,
            "epochs": self.epochs,
            "lr": self.lr,
            "lr_schedule": self.schedule,
            "seed": self.seed,
            "device": "cpu",
            "timeout_s": 1800.0,  # cores may be busy with other programs
            "predict": False,
            "out": "off",
            "quiet": True,
        }
        if self.kind == "full":
            return found
        found |= {"schedule": "async", "chunks": CHUNKS, "stages": self.stages}
        if self.kind != "sequential":
            found["weights"] = self.kind.split()[0]
        if self.kind in ("2bw", "predict by S"):
            found["steps_every"] = self.stages
        return found


def grid(graph: str, model: str, kind: str, stages: int) -> list[Cell]:
    """Runs of seed 0 by which learning rate and schedule are chosen."""
    return [Cell(graph, model, kind, stages, lr, s, 0) for lr in RATES for s in SCHEDULES]


def best_of(rows: Rows, cells: list[Cell]) -> Cell | None:
    """The cell whose last epoch has the best validation accuracy; ``None`` if one is missing."""
    if any(cell.key() not in rows for cell in cells):
        return None
    # max takes the first of equal ones; a run that failed has no score.
    return max(
        cells, key=lambda cell: rows[cell.key()]["val"][-1] if rows[cell.key()]["val"] else 0
    )


def seeds(graph: str, model: str, kind: str, stages: int, chosen: tuple[float, str]) -> list[Cell]:
    """The runs of all seeds with a learning rate and schedule."""
    return [Cell(graph, model, kind, stages, *chosen, seed) for seed in SEEDS]


def tuned(rows: Rows, graph: str, model: str, kind: str, stages: int) -> list[Cell]:
    """The grid, and once it is complete all seeds of its best cell."""
    cells = grid(graph, model, kind, stages)
    best = best_of(rows, cells)
    more = [] if best is None else seeds(graph, model, kind, stages, (best.lr, best.schedule))
    return list(dict.fromkeys([*cells, *more]))


def depths(model: str) -> tuple[int, ...]:
    """Numbers of stages of the pipelines."""
    return (4, 8) if model in DEEP else (4,)


def main_runs(rows: Rows, graph: str, model: str) -> Iterator[Cell]:
    """Steps by chunk with predicted weights, on one rank and on several, and the full batch."""
    yield from seeds(graph, model, "sequential", 1, CHUNKED)
    for stages in depths(model):
        yield from seeds(graph, model, "predict", stages, CHUNKED)
    yield from seeds(graph, model, "full", 1, DEFAULT)
    yield from tuned(rows, graph, model, "full", 1)


def policy_runs(_: Rows, graph: str, model: str) -> Iterator[Cell]:
    """The other weight policies."""
    for stages in depths(model):
        for kind in OTHERS:
            yield from seeds(graph, model, kind, stages, CHUNKED)


def tuned_runs(rows: Rows, graph: str, model: str) -> Iterator[Cell]:
    """Predicted weights with a tuned learning rate."""
    for stages in depths(model):
        yield from tuned(rows, graph, model, "predict", stages)


Runs = Callable[[Rows, str, str], Iterator[Cell]]
SMALL = tuple(graph for graph in GRAPHS if graph != "debian_deps")
ORDER: tuple[tuple[Runs, tuple[str, ...], tuple[str, ...]], ...] = (
    (main_runs, SMALL, SHALLOW),
    (policy_runs, SMALL, SHALLOW),
    (main_runs, ("debian_deps",), SHALLOW),
    (main_runs, SMALL, DEEP),
    (policy_runs, ("debian_deps",), SHALLOW),
    (policy_runs, SMALL, DEEP),
    (main_runs, ("debian_deps",), DEEP),
    (tuned_runs, tuple(GRAPHS), SHALLOW),
    (policy_runs, ("debian_deps",), DEEP),
    (tuned_runs, tuple(GRAPHS), DEEP),
)


def cells(rows: Rows) -> list[Cell]:
    """All runs that are known so far, the most telling first; a grid makes others known."""
    return [
        cell
        for runs, graphs, models in ORDER
        for model in models
        for graph in graphs
        for cell in runs(rows, graph, model)
    ]
