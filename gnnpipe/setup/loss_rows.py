"""Counts the loss rows of a graph: the vertices that have a training label (``plan.loss_rows``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray, Graph
from gnnpipe.plan import ALL_ROWS, LossRows, ModelGraph, choose_loss_rows

_MIN_ROWS = 2
"""Least loss rows of a chunk on a shard: a user's model may fail for 0 rows or squeeze 1 row."""


def loss_row_mask(graph: Graph, chunking: Chunking) -> BoolArray:
    """Returns the mask [N] of training vertices, with at least ``_MIN_ROWS`` per chunk and shard.

    ``graph`` is in the order of ``chunking``.
    """
    mask = graph.train_mask.copy()
    for start, stop in pairwise(np.unique(chunking.ptr).tolist()):
        missing = _MIN_ROWS - int(mask[start:stop].sum())
        if missing > 0:
            mask[start + np.flatnonzero(~mask[start:stop])[:missing]] = True
    return mask


def find_loss_rows(
    model: ModelGraph, graph: Graph, mask: BoolArray, last_stage: Sequence[int]
) -> LossRows:
    """Returns the loss rows of the graph; all rows with several vertex types or link targets, and
    without training vertices.

    ``mask`` [N]; ``last_stage``: its ops. See ``plan.choose_loss_rows``.
    """
    if graph.types is not None or graph.pairs is not None or not graph.train_mask.any():
        return ALL_ROWS
    counts = _count(graph, mask, np.arange(graph.num_vertices))
    return choose_loss_rows(model, last_stage, counts, graph.num_vertices)


def loss_rows_of_shard(
    graph: Graph, mask: BoolArray, loss_rows: LossRows, own: npt.NDArray[np.int64]
) -> LossRows:
    """Returns ``loss_rows`` counted for the shard that owns the rows ``own``."""
    if not loss_rows.ops:
        return loss_rows
    counts = _count(graph, mask, own)
    return replace(loss_rows, rows=counts.rows, edges=counts.edges)


def _count(graph: Graph, mask: BoolArray, own: npt.NDArray[np.int64]) -> LossRows:
    chosen = own[mask[own]]
    return LossRows(len(chosen), int(graph.degrees[chosen].sum()))
