"""A run's epoch before it is run: from a prepared run and a profile to costs and a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.errors import InputError
from gnnpipe.files import read_text
from gnnpipe.machine import machine_key
from gnnpipe.perf import ChunkSizes, Profile, Span, TimeShares, simulate, time_shares
from gnnpipe.perf.predicted import predicted_spans, simulated_epochs
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.profile.profile import take_short_profile
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepare import Prepared, chunk_order

__all__ = [
    "Predicted",
    "Predictor",
    "check_profile",
    "check_profile_file",
    "read_profile",
    "run_costs",
]

LEAST_EPOCHS = 10
"""A shorter run is over before it is worth a profile of its own."""


@dataclass(frozen=True)
class Predicted:
    """An epoch that was not run."""

    epoch_time_s: float
    time_shares: list[TimeShares]
    """By rank."""
    timeline: tuple[Span, ...]
    """On rank 0."""


class Predictor:
    """Of one run, on every rank; rank 0 knows what it costs."""

    def __init__(
        self, prepared: Prepared, mesh: Mesh, costs: ProfiledCosts | None, profile: Profile | None
    ) -> None:
        self._prepared, self._mesh, self._costs = prepared, mesh, costs
        link = None if profile is None else profile.message
        self._link_bytes_per_s = math.inf if link is None else link.bandwidth_bytes_per_s

    @classmethod
    def of_run(cls, prepared: Prepared, mesh: Mesh, epochs: int) -> Predictor | None:
        """Takes a short profile, or reads the one that the config names; on every rank.

        ``epochs``: how many the run has left. ``None`` where nothing is to be predicted: the config
        says so, too few epochs are left, a profile would take too long, or the ranks are GPUs,
        where the steps of an epoch are not noted either.
        """
        config = prepared.config
        if not config.predict:
            return None
        is_given = config.profile != ""
        if not is_given and (epochs < LEAST_EPOCHS or mesh.device.type != "cpu"):
            return None
        hosts = mesh.gather(machine_key())
        together = max(hosts.count(host) for host in hosts)
        error, profile, sizes = None, None, None
        if mesh.rank == 0:
            sizes = chunk_sizes(prepared)
        if is_given and sizes is not None:
            try:
                profile = read_profile(config.profile)
                run_costs(prepared, profile, together, sizes)
            except InputError as fault:
                error = fault
        text = mesh.share(None if error is None else str(error))
        if text is not None:
            raise InputError(text)
        if not is_given:
            profile = take_short_profile(prepared, mesh, sizes, epochs)
        if not mesh.share(profile is not None):
            return None
        costs = None
        if profile is not None and sizes is not None:
            costs = run_costs(prepared, profile, together, sizes)
        return cls(prepared, mesh, costs, profile)

    def epoch(self, order: Sequence[int] | None = None) -> Predicted:
        """Of one in which the chunks are walked in ``order``, or in that of the last; every rank.

        It is one behind the exact epochs at the start, where there are others.
        """
        prepared, plan = self._prepared, self._prepared.plan
        found: Predicted | None = None
        if self._costs is not None:
            if order is None:
                order = chunk_order(prepared.config, prepared.config.epochs - 1)
            timeline = simulate(program_tasks(prepared.program, self._costs, order))
            notes = simulated_epochs(timeline, plan.shards)
            links = [self._link_bytes_per_s] * plan.world_size
            found = Predicted(
                timeline.makespan_s,
                time_shares(notes, plan.shards, links),
                predicted_spans(timeline, plan.steps, plan.shards),
            )
        # Spans are many, and only rank 0 writes them.
        told: Predicted = self._mesh.share(None if found is None else replace(found, timeline=()))
        return told if found is None else found


def read_profile(path: str) -> Profile:
    """Of a file that ``gnnpipe profile`` wrote, or a person."""
    try:
        text = read_text(Path(path))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--profile {path!r}: cannot be read ({error}); make one with `gnnpipe profile --save`"
        ) from None
    return Profile.from_json(text, f"--profile {path!r}")


def check_profile_file(config: TrainConfig, mesh: Mesh) -> None:
    """``InputError`` on every rank if the run's profile cannot be read; before anything is done."""
    if not config.predict or not config.profile:
        return
    error = None
    if mesh.rank == 0:
        try:
            read_profile(config.profile)
        except InputError as fault:
            error = fault
    text = mesh.share(None if error is None else str(error))
    if text is not None:
        raise InputError(text)


def run_costs(
    prepared: Prepared, profile: Profile, ranks_per_machine: int, sizes: ChunkSizes | None = None
) -> ProfiledCosts:
    """What the run costs by the profile, with so many ranks on each machine.

    ``sizes``: those of the run's chunks, if they are known. ``InputError`` if the profile was taken
    with other settings, or lacks an op or a link.
    """
    check_profile(prepared.config, profile, ranks_per_machine, len(prepared.probes) > 0)
    return ProfiledCosts(
        profile,
        prepared.plan,
        prepared.model_graph,
        sizes or chunk_sizes(prepared),
        number_bytes=prepared.dtype.itemsize,
        row_bytes=prepared.row_dtype.itemsize,
        ranks_at_once=min(ranks_per_machine, prepared.plan.world_size),
    )


def check_profile(
    config: TrainConfig, profile: Profile, ranks_per_machine: int, forecasts: bool
) -> None:
    """``InputError`` if it was taken with other settings than the run's."""
    for name in ("dtype", "comm_dtype", "matmul_dtype", "kernel", "recompute"):
        here, there = getattr(config, name), getattr(profile, name)
        if here != there:
            raise InputError(
                f"--profile: {name}: was taken with {there}, not {here}; take one with "
                f"{flag(name)} as in the run"
            )
    times = profile.compute_of(ranks_per_machine).ops.values()
    if forecasts and not any(op.forecast.time_s(1) for op in times):
        raise InputError(
            "--profile: ops.forecast: was not measured; take one with --staleness auto, as in the "
            "run"
        )
