"""Setting up a run, one way: inputs -> model -> plan -> partition -> programs.

Nothing large is allocated here but the graph and the model; ``gnnpipe info`` stops at this point,
and ``setup.build`` goes on. No step changes the config or what an earlier step decided.
"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.config.validation import check_staleness
from gnnpipe.data.load import configured_graph
from gnnpipe.errors import InputError
from gnnpipe.graph.chunking import Chunking, make_chunking, renumber
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.quality import chunk_edges, cut_quality
from gnnpipe.graph.stale_rows import choose_probe_vertices
from gnnpipe.ops.spmm import kernel_named
from gnnpipe.perf import closed_form_volume, probe_rows_bytes
from gnnpipe.plan import ModelGraph, Plan, gradient_buckets
from gnnpipe.planner import GraphCounts, Planner, PlanRequest, Shape, planner_named
from gnnpipe.runtime.comm.world import World
from gnnpipe.schedule import EXACT_SCHEDULE, training_program, with_forecast
from gnnpipe.setup.inputs import (
    check_parts,
    check_validation,
    choose_model,
    number_dtype,
    row_dtype,
    without_unread,
)
from gnnpipe.setup.loss_rows import find_loss_rows
from gnnpipe.setup.model_graph import describe
from gnnpipe.setup.prepared import Inputs, Prepared, Programs
from gnnpipe.tasks.loss import LossFn, check_loss, choose_metric

__all__ = ["join_world", "prepare", "ranks_of", "shape_of"]

_SAMPLED_ROWS = 10_000
"""Feature rows that the digest of a graph reads."""


def prepare(
    config: TrainConfig,
    world: World,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    planner: Planner | None = None,
    loss_fn: LossFn | None = None,
    refill_epochs: int = 0,
) -> Prepared:
    """Decide everything about a run; ``InputError`` on every rank if any rank has one.

    ``planner``: in the place of the one that ``config.plan`` names. ``refill_epochs``: exact epochs
    at the start, whatever the config says, to fill tables that a checkpoint did not store.
    """
    check_parts(config, graph, model)
    planner = planner or planner_named(config.plan)
    inputs = _read_inputs(config, world, graph, model, loss_fn)
    model_graph = describe(inputs.model, inputs.graph)
    counts = _graph_counts(model_graph, inputs.graph)
    plan = planner.plan(PlanRequest(model_graph, counts, shape_of(config)))
    check_staleness(config, plan.chunks)
    chunking = _partition(config, plan, inputs.graph, world)
    quality = cut_quality(inputs.graph, chunking)
    inputs = replace(inputs, graph=renumber(inputs.graph, chunking))
    programs = _make_programs(config, model_graph, plan, inputs.graph, chunking)
    is_exact = programs.usual.is_exact
    if not is_exact and world.rank == 0 and any(op.is_mean for op in model_graph.ops):
        _warn_of_norms(inputs.model.name)
    graph = inputs.graph
    probes = {name: int(rows[programs.probes].sum()) for name, rows in graph.row_types.items()}
    row_bytes = row_dtype(config).itemsize
    volume = closed_form_volume(
        plan,
        model_graph,
        num_vertices=graph.vertex_counts,
        crossings=quality.crossings_by_type,
        number_bytes=number_dtype(config).itemsize,
        row_bytes=row_bytes,
        probes=probes,
    )
    return Prepared(
        config,
        inputs,
        model_graph,
        plan,
        chunking,
        quality,
        programs,
        volume,
        recall_bytes=probe_rows_bytes(plan, probes, row_bytes),
        chunk_edges=None if is_exact else chunk_edges(graph, chunking),
        refill_epochs=refill_epochs,
    )


def shape_of(config: TrainConfig) -> Shape:
    """The shape that the flags ask for."""
    is_exact = config.staleness_settings_for(config.chunks).is_exact
    return Shape(config.stages, config.shards, config.chunks, is_exact)


def ranks_of(config: TrainConfig, planner: Planner | None = None) -> int:
    """Ranks that the plan will need, known before anything is read."""
    return (planner or planner_named(config.plan)).num_ranks(shape_of(config))


def join_world(config: TrainConfig, planner: Planner | None = None) -> World:
    """Meet the other ranks; ``InputError`` if there are more or fewer than the plan needs."""
    shape = f"--stages {config.stages} --shards {config.shards}"
    if planner is not None or config.plan != "uniform":
        shape = "plan"
    return World.meet(ranks_of(config, planner), config.device, config.timeout_s, shape)


def _read_inputs(
    config: TrainConfig,
    world: World,
    graph: Graph | None,
    model: nn.Module | None,
    loss_fn: LossFn | None,
) -> Inputs:
    """Load the graph, make or record the model, and see that they fit each other."""
    error: InputError | None = None
    device = "cuda" if config.device == "cuda" else world.device.type  # or as `info` is asked for
    try:
        if config.kernel not in ("auto", "measured") and device == world.device.type:
            kernel_named(config.kernel, row_dtype(config), world.device)  # that it works here
        if graph is None:
            graph = configured_graph(config)
    except InputError as fault:
        error = fault
    world.agree(error)
    assert graph is not None
    digest = _agreed_digest(graph, world)
    metric = choose_metric(graph, config.metric)
    check_validation(config, graph, metric)
    dtype = number_dtype(config)
    if loss_fn is not None:
        check_loss(loss_fn, graph, dtype)
    # Before the partition, which may take long: a model that cannot be used is refused at once.
    chosen = choose_model(model, config, graph, world, dtype)
    return Inputs(without_unread(graph, chosen, world), chosen, metric, digest, loss_fn)


def _agreed_digest(graph: Graph, world: World) -> str:
    """A short digest of the graph; ``InputError`` if the ranks have different graphs."""
    digest = _digest(graph)
    if len(set(world.gather(digest))) > 1:
        raise InputError(
            "graph: is another on every rank; make it in the same way, and seed what draws "
            "(RandomLinkSplit and other transforms: torch_geometric.seed_everything(0) before)"
        )
    return digest


def _digest(graph: Graph) -> str:
    """A checksum of structure, labels and masks, and of a sample of the features."""
    arrays: list[Any] = [graph.indptr, graph.indices, graph.y, graph.train_mask, graph.val_mask]
    arrays += [graph.test_mask, *graph.edge_data.values()]
    if graph.pairs is not None:
        arrays += [graph.pairs.ends, graph.pairs.label, graph.pairs.part]
    for name in graph.row_types if graph.types is None else graph.types.features:
        x = graph.features(name)
        rows = x[:: max(1, graph.num_vertices // _SAMPLED_ROWS)]
        arrays.append(rows.data if sp.issparse(rows) else rows)
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
    return f"{found:08x}"


def _graph_counts(model: ModelGraph, graph: Graph) -> GraphCounts:
    """The sizes of the graph that a planner looks at."""
    num_edges = {t: int(graph.degrees[of].sum()) for t, of in graph.row_types.items()}
    if graph.pairs is not None:
        num_edges[PAIRS] = graph.pairs.num_pairs
    return GraphCounts(
        graph.vertex_counts,
        num_edges,
        {t: _entries(graph, t) for t in graph.vertex_counts},
        find_loss_rows(model, graph, graph.train_mask, range(model.num_ops)),
    )


def _entries(graph: Graph, vertex_type: str) -> int:
    """Stored numbers of the features of a type."""
    if graph.types is not None and vertex_type not in graph.types.features:
        return 0
    x = graph.features(vertex_type)
    return int(x.nnz) if isinstance(x, sp.csr_array) else int(x.size)


def _partition(config: TrainConfig, plan: Plan, graph: Graph, world: World) -> Chunking:
    """Cut the graph into the plan's chunks and shards; rank 0 does so and shares the result."""
    chunking, error = None, None
    try:
        if world.rank == 0:
            chunking = make_chunking(
                graph,
                chunks=plan.chunks,
                shards=plan.shards,
                shares=None if len(set(plan.shares)) == 1 else plan.shares,
                seed=config.seed,
                partitioner=config.partitioner,
                order=config.order,
                cache_dir=config.cache_dir,
            )
    except InputError as fault:
        error = fault
    failed = world.share(str(error) if error else None)
    if failed:
        raise InputError(failed)
    shared: Chunking = world.share(chunking)
    return shared


def _make_programs(
    config: TrainConfig, model: ModelGraph, plan: Plan, graph: Graph, chunking: Chunking
) -> Programs:
    """Lower the plan's schedule to programs, and prove them."""
    buckets = gradient_buckets(model, plan, number_dtype(config).itemsize)
    usual = training_program(plan, buckets)
    exact = training_program(replace(plan, schedule=EXACT_SCHEDULE), buckets)
    probes = np.empty(0, dtype=np.int64)
    each = config.staleness_settings_for(plan.chunks).probes_per_column
    if each and not usual.is_exact:
        counts = _probes_wanted(model, list(graph.row_types), each)
        probes = choose_probe_vertices(chunking, counts, graph.row_types, config.seed)
    if len(probes):
        usual, exact = with_forecast(plan, usual), with_forecast(plan, exact)
    return Programs(usual, exact, probes)


def _probes_wanted(model: ModelGraph, types: list[str], each: int) -> dict[str, int]:
    """Probe vertices of each type: ``each`` per column of the widest map fitted to the type."""
    widths = dict.fromkeys(types, 0)
    forecast = [op for op in model.aggregations if op.is_forecast]
    for op in forecast:
        if not op.is_mean:
            pushing = op.vertex_type if op.over_pairs else op.pushed_type
            widths[pushing] = max(widths[pushing], op.push_width)
    return {name: each * (width + 1) * bool(forecast) for name, width in widths.items()}


def _warn_of_norms(name: str) -> None:
    warnings.warn(
        f"model: {name} normalises over all vertices: chunks that come later in the "
        "walk count with their rows of the last epoch, forecast by --staleness auto; exact "
        "with --chunks 1 or --staleness exact",
        UserWarning,
        stacklevel=4,
    )
