"""Losses of models in gnnpipe and in plain PyG, on one rank and on two (for pages on parity)."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import run_ranks  # noqa: E402

from gnnpipe import Graph, TrainConfig, Trainer  # noqa: E402
from gnnpipe.errors import InputError  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402

EPOCHS, LR = 3, 0.01
Shape = tuple[int, int, int]
"""Stages, shards and chunks."""
ALONE: tuple[Shape, ...] = ((1, 1, 1), (1, 1, 4))
ON_TWO_RANKS: tuple[Shape, ...] = ((2, 1, 4), (1, 2, 1))
SHAPES = (*ALONE, *ON_TWO_RANKS)
SLOW_S = 1200
"""Two ranks that train all models one after the other are given up after this time."""


def gnnpipe_losses(
    model: nn.Module,
    graph: Graph,
    shape: Shape,
    world: Mesh | None = None,
    must_be_recorded: bool = True,
    **settings: Any,
) -> list[float]:
    """Losses in gnnpipe, in float64 and exact; ``settings``: more fields of ``TrainConfig``."""
    stages, shards, chunks = shape
    config = TrainConfig(
        lr=LR,
        epochs=EPOCHS,
        eval_every=0,
        out="off",
        cache_dir="off",
        dtype="float64",
        quiet=True,
        stages=stages,
        shards=shards,
        chunks=chunks,
        staleness="exact",
        require_capture=must_be_recorded,
        **settings,
    )
    history = Trainer(config, graph=graph, model=model, world=world).fit().history
    return [row.loss for row in history]


Train = Callable[[str, Shape, Mesh], list[float]]
"""Losses of a model, by name, on a shape; called in processes of their own."""


def losses_on_two_ranks(train: Train, names: Sequence[str]) -> dict[tuple[str, Shape], list[float]]:
    """Losses by model and shape; no losses for a model that cannot run on two ranks."""
    found: dict[tuple[str, Shape], list[float]] = run_ranks(
        _losses_by_shape, 2, train, names, timeout_s=SLOW_S
    )[0]
    return found


def _losses_by_shape(train: Train, names: Sequence[str]) -> dict[tuple[str, Shape], list[float]]:
    warnings.simplefilter("ignore")
    found: dict[tuple[str, Shape], list[float]] = {}
    for shape in ON_TWO_RANKS:
        mesh = Mesh.join(*shape[:2])
        for name in names:
            try:
                found[name, shape] = train(name, shape, mesh)
            except InputError:
                found[name, shape] = []
    return found


def difference(found: Sequence[float], truth: Sequence[float]) -> float:
    """The largest relative difference of a loss; NaN if there are no losses."""
    if not found:
        return math.nan
    return max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True))


def shown(value: float) -> str:
    """A difference in a table: one digit, or a dash for NaN."""
    if value == 0:
        return "0"
    return "—" if math.isnan(value) else f"{value:.0e}"
