"""The rows of a graph that the loss asks for: of training vertices, where that is worth it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gnnpipe.config import TrainConfig
from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray, Graph
from gnnpipe.plan import ALL_ROWS, LossRows, ModelGraph, choose_loss_rows
from gnnpipe.setup.inputs import number_dtype, row_dtype

__all__ = ["find_loss_rows", "loss_row_mask", "loss_rows_of_shard"]

_LEAST = 2
"""Rows of a chunk on a shard: what a user's model does with rows it may not do with none, or it may
take a single one for no row at all (``squeeze``)."""


def loss_row_mask(graph: Graph, chunking: Chunking) -> BoolArray:
    """[N], training vertices, and others where a chunk on a shard has too few of them.

    ``graph`` in the order of ``chunking``.
    """
    mask = graph.train_mask.copy()
    for start, stop in pairwise(np.unique(chunking.ptr).tolist()):
        missing = _LEAST - int(mask[start:stop].sum())
        if missing > 0:
            mask[start + np.flatnonzero(~mask[start:stop])[:missing]] = True
    return mask


def find_loss_rows(
    config: TrainConfig,
    model: ModelGraph,
    graph: Graph,
    mask: BoolArray,
    last_stage: tuple[int, int],
    precomputed: Collection[str] = (),
) -> LossRows:
    """Of the rows of a ``mask``; ``last_stage``: its ops (see ``plan.choose_loss_rows``)."""
    if graph.types is not None or graph.pairs is not None:
        return ALL_ROWS
    found = _counted(graph, mask, np.arange(graph.num_vertices))
    return choose_loss_rows(
        model,
        last_stage,
        found.rows,
        graph.num_vertices,
        found.edges,
        graph.num_edges,
        precomputed=precomputed,
        number_bytes=number_dtype(config).itemsize,
        row_bytes=row_dtype(config).itemsize,
    )


def loss_rows_of_shard(
    graph: Graph, mask: BoolArray, loss_rows: LossRows, own: npt.NDArray[np.int64]
) -> LossRows:
    """What is ``loss_rows`` for of a graph, of a shard that owns these rows."""
    if not loss_rows.ops:
        return loss_rows
    counted = _counted(graph, mask, own)
    return replace(loss_rows, rows=counted.rows, edges=counted.edges)


def _counted(graph: Graph, mask: BoolArray, own: npt.NDArray[np.int64]) -> LossRows:
    chosen = own[mask[own]]
    return LossRows(len(chosen), int(graph.degrees[chosen].sum()))
