"""Allocates what one rank runs: operators, history tables, stage, executor and optimizer.

A rank takes its stage of the whole model and its shard's rows of the whole graph; the rest of both
can be freed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from gnnpipe.graph.blocks import Blocks
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout, restrict, shard_layout, table_layouts
from gnnpipe.graph.operators import Everyone, LinearOperator
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.stale_rows import choose_drift_rows
from gnnpipe.models import Aggregation, Rows
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.hashed_dropout import ChunkMasks, KeptMasks, MaskSource, row_keys
from gnnpipe.ops.spmm import Kernel, default_kernel, kernel_named, time_kernels
from gnnpipe.optim.flat_step import FlatStep, can_be_flat
from gnnpipe.optim.optimizers import make_optimizer
from gnnpipe.optim.predicted_step import StepRates, check_predictable
from gnnpipe.optim.weight_policies import WEIGHT_POLICIES, StageSteps
from gnnpipe.plan import RowWay, gradient_steps
from gnnpipe.runtime.comm.column_exchange import ColumnExchange
from gnnpipe.runtime.comm.halo_exchange import GradientSum, HaloExchange
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.row_links import RowLinks
from gnnpipe.runtime.cuda_graph import CudaGraphExecutor
from gnnpipe.runtime.executor import Executor, WeightUpdate
from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.runtime.history.base import History, HistorySpec
from gnnpipe.runtime.history.block import BlockHistory
from gnnpipe.runtime.history.columns import ColumnHistory
from gnnpipe.runtime.history.linear import LinearHistory
from gnnpipe.runtime.history.mean import MeanHistory
from gnnpipe.runtime.label_inputs import LabelInputs, LabelIterations, LabelTable
from gnnpipe.runtime.memory_use import held_bytes
from gnnpipe.runtime.stage import ChunkLossRows, Stage
from gnnpipe.runtime.staleness.forecast import Forecaster, ProbeRows
from gnnpipe.schedule import CheckedProgram
from gnnpipe.setup.memory_estimate import check_memory
from gnnpipe.setup.prepared import Prepared
from gnnpipe.setup.structures import Structure, StructureBuilder, StructureKey, aggregated_features
from gnnpipe.tasks.loss import Loss, Targets, TrainedLabels, known_labels, takes, targets_by_chunk

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankRuntime:
    """Everything that runs on one rank."""

    executor: Executor
    target: ShardLayout
    """Layout of the vertices that have labels."""
    evaluation: CheckedProgram
    targets: Targets
    """Labels and split; empty except on the last stage."""
    metric: str
    """The metric that ``evaluate`` returns beside accuracy."""
    is_multi_label: bool
    num_classes: int
    """Number of scores of a vertex, or of a pair."""
    memory_before_bytes: int
    """Memory that the process held before ``build_rank``, without code pages."""
    rates: StepRates | None = None
    """Learning rates of coming steps, which the weight policy predicts; ``None`` without one."""


def build_rank(prepared: Prepared, mesh: Mesh) -> RankRuntime:
    """Allocates this rank's stage, rows, tables and optimizer.

    Raises:
        InputError: The rank cannot fit into memory.
    """
    check_memory(prepared, mesh)
    memory_before_bytes = held_bytes(mesh.device)
    mesh.recorder.clear()
    builder = _RankBuilder(prepared, mesh)
    graph, targets = prepared.graph, builder.make_targets()
    return RankRuntime(
        executor=builder.make_executor(targets),
        target=builder.layouts[graph.target],
        evaluation=prepared.evaluation_program,
        targets=targets,
        metric=prepared.metric,
        is_multi_label=graph.is_multi_label or graph.pairs is not None,
        num_classes=prepared.model_graph.num_classes,
        memory_before_bytes=memory_before_bytes,
        rates=builder.rates,
    )


class _RankBuilder:
    """Builds the parts of one rank from its stage module and its sparse operators."""

    def __init__(self, prepared: Prepared, mesh: Mesh) -> None:
        self._prepared, self._mesh = prepared, mesh
        chunking = prepared.chunkings[mesh.stage]
        self._shard = shard_layout(prepared.graph, chunking, mesh.shard)
        self.layouts = table_layouts(prepared.graph, chunking, self._shard)
        self._ops = prepared.plan.stages[mesh.stage].ops
        self._stage_module = prepared.model.stage_module(self._ops)
        self._stage_module.to(mesh.device)
        self._is_last = mesh.stage == mesh.stages - 1
        self._builder = StructureBuilder(prepared, mesh, self.layouts)
        self._builder.kernel = self._choose_kernel()
        shares = prepared.plan.stages[mesh.stage].shares
        self._column_exchange = ColumnExchange(mesh, prepared.row_dtype, shares)
        self.rates: StepRates | None = None
        """Set by ``make_executor``."""
        self._label_tables: list[LabelTable] = []
        self._drawn: dict[str, Structure] = {}
        """Random edges of a label iteration, by aggregation."""
        self._aggregated = {
            structure: aggregated_features(prepared, self._shard, structure, mesh.device)
            for structure in self._stage_module.feature_structures
        }
        """Products [n, num_features] of a matrix and the features, by structure."""
        self._structures: dict[StructureKey, Structure] = {}
        for a in self._stage_module.aggregations:
            if self._builder.key(a) not in self._structures:
                self._structures[self._builder.key(a)] = self._builder.make(a, prepared.graph)

    def make_targets(self) -> Targets:
        """Returns labels and split of this rank's vertices or pairs."""
        graph = self._prepared.graph
        pairs = self._structures.get(((PAIRS, PAIRS, ""), RowWay.HALO))
        if isinstance(pairs, Blocks):
            return Targets.of_pairs(pairs)
        layout = self.layouts[graph.target] if self._is_last else None
        return Targets.of_vertices(graph, layout, self._prepared.dtype, self._mesh.device)

    def make_executor(self, targets: Targets) -> Executor:
        """Returns the executor, with tables, stage, forecaster and optimizer."""
        prepared, mesh, config = self._prepared, self._mesh, self._prepared.config
        ways = sorted({RowWay.HALO, *prepared.plan.ways.values()} - {RowWay.COLUMNS})
        specs = {way: self._history_specs(self._builder.layouts_of(way)) for way in ways}
        exchanges = [spec.exchange for by_type in specs.values() for spec in by_type.values()]
        loss_rows, operators = self._make_loss_rows()
        criterion = Loss(
            targets,
            prepared.loss_fn,
            targets_by_chunk(prepared.graph, prepared.chunking.chunk_of_row()),
            None if loss_rows is None else loss_rows.places,
            self._vertices_of_loss(),
            self._trained_labels() if self._is_last and config.label_inputs else None,
        )
        own = {name: self.layouts[name].own for name in prepared.graph.row_types}
        pointers = {name: self.layouts[name].own_ptr for name in own}
        stage = Stage(
            self._stage_module,
            self._make_rows(own, pointers),
            lambda a, is_training: self._open_history(a, specs, operators, is_training),
            criterion if self._is_last else None,
            prepared.recompute_every(mesh.stage),
            loss_rows,
        )
        if prepared.given_edges is not None:
            stage.draw_edges = partial(self._draw_edges, stage)
        forecaster = self._make_forecaster(stage) if len(prepared.probes) else None
        kind = CudaGraphExecutor if self._can_use_cuda_graph() else Executor
        executor = kind(
            prepared.dag,
            mesh,
            stage,
            RowLinks(
                prepared.plan,
                mesh.rank,
                prepared.chunkings,
                prepared.graph.row_types,
                prepared.probes,
            ),
            [self._column_exchange, *exchanges],
            self._make_weight_update(),
            (prepared.dtype, prepared.row_dtype),
            forecaster,
        )
        executor.label_inputs = self._make_label_inputs()
        if mesh.device.type == "cpu":  # a recorded CUDA graph would read the weights' old memory
            copies = [self._stage_module] + ([forecaster.before] if forecaster else [])
            types = _sparse_types(prepared.graph)
            executor.sparse_maps = [w for one in copies for w in one.maps_of_features(types)]
        return executor

    def _trained_labels(self) -> TrainedLabels:
        """Returns the training labels of the last stage, which are inputs in some epochs."""
        prepared, device = self._prepared, self._mesh.device
        graph, layout = prepared.graph, self.layouts[self._prepared.graph.target]
        train = np.flatnonzero(graph.train_mask)

        def keys_of(rows: Numbers) -> Tensor:
            return row_keys(torch.from_numpy(prepared.chunking.perm[rows])).to(device)

        chunks = (layout.own[start:stop] for start, stop in pairwise(layout.own_ptr.tolist()))
        return TrainedLabels(
            prepared.config.label_inputs,
            prepared.config.seed,
            [keys_of(own[graph.train_mask[own]]) for own in chunks],
            keys_of(train),
            torch.from_numpy(known_labels(graph.y[train])).to(device),
        )

    def _make_label_inputs(self) -> LabelInputs | None:
        """Returns the label columns of this rank's features, if labels are inputs."""
        prepared, config, graph = self._prepared, self._prepared.config, self._prepared.graph
        if not config.label_inputs:
            return None
        iterations = None
        if config.label_iterations:
            iterations = LabelIterations(
                config.label_iterations,
                prepared.evaluation_program,
                graph.target,
                graph.num_classes,
                graph.is_multi_label,
                prepared.dag.feature_stages,
            )
        return LabelInputs(config.label_inputs, config.seed, self._label_tables, iterations)

    def _vertices_of_loss(self) -> list[Tensor]:
        """Returns the numbers of the labelled vertices by chunk, if the user's loss takes them."""
        prepared, graph = self._prepared, self._prepared.graph
        if prepared.loss_fn is None or not takes(prepared.loss_fn, "vertices"):
            return []
        number = prepared.chunking.perm if graph.types is None else graph.types.number
        layout = self.layouts[graph.target]
        own = torch.from_numpy(number[layout.own]).to(self._mesh.device)
        return [own[start:stop] for start, stop in pairwise(layout.own_ptr.tolist())]

    def _draw_edges(self, stage: Stage, epoch: int | None, is_label_iteration: bool) -> None:
        """Gives the histories the random edges of a training epoch, or of a label iteration.

        ``None``: of evaluation, whose histories have its edges already.
        """
        self._drawn.clear()
        if epoch is None:
            self._stage_module.set_vertex_values(None)
            return
        graph, values = self._prepared.edges_of_epoch(epoch)
        self._stage_module.set_vertex_values(values)
        made: dict[tuple[StructureKey, bool], Structure] = {}
        for a in self._stage_module.aggregations:
            if a.is_mean or a.structure == PAIRS:
                continue
            is_of_loss_rows = a.name in self._prepared.loss_rows.ops and not is_label_iteration
            key = self._builder.key(a), is_of_loss_rows
            if key not in made:
                made[key] = self._builder.make(a, graph)
                if is_of_loss_rows:
                    made[key] = self._builder.of_loss_rows(a, made[key])
            if is_label_iteration:
                self._drawn[a.name] = made[key]
            else:
                stage.histories[a.name].take(made[key])

    def _make_weight_update(self) -> WeightUpdate:
        prepared, mesh, config = self._prepared, self._mesh, self._prepared.config
        named = dict(self._stage_module.named_parameters())
        # Steps of single weights would take as long as the chunks, if there are many steps.
        is_fused = mesh.device.type == "cuda" or prepared.program.steps_by_chunk
        # Plans with few and with many steps are compared by one measurement.
        is_fused = is_fused or config.plans_for_target
        optimizer = make_optimizer(
            config, prepared.optimizer, prepared.model.module, named, is_fused
        )
        steps = gradient_steps(prepared.model_graph, self._ops)
        trained = [(p, steps.get(name, 0)) for name, p in named.items() if p.requires_grad]
        program, name = prepared.program, config.weights
        is_ours = prepared.optimizer is None or isinstance(prepared.optimizer, type)
        has_many = (program.consistency.optimizer_steps or 1) > 1
        is_flat = is_ours and has_many and can_be_flat(optimizer)
        flat = FlatStep(optimizer) if is_flat else None
        clip = GradClip(
            self._stage_module.named_parameters(),
            mesh,
            config.clip_norm,
            None if flat is None else flat.gather,
        )
        update = WeightUpdate(GradientSum(trained, mesh), clip, optimizer, flat=flat)
        if not program.largest_gap:
            return update
        policy, depth = WEIGHT_POLICIES[name], prepared.dag.depths[mesh.stage] - 1
        if policy.predicts_steps:
            check_predictable(type(optimizer), f"--weights {name}")
            self.rates = StepRates(optimizer.param_groups)
            update = replace(update, count_step=self.rates.count_step)
        stepped = optimizer if flat is None else flat.optimizer
        asynchronous = StageSteps(stepped, program.version_gaps[mesh.stage], self.rates, depth)
        return replace(update, policy=policy(asynchronous))

    def _can_use_cuda_graph(self) -> bool:
        """Whether every epoch launches the same kernels on a single GPU."""
        prepared, mesh = self._prepared, self._mesh
        is_alone = mesh.device.type == "cuda" and prepared.plan.chunks == mesh.world_size == 1
        is_alone = is_alone and not prepared.program.steps_by_chunk
        return (
            is_alone
            and not mesh.recorder.is_on  # a profile times single steps
            and self._stage_module.is_cuda_graph_safe
            and prepared.given_edges is None
            and not prepared.config.label_inputs
            and prepared.loss_fn is None
            and not prepared.recomputes(mesh.stage)  # backward would draw dropout masks again
        )

    @cached_property
    def _reads_features(self) -> bool:
        """Whether the stage reads features, not only what is aggregated of them."""
        return any(op.reads_features for op in self._prepared.model_graph.select(self._ops))

    def _make_rows(
        self,
        own: Mapping[str, Numbers],
        pointers: Mapping[str, Numbers] | None,
        has_features: bool = True,
    ) -> list[Rows]:
        """Returns the rows of every chunk; ``own`` rows by vertex type, split at ``pointers``.

        Without ``pointers``: one item with all rows, for passes without dropout. ``has_features``:
        with the features that the stage reads.
        """
        graph, seed = self._prepared.graph, self._prepared.config.seed
        by_type = {
            name: self._make_rows_of_type(
                rows, name, None if pointers is None else pointers[name], has_features
            )
            for name, rows in own.items()
        }
        if graph.types is None:
            return next(iter(by_type.values()))
        return [
            Rows(target.keys, None, seed=seed, parts={k: v[c] for k, v in by_type.items()})
            for c, target in enumerate(by_type[graph.target])
        ]

    def _make_rows_of_type(
        self, own: Numbers, vertex_type: str, pointer: Numbers | None, has_features: bool
    ) -> list[Rows]:
        prepared, device, graph = self._prepared, self._mesh.device, self._prepared.graph
        original = prepared.chunking.perm[own]
        within = original if graph.types is None else graph.types.number[own]
        keys = row_keys(torch.from_numpy(original)).to(device)
        vertices = torch.from_numpy(within).to(device)
        table = None
        is_read = has_features and self._reads_features
        if is_read and (graph.types is None or vertex_type in graph.types.features):
            number = np.cumsum(graph.row_types[vertex_type]) - 1
            x = graph.features(vertex_type)[number[own]]
            has_labels = prepared.config.label_inputs and vertex_type == graph.target
            num_labels = graph.num_classes if has_labels else 0
            by_chunk = None
            if prepared.program.steps_by_chunk and pointer is not None:
                by_chunk = list(pairwise(pointer.tolist()))
            table = FeatureTable(x, prepared.dtype, device, num_labels, by_chunk)
            if table.label_columns is not None:
                self._add_label_table(table.label_columns, own, keys)
        aggregated: Mapping[str, Tensor] = {}
        if has_features:
            places = np.searchsorted(self.layouts[vertex_type].own, own)
            are_all = len(places) == self._shard.num_own
            aggregated = {k: x if are_all else x[places] for k, x in self._aggregated.items()}
        masks: MaskSource | None = None
        ends = [0, len(own)] if pointer is None else pointer.tolist()
        if pointer is not None and not prepared.recomputes(self._mesh.stage):
            # Stored masks take a byte per number of all rows; those of a few chunks are equal.
            masks = ChunkMasks(keys, ends) if prepared.program.steps_by_chunk else KeptMasks(keys)
        return [
            Rows(
                keys=keys[start:stop],
                vertices=vertices[start:stop],
                features=None if table is None else table.rows(start, stop),
                aggregated={k: x[start:stop] for k, x in aggregated.items()},
                seed=prepared.config.seed,
                masks=masks,
                start=start,
            )
            for start, stop in pairwise(ends)
        ]

    def _add_label_table(self, columns: Tensor, own: Numbers, keys: Tensor) -> None:
        """Notes the label columns of rows ``own``, all own rows or the probe vertices."""
        prepared, device = self._prepared, self._mesh.device
        every = self.layouts[prepared.graph.target].own
        places = None
        if len(own) < len(every):
            places = torch.from_numpy(np.searchsorted(every, own)).to(device)
        has_label = known_labels(prepared.graph.y[own]) > 0
        is_train = torch.from_numpy(prepared.graph.train_mask[own] & has_label).to(device)
        self._label_tables.append(
            LabelTable(columns, columns.to(torch.int8), is_train, keys, places)
        )

    def _make_loss_rows(self) -> tuple[ChunkLossRows | None, dict[str, LinearOperator]]:
        """Returns the loss rows of every chunk, and the operators of those rows by aggregation.

        ``None`` and no operators if the last step computes all rows, or runs on another stage.
        """
        prepared, device = self._prepared, self._mesh.device
        reading = [a for a in self._stage_module.aggregations if a.name in prepared.loss_rows.ops]
        if not reading:
            return None, {}
        target = prepared.graph.target
        layout = self.layouts[target]
        loss_rows = restrict(layout, prepared.loss_row_mask)
        rows = torch.from_numpy(np.searchsorted(layout.own, loss_rows.own)).to(device)
        pointer = loss_rows.own_ptr.tolist()
        operators: dict[StructureKey, LinearOperator] = {}
        for a in reading:
            key = self._builder.key(a)
            if key not in operators:
                operators[key] = self._builder.of_loss_rows(a, self._structures[key])
        starts = layout.own_ptr[:-1].tolist()
        places = [
            rows[first:last] - start
            for (first, last), start in zip(pairwise(pointer), starts, strict=True)
        ]
        pointers = {target: loss_rows.own_ptr}
        by_chunk = self._make_rows({target: loss_rows.own}, pointers, has_features=False)
        by_name = {a.name: operators[self._builder.key(a)] for a in reading}
        return ChunkLossRows(by_chunk, places), by_name

    def _make_forecaster(self, stage: Stage) -> Forecaster:
        prepared, mesh = self._prepared, self._mesh
        graph, own = prepared.graph, self._shard.own
        is_probe = np.isin(np.arange(graph.num_vertices), prepared.probes)
        own_probes = {
            name: torch.from_numpy(np.flatnonzero(is_probe[layout.own])).to(mesh.device)
            for name, layout in self.layouts.items()
        }
        totals = {
            name: (int(is_probe[chosen].sum()), bool(is_probe[chosen].all()))
            for name, chosen in graph.table_rows.items()
        }
        probes = own[is_probe[own]]
        by_type = {name: probes[is_of[probes]] for name, is_of in graph.row_types.items()}
        (rows,) = self._make_rows(by_type, None)
        return Forecaster(
            self._stage_module,
            stage.histories,
            {
                a.name: self._structures[self._builder.key(a)]
                for a in self._stage_module.aggregations
            },
            ProbeRows(replace(rows, is_probe=True), own_probes, totals),
            mesh,
            prepared.row_dtype != prepared.dtype,
            {name for t in prepared.dag.sends(mesh.stage) for name in t.widths}
            - prepared.dag.passed_on(mesh.stage),
            prepared.given_edges is not None,
        )

    def _history_specs(self, layouts: Mapping[str, ShardLayout]) -> dict[str, HistorySpec]:
        """Returns the settings of the training tables by vertex type."""
        prepared, device = self._prepared, self._mesh.device
        staleness = prepared.staleness
        # Drift is a change from one epoch to the next, and epochs may not end one by one.
        has_drift = not (prepared.program.is_exact or prepared.spans_epochs)
        is_drift = np.zeros(prepared.graph.num_vertices, dtype=bool)
        if has_drift:
            is_drift[choose_drift_rows(prepared.chunking, prepared.config.seed)] = True

        def sample_of(layout: ShardLayout) -> Tensor:
            return torch.from_numpy(np.flatnonzero(is_drift[layout.own])).to(device)

        return {
            name: HistorySpec(
                layout,
                HaloExchange(layout, self._mesh, prepared.row_dtype),
                prepared.dtype,
                staleness.snapshot_every,
                staleness.scale_live_gradients,
                sample_of(layout) if has_drift else None,
            )
            for name, layout in layouts.items()
        }

    def _open_history(
        self,
        aggregation: Aggregation,
        specs: Mapping[RowWay, Mapping[str, HistorySpec]],
        loss_row_operators: Mapping[str, LinearOperator],
        is_training: bool,
    ) -> History:
        """Opens the table of an aggregation for training or evaluation."""
        way = self._prepared.way_of(aggregation.name)
        spec = specs.get(way, specs[RowWay.HALO])[aggregation.pushed_type]
        structure = self._structures[self._builder.key(aggregation)]
        if is_training:
            structure = loss_row_operators.get(aggregation.name, structure)
        else:
            structure = self._drawn.get(aggregation.name, structure)
            spec = replace(spec, snapshot_every=1, sample=None)
        if isinstance(structure, Everyone):
            return MeanHistory(spec, aggregation.width, structure)
        if isinstance(structure, Blocks):
            return BlockHistory(spec, aggregation.width, structure)
        if way is RowWay.COLUMNS:
            reads_loss_rows = is_training and aggregation.name in loss_row_operators
            cells = self._builder.cells(aggregation, reads_loss_rows)
            spec = replace(spec, layout=self._builder.layouts(aggregation)[aggregation.pushed_type])
            return ColumnHistory(spec, aggregation.width, structure, cells, self._column_exchange)
        is_shared = is_training and aggregation.name in self._prepared.shared_tables
        return LinearHistory(spec, aggregation.width, structure, is_shared)

    def _choose_kernel(self) -> Kernel:
        """Returns the sparse kernel of the config; 'measured' times all kernels on rank 0."""
        prepared, mesh = self._prepared, self._mesh
        name = prepared.config.kernel
        if name == "auto":
            return default_kernel(mesh.device)
        if name == "measured":
            whole = prepared.model.stage_module(range(prepared.plan.num_ops))
            linear = [a for a in whole.aggregations if a.is_linear]
            name = "embedding-bag"
            if linear and mesh.rank == 0:
                widest = max(linear, key=lambda a: a.width)
                operator = self._builder.make(widest, prepared.graph)
                assert isinstance(operator, LinearOperator)
                m = operator.forward
                times = time_kernels(m.indptr, m.indices, m.values, m.num_columns, widest.width)
                name = min(times, key=lambda kernel: times[kernel])
            name = mesh.share(name)
        return kernel_named(name, prepared.row_dtype, mesh.device)


def _sparse_types(graph: Graph) -> list[str]:
    """Returns the vertex types whose features are sparse."""
    if graph.types is None:
        return [""] if sp.issparse(graph.x) else []
    return [name for name, x in graph.types.features.items() if sp.issparse(x)]
