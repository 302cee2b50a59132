"""Counts the rows, edges and features of every chunk, as input of the cost formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.graph.chunking import Chunking
from gnnpipe.graph.graph import BoolArray, Graph
from gnnpipe.graph.layout import ShardLayout, shard_layout, table_layouts
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.quality import crossing_degrees
from gnnpipe.perf import ChunkSizes, PlanSizes
from gnnpipe.setup.prepared import Prepared

Numbers = npt.NDArray[np.int64]


def chunk_sizes(prepared: Prepared) -> PlanSizes:
    """Returns the sizes of every chunk of every shard of every stage."""
    split = prepared.plan.split
    distinct = dict(zip(split.bounds, prepared.chunkings, strict=True))
    by_bounds = {bounds: _sizes_of(prepared, chunking) for bounds, chunking in distinct.items()}
    stages = tuple(by_bounds[bounds] for bounds in split.bounds)
    if split.has_equal_stages:
        return PlanSizes.equal(stages[0], split)
    parts = _sizes_of(prepared, prepared.chunking)
    return PlanSizes(stages, split, parts.rows, parts.probes)


def _sizes_of(prepared: Prepared, chunking: Chunking) -> ChunkSizes:
    """Returns the sizes of every chunk of every shard of one stage."""
    graph = prepared.graph
    layouts = [
        table_layouts(graph, chunking, shard_layout(graph, chunking, shard))
        for shard in range(chunking.shards)
    ]
    degrees = dict.fromkeys(graph.row_types, graph.degrees)
    if graph.pairs is not None:
        degrees[PAIRS] = graph.pairs.degrees
    is_probe = np.zeros(graph.num_vertices, dtype=np.int64)
    is_probe[prepared.probes] = 1
    entries = {name: feature_entries(graph, name) for name in graph.row_types}
    names = list(layouts[0])

    def stacked(count: Any) -> Mapping[str, Numbers]:
        """Returns ``count(type, layout)`` of every shard, by vertex type."""
        return {
            name: np.array([count(name, by_type[name]) for by_type in layouts], dtype=np.int64)
            for name in names
        }

    nothing = np.zeros(graph.num_vertices, dtype=np.int64)
    loss_rows = prepared.loss_row_mask
    crossing = nothing if prepared.program.is_exact else crossing_degrees(graph, chunking)

    def summed(values: Mapping[str, Numbers]) -> Mapping[str, Numbers]:
        """Sums vertex values [N] over the chunks of every shard, [G, K] by vertex type."""
        return stacked(
            lambda name, layout: _by_chunk(values.get(name, nothing)[layout.own], layout)
        )

    return ChunkSizes(
        rows=stacked(lambda _, layout: np.diff(layout.own_ptr)),
        edges=summed(degrees),
        entries=summed(entries),
        boundary=stacked(lambda _, layout: layout.send_counts.sum(1)),
        halo=stacked(lambda _, layout: layout.receive_counts.sum(1)),
        stale=stacked(lambda name, layout: _stale_rows(prepared, chunking, name, layout)),
        probes=stacked(lambda _, layout: is_probe[layout.own].sum()),
        loss_rows=prepared.loss_rows.ops,
        loss_row_counts=summed({graph.target: loss_rows.astype(np.int64)})[graph.target],
        loss_row_edges=summed({graph.target: graph.degrees * loss_rows})[graph.target],
        loss_row_source_edges=_loss_row_source_edges(graph, chunking, loss_rows),
        shared=_back_over_some_edges(prepared),
        stale_edges={
            t: c // (1 if prepared.program.steps_by_chunk else 2)
            for t, c in summed(dict.fromkeys(names, crossing)).items()
        },
    )


def _back_over_some_edges(prepared: Prepared) -> frozenset[str]:
    """Returns the ops whose gradients return over live edges alone, or those of their chunk."""
    if not prepared.program.steps_by_chunk:
        return prepared.shared_tables
    return frozenset(op.name for op in prepared.model_graph.aggregations if op.is_linear)


def _loss_row_source_edges(graph: Graph, chunking: Chunking, loss_rows: BoolArray) -> Numbers:
    """Returns the edges into the loss rows of each shard by the chunk of the source, [G, K]."""
    is_into = np.repeat(loss_rows, graph.degrees)
    shard = np.repeat(chunking.shard_of_row(), graph.degrees)[is_into].astype(np.int64)
    chunk = chunking.chunk_of_row()[graph.indices[is_into]]
    cells = np.bincount(
        shard * chunking.chunks + chunk, minlength=chunking.shards * chunking.chunks
    )
    return cells.astype(np.int64).reshape(chunking.shards, chunking.chunks)


def _by_chunk(values: Numbers, layout: ShardLayout) -> Numbers:
    """Returns the sum over each chunk [K] of values [n] of own rows."""
    total = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(np.diff(total[layout.own_ptr]))


def feature_entries(graph: Graph, name: str) -> Numbers:
    """Returns the stored feature numbers of each vertex of a type, [N]; 0 for other vertices."""
    found = np.zeros(graph.num_vertices, dtype=np.int64)
    if graph.types is None or name in graph.types.features:
        x = graph.features(name)
        found[graph.row_types[name]] = (
            np.diff(x.indptr) if isinstance(x, sp.csr_array) else x.shape[1]
        )
    return found


def _stale_rows(prepared: Prepared, chunking: Chunking, name: str, layout: ShardLayout) -> int:
    """Returns the number of own and halo rows that are read stale, as a mean over chunk orders.

    A row that m other chunks read is read stale unless its own chunk is the first of these m + 1
    chunks: in m of m + 1 orders.
    """
    graph = prepared.graph
    structure = graph.pairs if name == PAIRS else graph
    if prepared.program.is_exact or structure is None:
        return 0
    chunk = chunking.chunk_of_row().astype(np.int64)
    reading = chunking.shard_of_row() == layout.shard
    reader = np.repeat(np.where(reading, chunk, -1), structure.degrees)
    read = structure.indices.astype(np.int64)
    others = (reader >= 0) & (reader != chunk[read])
    pairs = np.unique(read[others] * chunking.chunks + reader[others])
    times = np.bincount(pairs // chunking.chunks, minlength=graph.num_vertices)
    times = times[np.concatenate([layout.own, layout.halo])]
    return round(float((times / (times + 1)).sum()))
