"""Reference model for stale epochs.

The recording of a model decides which rows lie in a history table. A pass with stale rows therefore
runs the steps of the run's own stage module, as one stage on all vertices of the given graph.
Nothing else of the runtime is shared: rows are gathered edge by edge, and autograd computes the
gradients.

Shapes: N vertices, F columns.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnnpipe.graph.blocks import Block, EdgeData, edge_data_of
from gnnpipe.graph.graph import Features, Graph
from gnnpipe.graph.operators import EVERYONE, RELATION, edges_into, of_relation, weighted_rows
from gnnpipe.models import Aggregation, Model, Received, Rows, Values
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.hashed_dropout import row_keys
from gnnpipe.verification.reference_models import Pass, WholeModel


class StageModel(WholeModel):
    """All ops of a model as one stage on all vertices."""

    def __init__(
        self, model: Model, num_ops: int, graph: Graph, seed: int, dtype: torch.dtype
    ) -> None:
        """``graph``: the given graph, without edge data that the model does not read."""
        self._model = copy.deepcopy(model)
        self.module = self._model.module
        self._stage = self._model.stage_module(range(num_ops))
        self.means = frozenset(a.name for a in self._stage.aggregations if a.is_mean)
        self._graph, self._dtype = graph, dtype
        self._types = {name: torch.from_numpy(of) for name, of in graph.table_rows.items()}
        keys = row_keys(torch.arange(graph.num_vertices))
        self._keys = {name: keys[of] for name, of in self._types.items()}
        self._rows = self._rows_of(graph, seed)
        every = self._stage.aggregations
        self._edge_data = {a.structure: self._edge_data_of(a.structure) for a in every}
        over_edges = {a.structure_key for a in every if not a.is_mean}
        self._edges = {key: self._edges_of(*key) for key in over_edges}

    def outputs(self, now: Pass) -> Tensor:
        """See ``WholeModel``."""
        rows = replace(
            self._rows, epoch=now.epoch, training=not now.is_probe, is_probe=now.is_probe
        )
        values: Values = {}
        received: dict[str, Received] = {}
        for step in range(self._stage.num_steps):
            pushed, values = self._stage.step(step, values, received, rows)
            is_last = step == self._stage.num_steps - 1
            received = {
                a.name: self._received(a, pushed[a.name], now)
                for a in (() if is_last else self._stage.rounds[step])
            }
        return values.get("x", torch.empty(0))

    def _rows_of(self, graph: Graph, seed: int) -> Rows:
        def rows(name: str, x: Features | None, number: Tensor) -> Rows:
            table = None if x is None else FeatureTable(x, self._dtype, torch.device("cpu")).rows()
            return Rows(self._keys[name], table, seed=seed, vertices=number)

        if graph.types is None:
            found = rows("", graph.x, torch.arange(graph.num_vertices))
            structures = self._stage.feature_structures
            return replace(found, aggregated={s: self._of_features(found, s) for s in structures})
        parts = {
            name: rows(
                name,
                graph.types.features.get(name),
                torch.from_numpy(graph.types.number[graph.row_types[name]]),
            )
            for name in graph.types.names
        }
        return Rows(self._keys[graph.target], None, seed=seed, parts=parts)

    def _of_features(self, rows: Rows, structure: str) -> Tensor:
        """Returns the features, summed over the weighted edges of a matrix."""
        assert rows.features is not None
        source, target, weight = self._edges_of(structure, "", "")
        x = rows.features.dense()
        return torch.zeros_like(x).index_add_(0, target, x[source] * weight)

    def _edges_of(
        self, structure: str, pushed_type: str, vertex_type: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns source, target and weight of every edge, numbered within vertex types."""
        types = self._graph.table_rows
        matrix = weighted_rows(self._graph, structure)[types[vertex_type]][:, types[pushed_type]]
        target = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        return (
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(target.astype(np.int64)),
            torch.from_numpy(matrix.data).to(self._dtype)[:, None],
        )

    def _edge_data_of(self, structure: str) -> EdgeData:
        has_data = structure.partition(RELATION)[0] == "edges"
        return edge_data_of(of_relation(self._graph, structure), self._dtype) if has_data else {}

    def _received(self, a: Aggregation, pushed: Tensor, now: Pass) -> Received:
        """Returns the aggregated rows of all vertices."""
        table = now.read(a.name, pushed, a.pushed_type)
        if a.is_mean:
            return Received(self._mean(a, table)[None])
        source, target, weight = self._edges[a.structure_key]
        count = len(self._keys[a.vertex_type])
        if a.is_linear:
            received = table.new_zeros(count, table.shape[1])
            return Received(received.index_add(0, target, table[source] * weight))
        keys, into_keys = self._keys[a.pushed_type], None
        if a.pushed_type == a.vertex_type:
            # Own rows first, as in a block, then rows that are not current.
            source = torch.where(now.is_current(a.pushed_type)[source], source, source + count)
            table, keys = torch.cat([pushed, table]), torch.cat([keys, keys])
        else:
            into_keys = self._keys[a.vertex_type]
        nothing = torch.empty(0, dtype=torch.int64)
        edges, size = torch.stack([source, target]), (len(table), count)
        data = self._edge_data[a.structure]
        block = Block(edges, nothing, nothing.bool()[:, None], size, keys, into_keys, data)
        return Received(table, block)

    def _mean(self, a: Aggregation, table: Tensor) -> Tensor:
        """Returns the mean over all vertices, or over all edges into them, [F]."""
        if a.structure == EVERYONE:
            return table.mean(0)
        counts = edges_into(self._graph, a.structure)[self._graph.table_rows[a.pushed_type]]
        weights = torch.from_numpy(counts / max(counts.sum(), 1.0)).to(table.dtype)
        return weights @ table
