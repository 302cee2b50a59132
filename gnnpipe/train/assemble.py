"""From decisions to what runs on one rank: operators, histories, stage, executor, optimizer.

A rank takes its piece of the whole model and its shard's rows from the whole graph; the rest of
both can then be forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.graph.layout import ShardLayout, shard_layout
from gnnpipe.graph.operators import (
    EVERYONE,
    LINEAR_KINDS,
    Blocks,
    Everyone,
    LinearOperator,
    edge_data_of,
    weighted_rows,
)  # fmt: skip
from gnnpipe.graph.pilots import choose_drift_rows
from gnnpipe.models import Aggregation, Rows
from gnnpipe.models.dropout import row_keys
from gnnpipe.models.feature_linear import feature_rows
from gnnpipe.runtime.exchange import Exchange
from gnnpipe.runtime.executor import Executor
from gnnpipe.runtime.forecast import Forecaster
from gnnpipe.runtime.history import History, HistorySpec
from gnnpipe.runtime.mean_history import open_history
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.runtime.stage import Stage
from gnnpipe.schedule import Program, evaluation_program
from gnnpipe.train.prepare import Prepared
from gnnpipe.train.task import loss_sum, num_targets

__all__ = ["Assembly", "assemble"]


@dataclass(frozen=True, eq=False)
class Assembly:
    """What runs on one rank."""

    executor: Executor
    evaluation: Program
    labels: list[Tensor]
    """Per chunk [C] classes, or [C, T] labels, of the own rows; last stage only."""
    masks: list[Tensor]
    """Per chunk [3, C] bool: train, val, test; last stage only."""
    metric: str
    """What ``evaluate`` gives beside accuracy."""
    several_labels: bool
    num_classes: int


def assemble(prepared: Prepared, mesh: Mesh) -> Assembly:
    """Allocate this rank's part: its piece, its shard's rows and tables, the optimizer."""
    config, graph, dtype = prepared.config, prepared.graph, prepared.dtype
    layout = shard_layout(graph, prepared.chunking, mesh.shard)
    first, last = prepared.plan.stages[mesh.stage]
    piece = prepared.model.piece(first, last)
    piece.to(mesh.device)
    exchange = Exchange(layout, mesh)
    structures = {
        kind: _structure(kind, prepared, layout, mesh.device)
        for kind in sorted({a.structure for a in piece.aggregations})
    }
    techniques = config.techniques
    sample = None
    if not prepared.report.exact:
        chosen = choose_drift_rows(prepared.chunking, config.seed)
        sample = torch.from_numpy(np.flatnonzero(np.isin(layout.own, chosen))).to(mesh.device)
    training = HistorySpec(
        layout,
        exchange,
        dtype,
        techniques.snapshot_every,
        techniques.scale_live_gradients,
        techniques.exact_epochs,
        sample,
    )
    evaluation = replace(training, snapshot_every=1, sample=None)

    def history(aggregation: Aggregation, is_training: bool) -> History:
        spec = training if is_training else evaluation
        return open_history(spec, aggregation.width, structures[aggregation.structure])

    own = [layout.own[a:b] for a, b in zip(layout.own_ptr[:-1], layout.own_ptr[1:], strict=True)]
    reads_features = any(op.reads_features for op in prepared.model_graph.ops[first:last])

    def rows_of(part: npt.NDArray[np.int64]) -> Rows:
        vertices = torch.from_numpy(prepared.chunking.perm[part])
        return Rows(
            keys=row_keys(vertices).to(mesh.device),
            vertices=vertices.to(mesh.device),
            features=feature_rows(graph.x[part], dtype, mesh.device) if reads_features else None,
            seed=config.seed,
        )

    is_last = mesh.stage == mesh.stages - 1
    labels = [torch.from_numpy(graph.y[part]).to(mesh.device) for part in own] if is_last else []
    split = np.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    masks = [torch.from_numpy(split[:, part]).to(mesh.device) for part in own] if is_last else []
    total = num_targets(graph)

    def criterion(logits: Tensor, chunk: int) -> Tensor:
        chosen = masks[chunk][0].nonzero().squeeze(1)
        if prepared.loss_fn is not None and not len(chosen):
            # Not every loss knows what to make of no rows.
            return logits.sum() * 0.0
        loss = prepared.loss_fn or loss_sum
        return loss(logits[chosen], labels[chunk][chosen]) / total

    stage = Stage(piece, [rows_of(part) for part in own], history, criterion if is_last else None)
    forecaster = None
    if len(prepared.pilots):
        is_mine = np.isin(layout.own, prepared.pilots)
        chosen = layout.own[is_mine]
        forecaster = Forecaster(
            piece, stage.histories, lambda aggregation: structures[aggregation.structure],
            torch.from_numpy(np.flatnonzero(is_mine)).to(mesh.device),
            replace(rows_of(chosen), pilot=True),
            len(prepared.pilots), len(prepared.pilots) == graph.num_vertices, mesh,
        )  # fmt: skip
    # As a group, which may be empty: a stage need not have weights.
    optimizer = torch.optim.Adam(
        [{"params": piece.parameters()}], lr=config.lr, weight_decay=config.weight_decay
    )
    executor = Executor(prepared.plan, mesh, stage, layout, exchange, optimizer, dtype, forecaster)
    return Assembly(
        executor, evaluation_program(prepared.plan), labels, masks, prepared.metric,
        graph.is_multi_label, graph.num_classes,
    )  # fmt: skip


def _structure(
    kind: str, prepared: Prepared, layout: ShardLayout, device: torch.device
) -> LinearOperator | Blocks | Everyone:
    if kind == EVERYONE:
        sizes = np.bincount(prepared.chunking.chunk_of_row(), minlength=layout.num_chunks)
        return Everyone(
            prepared.graph.num_vertices, torch.from_numpy(sizes / prepared.graph.num_vertices)
        )
    rows = weighted_rows(prepared.graph, kind)
    if kind in LINEAR_KINDS:
        return LinearOperator.build(rows, layout, prepared.dtype, device)
    local = prepared.chunking.perm[np.concatenate([layout.own, layout.halo])]
    # Loops have no data, and the layer that asks for them reads none.
    data = edge_data_of(prepared.graph, prepared.dtype) if kind == "edges" else {}
    return Blocks.build(rows, layout, row_keys(torch.from_numpy(local)).to(device), data)
