"""A profile taken in a second or two, just before a run, for that run alone.

Every rank walks its own part with made-up values (see ``rehearsal``) a few times, and a few
messages are sent. It tells what the steps of this plan take, no others: what an op
does before its push cannot be told from what it does behind it, where they lie in one step. For
other plans and other runs ``gnnpipe profile`` takes a thorough one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from itertools import pairwise

import torch

from gnnpipe.machine import machine_key
from gnnpipe.perf import ChunkSizes, Profile
from gnnpipe.perf.fit import Sample, fit_costs
from gnnpipe.profile.comm_times import Probe
from gnnpipe.profile.dry_run import DryRun, rehearsal
from gnnpipe.profile.profile import compute_times, link_times
from gnnpipe.profile.steps import StepPlace, typical_walk, work_at
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import Prepared

__all__ = ["LEAST_S", "RUN_SHARE", "take_short_profile"]

LEAST_S, RUN_SHARE = 2.0, 0.05
"""No walk begins behind this, or behind this share of what the run will take."""

REPEATS = 6

BRIEF = Probe((1 << 10, 1 << 14, 1 << 17, 1 << 20), warm_up=1, repeats=6)


def take_short_profile(
    prepared: Prepared, mesh: Mesh, sizes: ChunkSizes | None, epochs: int
) -> Profile | None:
    """Measure; on rank 0, which alone needs ``sizes``. ``None`` on every rank if it takes too long.

    ``epochs``: how many the run has left.
    """
    with rehearsal(prepared, mesh) as stage:
        found = _walks(stage, mesh, epochs)
    if found is None:
        return None
    hosts = mesh.gather(machine_key())
    bounds = range(0, mesh.world_size, mesh.shards)
    links = link_times(mesh, BRIEF, list(pairwise(bounds)), True)
    everyone = mesh.collect(found)
    if sizes is None:
        return None
    samples = []
    for rank, times in enumerate(everyone):
        for place, time_s in times.items():
            work = work_at(place, prepared, sizes, rank % mesh.shards)
            # By its length: the sum of all steps is to be right, rather than each of them.
            samples.append(Sample(time_s, work, weight=time_s))
    config = prepared.config
    together = max(hosts.count(host) for host in hosts)
    return Profile(
        machine=platform.node(),
        source="measured",
        note="short, before the run",
        device=mesh.device.type,
        dtype=config.dtype,
        comm_dtype=config.comm_dtype,
        matmul_dtype=config.matmul_dtype,
        kernel=config.kernel,
        recompute=config.recompute,
        threads=torch.get_num_threads(),
        # What shards take out of tables for each other was part of the steps.
        compute=(compute_times(fit_costs(samples), together, boundary_per_number_s=0.0),),
        **links,
    )


def _walks(stage: DryRun, mesh: Mesh, epochs: int) -> Mapping[StepPlace, float] | None:
    """Typical seconds by place; ``None`` on every rank if there is no time for it."""
    first_s = _walk(stage, mesh, [])
    most_s = max(LEAST_S, RUN_SHARE * epochs * first_s)
    if first_s > most_s:
        return None
    # The first one faulted all pages in, and does not count.
    walks: list[Mapping[StepPlace, float]] = []
    spent_s = first_s
    for _ in range(REPEATS):
        spent_s += _walk(stage, mesh, walks)
        if spent_s > most_s:
            break
    return typical_walk(walks)


def _walk(stage: DryRun, mesh: Mesh, walks: list[Mapping[StepPlace, float]]) -> float:
    """Walk once, on all ranks together; the seconds of the slowest."""
    mesh.gather(None)  # at once means at once
    start_s = time.perf_counter()
    walks.append(stage.walk())
    slowest_s: float = max(mesh.gather(time.perf_counter() - start_s))
    return slowest_s
