"""The rows of a graph that the loss asks for: of training vertices, where that is worth it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gnnpipe.config import TrainConfig
from gnnpipe.graph.graph import Graph
from gnnpipe.plan import ALL_ROWS, Asked, ModelGraph, asked_of
from gnnpipe.train.number_types import number_dtype, row_dtype

__all__ = ["asked_among", "asked_rows"]


def asked_rows(
    config: TrainConfig,
    model: ModelGraph,
    graph: Graph,
    last_stage: tuple[int, int],
    once: Collection[str] = (),
) -> Asked:
    """Of the whole graph; ``last_stage``: its ops (see ``plan.asked_of``)."""
    if graph.types is not None or graph.pairs is not None:
        return ALL_ROWS
    found = _counted(graph, np.arange(graph.num_vertices))
    return asked_of(
        model, last_stage, found.rows, graph.num_vertices, found.edges, once=once,
        number_bytes=number_dtype(config).itemsize, row_bytes=row_dtype(config).itemsize,
    )  # fmt: skip


def asked_among(graph: Graph, asked: Asked, own: npt.NDArray[np.int64]) -> Asked:
    """What is ``asked`` for of a graph, of a shard that owns these rows."""
    return replace(_counted(graph, own), ops=asked.ops) if asked.ops else asked


def _counted(graph: Graph, own: npt.NDArray[np.int64]) -> Asked:
    chosen = own[graph.train_mask[own]]
    return Asked(len(chosen), int(graph.degrees[chosen].sum()))
