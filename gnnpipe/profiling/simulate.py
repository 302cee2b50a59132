"""Function ``gnnpipe.simulate``: predicts an epoch of any shape on any cluster in one process."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import nn

from gnnpipe.capture.preserve import detached_copy
from gnnpipe.config import TrainConfig
from gnnpipe.config.validation import check_timed
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.output import human_bytes
from gnnpipe.perf import Profile, TimeShares, time_shares
from gnnpipe.perf import simulate as simulate_tasks
from gnnpipe.perf.hardware import hardware_memory_bytes, hardware_profile
from gnnpipe.perf.memory import ON_TOP
from gnnpipe.perf.predicted import simulated_epochs
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.perf.what_if import (
    LESS,
    critical_shares,
    sensitivity,
    task_group,
    task_place,
    what_ifs,
)
from gnnpipe.plan import ModelGraph
from gnnpipe.plan.cluster import Cluster
from gnnpipe.plan.plan import shards_text
from gnnpipe.planner import AUTO, PLANNERS, Planner, find_plan
from gnnpipe.planner.given_devices import Hardware, hardware_of, profile_or_sheets
from gnnpipe.profiling.predict import costs_of, naming_profile
from gnnpipe.profiling.scenario import (
    GraphShape,
    Scenario,
    model_on_shape,
    nearest_that_fits,
    scenario_of,
    scenario_of_shape,
)
from gnnpipe.profiling.search import (
    OfflinePlanner,
    check_no_target,
    scenario_of_found,
    search_space,
    workload_of_shape,
)
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.inputs import settled_config
from gnnpipe.setup.memory_estimate import fit_recompute_every, rank_memory_bytes
from gnnpipe.setup.prepare import prepare, ranks_of, reads_stale_rows, shape_text

VERSION = 1
MAX_RANKS = 1024
"""Devices among which a fitting shape is searched if only their data sheet is given."""

SHOWN_RANKS = 8
"""With more ranks, lines for single ranks and places are left out."""


@dataclass(frozen=True)
class Simulation:
    """Result of ``simulate``; ``str`` gives the text of ``gnnpipe simulate``.

    Times are in seconds, of one epoch.
    """

    stages: int
    shards: int
    """The shards of the stage with the most."""
    shards_by_stage: list[int]
    chunks: int
    schedule: str
    profile: str
    """Machine and source of the profile."""
    predicted_epoch_time_s: float
    predicted_time_shares: list[TimeShares]
    """By rank."""
    memory_bytes: list[int]
    """Estimate by rank."""
    device_memory_bytes: list[int]
    """By rank; empty without a cluster or data sheet."""
    comm_bytes_per_epoch: dict[str, int]
    critical_path: dict[str, float]
    """Share of the epoch by kind and stage of task, largest first; for many ranks by kind."""
    what_if_s: dict[str, float]
    """Seconds of the epoch by change."""
    sensitivity: dict[str, float]
    """Relative change of the epoch by the tasks that take a tenth less time."""
    search: list[str] = field(default_factory=list)
    """Lines about the search of ``--plan auto``."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> str:
        """The result as JSON with a version."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    def lines(self) -> Iterator[str]:
        """The result as text for a person."""
        epoch_s, shards = self.predicted_epoch_time_s, shards_text(self.shards_by_stage)
        yield from self.search
        yield (
            f"shape: {self.stages} x {shards} x {self.chunks} (stages x shards x chunks) on "
            f"{_ranks(len(self.memory_bytes))}, schedule {self.schedule}"
        )
        yield f"profile: {self.profile}"
        yield f"predicted: {epoch_s:.4g} s an epoch"
        parts = {
            "compute": ("compute_s",),
            "exposed communication": ("exposed_pipeline_s", "exposed_graph_s"),
            "bubble": ("bubble_s",),
            "imbalance": ("imbalance_s",),
        }
        shares = [asdict(share) for share in self.predicted_time_shares]
        means = {
            name: statistics.mean(sum(share[key] for key in keys) for share in shares) / epoch_s
            for name, keys in parts.items()
        }
        yield "mean of the ranks: " + ", ".join(f"{k} {v:.0%}" for k, v in means.items())
        yield from self._memory_lines()
        yield f"(estimated; {ON_TOP})"
        sent = self.comm_bytes_per_epoch
        axes = ", ".join(f"{k} {v:,}" for k, v in sent.items() if k != "total")
        yield f"sent per epoch over all ranks: {human_bytes(sent['total'])} ({axes} bytes)"
        path = ", ".join(f"{v:.0%} {k}" for k, v in list(self.critical_path.items())[:6])
        yield f"critical path: {path}"
        yield "(one longest path; others may be as long, so what shortens the epoch is below)"
        for words, time_s in self.what_if_s.items():
            yield f"what if {words}: {time_s:.4g} s ({time_s / epoch_s - 1:+.1%})"
        for words, change in self.sensitivity.items():
            yield f"if {words} took {LESS:.0%} less time: {change:+.1%}"

    def _memory_lines(self) -> Iterator[str]:
        of = [f" of {human_bytes(b)}" for b in self.device_memory_bytes]
        if len(self.memory_bytes) <= SHOWN_RANKS:
            for rank, size in enumerate(self.memory_bytes):
                yield f"memory of rank {rank}: {human_bytes(size)}{of[rank] if of else ''}"
            return
        worst = max(range(len(self.memory_bytes)), key=lambda rank: self.memory_bytes[rank])
        middle = statistics.median(self.memory_bytes)
        yield (
            f"memory: rank {worst} takes most, {human_bytes(self.memory_bytes[worst])}"
            f"{of[worst] if of else ''}; the median is {human_bytes(middle)}"
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def simulate(
    config: TrainConfig,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    profile: Profile | None = None,
    hardware: str | None = None,
    shape: GraphShape | None = None,
    cluster: Cluster | None = None,
    devices: int | None = None,
) -> Simulation:
    """Predicts the epoch time of a configuration on any devices, in one process.

    Times are in seconds. Either a profile or ``hardware`` is needed.

    >>> graph = GraphShape(vertices=2_400_000, edges=124_000_000, features=100, classes=47)
    >>> config = TrainConfig(layers=8, stages=4, chunks=16)
    >>> simulate(config, shape=graph, hardware="h100:100gbe").stages
    4

    Args:
        config: The settings.
        graph: The graph, in place of ``config.dataset``.
        model: The model, in place of ``config.model``; stays as it is.
        profile: A result of ``gnnpipe.profile``, in place of the file ``config.profile``.
        hardware: Data sheets in place of a profile: 'DEVICE:LINK', like 'h100:100gbe'.
        shape: Numbers of a graph that is not here, in place of ``graph`` and ``config.dataset``.
        cluster: Speed and memory of every device, and the links; ``None``: every rank is the device
            of the profile.
        devices: Number of devices for ``plan="auto"`` without a cluster.

    Raises:
        InputError: An argument is wrong, or the plan does not fit the cluster; the message names
            the nearest shape that does.
    """
    known = None
    if config.plan == AUTO:
        known = hardware_of(config, hardware, cluster, devices, profile)
    profile = profile_or_sheets(config, hardware, profile) if known is None else known.profile
    _check_arguments(config, graph, shape, devices)
    if known is not None:
        return _simulate_found(config, known, graph, model, shape)

    ranks = ranks_of(config)
    device_bytes = _device_bytes(hardware, cluster, ranks)

    def described(one: TrainConfig) -> ModelGraph:
        assert shape is not None
        return model_on_shape(one, shape, detached_copy(model))

    def scenario_with(one: TrainConfig) -> Scenario:
        if shape is not None:
            least = _least_bytes(device_bytes, ranks)
            found = scenario_of_shape(one, shape, described(one), least)
            return replace(found, model_with=described)
        return _scenario_of_graph(one, graph, model, device_bytes, ranks)

    return _simulate(config, scenario_with, profile, hardware, cluster, ranks)


def _device_bytes(hardware: str | None, cluster: Cluster | None, ranks: int) -> list[int]:
    """Memory of the devices; empty for a profile without a cluster."""
    if cluster is not None:
        return [device.memory_bytes for device in cluster.devices]
    return [] if hardware is None else [hardware_memory_bytes(hardware)] * max(ranks, MAX_RANKS)


def _least_bytes(device_bytes: Sequence[int], ranks: int) -> int:
    """Memory of the smallest device that has a rank; of this machine if no device is known."""
    return min(device_bytes[:ranks], default=rank_memory_bytes(World.alone()))


def _scenario_of_graph(
    config: TrainConfig,
    graph: Graph | None,
    model: nn.Module | None,
    device_bytes: Sequence[int],
    ranks: int,
    planner: Planner | None = None,
) -> Scenario:
    """Scenario of a graph; ``--recompute-every 0`` is settled by the memory of the devices."""
    settled = replace(config, recompute_every=config.recompute_every or 1)
    prepared = prepare(settled, World.alone(), graph, detached_copy(model), planner)
    if not config.recompute_every:
        is_open = replace(prepared.config, recompute_every=0)
        least = _least_bytes(device_bytes, ranks)
        prepared = fit_recompute_every(replace(prepared, config=is_open), least)
    return scenario_of(prepared)


def _check_arguments(
    config: TrainConfig, graph: Graph | None, shape: GraphShape | None, devices: int | None
) -> None:
    """``InputError`` for arguments of ``simulate`` that contradict each other."""
    if graph is not None and shape is not None:
        raise InputError("simulate: graph and shape: each stands for the graph; leave one out")
    check_timed(config)
    if shape is not None and config.label_inputs:
        raise InputError(
            f"--label-inputs {config.label_inputs:g}: with --shape the labels are features; leave "
            f"it out, and give features={shape.features + shape.classes}"
        )
    if devices is not None and config.plan != AUTO:
        raise InputError(f"--devices {devices}: only used by --plan auto; leave it out")


def _simulate_found(
    config: TrainConfig,
    hardware: Hardware,
    graph: Graph | None,
    model: nn.Module | None,
    shape: GraphShape | None,
) -> Simulation:
    """Searches a plan and simulates it."""
    check_no_target(config)
    device_bytes = hardware.device_bytes()
    if shape is not None:
        described = model_on_shape(config, shape, detached_copy(model))
        with naming_profile(config):
            work = workload_of_shape(config, shape, described, hardware)
            found = find_plan(search_space(config, work, hardware))
            if not reads_stale_rows(config, found.plan.chunks, found.plan.schedule):
                # As in a run, an exact plan may aggregate narrower rows.
                exact = model_on_shape(config, shape, detached_copy(model), is_exact=True)
                work = workload_of_shape(config, shape, exact, hardware)
                space = search_space(config, work, hardware)
                found = find_plan(replace(space, max_stale_chunks=1))
        config = settled_config(config, found.plan)
        scenario = scenario_of_found(config, found, shape)
    else:
        planner = OfflinePlanner(config, hardware)
        ranks = hardware.num_devices
        scenario = _scenario_of_graph(config, graph, model, device_bytes, ranks, planner)
        found = planner.found[-1]
    simulated = _simulate(
        config,
        lambda _: scenario,
        hardware.profile,
        hardware.sheets,
        found.best.form.workload.cluster,
        found.plan.num_ranks,
    )
    return replace(simulated, search=[*found.plan_lines(), *found.search_lines()])


def _simulate(
    config: TrainConfig,
    scenario_with: Callable[[TrainConfig], Scenario],
    profile: Profile | None,
    hardware: str | None,
    cluster: Cluster | None,
    ranks: int,
) -> Simulation:
    """Simulates the scenario of a config by its profile, else by the data sheets ``hardware``."""
    if cluster is not None and ranks > len(cluster.devices):
        raise InputError(
            f"{cluster.source}: number of devices {len(cluster.devices)}, and "
            f"{shape_text(config)} needs {ranks}; add devices, or try a smaller shape"
        )
    device_bytes = _device_bytes(hardware, cluster, ranks)
    scenario = scenario_with(config)
    config = scenario.config
    if device_bytes:
        source = f"--hardware {hardware}" if cluster is None else cluster.source
        _check_memory(scenario, device_bytes, source, cluster is None)
    if profile is None:
        profile = hardware_profile(hardware or "", scenario.model, config)
        config = replace(config, kernel=profile.kernel)
    costs = _costs(scenario, config, profile, cluster)
    timeline = simulate_tasks(program_tasks(scenario.program, costs, scenario.order))
    count = scenario.program.epochs
    epochs = simulated_epochs(timeline, scenario.plan.placement, count)
    link = profile.message if cluster is None else cluster.link
    bytes_per_s = math.inf if link is None else link.bandwidth_bytes_per_s
    changed = what_ifs(timeline, scenario.program, costs, scenario.order)
    doubled = _with_twice_the_chunks(scenario, scenario_with)
    if doubled is not None:
        twice = _costs(doubled, config, profile, cluster)
        tasks = program_tasks(doubled.program, twice, doubled.order)
        makespan_s = simulate_tasks(tasks).makespan_s
        changed[f"--chunks {doubled.plan.chunks}"] = makespan_s / doubled.program.epochs
    name = task_group if ranks > SHOWN_RANKS else task_place
    return Simulation(
        stages=scenario.plan.num_stages,
        shards=scenario.plan.most_shards,
        shards_by_stage=[stage.shards for stage in scenario.plan.stages],
        chunks=scenario.plan.chunks,
        schedule=scenario.plan.schedule,
        profile=f"{profile.machine}, {profile.source}; {profile.note}",
        predicted_epoch_time_s=timeline.makespan_s / count,
        predicted_time_shares=time_shares(epochs, scenario.plan.placement, [bytes_per_s] * ranks),
        memory_bytes=scenario.memory_bytes,
        device_memory_bytes=device_bytes[:ranks],
        comm_bytes_per_epoch=scenario.volume.to_dict(),
        critical_path=critical_shares(timeline, name),
        what_if_s=changed,
        sensitivity=sensitivity(timeline, name),
    )


def _costs(
    scenario: Scenario, config: TrainConfig, profile: Profile, cluster: Cluster | None
) -> ProfiledCosts:
    # As many ranks share a machine as in the profile.
    ranks_per_machine = min(max(times.ranks for times in profile.compute), scenario.plan.num_ranks)
    return costs_of(
        config,
        profile,
        scenario.dag,
        scenario.model,
        scenario.sizes,
        ranks_per_machine,
        scenario.has_forecasts,
        cluster,
    )


def _with_twice_the_chunks(
    scenario: Scenario, scenario_with: Callable[[TrainConfig], Scenario]
) -> Scenario | None:
    """The scenario with twice as many chunks, if the graph can be cut so often."""
    config = scenario.config
    if config.chunks == 1 or config.plan not in set(PLANNERS):
        return None
    try:
        return scenario_with(replace(config, chunks=2 * config.chunks))
    except InputError:
        return None


def _check_memory(
    scenario: Scenario, device_bytes: Sequence[int], source: str, is_open: bool
) -> None:
    """``InputError`` if a rank needs more memory than its device has; ``device_bytes`` by device.

    ``source``: where the memory is given. ``is_open``: the number of devices is not given.
    """
    over = [r for r, size in enumerate(scenario.memory_bytes) if size > device_bytes[r]]
    if not over:
        return
    worst = max(over, key=lambda r: scenario.memory_bytes[r] / device_bytes[r])
    plan, nearest = scenario.plan, nearest_that_fits(scenario, device_bytes)
    if nearest is None:
        where = (
            f"on up to {len(device_bytes):,} such" if is_open else f"on these {len(device_bytes)}"
        )
        hint = f"nor does any shape {where} devices; try --recompute or a smaller --hidden"
    else:
        stages, shards, chunks = nearest
        hint = f"by estimate --stages {stages} --shards {shards} --chunks {chunks} fits; try that"
    raise InputError(
        f"{shape_text(scenario.config)}, {plan.chunks} chunks: rank {worst} takes "
        f"{human_bytes(scenario.memory_bytes[worst])} (estimated), and its device has "
        f"{human_bytes(device_bytes[worst])} ({source}); {hint}"
    )
