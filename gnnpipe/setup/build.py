"""From decisions to what runs on one rank: operators, histories, stage, executor, optimizer.

A rank takes its piece of the whole model and its shard's rows from the whole graph; the rest of
both can then be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gnnpipe.graph.blocks import Blocks, EdgeData, edge_data_of
from gnnpipe.graph.layout import ShardLayout, restrict, shard_layout, table_layouts
from gnnpipe.graph.operators import EVERYONE, Everyone, LinearOperator, edges_into, weighted_rows
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.stale_rows import choose_drift_rows
from gnnpipe.models import Aggregation, Rows, StageModule
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.hashed_dropout import KeptMasks, row_keys
from gnnpipe.ops.spmm import Kernel, default_kernel, embedding_bag, kernel_named, time_kernels
from gnnpipe.plan import gradient_steps
from gnnpipe.runtime.comm.halo_exchange import GradientSum, HaloExchange
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.cuda_graph import CudaGraphExecutor
from gnnpipe.runtime.executor import Executor, WeightUpdate
from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.runtime.history.base import History, HistorySpec
from gnnpipe.runtime.history.mean import open_history
from gnnpipe.runtime.memory_use import held_bytes
from gnnpipe.runtime.stage import ChunkLossRows, Stage
from gnnpipe.runtime.staleness.forecast import Forecaster
from gnnpipe.schedule import CheckedProgram, evaluation_program
from gnnpipe.setup.memory_check import check_memory
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.loss import Loss, Targets, data_of_pairs, num_targets

__all__ = ["ChunkRows", "LossRowsPart", "RankRuntime", "build_rank", "loss_rows_part"]


class ChunkRows:
    """Makes ``Rows`` of runs of rows of the renumbered graph."""

    def __init__(self, prepared: Prepared, reads_features: bool, device: torch.device) -> None:
        self._prepared, self._reads_features, self._device = prepared, reads_features, device
        # Within its type, the number of every row.
        self._number = np.empty(prepared.graph.num_vertices, dtype=np.int64)
        for chosen in prepared.graph.row_types.values():
            self._number[chosen] = np.arange(chosen.sum())

    def of(self, part: npt.NDArray[np.int64]) -> Rows:
        """Of these rows, of every type a part of its own if there are several."""
        types = self._prepared.graph.row_types
        return self._cut({name: part[is_of[part]] for name, is_of in types.items()}, None)[0]

    def chunks(self, layouts: Mapping[str, ShardLayout]) -> list[Rows]:
        """Of every chunk of a shard; features and dropout masks are those of the whole shard."""
        types = self._prepared.graph.row_types
        own = {name: layouts[name].own for name in types}
        return self._cut(own, {name: layouts[name].own_ptr for name in types})

    def _cut(
        self,
        own: Mapping[str, npt.NDArray[np.int64]],
        pointers: Mapping[str, npt.NDArray[np.int64]] | None,
    ) -> list[Rows]:
        """Rows by type, cut where ``pointers`` say, or not at all."""
        graph = self._prepared.graph
        by_type = {
            name: self._of_type(rows, name, None if pointers is None else pointers[name])
            for name, rows in own.items()
        }
        if graph.types is None:
            return next(iter(by_type.values()))
        seed = self._prepared.config.seed
        return [
            Rows(own.keys, None, seed=seed, parts={k: v[c] for k, v in by_type.items()})
            for c, own in enumerate(by_type[graph.target])
        ]

    def _of_type(
        self, part: npt.NDArray[np.int64], vertex_type: str, pointer: npt.NDArray[np.int64] | None
    ) -> list[Rows]:
        prepared, device = self._prepared, self._device
        graph = prepared.graph
        original = prepared.chunking.perm[part]
        within = original if graph.types is None else graph.types.number[part]
        table = None
        if self._reads_features and (graph.types is None or vertex_type in graph.types.features):
            x = graph.features(vertex_type)[self._number[part]]
            table = FeatureTable(x, prepared.dtype, device)
        keys = row_keys(torch.from_numpy(original)).to(device)
        vertices = torch.from_numpy(within).to(device)
        ends = [0, len(part)] if pointer is None else pointer.tolist()
        # Kept masks take a byte for each number that is dropped; made again, they are the same.
        is_kept = pointer is not None and not prepared.config.recompute
        masks = KeptMasks(keys) if is_kept else None
        return [
            Rows(
                keys=keys[start:stop],
                vertices=vertices[start:stop],
                features=None if table is None else table.rows(start, stop),
                seed=prepared.config.seed,
                masks=masks,
                start=start,
            )
            for start, stop in pairwise(ends)
        ]


@dataclass(frozen=True, eq=False)
class LossRowsPart:
    """The last step of training; other ranks have none."""

    rows: ChunkLossRows | None
    """None: all are made."""
    operators: Mapping[str, LinearOperator]
    """By aggregation."""


def loss_rows_part(
    prepared: Prepared,
    stage_module: StageModule,
    layouts: Mapping[str, ShardLayout],
    structures: Mapping[tuple[str, str, str], LinearOperator | Blocks | Everyone],
    device: torch.device,
) -> LossRowsPart:
    """Of a stage's piece, cut out of the ``structures`` of its aggregations."""
    reading = [a for a in stage_module.aggregations if a.name in prepared.loss_rows.ops]
    if not reading:
        return LossRowsPart(None, {})
    layout = layouts[prepared.graph.target]
    loss_rows = restrict(layout, prepared.loss_row_mask)
    number = np.searchsorted(layout.own, loss_rows.own)
    rows, pointer = torch.from_numpy(number).to(device), loss_rows.own_ptr.tolist()
    operators: dict[tuple[str, str, str], LinearOperator] = {}
    for a in reading:
        whole = structures[a.structure_key]
        assert isinstance(whole, LinearOperator)
        if a.structure_key not in operators:
            operators[a.structure_key] = whole.of_rows(rows, pointer)
    places = [
        rows[first:last] - start
        for (first, last), start in zip(pairwise(pointer), layout.own_ptr.tolist(), strict=False)
    ]
    of_chunks = ChunkRows(prepared, False, device).chunks({prepared.graph.target: loss_rows})
    return LossRowsPart(
        ChunkLossRows(of_chunks, places), {a.name: operators[a.structure_key] for a in reading}
    )


@dataclass(frozen=True, eq=False)
class RankRuntime:
    """What runs on one rank."""

    executor: Executor
    target: ShardLayout
    """Of the vertices that have labels."""
    evaluation: CheckedProgram
    targets: Targets
    """What is to be learned; empty but on the last stage."""
    metric: str
    """What ``evaluate`` gives beside accuracy."""
    is_multi_label: bool
    num_classes: int
    """Numbers that are scored for a vertex, or a pair."""
    memory_before_bytes: int
    """What the rank held before any of this, pages of code aside."""


def build_rank(prepared: Prepared, mesh: Mesh) -> RankRuntime:
    """Allocate this rank's part: its piece, its shard's rows and tables, the optimizer.

    ``InputError`` if that cannot fit into memory.
    """
    check_memory(prepared, mesh)
    config, graph, dtype = prepared.config, prepared.graph, prepared.dtype
    memory_before_bytes = held_bytes(mesh.device)
    mesh.recorder.clear()
    whole = shard_layout(graph, prepared.chunking, mesh.shard)
    layouts = table_layouts(graph, prepared.chunking, whole)
    ops = prepared.plan.stages[mesh.stage].ops
    stage_module = prepared.model.stage_module(ops)
    stage_module.to(mesh.device)
    kernel = _kernel(prepared, layouts, mesh)
    structures: dict[tuple[str, str, str], LinearOperator | Blocks | Everyone] = {}
    for a in stage_module.aggregations:
        if a.structure_key not in structures:
            structures[a.structure_key] = _structure(a, prepared, layouts, mesh.device, kernel)
    training = _history_specs(prepared, layouts, mesh)
    evaluation = {k: replace(v, snapshot_every=1, sample=None) for k, v in training.items()}
    loss_rows = loss_rows_part(prepared, stage_module, layouts, structures, mesh.device)
    shared = prepared.shared_tables

    def history(aggregation: Aggregation, is_training: bool) -> History:
        spec = (training if is_training else evaluation)[aggregation.pushed_type]
        structure = structures[aggregation.structure_key]
        if is_training:
            structure = loss_rows.operators.get(aggregation.name, structure)
        is_shared = is_training and aggregation.name in shared
        return open_history(spec, aggregation.width, structure, is_shared)

    reads_features = any(op.reads_features for op in prepared.model_graph.select(ops))
    precomputed = _precomputed(prepared, stage_module, structures, mesh.device)
    stage_module.use_aggregated_features(precomputed.keys())
    rows = ChunkRows(prepared, reads_features and stage_module.needs_features, mesh.device)
    target = layouts[graph.target]
    is_last = mesh.stage == mesh.stages - 1
    pairs = structures.get((PAIRS, PAIRS, ""))
    if isinstance(pairs, Blocks):
        targets = Targets.of_pairs(pairs)
    else:
        targets = Targets.of_vertices(graph, target if is_last else None, dtype, mesh.device)
    made = None if loss_rows.rows is None else loss_rows.rows.places
    criterion = Loss(targets, prepared.loss_fn, num_targets(graph), made)
    stage = Stage(
        stage_module,
        rows.chunks(layouts),
        history,
        criterion if is_last else None,
        config.recompute,
        precomputed,
        loss_rows.rows,
    )
    forecaster = None
    if len(prepared.probes):
        is_probe = np.isin(np.arange(graph.num_vertices), prepared.probes)
        places = {
            name: torch.from_numpy(np.flatnonzero(is_probe[layout.own])).to(mesh.device)
            for name, layout in layouts.items()
        }
        totals = {
            name: (int(is_probe[chosen].sum()), bool(is_probe[chosen].all()))
            for name, chosen in graph.table_rows.items()
        }
        forecaster = Forecaster(
            stage_module,
            stage.histories,
            lambda aggregation: structures[aggregation.structure_key],
            places,
            replace(rows.of(whole.own[is_probe[whole.own]]), is_probe=True),
            totals,
            mesh,
            dtype,
            bool(prepared.plan.sends(mesh.stage)),
        )
    # As a group, which may be empty: a stage need not have weights.
    optimizer = torch.optim.Adam(
        [{"params": stage_module.parameters()}],
        lr=config.lr,
        weight_decay=config.weight_decay,
        fused=mesh.device.type == "cuda",
    )
    steps = gradient_steps(prepared.model_graph, ops)
    trained = [
        (p, steps.get(name, 0)) for name, p in stage_module.named_parameters() if p.requires_grad
    ]
    is_alone = mesh.device.type == "cuda" and prepared.plan.chunks == mesh.world_size == 1
    # A profile times every step, which a CUDA graph does not show.
    is_alone = is_alone and not mesh.recorder.is_on
    # To recompute, masks are made anew in the midst of backward.
    makes_masks = config.recompute and config.dropout > 0
    repeats = (
        is_alone
        and stage_module.is_cuda_graph_safe
        and prepared.loss_fn is None
        and not makes_masks
    )
    executor = (CudaGraphExecutor if repeats else Executor)(
        prepared.plan,
        mesh,
        stage,
        layouts,
        [spec.exchange for spec in training.values()],
        WeightUpdate(
            GradientSum(trained, mesh),
            GradClip(stage_module.named_parameters(), mesh, config.clip_norm),
            optimizer,
        ),
        (dtype, prepared.row_dtype),
        forecaster,
    )
    return RankRuntime(
        executor,
        target,
        evaluation_program(prepared.plan),
        targets,
        prepared.metric,
        graph.is_multi_label or graph.pairs is not None,
        prepared.model_graph.num_classes,
        memory_before_bytes,
    )


def _precomputed(
    prepared: Prepared,
    stage_module: StageModule,
    structures: Mapping[tuple[str, str, str], LinearOperator | Blocks | Everyone],
    device: torch.device,
) -> dict[str, Tensor]:
    """By aggregation what it makes of the features [n, F] of all rows, where that is made once."""
    chosen = {
        a.name: a.structure_key for a in stage_module.aggregations if a.name in prepared.precomputed
    }
    if not chosen:
        return {}
    table = FeatureTable(prepared.graph.x, prepared.dtype, device)
    x = table.dense(0, table.num_rows)
    found: dict[tuple[str, str, str], Tensor] = {}
    for over in chosen.values():
        operator = structures[over]
        assert isinstance(operator, LinearOperator)
        if over not in found:
            found[over] = operator.forward.matmul(x)
    return {name: found[over] for name, over in chosen.items()}


def _history_specs(
    prepared: Prepared, layouts: Mapping[str, ShardLayout], mesh: Mesh
) -> dict[str, HistorySpec]:
    """What the tables of each type have in common, for training."""
    staleness = prepared.staleness
    is_drift = np.zeros(prepared.graph.num_vertices, dtype=bool)
    if not prepared.program.is_exact:
        is_drift[choose_drift_rows(prepared.chunking, prepared.config.seed)] = True
    return {
        name: HistorySpec(
            layout,
            HaloExchange(layout, mesh, prepared.row_dtype),
            prepared.dtype,
            staleness.snapshot_every,
            staleness.scale_live_gradients,
            None
            if prepared.program.is_exact
            else torch.from_numpy(np.flatnonzero(is_drift[layout.own])).to(mesh.device),
        )
        for name, layout in layouts.items()
    }


def _kernel(prepared: Prepared, layouts: Mapping[str, ShardLayout], mesh: Mesh) -> Kernel:
    """What the config asks for; if that is to be measured, the fastest on rank 0, for all ranks."""
    name = prepared.config.kernel
    if name == "auto":
        return default_kernel(mesh.device)
    if name == "measured":
        whole = prepared.model.stage_module(range(prepared.plan.num_ops))
        linear = [a for a in whole.aggregations if a.is_linear]
        name = "embedding-bag"
        if linear and mesh.rank == 0:
            widest = max(linear, key=lambda a: a.width)
            operator = _structure(widest, prepared, layouts, mesh.device, embedding_bag)
            assert isinstance(operator, LinearOperator)
            m = operator.forward
            times = time_kernels(m.indptr, m.indices, m.values, m.num_columns, widest.width)
            name = min(times, key=lambda kernel: times[kernel])
        name = mesh.share(name)
    return kernel_named(name, prepared.row_dtype, mesh.device)


def _structure(
    aggregation: Aggregation,
    prepared: Prepared,
    layouts: Mapping[str, ShardLayout],
    device: torch.device,
    kernel: Kernel,
) -> LinearOperator | Blocks | Everyone:
    graph, kind = prepared.graph, aggregation.structure
    layout, into = layouts[aggregation.pushed_type], layouts[aggregation.vertex_type]
    if aggregation.is_mean:
        chosen = graph.row_types[aggregation.pushed_type]
        chunk = prepared.chunking.chunk_of_row()[chosen]
        weights = own = None
        if kind != EVERYONE:
            weights = edges_into(graph, kind)
            own, weights = torch.from_numpy(weights[layout.own]).to(device), weights[chosen]
        sizes = np.bincount(chunk, weights, layout.num_chunks)
        count = round(float(sizes.sum()))
        return Everyone(count, torch.from_numpy(sizes / max(count, 1)), own)
    if aggregation.is_linear:
        # Handed over, not kept here: ``build`` lets the float64 matrix go as soon as it can.
        return LinearOperator.build(
            weighted_rows(graph, kind), layout, into, prepared.row_dtype, device, kernel
        )
    data: EdgeData = {}  # Loops have none, and the layer that asks for them reads none.
    if kind == PAIRS:
        data = data_of_pairs(graph)
    elif kind == "edges":
        data = edge_data_of(graph, prepared.dtype)
    vertices = torch.from_numpy(prepared.chunking.perm)
    keys = (
        row_keys(vertices[np.concatenate([layout.own, layout.halo])]).to(device),
        row_keys(vertices[into.own]).to(device),
    )
    return Blocks.build(weighted_rows(graph, kind), layout, into, keys, data)
