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
from gnnpipe.plan import ALL_ROWS, Asked, ModelGraph, asked_of
from gnnpipe.setup.inputs import number_dtype, row_dtype

__all__ = ["asked_among", "asked_mask", "asked_rows"]

_LEAST = 2
"""Rows of a chunk on a shard: what a user's model does with rows it may not do with none, or it may
take a single one for no row at all (``squeeze``)."""


def asked_mask(graph: Graph, chunking: Chunking) -> BoolArray:
    """[N], training vertices, and others where a chunk on a shard has too few of them.

    ``graph`` in the order of ``chunking``.
    """
    mask = graph.train_mask.copy()
    for start, stop in pairwise(np.unique(chunking.ptr).tolist()):
        missing = _LEAST - int(mask[start:stop].sum())
        if missing > 0:
            mask[start + np.flatnonzero(~mask[start:stop])[:missing]] = True
    return mask


def asked_rows(
    config: TrainConfig,
    model: ModelGraph,
    graph: Graph,
    mask: BoolArray,
    last_stage: tuple[int, int],
    once: Collection[str] = (),
) -> Asked:
    """Of the rows of a ``mask``; ``last_stage``: its ops (see ``plan.asked_of``)."""
    if graph.types is not None or graph.pairs is not None:
        return ALL_ROWS
    found = _counted(graph, mask, np.arange(graph.num_vertices))
    return asked_of(
        model, last_stage, found.rows, graph.num_vertices, found.edges, graph.num_edges,
        once=once, number_bytes=number_dtype(config).itemsize,
        row_bytes=row_dtype(config).itemsize,
    )  # fmt: skip


def asked_among(graph: Graph, mask: BoolArray, asked: Asked, own: npt.NDArray[np.int64]) -> Asked:
    """What is ``asked`` for of a graph, of a shard that owns these rows."""
    if not asked.ops:
        return asked
    counted = _counted(graph, mask, own)
    return replace(asked, rows=counted.rows, edges=counted.edges)


def _counted(graph: Graph, mask: BoolArray, own: npt.NDArray[np.int64]) -> Asked:
    chosen = own[mask[own]]
    return Asked(len(chosen), int(graph.degrees[chosen].sum()))
