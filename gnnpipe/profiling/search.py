"""``--plan auto`` in the commands: sizes, costs, devices and limits for the search of a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.output import Step, say
from gnnpipe.perf import CommVolume, Profile, closed_form_volume
from gnnpipe.perf.workload import Workload, num_probes
from gnnpipe.plan import ModelGraph, Placement, Plan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import (
    AUTO,
    FoundPlan,
    GivenPlan,
    GraphCounts,
    Planner,
    PlanRequest,
    SearchSpace,
    Shape,
    find_plan,
    find_plan_for_target,
)
from gnnpipe.planner.auto import EXACT_AFTER_JUMPS
from gnnpipe.planner.candidate import MAX_CHUNKS
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.profiling.devices import (
    RankSpeeds,
    measure_cluster,
    measure_speeds,
    relative_to_fastest,
)
from gnnpipe.profiling.links import BRIEF
from gnnpipe.profiling.predict import check_profile, naming_profile, on_rank_0
from gnnpipe.profiling.profile import one_stage, take_planning_profile
from gnnpipe.profiling.scenario import GraphShape, Scenario
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.inputs import number_dtype, row_dtype, settled_config
from gnnpipe.setup.memory_estimate import check_memory, memory_settings, rank_memory_bytes
from gnnpipe.setup.prepare import training_programs
from gnnpipe.setup.prepared import Prepared, chunk_order, epochs_to_flush


def _workload(
    config: TrainConfig,
    model: ModelGraph,
    hardware: Hardware,
    counts: GraphCounts,
    halo: Callable[[int], float],
    is_symmetric: bool,
) -> Workload:
    config = _unrounded(config)
    probes = config.staleness_settings_for(MAX_CHUNKS, config.schedule).probes
    profile = hardware.profile_of(model, config)
    if hardware.profile is not None:
        check_profile(config, profile, hardware.num_devices, has_forecasts=False)
    return Workload(
        model,
        profile,
        hardware.cluster,
        counts.num_vertices,
        counts.num_edges,
        counts.feature_entries,
        counts.loss_rows,
        counts.loss_numbers,
        halo,
        sum(num_probes(model, counts.num_vertices, probes).values()),
        memory_settings(
            config,
            MAX_CHUNKS,
            config.schedule,
            has_sparse_features=counts.has_sparse_features,
            is_symmetric=is_symmetric,
            is_exact=True,
            extra_weights=int(config.kept_epoch == "best"),
        ),
    )


def _unrounded(config: TrainConfig) -> TrainConfig:
    """Returns the config with rows that are not rounded unless the user said so."""
    return replace(config, comm_dtype="same") if config.comm_dtype == "auto" else config


def _rounded(config: TrainConfig, workload: Workload, hardware: Hardware) -> Workload | None:
    """Returns the same work with rows in bf16; None if the rows are in bf16 already.

    Ops are assumed to take as long as in the profile if this was measured.
    """
    if workload.memory.rounds_rows:
        return None
    bf16 = replace(_unrounded(config), comm_dtype="bf16")
    if hardware.profile is None:
        profile = hardware.profile_of(workload.model, bf16)
    else:
        profile = replace(hardware.profile, comm_dtype="bf16")
    memory = replace(workload.memory, row_bytes=row_dtype(bf16).itemsize)
    return replace(workload, profile=profile, memory=memory)


def workload_of_shape(
    config: TrainConfig, shape: GraphShape, model: ModelGraph, hardware: Hardware
) -> Workload:
    """Returns the workload of a graph that is given in numbers."""
    counts = GraphCounts(
        {"": shape.vertices},
        {"": shape.edges},
        {"": shape.stored or shape.vertices * shape.features},
        # The training vertices are not known: all of them, with cross entropy.
        loss_numbers=shape.vertices * shape.classes,
        has_sparse_features=shape.stored > 0,
    )
    return _workload(config, model, hardware, counts, lambda shards: shape.halo, is_symmetric=True)


def workload_of_request(config: TrainConfig, request: PlanRequest, hardware: Hardware) -> Workload:
    """Returns the workload of a graph that was read."""

    def halo(shards: int) -> float:
        return request.halo(shards, hardware.num_devices)

    # Whether all edges have their reverse is not known yet; without, matrices take more memory.
    return _workload(config, request.model, hardware, request.graph, halo, is_symmetric=False)


def search_space(
    config: TrainConfig,
    workload: Workload,
    hardware: Hardware,
    device_bytes: Sequence[int] = (),
    *,
    uses_all: bool = False,
    is_whole: bool = False,
) -> SearchSpace:
    """Returns the plans that the settings allow on these devices.

    ``device_bytes``: memory of the devices, if the hardware does not say. ``uses_all``: every
    device gets work. ``is_whole``: the model cannot be divided into chunks.
    """
    staleness = config.staleness_settings_for(MAX_CHUNKS, config.schedule)
    share = min(staleness.exact_epochs / config.epochs, 1.0)
    if staleness.exact_above:
        share = min(share + EXACT_AFTER_JUMPS, 1.0)
    return SearchSpace(
        workload,
        hardware.num_devices,
        uses_all,
        device_bytes or hardware.device_bytes(),
        max_stale_chunks=1 if staleness.is_exact else MAX_CHUNKS,
        max_chunks=1 if is_whole else MAX_CHUNKS,
        exact_share=share,
        can_recompute=not (is_whole or config.recompute),
        rounded=None if is_whole else _rounded(config, workload, hardware),
        may_round=config.comm_dtype == "auto",
    )


def scenario_of_found(config: TrainConfig, found: FoundPlan, shape: GraphShape) -> Scenario:
    """Returns the scenario of the best plan for a graph that is given in numbers."""
    best = found.best
    work, dag, is_exact = best.form.workload, best.dag, best.form.is_exact
    staleness = config.staleness_settings_for(dag.plan.chunks, dag.plan.schedule)
    sizes = work.plan_sizes(dag.plan, is_exact)
    probes = 0 if is_exact else work.probes
    shuffle = config.seed if staleness.shuffle_chunks else None
    training_programs(config, work.model, dag)  # raises if settings contradict the plan
    return Scenario(
        config,
        dag,
        work.model,
        best.program,
        chunk_order(dag.plan.chunks, shuffle, staleness.exact_epochs),
        sizes,
        _volume(config, found, shape, probes),
        best.memory_bytes,
        shape,
        probes > 0,
    )


def _volume(config: TrainConfig, found: FoundPlan, shape: GraphShape, probes: int) -> CommVolume:
    best = found.best
    sizes = best.form.workload.plan_sizes(best.plan, best.form.is_exact)
    return closed_form_volume(
        best.dag,
        best.form.model,
        num_vertices={"": shape.vertices},
        crossings=[
            {t: int(np.sum(rows)) for t, rows in stage.boundary.items()} for stage in sizes.stages
        ],
        probes={"": probes},
        number_bytes=number_dtype(config).itemsize,
        row_bytes=row_dtype(config).itemsize,
    )


def check_no_target(config: TrainConfig) -> None:
    """``InputError`` for a choice by time to the target, which only a run makes."""
    if config.plans_for_target:
        raise InputError(
            f"--target-metric {config.target_metric:g}: this command plans by the time of an epoch "
            "alone; leave it out, or give it to gnnpipe train"
        )


@dataclass(frozen=True)
class OfflinePlanner:
    """Planner that searches a plan for given devices, outside a run."""

    config: TrainConfig
    hardware: Hardware
    found: list[FoundPlan] = field(default_factory=list)
    """The result, once there is one."""

    def __post_init__(self) -> None:
        check_no_target(self.config)

    def num_ranks(self, shape: Shape) -> int:
        """Returns the largest possible number of ranks."""
        del shape
        return self.hardware.num_devices

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the fastest plan; ``InputError`` if none fits."""
        with naming_profile(self.config):
            work = workload_of_request(self.config, request, self.hardware)
            space = search_space(self.config, work, self.hardware, is_whole=request.is_whole)
            self.found.append(find_plan(space))
        return self.found[-1].plan


@dataclass(frozen=True)
class RunPlanner:
    """Planner of a run: all ranks measure, rank 0 searches, and all ranks get the plan."""

    config: TrainConfig
    world: World
    say: Callable[[str], None]
    """Prints a line on rank 0."""
    cluster: Cluster | None = None
    """Devices and links by rank; None: measured."""
    speeds: list[float] = field(default_factory=list)
    """Speed of each rank's device, once planned; empty if all are equal."""
    kept_schedule: str = ""
    """Schedule of a run that is planned anew; it trains as before."""

    def num_ranks(self, shape: Shape) -> int:
        """Returns the number of ranks of the world."""
        del shape
        return self.world.world_size

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the fastest plan for these ranks; ``InputError`` on all ranks if none fits."""
        world, config = self.world, self.config
        cluster = self._given_cluster()
        limits = world.gather(rank_memory_bytes(world))
        if cluster is not None:
            limits = [device.memory_bytes for device in cluster.devices]
        if world.world_size == 1 and not (config.profile or self._is_for_target):
            plain = self._found(request, Hardware(), limits, is_one_chunk=True)
            if plain is not None:
                self.say("plan: 1 stage, 1 shard, 1 chunk: the fastest on one device, and it fits")
                return plain.plan
        profile, cluster = self._measured(request, cluster)
        if cluster is not None and len({device.speed for device in cluster.devices} | {1.0}) > 1:
            self.speeds[:] = [device.speed for device in cluster.devices]
        hardware = Hardware(profile, None, cluster, world.world_size)
        if world.world_size > 1:
            request.halo(world.world_size, world.world_size)  # counted on all ranks
        with naming_profile(config):
            found = on_rank_0(world, lambda: self._found(request, hardware, limits))
        for line in found.lines() if found is not None else ():
            self.say(line)
        plan: Plan = world.share(None if found is None else found.plan)
        return plan

    @property
    def _is_for_target(self) -> bool:
        """Whether plans with other optimizer steps are compared."""
        return self.config.plans_for_target and self.kept_schedule in ("", "async")

    def _found(
        self,
        request: PlanRequest,
        hardware: Hardware,
        limits: Sequence[int],
        is_one_chunk: bool = False,
    ) -> FoundPlan | None:
        """Return the fastest plan; None if ``is_one_chunk`` and one chunk does not fit."""
        work = workload_of_request(self.config, request, hardware)
        space = search_space(
            self.config,
            work,
            hardware,
            limits,
            uses_all=not self.world.can_shrink,
            is_whole=request.is_whole or is_one_chunk,
        )
        # If the plan leaves ranks out, the first ones stay.
        space = replace(space, in_order=True)
        try:
            if not self._is_for_target:
                return find_plan(space)
            epochs = epochs_to_flush(self.config, MAX_CHUNKS, 0, self.config.epochs)
            is_kept = self.kept_schedule == "async"
            return find_plan_for_target(space, epochs, request.why_not_async, is_kept)
        except InputError:
            if is_one_chunk:
                return None
            raise

    def _check_memory(self, prepared: Prepared, mesh: Mesh) -> None:
        """Raises ``InputError`` on every rank if a rank of ``mesh`` cannot hold the whole model."""
        try:
            check_memory(prepared, mesh)
        except InputError as error:
            raise InputError(
                f"--plan auto: every rank measures the whole model: {error}; or give --profile FILE"
            ) from None

    def _given_cluster(self) -> Cluster | None:
        """Returns rank 0's cluster on every rank; ``InputError`` if it has other ranks."""
        cluster: Cluster | None = self.world.share(self.cluster)
        if cluster is not None and len(cluster.devices) != self.world.world_size:
            raise InputError(
                f"{cluster.source}: number of devices {len(cluster.devices)}, number of ranks "
                f"{self.world.world_size}; give one device for each rank"
            )
        return cluster

    def _measured(
        self, request: PlanRequest, cluster: Cluster | None
    ) -> tuple[Profile, Cluster | None]:
        """Returns a profile, and the cluster: as given, or measured if speeds differ."""
        config, world = self.config, self.world
        if config.profile:
            return world.share(
                on_rank_0(world, lambda: Profile.read_to_use(config.profile))
            ), cluster
        assert request.prepared_with is not None
        num_ops = request.model.num_ops
        mesh = Mesh.of(world, Placement.grid(1, world.world_size))
        self._check_memory(request.prepared_with(one_stage(num_ops)), mesh)
        start_s = time.perf_counter()
        with Step("measuring the model, to plan", config.quiet, world.rank == 0):
            if cluster is not None:
                cluster = relative_to_fastest(cluster)
                speeds = RankSpeeds.of_cluster(cluster)
            else:
                speeds = measure_speeds(request.prepared_with(one_stage(num_ops)), mesh)
            profile = take_planning_profile(
                _unrounded(config),
                mesh,
                sum(request.graph.num_vertices.values()),
                num_ops,
                request.prepared_with,
                speeds.reference,
            )
            if cluster is None and not speeds.are_equal:
                cluster = measure_cluster(mesh, speeds, BRIEF)
        if self.cluster is None and not speeds.are_equal:
            self.say(speeds.line())
        self.say(f"measured in {time.perf_counter() - start_s:.2g} s, to plan")
        return profile, cluster


def _kept_plan(run: Path | None) -> GivenPlan | None:
    """Returns the plan in a run folder, if there is one."""
    path = None if run is None else run / "plan.json"
    return GivenPlan.read(str(path)) if path is not None and path.exists() else None


def run_planner(
    config: TrainConfig,
    world: World,
    cluster: Cluster | None = None,
    resumed: Path | None = None,
    planned_ranks: int = 0,
    replan: bool = False,
) -> Planner | None:
    """Returns a search, or the plan of the run in folder ``resumed`` if found for as many ranks.

    None if ``--plan`` is no search.

    ``planned_ranks``: ranks of the run's last launch, of which the plan may use fewer. With
    ``replan`` or a ``cluster`` always a search.
    """
    if config.plan != AUTO:
        return None
    # Ranks of other machines may have no run folder, or another one.
    kept: GivenPlan | None = world.share(on_rank_0(world, lambda: _kept_plan(resumed)))
    planned_ranks = world.share(planned_ranks)
    if kept is not None:
        fits = world.world_size == kept.given.num_ranks
        fits = fits or (world.world_size == planned_ranks and world.can_shrink)
        if fits and not replan and cluster is None:
            return kept
        config = settled_config(config, kept.given)  # what changes results stays
    is_quiet = config.quiet or world.rank > 0
    schedule = "" if kept is None else kept.given.schedule
    tell = (lambda line: None) if is_quiet else say
    return RunPlanner(config, world, tell, cluster, kept_schedule=schedule)


def check_search(config: TrainConfig, plan: Plan | None, given: Mapping[str, bool]) -> None:
    """``InputError`` for settings of a search, which are ``given`` by name, without a search."""
    for name, is_given in given.items():
        if is_given and (plan is not None or config.plan != AUTO):
            raise InputError(f"{name}: no effect without --plan {AUTO}; leave it out, or add that")


def ranks_of_plan(config: TrainConfig, plan: Plan, world: World) -> World:
    """Returns the ranks that a plan uses: all, or the first ones of a search (``World.keep``).

    Raises:
        IdleRank: On the ranks that a searched plan leaves out.
        InputError: A plan that was not searched has another number of ranks.
    """
    if config.plan == AUTO:
        return world.keep(plan.num_ranks, config.quiet)
    if plan.num_ranks != world.world_size:
        raise InputError(
            f"world: has {world.world_size} ranks, and the plan uses {plan.num_ranks}; give a "
            "world of as many"
        )
    return world


def planned_speeds(planner: Planner | None, world: World) -> list[float]:
    """Returns the speed of each rank's device that a search has found; empty if all are equal."""
    return planner.speeds[: world.world_size] if isinstance(planner, RunPlanner) else []
