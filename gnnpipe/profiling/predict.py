"""Predicts a run's epoch before the run, from its program and a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.documents import named
from gnnpipe.errors import InputError
from gnnpipe.output import Step, say
from gnnpipe.perf import PlanSizes, Profile, Span, TimeShares, simulate, time_shares
from gnnpipe.perf.predicted import predicted_spans, simulated_epochs
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.plan import ModelGraph, Plan, StageDag
from gnnpipe.plan.cluster import Cluster
from gnnpipe.profiling.links import most_ranks_per_machine
from gnnpipe.profiling.profile import SHORT_RUN_SHARE, take_short_profile
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.inputs import number_dtype, row_dtype
from gnnpipe.setup.prepared import Prepared

MIN_EPOCHS = 10
"""A shorter run is not worth a profile of its own."""

T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """A simulated epoch."""

    epoch_time_s: float
    time_shares: list[TimeShares]
    """By rank."""
    timeline: tuple[Span, ...]
    """Empty except on rank 0."""


class Predictor:
    """Predicts epochs of one run on every rank; rank 0 has the costs and simulates."""

    def __init__(
        self,
        prepared: Prepared,
        mesh: Mesh,
        costs: ProfiledCosts | None,
        profile: Profile | None,
        speeds: Sequence[float] = (),
    ) -> None:
        self.speeds = speeds or (1.0,) * mesh.world_size
        """The assumed speed of each rank's device."""
        self._prepared, self._mesh, self._costs = prepared, mesh, costs
        link = None if profile is None else profile.message
        self._link_bytes_per_s = math.inf if link is None else link.bandwidth_bytes_per_s

    @classmethod
    def of_run(
        cls, prepared: Prepared, mesh: Mesh, epochs: int, speeds: Sequence[float] = ()
    ) -> Predictor | None:
        """Take a short profile, or read the config's profile; call it on every rank.

        ``epochs``: how many the run has left. ``speeds``: of the ranks' devices; empty: all are
        equal. None if the config disables predictions, if a profile
        would take too long or too few epochs are left, with label iterations, and on GPUs, whose
        epochs have no recorded steps.
        """
        config = prepared.config
        if not config.predict or config.label_iterations:
            return None
        has_file = config.profile != ""
        if not has_file and (epochs < MIN_EPOCHS or mesh.device.type != "cpu"):
            return None
        ranks_per_machine = most_ranks_per_machine(mesh)
        sizes = chunk_sizes(prepared) if mesh.rank == 0 else None
        if has_file:
            profile = on_rank_0(mesh, lambda: Profile.read_to_use(config.profile))
        else:
            with Step("measuring an epoch, to predict its time", config.quiet, mesh.rank == 0):
                profile = _short_profile(prepared, mesh, sizes, epochs, speeds)
            if not mesh.share(profile is not None):
                if mesh.rank == 0:
                    say(
                        f"no prediction: measuring would take more than {SHORT_RUN_SHARE:.0%} of "
                        "so short a run; try --profile with a file of gnnpipe profile",
                        config.quiet,
                    )
                return None

        def costs() -> ProfiledCosts | None:
            if profile is None:
                return None
            return run_costs(prepared, profile, ranks_per_machine, sizes).with_speeds(speeds)

        return cls(prepared, mesh, on_rank_0(mesh, costs), profile, speeds)

    @cached_property
    def usual(self) -> Prediction:
        """The predicted last epoch, without its timeline; the first access is on every rank."""
        return replace(self.epoch(), timeline=())

    def epoch(self, order: Sequence[int] | None = None) -> Prediction:
        """Predict an epoch with the chunks in ``order`` (default: the order of the last epoch).

        Not one of the exact epochs at the start, where a run has others.
        """
        prepared, plan = self._prepared, self._prepared.plan
        found: Prediction | None = None
        if self._costs is not None:
            if order is None:
                count = prepared.program.epochs
                order = prepared.passes(max(prepared.config.epochs - count, 0), count)
            program, count = prepared.program, len(order) // plan.chunks
            if count != program.epochs:
                program = prepared.program_over(count)
            timeline = simulate(program_tasks(program, self._costs, order))
            epochs = simulated_epochs(timeline, plan.placement, count)
            links = [self._link_bytes_per_s] * plan.num_ranks
            found = Prediction(
                timeline.makespan_s / count,
                time_shares(epochs, plan.placement, links),
                predicted_spans(timeline, prepared.dag.steps, plan.placement),
            )
        # Only rank 0 writes the spans, which are many.
        shared: Prediction = self._mesh.share(
            None if found is None else replace(found, timeline=())
        )
        return shared if found is None else found


def _short_profile(
    prepared: Prepared, mesh: Mesh, sizes: PlanSizes | None, epochs: int, speeds: Sequence[float]
) -> Profile | None:
    """Measure the run's own plan; if the run steps by chunk, in epochs of fill-drain."""
    if prepared.program.steps_by_chunk:
        prepared = prepared.drained_by_epoch
        sizes = chunk_sizes(prepared) if mesh.rank == 0 else None
    return take_short_profile(prepared, mesh, sizes, epochs, speeds)


def on_rank_0(world: World, work: Callable[[], T]) -> T | None:
    """The result of ``work`` on rank 0, None elsewhere; its ``InputError`` on every rank."""
    found, error = None, None
    if world.rank == 0:
        try:
            found = work()
        except InputError as fault:
            error = str(fault)
    error = world.share(error)
    if error is not None:
        raise InputError(error)
    return found


def check_profile_file(config: TrainConfig, world: World) -> None:
    """``InputError`` on every rank if the config's profile cannot be read."""
    if config.predict and config.profile:
        on_rank_0(world, lambda: Profile.read(config.profile))


def run_costs(
    prepared: Prepared,
    profile: Profile,
    ranks_per_machine: int,
    sizes: PlanSizes | None = None,
    cluster: Cluster | None = None,
) -> ProfiledCosts:
    """Costs of the run as ``costs_of``; ``sizes`` of its chunks, if they are known already."""
    return costs_of(
        prepared.config,
        profile,
        prepared.dag,
        prepared.model_graph,
        sizes or chunk_sizes(prepared),
        min(ranks_per_machine, prepared.plan.num_ranks),
        len(prepared.probes) > 0,
        cluster,
    )


def costs_of(
    config: TrainConfig,
    profile: Profile,
    dag: StageDag,
    model: ModelGraph,
    sizes: PlanSizes,
    ranks_at_once: int,
    has_forecasts: bool,
    cluster: Cluster | None,
) -> ProfiledCosts:
    """Costs of a plan by the profile, with ``ranks_at_once`` ranks on a machine.

    ``InputError`` if the profile was taken with other settings, or lacks an op or a link.
    """
    with naming_profile(config):
        check_profile(config, profile, ranks_at_once, has_forecasts, dag.plan)
        return ProfiledCosts(
            profile,
            dag,
            model,
            sizes,
            number_bytes=number_dtype(config).itemsize,
            row_bytes=row_dtype(config).itemsize,
            ranks_at_once=ranks_at_once,
            cluster=cluster,
        ).recomputing(config.recompute_every if config.recompute else 1)


def naming_profile(config: TrainConfig) -> AbstractContextManager[None]:
    """Name the config's profile in an ``InputError`` of the block that is about a profile."""
    return named("profile", f"--profile {config.profile!r}" if config.profile else "profile")


def check_profile(
    config: TrainConfig,
    profile: Profile,
    ranks_per_machine: int,
    has_forecasts: bool,
    plan: Plan | None = None,
) -> None:
    """``InputError`` if the profile was taken with other settings than the run's.

    What ``plan`` has chosen may differ: the times are then derived from those of the profile.
    """
    for name in ("dtype", "comm_dtype", "matmul_dtype", "kernel"):
        wanted, found = getattr(config, name), getattr(profile, name)
        is_chosen = name == "comm_dtype" and plan is not None and plan.comm_dtype == "bf16"
        if wanted != found and not is_chosen:
            raise InputError(
                f"profile: {name}: was taken with {found}, not {wanted}; take one with "
                f"{flag(name)} {wanted}, as in the run"
            )
    _check_recomputation(config, profile, plan)
    times = profile.compute_of(ranks_per_machine).ops.values()
    if has_forecasts and not any(op.forecast.time_s(1) for op in times):
        raise InputError(
            "profile: ops.forecast: was not measured; take one with --staleness auto, as in the run"
        )


def _check_recomputation(config: TrainConfig, profile: Profile, plan: Plan | None) -> None:
    """Check that the profile tells the times of every stage, with or without recomputation.

    Those of a stage that the plan recomputes are derived from times without recomputation.
    """
    every = profile.recompute_every
    if config.recompute and profile.recompute and every not in (1, config.recompute_every):
        raise InputError(
            f"profile: recompute_every: was taken with {every}, not {config.recompute_every}; take "
            f"one with --recompute-every 1 or {config.recompute_every}"
        )
    stages = [False] if plan is None else [stage.recompute for stage in plan.stages]
    for i, is_in_plan in enumerate(stages):
        wanted = config.recompute or is_in_plan
        if wanted == profile.recompute or (is_in_plan and not profile.recompute):
            continue
        which = f"stage {i} of the plan" if any(stages) else "the run"
        does = "recomputes" if wanted else "does not recompute"
        had, needed = ("with", "without") if profile.recompute else ("without", "with")
        raise InputError(
            f"profile: recompute: was taken {had} --recompute, and {which} {does}; take one "
            f"{needed} --recompute"
        )
