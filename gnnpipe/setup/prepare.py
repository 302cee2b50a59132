"""Sets up a run: inputs -> model -> plan -> partition -> programs.

Allocates only the graph and the model. ``gnnpipe info`` stops here; a run goes on with
``setup.build``. No step changes the decision of an earlier step; ``--comm-dtype auto`` is
settled once, by the plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.config.settings import BY_CHUNK
from gnnpipe.config.validation import check_schedule, check_staleness
from gnnpipe.data.load import configured_graph
from gnnpipe.errors import InputError
from gnnpipe.graph.chunking import Chunking, ShardShares, check_counts, make_chunking, renumber
from gnnpipe.graph.graph import Graph, bare
from gnnpipe.graph.halo import halo_at, halo_by_shards
from gnnpipe.graph.operators import SUM
from gnnpipe.graph.order import pays_back
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.quality import CutQuality, chunk_edges, cut_quality
from gnnpipe.graph.stale_rows import choose_probe_vertices
from gnnpipe.models import Model
from gnnpipe.ops.spmm import kernel_named
from gnnpipe.optim.optimizers import OptimizerChoice
from gnnpipe.output import Step, report_progress, warn
from gnnpipe.perf import CommVolume, ShardRows, closed_form_volume, row_way_bytes
from gnnpipe.perf.workload import num_probes
from gnnpipe.plan import ModelGraph, Plan, RowWay, StageDag, StagePlan, gradient_buckets
from gnnpipe.planner import (
    MAX_CHUNKS,
    PLANNERS,
    GivenPlan,
    GraphCounts,
    Planner,
    PlanRequest,
    Shape,
    UniformPlanner,
    naming_plan,
    planner_named,
)
from gnnpipe.runtime.comm.launch import launched_world_size
from gnnpipe.runtime.comm.world import World
from gnnpipe.schedule import EXACT_SCHEDULE, CheckedProgram, training_program, with_forecast
from gnnpipe.setup.by_chunk import (
    check_edges,
    check_optimizer,
    partitioner_of,
    program_by_chunk,
    why_not_async,
)
from gnnpipe.setup.chunk_sizes import feature_entries
from gnnpipe.setup.inputs import (
    aggregates_first,
    check_parts,
    check_validation,
    choose_model,
    edges_are_random,
    made_model,
    number_dtype,
    reason_not_recorded,
    row_dtype,
    settled_config,
    with_edge_work,
    with_vertex_data,
    without_unread,
)
from gnnpipe.setup.label_inputs import with_label_inputs
from gnnpipe.setup.loss_rows import find_loss_rows, loss_row_mask
from gnnpipe.setup.memory_estimate import fit_recompute_every, rank_memory_bytes
from gnnpipe.setup.model_graph import describe
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.loss import LossFn, check_loss, choose_metric, kept_by_loss

_READ_BYTES_PER_S = 5e7
"""Typical speed of reading and cleaning: 30 MB/s of a compressed file, 200 MB/s of features."""

_SAMPLED_ROWS = 10_000
"""Feature rows that the digest of a graph reads."""


def prepare(
    config: TrainConfig,
    world: World,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    planner: Planner | None = None,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerChoice | None = None,
    refill_epochs: int = 0,
) -> Prepared:
    """Decides everything about a run; ``InputError`` on every rank if any rank has an error.

    ``graph``, ``model`` and ``planner`` replace those that ``config`` names. ``refill_epochs``:
    exact epochs at the start, to fill tables that a checkpoint did not store.
    """
    graph = check_parts(config, graph, model)
    if model is not None:
        config = replace(config, model=f"passed-in:{type(model).__name__}")
    planner = planner or planner_named(config.plan)
    graph, digest = _read_graph(config, world, graph, loss_fn is None)
    metric = choose_metric(graph, config.metric)
    check_validation(config, graph, metric, loss_fn)
    dtype = number_dtype(config)
    # Before the partition, which may take long, so that an unusable model is refused at once.
    must_record = config.require_capture or config.chunks * ranks_of(config, planner) > 1

    def recorded(complete: Graph, may_be_stale: bool) -> _Inputs:
        chosen = choose_model(module, config, complete, world, dtype, must_record, may_be_stale)
        given = without_unread(complete, chosen, world)
        own = with_edge_work(given, chosen, config, world)
        described = describe(chosen, own)
        return _Inputs(
            config, world, own, given, digest, chosen, metric, described, loss_fn, optimizer
        )

    with Step("recording the model", config.quiet, world.rank == 0):
        complete, module, digest = _with_inputs(config, world, graph, model, digest)
        inputs = recorded(complete, may_read_stale_rows(config, planner))
    if loss_fn is not None:
        check_loss(loss_fn, inputs.graph, inputs.model_graph.output_width, dtype)
    with naming_plan(planner):
        plan = _plan(inputs, planner)
        is_stale = reads_stale_rows(config, plan.chunks, plan.schedule)
        if aggregates_first(inputs.model) and not is_stale:
            # Only a search does not know this before.
            planned, inputs = inputs.model_graph, recorded(inputs.given, False)
            plan = _with_ways_of(plan, planned, inputs.model_graph)
        found = _prepared(inputs, plan, refill_epochs)
    if config.recompute_every:
        return found
    least_bytes = min(world.gather(rank_memory_bytes(world)))
    return fit_recompute_every(found, least_bytes, warns=world.rank == 0)


@dataclass(frozen=True)
class _Inputs:
    """Everything about a run but its plan."""

    config: TrainConfig
    world: World
    graph: Graph
    given: Graph
    """The graph without the work on edges that the model does."""
    digest: str
    model: Model
    metric: str
    model_graph: ModelGraph
    loss_fn: LossFn | None
    optimizer: OptimizerChoice | None


def _with_ways_of(plan: Plan, planned: ModelGraph, model: ModelGraph) -> Plan:
    """Returns the plan with the numbers that aggregations have in the other recording ``model``."""
    numbers = {op.name: i for i, op in enumerate(model.ops)}
    ways = {numbers[planned.ops[i].name]: way for i, way in plan.ways.items()}
    return replace(plan, ways=ways)


def may_read_stale_rows(config: TrainConfig, planner: Planner) -> bool:
    """Returns whether a usual epoch of the plan, which may not be found yet, reads stale rows."""
    if isinstance(planner, GivenPlan):
        return reads_stale_rows(config, planner.given.chunks, planner.given.schedule)
    is_search = not isinstance(planner, UniformPlanner)
    return reads_stale_rows(config, MAX_CHUNKS if is_search else config.chunks, config.schedule)


def reads_stale_rows(config: TrainConfig, chunks: int, schedule: str) -> bool:
    """Returns whether a usual epoch of such a plan reads stale rows."""
    is_exact = config.staleness_settings_for(chunks, schedule).is_exact
    return chunks > 1 and schedule != EXACT_SCHEDULE and not is_exact


def _prepared(inputs: _Inputs, plan: Plan, refill_epochs: int = 0) -> Prepared:
    """Returns the run with this plan, partitioned."""
    config, graph = settled_config(inputs.config, plan), inputs.graph
    model_graph = inputs.model_graph
    world, chosen = inputs.world, inputs.model
    check_counts(graph.num_vertices, plan.chunks, plan.split.num_parts)  # before a long program
    check_edges(plan, chosen)
    dag = StageDag.of(plan, model_graph)
    usual, exact_program = training_programs(config, model_graph, dag)
    if usual.largest_gap:
        check_optimizer(config, inputs.optimizer)
    chunking = _partition(config, plan, graph, world, _order(config, plan, model_graph, chosen))
    qualities = _qualities(graph, chunking, plan)
    graph = renumber(graph, chunking)
    probes = _probes(config, model_graph, graph, chunking, plan, usual)
    program = with_forecast(dag, usual) if len(probes) else usual
    return Prepared(
        config=config,
        graph=graph,
        digest=inputs.digest,
        model=chosen,
        metric=inputs.metric,
        loss_fn=inputs.loss_fn,
        optimizer=inputs.optimizer,
        model_graph=model_graph,
        dag=dag,
        chunking=chunking,
        qualities=qualities,
        program=program,
        exact_program=exact_program,
        probes=probes,
        volume=_epoch_bytes(
            config, dag, model_graph, graph, chunking, qualities, probes
        ).with_steps(program.consistency.optimizer_steps or 1),
        chunk_edges=None if program.is_exact else chunk_edges(graph, chunking),
        refill_epochs=refill_epochs,
        given_edges=bare(inputs.given) if edges_are_random(chosen) else None,
    )


def shape_of(config: TrainConfig) -> Shape:
    """Returns the shape that the config asks for."""
    is_exact = config.staleness_settings_for(config.chunks, config.schedule).is_exact
    return Shape(
        config.stages,
        config.shards,
        config.chunks,
        is_exact,
        RowWay(config.row_way),
        config.schedule,
        row_dtype(config) != number_dtype(config),
    )


def ranks_of(config: TrainConfig, planner: Planner | None = None) -> int:
    """Returns the number of ranks of the plan, known before the graph is read."""
    found = (planner or planner_named(config.plan)).num_ranks(shape_of(config))
    return launched_world_size() if found is None else found


def shape_text(config: TrainConfig) -> str:
    """Returns the flags that give the number of ranks, for messages."""
    if config.plan in set(PLANNERS):
        return f"--stages {config.stages} --shards {config.shards}"
    return f"--plan {config.plan!r}"


def join_world(config: TrainConfig, planner: Planner | None = None, **settings: object) -> World:
    """Joins the other ranks.

    ``settings``: further settings that all ranks must have in common, by flag.

    Raises:
        InputError: On every rank, if ranks have other settings, or if their number is not that of
            the plan.
    """
    planner = planner or planner_named(config.plan)
    settings, shape, remedy = config.common_settings() | settings, shape_text(config), ""
    if isinstance(planner, GivenPlan):
        settings["--plan"] = f"with checksum {zlib.crc32(planner.given.to_json().encode()):08x}"
        shape, remedy = planner.source, "try --plan auto or --plan uniform"
    num_ranks = ranks_of(config, planner)
    return World.meet(num_ranks, config.device, config.timeout_s, shape, settings, remedy)


def _read_graph(
    config: TrainConfig, world: World, graph: Graph | None, needs_labels: bool
) -> tuple[Graph, str]:
    """Returns the given or configured graph and its digest, equal on all ranks."""
    error: InputError | None = None
    # ``info`` may ask for CUDA on a machine without a GPU; the kernel is then not tried.
    device = "cuda" if config.device == "cuda" else world.device.type
    try:
        if config.kernel not in ("auto", "measured") and device == world.device.type:
            kernel_named(config.kernel, row_dtype(config), world.device)  # raises if not usable
        if graph is None:
            with Step(f"reading {config.dataset}", config.quiet, world.rank == 0):
                report_progress(left_s=_reading_time_s(config.dataset))
                graph = configured_graph(config, needs_labels)
    except InputError as fault:
        error = fault
    world.agree(error)
    assert graph is not None
    return graph, _common_digest(graph, world)


def _common_digest(graph: Graph, world: World) -> str:
    """Returns the digest of the graph, which must be equal on all ranks."""
    digest = _digest(graph)
    if len(set(world.gather(digest))) > 1:
        raise InputError(
            "graph: differs between ranks; make it in the same way on each, and seed what draws "
            "(RandomLinkSplit and other transforms: torch_geometric.seed_everything(0) before)"
        )
    return digest


def _with_inputs(
    config: TrainConfig, world: World, graph: Graph, model: nn.Module | None, digest: str
) -> tuple[Graph, nn.Module, str]:
    """Returns the graph whose features hold all that is an input of the model, and the model.

    Labels and data of vertices become features. The digest counts data of vertices that is read.
    """
    graph = with_label_inputs(graph, config)
    module = made_model(model, config, graph)
    graph = with_vertex_data(graph, module)
    # Every rank takes part, also one whose graph has no such data.
    common = _common_digest(graph, world)
    return graph, module, common if graph.vertex_columns else digest


def _reading_time_s(dataset: str) -> float | None:
    """Returns about how long a file or folder takes to read; ``None`` for the name of a dataset."""
    path = Path(dataset)
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in files) / _READ_BYTES_PER_S or None


def _digest(graph: Graph) -> str:
    """Returns a checksum of structure, labels, masks, edge data and a sample of the features.

    Edge data, types and relations count with their names. Other arrays have none, so that the
    digest of a graph without these is that of earlier checkpoints.
    """
    split = graph.train_mask, graph.val_mask, graph.test_mask
    named: list[tuple[str, Any]] = [("", a) for a in (graph.indptr, graph.indices, graph.y, *split)]
    named += [(f"{k} {v.shape[1:]}", v) for k, v in graph.edge_data.items()]
    if graph.pairs is not None:
        named += [("", a) for a in (graph.pairs.ends, graph.pairs.label, graph.pairs.part)]
    if graph.types is not None:
        named.append((f"{graph.types.target} {graph.types.relations}", graph.types.of_vertex))
    for name in graph.row_types if graph.types is None else graph.types.features:
        x = graph.features(name)
        rows = x[:: max(1, graph.num_vertices // _SAMPLED_ROWS)]
        named.append((name, rows.data if sp.issparse(rows) else rows))
    found = 0
    for name, array in named:
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(name.encode(), found))
    return f"{found:08x}"


def _graph_counts(model: ModelGraph, graph: Graph) -> GraphCounts:
    """Returns the sizes of the graph that a planner reads."""
    num_edges = {t: int(graph.degrees[of].sum()) for t, of in graph.row_types.items()}
    if graph.pairs is not None:
        num_edges[PAIRS] = graph.pairs.num_pairs
    return GraphCounts(
        graph.vertex_counts,
        num_edges,
        {t: int(feature_entries(graph, t).sum()) for t in graph.vertex_counts},
        find_loss_rows(model, graph, graph.train_mask, range(model.num_ops)),
        int(graph.train_mask.sum()) * kept_by_loss(graph, model.output_width),
        any(sp.issparse(graph.features(t)) for t in _featured_types(graph)),
    )


def _featured_types(graph: Graph) -> list[str]:
    return list(graph.row_types if graph.types is None else graph.types.features)


def _plan(inputs: _Inputs, planner: Planner) -> Plan:
    """Returns the planner's plan; ``InputError`` for chunks of a model that runs as it is."""
    config, reason = inputs.config, reason_not_recorded(inputs.model)

    def measurable(plan: Plan) -> Prepared:
        # Chunks of any partition take about as long.
        return _prepared(replace(inputs, config=replace(config, partitioner="range")), plan)

    plan = planner.plan(
        PlanRequest(
            inputs.model_graph,
            _graph_counts(inputs.model_graph, inputs.graph),
            shape_of(config),
            reason != "",
            _HaloCounts(inputs).at,
            measurable,
            why_not_async(config, inputs.model, inputs.optimizer),
        )
    )
    if reason and (plan.chunks > 1 or plan.recomputes):
        raise InputError(reason)
    return plan


@dataclass
class _HaloCounts:
    """Counts the rows that shards read from one another, once for each largest number of shards."""

    inputs: _Inputs
    found: dict[int, Mapping[int, float]] = field(default_factory=dict)

    def at(self, shards: int, most: int) -> float:
        """Returns M / N for a number of shards; the graph is cut into the most shards."""
        graph, config, world = self.inputs.graph, self.inputs.config, self.inputs.world
        # Chunks on one device read copies as shards do.
        most = min(max(most, 2), graph.num_vertices)
        if most not in self.found:
            plan = Plan((StagePlan.even((0,), tuple(range(most))),), 1, "fill-drain")
            chunking = _partition(config, plan, graph, world, "given")
            part = chunking.shard_of_row()[chunking.inverse]
            self.found[most] = halo_by_shards(graph, part)
        return halo_at(self.found[most], shards)


def _order(config: TrainConfig, plan: Plan, model_graph: ModelGraph, model: Model) -> str:
    """Returns the order of the vertices inside a chunk: 'given', 'metis' or 'auto'."""
    if reason_not_recorded(model):
        return "given"
    # Of several chunks METIS is waited for anyway.
    width = sum(op.push_width for op in model_graph.aggregations)
    is_late = not pays_back(config.epochs, width, plan.most_shards)
    return "given" if config.order == "auto" and plan.chunks == 1 and is_late else config.order


def _partition(config: TrainConfig, plan: Plan, graph: Graph, world: World, order: str) -> Chunking:
    """Partitions the graph into the plan's chunks and shards, on rank 0 for all ranks."""
    chunking, error = None, None
    try:
        if world.rank == 0:
            with Step("partitioning the graph", config.quiet):
                chunking = make_chunking(
                    graph,
                    chunks=plan.chunks,
                    shards=plan.split.num_parts,
                    shares=ShardShares(plan.split.shares, plan.split.levels[:-1]),
                    seed=config.seed,
                    partitioner=partitioner_of(config, plan),
                    order=order,
                    cache_dir=config.cache_dir,
                )
    except InputError as fault:
        error = fault
    failed = world.share(str(error) if error else None)
    if failed:
        raise InputError(failed)
    shared: Chunking = world.share(chunking)
    return shared


def _qualities(graph: Graph, chunking: Chunking, plan: Plan) -> tuple[CutQuality, ...]:
    """Returns the quality of the partition by stage."""
    bounds = plan.split.bounds
    found = {each: cut_quality(graph, chunking.merged(each)) for each in dict.fromkeys(bounds)}
    return tuple(found[each] for each in bounds)


def training_programs(
    config: TrainConfig, model: ModelGraph, dag: StageDag
) -> tuple[CheckedProgram, CheckedProgram]:
    """Returns the checked programs of usual epochs, without a forecast, and of exact epochs.

    Raises:
        InputError: Settings of stale rows contradict each other, or the schedule of the plan.
    """
    chunks, schedule = dag.plan.chunks, dag.plan.schedule
    check_schedule(config, chunks, schedule)
    check_staleness(config, chunks, schedule)
    buckets = gradient_buckets(model, dag.plan, number_dtype(config).itemsize)
    exact = training_program(dag, buckets, EXACT_SCHEDULE)
    if schedule in BY_CHUNK:
        usual = program_by_chunk(config, dag, buckets)
    else:
        usual = training_program(dag, buckets)
    must_be_exact = config.staleness_settings_for(chunks, schedule).is_exact
    if not must_be_exact:
        _check_ways(config, dag.plan, usual)
    if usual.is_exact or not must_be_exact:
        return usual, exact
    if config.staleness == "exact":
        raise InputError(
            f"plan: its schedule {dag.plan.schedule!r} reads stale rows, and --staleness exact "
            "allows none; drop one of the two"
        )
    return exact, exact  # as many exact epochs at the start as epochs


def _check_ways(config: TrainConfig, plan: Plan, program: CheckedProgram) -> None:
    """``InputError`` for columns in a program with stale reads.

    Stale rows are forecast, and stored in checkpoints, as whole rows; a rank has columns of them.
    """
    if not program.is_exact and RowWay.COLUMNS in plan.ways.values():
        what = "plan: ways:" if config.row_way == RowWay.HALO else "--row-way"
        raise InputError(
            f"{what} columns: {plan.chunks} chunks read stale rows, whose forecast and checkpoint "
            "need whole rows; try --staleness exact, one chunk, or halo"
        )


def _probes(
    config: TrainConfig,
    model: ModelGraph,
    graph: Graph,
    chunking: Chunking,
    plan: Plan,
    program: CheckedProgram,
) -> npt.NDArray[np.int64]:
    """Returns the probe vertices of the forecast; none if no row of ``program`` is stale."""
    probes = config.staleness_settings_for(plan.chunks, plan.schedule).probes
    if not probes or program.is_exact:
        return np.empty(0, dtype=np.int64)
    counts = num_probes(model, graph.vertex_counts, probes)
    return choose_probe_vertices(chunking, counts, graph.row_types, config.seed)


def _epoch_bytes(
    config: TrainConfig,
    dag: StageDag,
    model: ModelGraph,
    graph: Graph,
    chunking: Chunking,
    qualities: Sequence[CutQuality],
    probes: npt.NDArray[np.int64],
) -> CommVolume:
    """Returns the bytes sent in a usual epoch with one optimizer step."""
    by_type = {name: int(rows[probes].sum()) for name, rows in graph.row_types.items()}
    by_halo = closed_form_volume(
        dag,
        model,
        num_vertices=graph.vertex_counts,
        crossings=[quality.crossings_by_type for quality in qualities],
        number_bytes=number_dtype(config).itemsize,
        row_bytes=row_dtype(config).itemsize,
        probes=by_type,
        label_iterations=config.label_iterations,
    )
    if not dag.plan.ways:
        return by_halo
    rows, row_bytes = _shard_rows(dag.plan, model, graph, chunking), row_dtype(config).itemsize
    moved = row_way_bytes(dag, model, rows, row_bytes, config.label_iterations)
    return replace(by_halo, graph=by_halo.graph + moved)


def _shard_rows(plan: Plan, model: ModelGraph, graph: Graph, chunking: Chunking) -> list[ShardRows]:
    """Returns the rows of the shards of every stage."""
    mask, found = loss_row_mask(graph, chunking), []
    limited = find_loss_rows(model, graph, mask, plan.stages[-1].ops).ops
    for bounds in plan.split.bounds:
        cells = chunking.merged(bounds)
        own = {t: cells.counts(rows).sum(0).tolist() for t, rows in graph.table_rows.items()}
        found.append(ShardRows(own, cells.counts(mask).sum(0).tolist(), limited))
    return found


def warn_of_stale_rows(prepared: Prepared, world: World) -> None:
    """Warns on rank 0 if stale rows change statistics over all vertices, or carry label inputs."""
    if world.rank or prepared.program.is_exact:
        return
    by_chunk = prepared.program.steps_by_chunk
    exact = (
        "--chunks 1, or --schedule fill-drain --staleness exact"
        if by_chunk
        else ("--chunks 1 or --staleness exact")
    )
    model, share = prepared.model_graph, prepared.config.label_inputs
    if share:
        warn(
            f"--label-inputs {share:g}: stale rows carry labels that were inputs in the last "
            f"epoch, also those that are trained on now; exact with {exact}"
        )
    if not any(op.is_mean for op in model.ops):
        return
    what = "normalises over all vertices: statistics include stale rows of later chunks"
    what += " (zeros in the first epoch)" if by_chunk else ", forecast by --staleness auto"
    what += "; with BatchNorm, scores can fall far behind the loss"
    if any(op.structure == SUM for op in model.ops):
        what = "sums over all vertices: the parts of later chunks are those of the last epoch"
    warn(f"model: {model.name} {what}; exact with {exact}")
