"""A prepared run and a profile to costs, which the simulator makes a timeline of."""

from __future__ import annotations

from gnnpipe.errors import InputError
from gnnpipe.perf import Profile
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.settings import flag
from gnnpipe.train.prepare import Prepared
from gnnpipe.train.sizes import chunk_sizes

__all__ = ["run_costs"]


def run_costs(prepared: Prepared, profile: Profile, ranks_per_machine: int) -> ProfiledCosts:
    """What the run costs by the profile, with so many ranks on each machine.

    ``InputError`` if the profile was taken with other settings, or lacks an op or a link.
    """
    config = prepared.config
    for name in ("dtype", "comm_dtype", "kernel", "recompute"):
        here, there = getattr(config, name), getattr(profile, name)
        if here != there:
            raise InputError(
                f"profile: {name}: was taken with {there}, not {here}; take one with "
                f"{flag(name)} as in the run"
            )
    times = profile.compute_of(ranks_per_machine).ops.values()
    if len(prepared.pilots) and not any(op.forecast.time_s(1) for op in times):
        raise InputError(
            "profile: ops.forecast: was not measured; take one with --staleness auto, as in the run"
        )
    return ProfiledCosts(
        profile, prepared.plan, prepared.model_graph, chunk_sizes(prepared),
        number_bytes=prepared.dtype.itemsize, row_bytes=prepared.row_dtype.itemsize,
        ranks_at_once=min(ranks_per_machine, prepared.plan.world_size),
    )  # fmt: skip
