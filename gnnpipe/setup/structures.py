"""Makes the matrices, blocks and means that the aggregations of one rank run over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from gnnpipe.graph.blocks import Blocks, EdgeData, edge_data_of
from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout, gathered_layout, restrict, shard_layout, table_layouts
from gnnpipe.graph.operators import (
    EVERYONE,
    RELATION,
    SUM,
    Everyone,
    LinearOperator,
    edges_into,
    local_rows,
    of_relation,
    weighted_rows,
)
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.models import Aggregation
from gnnpipe.ops.hashed_dropout import row_keys
from gnnpipe.ops.spmm import Kernel, embedding_bag
from gnnpipe.plan import RowWay
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.columns import CellRows
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.loss import data_of_pairs

Structure = LinearOperator | Blocks | Everyone
StructureKey = tuple[tuple[str, str, str], RowWay]
"""``Aggregation.structure_key`` and the way of the rows: aggregations of equal keys share it."""

_SPARSE_ROWS = 4096
"""Rows of a product with sparse features that are made dense at a time."""


def aggregated_features(
    prepared: Prepared, layout: ShardLayout, structure: str, device: torch.device
) -> torch.Tensor:
    """Return the product [n, F] of own rows of an aggregation matrix and all features.

    It is computed on the CPU, where the features of the whole graph are.
    """
    x, dtype = prepared.graph.x, prepared.dtype
    rows = local_rows(weighted_rows(prepared.graph, structure), layout, layout)
    read = x[np.concatenate([layout.own, layout.halo])]
    if isinstance(read, np.ndarray):
        matrix = RowCSR.from_scipy(rows, dtype, torch.device("cpu"))
        return matrix.matmul(torch.from_numpy(read).to(dtype)).to(device)
    found = torch.empty(rows.shape[0], x.shape[1], dtype=dtype)
    for start in range(0, rows.shape[0], _SPARSE_ROWS):
        block = rows[start : start + _SPARSE_ROWS] @ read
        found[start : start + _SPARSE_ROWS] = torch.from_numpy(block.toarray())
    return found.to(device)


class StructureBuilder:
    """Builder of the structures of one rank's aggregations, for the rows that each way brings."""

    def __init__(self, prepared: Prepared, mesh: Mesh, layouts: Mapping[str, ShardLayout]) -> None:
        """``layouts``: of the shard, by vertex type."""
        self._prepared, self._mesh, self._layouts = prepared, mesh, layouts
        self._chunking = prepared.chunkings[mesh.stage]
        self.kernel: Kernel = embedding_bag

    def key(self, aggregation: Aggregation) -> StructureKey:
        """Return the key of an aggregation's structure."""
        return aggregation.structure_key, self._prepared.way_of(aggregation.name)

    def layouts(self, aggregation: Aggregation) -> Mapping[str, ShardLayout]:
        """Return the layouts of the rows that this rank aggregates, by vertex type."""
        return self.layouts_of(self._prepared.way_of(aggregation.name))

    def layouts_of(self, way: RowWay) -> Mapping[str, ShardLayout]:
        """Return the layouts of the rows that a way brings to this rank, by vertex type."""
        if way is RowWay.HALO:
            return self._layouts
        return self._gathered if way is RowWay.GATHER else self._whole

    @cached_property
    def _gathered(self) -> Mapping[str, ShardLayout]:
        """Layouts of own rows and all others."""
        layout = gathered_layout(self._chunking, self._mesh.shard)
        return table_layouts(self._prepared.graph, self._chunking, layout)

    @cached_property
    def _whole(self) -> Mapping[str, ShardLayout]:
        """Layouts of all rows, as of a single shard."""
        graph, chunking = self._prepared.graph, self._chunking.merged((0, self._chunking.shards))
        return table_layouts(graph, chunking, shard_layout(graph, chunking, 0))

    def cells(self, aggregation: Aggregation, reads_loss_rows: bool) -> CellRows:
        """Return the rows that each shard pushes and reads in each chunk."""
        rows = self._prepared.graph.table_rows
        read = rows[aggregation.vertex_type]
        if reads_loss_rows:
            read = self._prepared.loss_row_mask
        pushed = rows[aggregation.pushed_type]
        counts = self._chunking.counts(pushed), self._chunking.counts(read)
        return CellRows(*(each.tolist() for each in counts))

    def of_loss_rows(self, aggregation: Aggregation, structure: Structure) -> LinearOperator:
        """Return the operator of the loss rows alone."""
        assert isinstance(structure, LinearOperator)
        layout = self.layouts(aggregation)[self._prepared.graph.target]
        loss_rows = restrict(layout, self._prepared.loss_row_mask)
        rows = torch.from_numpy(np.searchsorted(layout.own, loss_rows.own)).to(self._mesh.device)
        return structure.of_rows(rows, loss_rows.own_ptr.tolist())

    def make(self, aggregation: Aggregation, graph: Graph) -> Structure:
        """Return the matrix, the blocks or the mean that an aggregation runs over in ``graph``."""
        prepared, device = self._prepared, self._mesh.device
        kind, layouts = aggregation.structure, self.layouts(aggregation)
        layout, into = layouts[aggregation.pushed_type], layouts[aggregation.vertex_type]
        if aggregation.is_mean:
            return self._mean(aggregation, graph)
        if aggregation.is_linear:
            # Not bound to a name here, so that ``build`` can free the float64 matrix early.
            return LinearOperator.build(
                weighted_rows(graph, kind), layout, into, prepared.row_dtype, device, self.kernel
            )
        data: EdgeData = {}  # for 'loops'
        if kind == PAIRS:
            data = data_of_pairs(graph)
        elif kind.partition(RELATION)[0] == "edges":
            data = edge_data_of(of_relation(graph, kind), prepared.dtype)
        vertices = torch.from_numpy(prepared.chunking.perm)
        keys = (
            row_keys(vertices[np.concatenate([layout.own, layout.halo])]).to(device),
            row_keys(vertices[into.own]).to(device),
        )
        return Blocks.build(weighted_rows(graph, kind), layout, into, keys, data)

    def _mean(self, aggregation: Aggregation, graph: Graph) -> Everyone:
        """Return the mean or the sum over all vertices, or over all edges."""
        prepared, kind = self._prepared, aggregation.structure
        layout = self._layouts[aggregation.pushed_type]
        if kind == SUM:
            shares = torch.full((layout.num_chunks,), 1 / layout.num_chunks, dtype=torch.float64)
            return Everyone(1, shares, is_sum=True)
        chosen = graph.row_types[aggregation.pushed_type]
        chunk = prepared.chunking.chunk_of_row()[chosen]
        weights = own = None
        if kind != EVERYONE:
            weights = edges_into(graph, kind)
            own = torch.from_numpy(weights[layout.own]).to(self._mesh.device)
            weights = weights[chosen]
        sizes = np.bincount(chunk, weights, layout.num_chunks)
        count = round(float(sizes.sum()))
        return Everyone(count, torch.from_numpy(sizes / max(count, 1)), own)
