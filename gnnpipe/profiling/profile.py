"""Takes profiles of this machine: the times of a model's steps, and the links between the ranks.

``take_profile`` serves every shape: it measures the whole model at several numbers of chunks. With
several ranks the steps are measured twice, on one rank while the others wait and on all of them at
once, because ranks of a machine share its memory and caches; both are in the profile.
``take_short_profile`` serves one run: it measures the steps of the run's own plan in a second or
two before the first epoch. It cannot tell apart ops that lie in one step.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from gnnpipe.capture.preserve import detached_copy
from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.config.settings import BY_CHUNK_SETTINGS
from gnnpipe.config.validation import check_timed
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.output import Step, report_progress
from gnnpipe.perf import PlanSizes, Profile
from gnnpipe.perf.fit import Fitted, Sample, fit_costs
from gnnpipe.perf.hardware import hardware_profile
from gnnpipe.perf.profile import Affine, ComputeTimes, OpTimes
from gnnpipe.plan import Placement, Plan, StagePlan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import PLANNERS
from gnnpipe.profiling.devices import RankSpeeds, measure_cluster, measure_speeds, times_of_fewer
from gnnpipe.profiling.links import (
    BRIEF,
    THOROUGH,
    Links,
    measure_all_links,
    measure_links,
    most_ranks_per_machine,
)
from gnnpipe.profiling.steps import (
    BEGIN,
    UPDATE,
    StepKey,
    boundary_time_per_number_s,
    measure_steps,
    measured_epochs,
    typical_epoch,
    work_of,
)
from gnnpipe.runtime.comm.cpu_affinity import crowding
from gnnpipe.runtime.comm.launch import launched_world_size
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.schedule import EXACT_SCHEDULE
from gnnpipe.setup.prepare import prepare
from gnnpipe.setup.prepared import Prepared

CHUNK_COUNTS = (1, 2, 8, 32)
"""Numbers of chunks that steps are measured with, beside the run's own."""

MIN_ROWS = 8
"""Mean rows of a chunk that is measured."""

PLANNING_CHUNKS = 1, 4
"""Numbers of chunks of a profile for ``--plan auto``."""

SHORT_REPEATS = 6
"""Epochs of a short profile, after the warm-up."""

SHORT_MIN_S, SHORT_RUN_SHARE = 2.0, 0.05
"""No epoch of a short profile starts later than this, or this share of the run's time."""


def profile(
    config: TrainConfig,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    world: World | None = None,
    hardware: str | None = None,
) -> Profile:
    """Measures the compute and communication times of a model on this machine.

    The profile serves every number of stages, shards and chunks. Every rank calls the function,
    under torchrun as for a run, and gets the same profile; links are measured with two ranks or
    more. The text of the profile has milliseconds; its fields have seconds and bytes.

    >>> config = TrainConfig(dataset="karate", layers=4)
    >>> found = profile(config, hardware="h100:100gbe")
    >>> found.message.bandwidth_bytes_per_s
    12500000000.0

    Args:
        config: The settings, without stages, shards and plan.
        graph: The graph, in place of ``config.dataset``.
        model: The model, in place of ``config.model``; stays as it is.
        world: The ranks, if they have been joined for another run of this process.
        hardware: Use data sheets in place of measuring: 'DEVICE:LINK', like 'h100:100gbe'.

    Raises:
        InputError: Before anything is measured, if an argument is wrong or the model cannot be
            recorded.
    """
    config = _checked(config)
    met = world or World.meet(launched_world_size(), config.device, config.timeout_s)
    mesh = Mesh.of(met, Placement.grid(1, met.world_size))
    if hardware is None:
        with mesh.on_own_cores(), Step("measuring the model", config.quiet, mesh.rank == 0):
            found, _ = take_profile(config, mesh, graph, model)
    else:
        prepared = prepare(config, mesh, graph, detached_copy(model))
        found = hardware_profile(hardware, prepared.model_graph, config)
        # Runs that read stale rows have other ops than exact ones.
        chunks = 1 if config.chunks > 1 else 2
        one = replace(config, chunks=chunks, partitioner="range")
        other = prepare(one, mesh, graph, detached_copy(model)).model_graph
        (times,), (more,) = found.compute, hardware_profile(hardware, other, config).compute
        compute = (replace(times, ops={**more.ops, **times.ops}),)
        note = f"dataset {prepared.graph.name}; {found.note}"
        found = replace(found, note=note, compute=compute)
    if world is None:
        mesh.leave()
    return found


def profile_and_cluster(config: TrainConfig, world: World) -> tuple[Profile, Cluster]:
    """Measures a profile, as ``profile``, and the devices and links of these ranks."""
    config = _checked(config)
    mesh = Mesh.of(world, Placement.grid(1, world.world_size))
    with mesh.on_own_cores(), Step("measuring the model", config.quiet, mesh.rank == 0):
        found, speeds = take_profile(config, mesh)
        return found, measure_cluster(mesh, speeds, THOROUGH)


def _checked(config: TrainConfig) -> TrainConfig:
    """Return the config to measure with; ``InputError`` for settings that a profile cannot have."""
    for name in ("stages", "shards"):
        if getattr(config, name) != 1:
            raise InputError(
                f"--{name} {getattr(config, name)}: a profile serves every number of {name}; leave "
                "it out"
            )
    defaults = TrainConfig()
    for name in BY_CHUNK_SETTINGS:
        if getattr(config, name) != getattr(defaults, name):
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: a profile serves every schedule; leave it "
                "out"
            )
    if config.plan not in set(PLANNERS):
        raise InputError(f"--plan {config.plan!r}: a profile serves every plan; leave it out")
    if config.profile:
        raise InputError(
            f"--profile {config.profile!r}: is read by other commands; to write a profile, try "
            f"--save {config.profile!r}"
        )
    if config.comm_dtype == "auto":
        raise InputError(
            "--comm-dtype auto: the rows of a profile have one type; give same or bf16"
        )
    check_timed(config)
    # A profile serves every plan, also that of a search.
    return replace(config, plan="uniform")


def take_profile(
    config: TrainConfig, mesh: Mesh, graph: Graph | None = None, model: nn.Module | None = None
) -> tuple[Profile, RankSpeeds]:
    """Measure the model and the links; returns profile and speeds, the same on every rank.

    The profile describes the device of the fastest ranks. ``mesh`` has one stage whose shards are
    all ranks; every rank measures the whole graph, whatever S and G of the config. ``graph`` and
    ``model`` as in ``Trainer``; the model stays as it is.
    """
    ranks_at_once = most_ranks_per_machine(mesh)
    # On one rank alone, and on all at once.
    turns = sorted({1, ranks_at_once})
    measured = _Measured(config, mesh, graph, model, turns)
    speeds = RankSpeeds((1.0,))
    if mesh.world_size > 1:
        # With the run's own chunks, so that a wrong setting is refused before anything is measured.
        speeds = measured.speeds()
    found = [measured.compute_times(ranks, speeds.reference) for ranks in turns]
    compute, waiting = [times for times, _ in found], max(share for _, share in found)
    links = measure_all_links(mesh, THOROUGH)
    note = (
        f"{time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}, dataset {config.dataset}, "
        f"{mesh.world_size} rank{'s' * (mesh.world_size > 1)}"
    )
    machine = f"{platform.node()}, {_processor()}"
    own = replace(_profile(config, mesh, machine, note, compute, links), waiting_share=waiting)
    profile: Profile = mesh.share(own)
    return profile, speeds


def take_short_profile(
    prepared: Prepared,
    mesh: Mesh,
    sizes: PlanSizes | None,
    epochs: int,
    speeds: Sequence[float] = (),
) -> Profile | None:
    """Measure the run's own plan; returns a profile on rank 0, which alone needs ``sizes``.

    ``epochs``: how many the run has left. ``speeds``: of the ranks' devices; empty: all are equal.
    None on every rank if it would take too long.
    """
    # Speeds are by the wall clock.
    has_cores = not speeds and crowding(torch.get_num_threads(), mesh.gather) <= 1
    with measured_epochs(prepared, [mesh], has_cores) as run_epoch:
        found: list[Mapping[StepKey, float]] = []
        spent_s, limit_s = 0.0, math.inf
        while spent_s <= limit_s and len(found) <= SHORT_REPEATS:
            mesh.gather(None)  # All ranks start at once.
            start_s = time.perf_counter()
            found.append(run_epoch())
            spent_s += max(mesh.gather(time.perf_counter() - start_s))
            if len(found) == 1:
                limit_s = max(SHORT_MIN_S, SHORT_RUN_SHARE * epochs * spent_s)
    if len(found) == 1:
        return None
    # Memory pages are first touched in the first epoch.
    by_rank = mesh.collect(typical_epoch(found[1:]))
    ranks_at_once = most_ranks_per_machine(mesh)
    pairs = list(pairwise(ranks[0] for ranks in mesh.placement.stages))
    links = measure_links(mesh, BRIEF, pairs, True)
    if sizes is None:
        return None
    samples = []
    for rank, times in enumerate(by_rank):
        for key, measured_s in times.items():
            time_s = measured_s * speeds[rank] if speeds else measured_s
            # The sum of all steps should be right, rather than each of them.
            work = work_of(key, prepared, sizes, mesh.placement.shard(rank))
            samples.append(Sample(time_s, work, weight=time_s))
    # The steps contain what shards read from tables for one another.
    compute = _fitted_times(fit_costs(samples), ranks_at_once, boundary_per_number_s=0.0)
    note = "short, before the run"
    return _profile(prepared.config, mesh, platform.node(), note, [compute], links)


def take_planning_profile(
    config: TrainConfig,
    world: World,
    num_vertices: int,
    num_ops: int,
    prepared_with: Callable[[Plan], Prepared],
    reference: Collection[int],
) -> Profile:
    """Measure the model briefly in one stage, in one chunk and in several; the same on every rank.

    All ranks measure at once. Fewer ranks of a machine share its memory and cores with fewer
    others: epochs of 1, 2, 4, ... ranks at once tell how much faster these are.

    ``prepared_with``: prepares the run with another plan; called on every rank. ``reference``: the
    ranks whose device the profile describes. The profile serves every number of stages, shards and
    chunks.
    """
    mesh = Mesh.of(world, Placement.grid(1, world.world_size))
    has_cores = crowding(torch.get_num_threads(), mesh.gather) <= 1
    samples: list[Sample] = []
    faster: Mapping[int, float] = {}
    for chunks in PLANNING_CHUNKS if num_vertices >= MIN_ROWS * max(PLANNING_CHUNKS) else (1,):
        is_layered = chunks > 1 and config.staleness_settings_for(chunks, config.schedule).is_exact
        schedule = EXACT_SCHEDULE if is_layered else "fill-drain"
        prepared = prepared_with(one_stage(num_ops, chunks, schedule))
        samples += measure_steps(prepared, mesh.device, has_cores, is_brief=True)
        faster = faster or times_of_fewer(prepared, mesh)
    ranks_at_once = most_ranks_per_machine(mesh)
    boundary_s = boundary_time_per_number_s(mesh.device) if world.world_size > 1 else 0.0
    links = measure_all_links(mesh, BRIEF)
    found = _of_reference(mesh.gather(samples), reference)
    boundary_s = world.gather(boundary_s)[min(reference)]
    of_all = _fitted_times(fit_costs(found), ranks_at_once, boundary_s)
    compute = [*(of_all.scaled(factor, ranks) for ranks, factor in faster.items()), of_all]
    note = "short, for the plan"
    return _profile(config, mesh, platform.node(), note, compute, links)


def one_stage(num_ops: int, chunks: int = 1, schedule: str = "fill-drain") -> Plan:
    """The plan of one rank."""
    return Plan((StagePlan.even(tuple(range(num_ops)), (0,)),), chunks, schedule)


def _of_reference(by_rank: Sequence[Sequence[Sample]], reference: Collection[int]) -> list[Sample]:
    """The samples of these ranks."""
    return [sample for rank, some in enumerate(by_rank) if rank in reference for sample in some]


def _profile(
    config: TrainConfig,
    mesh: Mesh,
    machine: str,
    note: str,
    compute: list[ComputeTimes],
    links: Links,
) -> Profile:
    return Profile(
        machine=machine,
        source="measured",
        note=note,
        device=mesh.device.type,
        dtype=config.dtype,
        comm_dtype=config.comm_dtype,
        matmul_dtype=config.matmul_dtype,
        kernel=config.kernel,
        recompute=config.recompute,
        recompute_every=config.recompute_every if config.recompute else 1,
        threads=torch.get_num_threads(),
        compute=tuple(compute),
        message=links.message,
        exchange=links.exchange,
        shard_sum=links.shard_sum,
        pair_exchange=links.pair_exchange,
        pair_sum=links.pair_sum,
        collectives=mesh.collectives,
    )


@dataclass(frozen=True)
class _Measured:
    """Measurements of ``take_profile``, whose settings are these."""

    config: TrainConfig
    mesh: Mesh
    graph: Graph | None
    model: nn.Module | None
    turns: Sequence[int]
    """Numbers of ranks that are measured at once."""

    def prepared(self, chunks: int, ranks: Collection[int]) -> Prepared | None:
        """The run on one rank in so many chunks, on ``ranks``; an ``InputError`` on every rank."""
        config, mesh, found, error = self.config, self.mesh, None, None
        # At least one epoch that is exact and one that is not, where a run has both.
        epochs = max(config.epochs, 2)
        run = replace(config, stages=1, shards=1, epochs=epochs, require_capture=True)
        try:
            if mesh.rank in ranks:
                alone = World(0, 1, mesh.device)
                one = replace(run, chunks=chunks)
                found = prepare(one, alone, self.graph, detached_copy(self.model))
        except InputError as fault:
            error = fault
        mesh.agree(error)
        return found

    def speeds(self) -> RankSpeeds:
        """The speed of every rank; the same on every rank."""
        prepared = self.prepared(self.config.chunks, range(self.mesh.world_size))
        assert prepared is not None
        return measure_speeds(prepared, self.mesh)

    def compute_times(self, ranks: int, reference: Sequence[int]) -> tuple[ComputeTimes, float]:
        """Times on one rank alone (``ranks`` 1) or on all ranks at once; the same on every rank.

        Also returns the share of the time in which a rank waited for a core
        (``Profile.waiting_share``). ``reference``: the ranks whose times count.
        """
        config, mesh = self.config, self.mesh
        samples: list[Sample] = []
        here = reference[:1] if ranks == 1 else range(mesh.world_size)
        has_cores = ranks == 1 or crowding(torch.get_num_threads(), mesh.gather) <= 1
        # The run's own number first, so that a wrong setting is refused before anything is
        # measured.
        counts = [config.chunks, *(k for k in CHUNK_COUNTS if k != config.chunks)]
        limit, spent_s, waited_s = math.inf, 0.0, 0.0
        for chunks in counts:
            if chunks > limit:
                break
            mesh.gather(None)  # All ranks start at once.
            prepared = self.prepared(chunks, here)
            if prepared is not None:
                limit = max(prepared.graph.num_vertices // MIN_ROWS, config.chunks)
                start_s, start_waited_s = time.perf_counter(), waited_for_core_s()
                samples += measure_steps(prepared, mesh.device, has_cores)
                spent_s += time.perf_counter() - start_s
                waited_s += waited_for_core_s() - start_waited_s
            done = self.turns.index(ranks) + (counts.index(chunks) + 1) / len(counts)
            report_progress(done / len(self.turns))
            limit = mesh.gather(limit)[reference[0]]
        boundary_s = boundary_time_per_number_s(mesh.device) if mesh.rank in here else 0.0
        found = fit_costs(_of_reference(mesh.gather(samples), reference))
        can_tell = has_cores and mesh.device.type == "cpu" and spent_s > 0
        waiting = waited_s / spent_s if can_tell else 0.0
        times = _fitted_times(found, ranks, mesh.gather(boundary_s)[reference[0]])
        return times, max(mesh.gather(waiting))


def _fitted_times(fitted: Fitted, ranks: int, boundary_per_number_s: float) -> ComputeTimes:
    """Times of so many ranks at once, from the fitted parts."""
    kinds = dict.fromkeys(part[0] for part in fitted.costs if isinstance(part, tuple))
    return ComputeTimes(
        ranks=ranks,
        ops={kind: _op_times(fitted, kind) for kind in kinds},
        begin=fitted.costs.get(BEGIN, Affine()),
        update=fitted.costs[UPDATE],
        boundary_per_number_s=boundary_per_number_s,
    )


def _op_times(fitted: Fitted, kind: str) -> OpTimes:
    names = [f.name for f in fields(OpTimes) if f.name != "relative_error"]
    costs = {name: fitted.costs.get((kind, name), Affine()) for name in names}
    steps = [name for name in names if name.startswith(("forward", "backward"))]
    errors = [fitted.errors[kind, name] for name in steps if (kind, name) in fitted.errors]
    return OpTimes(**costs, relative_error=max(errors))


def waited_for_core_s(path: str = "/proc/thread-self/schedstat") -> float:
    """Return the seconds in which this thread could run and had no core; 0 if they are not counted.

    ``path``: the kernel's file; its second number is the run delay in ns.
    """
    try:
        return int(Path(path).read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _processor() -> str:
    """Model name of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
