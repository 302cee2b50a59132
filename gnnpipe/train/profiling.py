"""Takes a profile of this machine: the steps of a model, and the links between the ranks.

With several ranks the steps are measured twice, by one rank while the others are silent and by all
of them at once, for they share the memory and what is near the cores; both are in the profile.
"""

from __future__ import annotations

import copy
import math
import platform
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.perf import Profile
from gnnpipe.perf.fit import Fitted, Sample, fit_costs, fit_link
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes
from gnnpipe.runtime.link_times import (
    SIZES_BYTES,
    exchange_times,
    gradient_sum_times,
    message_times,
)
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.train.measure import BEGIN, UPDATE, boundary_time_per_number_s, measure_steps
from gnnpipe.train.prepare import prepare

__all__ = ["take_profile"]

LADDER = (1, 2, 8, 32)
"""Numbers of chunks that steps are measured with, beside the run's own."""

LEAST_ROWS = 8
"""Rows of a chunk, on the mean."""


def take_profile(
    config: TrainConfig, mesh: Mesh, graph: Graph | None = None, model: nn.Module | None = None
) -> Profile:
    """Measure; the same profile on every rank. ``mesh``: one stage whose shards are all ranks.

    ``graph`` and ``model`` as in ``Trainer``; the model's weights stay as they are. S and G of the
    config have no meaning: every rank measures the whole graph.
    """
    hosts = mesh.gather(platform.node())
    together = max(hosts.count(host) for host in hosts)
    compute = [_compute(config, mesh, graph, model, 1)]
    if together > 1:
        compute.append(_compute(config, mesh, graph, model, together))
    is_alone = mesh.world_size == 1
    profile = Profile(
        machine=mesh.share(f"{platform.node()}, {_processor()}"),
        source="measured",
        note=mesh.share(
            f"{time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}, dataset "
            f"{config.dataset}, {mesh.world_size} ranks"
        ),
        device=mesh.device.type,
        dtype=config.dtype, comm_dtype=config.comm_dtype, kernel=config.kernel,
        recompute=config.recompute, threads=torch.get_num_threads(),
        compute=tuple(compute),
        message=None if is_alone else _message(mesh),
        exchange=None if is_alone else _among_all(mesh, exchange_times, 1),
        gradient_sum=None if is_alone else _among_all(mesh, gradient_sum_times, 2),
    )  # fmt: skip
    shared: Profile = mesh.share(profile)
    return shared


def _compute(
    config: TrainConfig, mesh: Mesh, graph: Graph | None, model: nn.Module | None, ranks: int
) -> ComputeTimes:
    """Of rank 0 alone, or of all ranks at once; on every rank."""
    samples: list[Sample] = []
    boundary_s = 0.0
    # One exact epoch and one other: fewer would be another kind of run.
    run = replace(config, stages=1, shards=1, chunks=1, epochs=max(config.epochs, 2))
    most = math.inf
    for chunks in sorted({*LADDER, config.chunks}):
        if chunks > most:
            break
        error = None
        mesh.gather(None)  # at once means at once
        if ranks > 1 or mesh.rank == 0:
            try:
                alone = Mesh(1, 1, 0, mesh.device, None, None)
                prepared = prepare(
                    replace(run, chunks=chunks), alone, graph, copy.deepcopy(model)
                )  # fmt: skip
                most = max(prepared.graph.num_vertices // LEAST_ROWS, config.chunks)
                samples += measure_steps(prepared, alone)
            except InputError as fault:
                error = fault
        mesh.agree(error)
        most = mesh.share(most)
    if ranks > 1 or mesh.rank == 0:
        boundary_s = boundary_time_per_number_s(mesh.device)
    everyone = [sample for some in mesh.gather(samples) for sample in some]
    fitted = fit_costs(everyone)
    return ComputeTimes(
        ranks=ranks,
        ops={kind: _op_times(fitted, kind) for kind in _kinds(fitted)},
        begin=fitted.costs.get(BEGIN, Affine()),
        update=fitted.costs[UPDATE],
        boundary_per_number_s=mesh.share(boundary_s),
    )


def _kinds(fitted: Fitted) -> list[str]:
    return list(dict.fromkeys(part[0] for part in fitted.costs if isinstance(part, tuple)))


def _op_times(fitted: Fitted, kind: str) -> OpTimes:
    names = [f.name for f in fields(OpTimes) if f.name != "relative_error"]
    costs = {name: fitted.costs.get((kind, name), Affine()) for name in names}
    steps = [name for name in names if name.startswith(("forward", "backward"))]
    errors = [fitted.errors[kind, name] for name in steps if (kind, name) in fitted.errors]
    return OpTimes(**costs, relative_error=max(errors))


def _message(mesh: Mesh) -> LinkTimes:
    """Of the pairs (rank, rank + 1) the one in the middle."""
    links = [fit_link(SIZES_BYTES, times) for times in message_times(mesh)]
    return sorted(links, key=lambda link: link.time_s(SIZES_BYTES[-1]))[len(links) // 2]


def _among_all(mesh: Mesh, measured: Callable[[Mesh], list[float]], rounds: int) -> LinkTimes:
    return fit_link(SIZES_BYTES, measured(mesh), rounds * (mesh.shards - 1))


def _processor() -> str:
    """What the first processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
