"""Input of a simulation: a plan, the sizes of its chunks, the memory of its ranks.

A dataset is read and cut as for a run, and its sizes are counted. A shape (N vertices, E edges, F
features, C classes) is divided evenly; nothing is read or cut, and it may be larger than this
machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import scipy.sparse as sp
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.perf import (
    ChunkSizes,
    CommVolume,
    PlanSizes,
    ShardSizes,
    closed_form_volume,
    estimate_memory,
    row_way_bytes,
)
from gnnpipe.perf.workload import STALE_SHARE, num_probes
from gnnpipe.plan import ALL_ROWS, ModelGraph, Placement, Plan, StageDag
from gnnpipe.planner import GraphCounts, Planner, PlanRequest, naming_plan, planner_named
from gnnpipe.registry import nearest
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.schedule import CheckedProgram, Program, with_forecast
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.inputs import (
    check_parts,
    choose_model,
    made_model,
    number_dtype,
    row_dtype,
    settled_config,
)
from gnnpipe.setup.memory_estimate import (
    memory_by_rank,
    memory_settings,
    rank_memory_bytes,
    with_program,
)
from gnnpipe.setup.model_graph import describe
from gnnpipe.setup.prepare import may_read_stale_rows, reads_stale_rows, shape_of, training_programs
from gnnpipe.setup.prepared import Prepared, chunk_order
from gnnpipe.setup.recompute_every import settle_recompute_every

Shape = tuple[int, int, int]
"""Stages, shards, chunks."""

MAX_CHUNK_FACTOR = 64
"""Largest factor on the number of chunks in ``nearest_that_fits``."""


def nearest_that_fits(scenario: Scenario, device_bytes: Sequence[int]) -> Shape | None:
    """The shape with the fewest ranks, then the fewest chunks, that fits; None if no shape does.

    ``device_bytes``: memory of every device, in the order of the ranks. Stages and chunks are
    powers of 2 or those of the config. More shards need less memory each, so the smallest number of
    shards is found by bisection.
    """
    config, model, vertices = scenario.config, scenario.model, scenario.shape.vertices
    devices, plan = len(device_bytes), scenario.plan
    models = {reads_stale_rows(config, plan.chunks, plan.schedule): model}

    def fits(shards: int, stages: int, chunks: int) -> bool:
        try:
            wanted = replace(config, stages=stages, shards=shards, chunks=chunks, plan="uniform")
            is_stale = reads_stale_rows(wanted, chunks, wanted.schedule)
            if is_stale not in models:
                describe = scenario.model_with
                models[is_stale] = model if describe is None else describe(wanted)
            needed = memory_of_shape(wanted, scenario.shape, models[is_stale])
        except InputError:
            return False
        # The ranks of a stage need the same memory.
        places = Placement.grid(stages, shards)
        return all(
            needed[stage] <= size for (stage, _), size in zip(places, device_bytes, strict=False)
        )

    found: list[Shape] = []
    for chunks in _powers(config.chunks, min(MAX_CHUNK_FACTOR * config.chunks, vertices)):
        for stages in _powers(config.stages, min(len(model.cuts) + 1, devices)):
            counts = range(1, min(devices // stages, vertices // chunks) + 1)
            if counts and fits(counts[-1], stages, chunks):
                fit = partial(fits, stages=stages, chunks=chunks)
                found.append((stages, counts[bisect_left(counts, True, key=fit)], chunks))
    return min(found, key=lambda s: (s[0] * s[1], s[2], s[1]), default=None)


def _powers(own: int, most: int) -> list[int]:
    """Powers of 2 and ``own``, up to ``most``."""
    powers = {1 << i for i in range(most.bit_length())}
    return sorted(number for number in powers | {own} if number <= most)


MAX_VALUES = {"features": 1e6, "classes": 1e6, "halo": 1e5}
"""Larger values are taken for typing errors."""

MAX_NUMBERS = 10**18
"""Numbers in the features: within int64."""


@dataclass(frozen=True)
class GraphShape:
    """Numbers of a graph that is not here, for ``simulate``."""

    vertices: int
    edges: int
    features: int
    classes: int
    halo: float = 1.0
    """Rows of other shards that are read, per own row (M / N in a run's report)."""
    stored: int = 0
    """Stored numbers of sparse features; 0: the features are dense."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("halo", "stored", "edges") else 1
            most = MAX_VALUES.get(field.name, 1e15)
            if not least <= getattr(self, field.name) <= most:
                raise InputError(f"shape: {field.name} must be {least} to {most:,.0f}")
        numbers = self.vertices * self.features
        limits = {
            "vertices times features must be at most ": (numbers, MAX_NUMBERS),
            "stored must be at most vertices times features, ": (self.stored, numbers),
            "edges must be at most vertices times vertices, ": (self.edges, self.vertices**2),
        }
        for words, (value, limit) in limits.items():
            if value > limit:
                raise InputError(f"shape: {words}{limit:,.0f}")

    @classmethod
    def parse(cls, text: str) -> GraphShape:
        """Parse text like 'vertices=1000,edges=5000,features=16,classes=4'."""
        known = {f.name: float if f.name == "halo" else int for f in fields(cls)}
        values: dict[str, float] = {}
        for word in text.split(","):
            name, _, number = word.strip().partition("=")
            if name not in known:
                raise InputError(f"--shape {text!r}: {name!r}: {nearest(name, known)}")
            if name in values:
                raise InputError(f"--shape {text!r}: {name} is given twice; drop one of the two")
            try:
                # A whole number may be written as 1e7.
                value = float(number)
                if known[name] is int and value != int(value):
                    raise ValueError
                values[name] = known[name](value)
            except (ValueError, OverflowError):
                raise InputError(
                    f"--shape {text!r}: {name} {number!r} is no "
                    f"{'whole ' * (known[name] is int)}number"
                ) from None
        missing = [f for f in ("vertices", "edges", "features", "classes") if f not in values]
        if missing:
            raise InputError(
                f"--shape {text!r}: {' and '.join(missing)} missing; write it like "
                "vertices=1e6,edges=1e7,features=128,classes=40"
            )
        try:
            return cls(**values)  # type: ignore[arg-type]
        except InputError as error:
            reason = str(error).removeprefix("shape: ")
            raise InputError(f"--shape {text!r}: {reason}") from None


@dataclass(frozen=True, eq=False)
class Scenario:
    """A plan and its sizes."""

    config: TrainConfig
    dag: StageDag
    model: ModelGraph
    program: Program
    order: Sequence[int]
    sizes: PlanSizes
    volume: CommVolume
    memory_bytes: list[int]
    """Estimate by rank."""
    shape: GraphShape
    has_forecasts: bool
    model_with: Callable[[TrainConfig], ModelGraph] | None = None
    """Describes the model for another number of chunks; None: ``model`` is taken."""

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.dag.plan


def scenario_of(prepared: Prepared) -> Scenario:
    """Scenario of a dataset that was read and cut."""
    graph, config = prepared.graph, prepared.config
    x = graph.x
    stored = int(x.nnz) if isinstance(x, sp.csr_array) else 0
    has_shards = prepared.plan.most_shards > 1
    halo = prepared.quality.crossings_per_vertex if has_shards else 1.0
    return Scenario(
        config,
        prepared.dag,
        prepared.model_graph,
        prepared.program,
        prepared.passes(prepared.exact_epochs, prepared.program.epochs),
        chunk_sizes(prepared),
        prepared.volume,
        [m.on_device for m in memory_by_rank(prepared)],
        GraphShape(
            graph.num_vertices, graph.num_edges, graph.num_features, graph.num_classes, halo, stored
        ),
        len(prepared.probes) > 0,
    )


def scenario_of_shape(
    config: TrainConfig,
    shape: GraphShape,
    model: ModelGraph | None = None,
    memory_bytes: int | None = None,
) -> Scenario:
    """Scenario of a graph that is given in numbers; ``model`` in place of the config's.

    ``memory_bytes``: of the smallest device, for ``--recompute-every 0``; ``None``: this machine's.
    """
    model = model or model_on_shape(config, shape)
    planner = planner_named(config.plan)
    with naming_plan(planner):
        plan = _plan_of_shape(config, shape, model, planner)
        dag = StageDag.of(plan, model)
        config = settle_recompute_every(
            settled_config(config, plan),
            model,
            plan,
            lambda other: max(memory_of_shape(other, shape, model, dag)),
            rank_memory_bytes(World.alone()) if memory_bytes is None else memory_bytes,
        )
        return _scenario_of_plan(config, shape, model, dag)


def _scenario_of_plan(
    config: TrainConfig, shape: GraphShape, model: ModelGraph, dag: StageDag
) -> Scenario:
    plan, chunks = dag.plan, dag.plan.chunks
    staleness = config.staleness_settings_for(chunks, plan.schedule)
    program, _ = training_programs(config, model, dag)
    probes = _probes(config, shape, model, plan, program)
    by_shards = {
        shards: _sizes_of_shape(config, shape, model, dag, shards, program, probes)
        for shards in {stage.shards for stage in plan.stages} | {plan.split.num_parts}
    }
    parts = by_shards[plan.split.num_parts]
    sizes = PlanSizes(
        tuple(by_shards[stage.shards] for stage in plan.stages),
        plan.split,
        parts.rows,
        parts.probes,
    )
    crossings = [{"": int(of_stage.boundary[""].sum())} for of_stage in sizes.stages]
    volume = closed_form_volume(
        dag,
        model,
        num_vertices={"": shape.vertices},
        crossings=crossings,
        probes={"": probes},
        number_bytes=number_dtype(config).itemsize,
        row_bytes=row_dtype(config).itemsize,
    )
    rows = [of_stage.shard_rows for of_stage in sizes.stages]
    moved = row_way_bytes(dag, model, rows, row_dtype(config).itemsize)
    volume = replace(volume, graph=volume.graph + moved).with_steps(
        program.consistency.optimizer_steps or 1
    )
    by_stage = memory_of_shape(config, shape, model, dag)
    memory = [by_stage[stage] for stage, _ in plan.placement]
    return Scenario(
        config,
        dag,
        model,
        with_forecast(dag, program) if probes else program,
        [
            chunk
            for epoch in range(program.epochs)
            for chunk in chunk_order(
                plan.chunks,
                config.seed if staleness.shuffle_chunks else None,
                staleness.exact_epochs + epoch,
                program.most_in_flight if program.epochs > 1 else 1,
            )
        ],
        sizes,
        volume,
        memory,
        shape,
        probes > 0,
    )


def _sizes_of_shape(
    config: TrainConfig,
    shape: GraphShape,
    model: ModelGraph,
    dag: StageDag,
    shards: int,
    program: CheckedProgram,
    probes: int,
) -> ChunkSizes:
    """Sizes of the chunks in stages of equal ``shards``."""
    stored = shape.stored or shape.vertices * shape.features
    halo, chunks = shape.halo * (shards > 1), dag.plan.chunks
    rows = _divided(shape.vertices, shards, chunks)
    crossing = np.round(rows * halo).astype(np.int64)
    stale = STALE_SHARE * (1 + halo) * rows.sum(1) if probes else 0 * rows.sum(1)
    return ChunkSizes(
        rows={"": rows},
        edges={"": _divided(shape.edges, shards, chunks)},
        entries={"": _divided(stored, shards, chunks)},
        boundary={"": crossing},
        halo={"": crossing},
        stale={"": np.round(stale).astype(np.int64)},
        probes={"": _divided(probes, shards, 1)[:, 0]},
    )


def memory_of_shape(
    config: TrainConfig, shape: GraphShape, model: ModelGraph, dag: StageDag | None = None
) -> list[int]:
    """Bytes of a rank by stage; ``InputError`` if the shape cannot be planned."""
    planner = planner_named(config.plan)
    dag = dag or StageDag.of(_plan_of_shape(config, shape, model, planner), model)
    config = settled_config(config, dag.plan)
    plan, program = dag.plan, training_programs(config, model, dag)[0]
    is_exact, probes = program.is_exact, _probes(config, shape, model, plan, program)
    settings = memory_settings(
        config,
        plan.chunks,
        plan.schedule,
        has_sparse_features=shape.stored > 0,
        is_symmetric=True,
        is_exact=is_exact,
        extra_weights=(probes > 0) + (config.kept_epoch == "best"),
    )
    settings = with_program(settings, config, program)
    estimates = [
        estimate_memory(
            dag, model, i, _shard_sizes_of_shape(shape, stage.shards, is_exact, probes), settings
        )
        for i, stage in enumerate(plan.stages)
    ]
    return [estimate.on_device for estimate in estimates]


def _shard_sizes_of_shape(
    shape: GraphShape, shards: int, is_exact: bool, probes: int
) -> ShardSizes:
    """Sizes of the largest of equal ``shards``."""
    stored = shape.stored or shape.vertices * shape.features
    own = math.ceil(shape.vertices / shards)
    return ShardSizes(
        own_rows={"": own},
        halo_rows={"": math.ceil(own * shape.halo * (shards > 1))},
        own_edges=math.ceil(shape.edges / shards),
        graph_edges=shape.edges,
        # The edges between chunks are not known: the largest possible share.
        live_share=float(not is_exact),
        feature_entries=math.ceil(stored / shards),
        probe_rows={"": math.ceil(probes / shards)},
        probe_edges=math.ceil(probes * shape.edges / shape.vertices / shards),
        probe_feature_entries=math.ceil(probes * stored / shape.vertices / shards),
        copied_share=shape.halo,
        # The training vertices are not known: all of them, with cross entropy.
        loss_numbers=own * shape.classes,
        loss_rows=ALL_ROWS,
        graph_rows={"": shape.vertices},
        columns_share=1 / shards,
    )


def _probes(
    config: TrainConfig, shape: GraphShape, model: ModelGraph, plan: Plan, program: CheckedProgram
) -> int:
    if program.is_exact:
        return 0
    probes = config.staleness_settings_for(plan.chunks, plan.schedule).probes
    return num_probes(model, {"": shape.vertices}, probes)[""]


def _plan_of_shape(
    config: TrainConfig, shape: GraphShape, model: ModelGraph, planner: Planner
) -> Plan:
    counts = GraphCounts(
        {"": shape.vertices},
        {"": shape.edges},
        {"": shape.stored or shape.vertices * shape.features},
    )
    plan = planner.plan(PlanRequest(model, counts, shape_of(config)))
    if not plan.split.can_cut(counts.num_vertices, plan.chunks):
        raise InputError(
            f"--chunks {plan.chunks}: with --shards {plan.shards_text} more pieces than the "
            f"{shape.vertices:,} vertices; try fewer"
        )
    if any(len(set(stage.shares)) > 1 for stage in plan.stages):
        raise InputError(
            "plan: has unequal shares, which need the degrees of a graph; give --dataset in place "
            "of --shape"
        )
    return plan


def _divided(total: int, shards: int, chunks: int) -> np.ndarray:
    """[G, K] ints that add up to ``total`` and differ by at most one."""
    cells = np.arange(shards * chunks + 1, dtype=object) * total // (shards * chunks)
    return np.diff(cells).astype(np.int64).reshape(shards, chunks)


def model_on_shape(
    config: TrainConfig, shape: GraphShape, module: nn.Module | None = None, is_exact: bool = False
) -> ModelGraph:
    """Description of ``module``, or the config's model, on a graph of one vertex.

    ``is_exact``: no row that it reads is stale, whatever the plan.
    """
    none, features = np.zeros(1, dtype=bool), np.zeros((1, shape.features), dtype=np.float32)
    stand_in = Graph(
        "shape",
        np.zeros(2, dtype=np.int64),
        np.empty(0, dtype=np.int32),
        sp.csr_array(features) if shape.stored else features,
        np.zeros(1, dtype=np.int64),
        ~none,
        none,
        none,
        shape.classes,
    )
    check_parts(config, None, module)
    module = made_model(module, config, stand_in)
    is_stale = not is_exact and may_read_stale_rows(config, planner_named(config.plan))
    dtype = number_dtype(config)
    model = choose_model(module, config, stand_in, Mesh.alone(), dtype, True, is_stale)
    return describe(model, stand_in)
