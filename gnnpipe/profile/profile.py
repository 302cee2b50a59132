"""Takes a profile of this machine: the steps of a model, and the links between the ranks.

With several ranks the steps are measured twice, by one rank while the others are silent and by all
of them at once, for they share the memory and what is near the cores; both are in the profile.
"""

from __future__ import annotations

import copy
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.files import NewFile
from gnnpipe.graph.graph import Graph
from gnnpipe.machine import machine_key
from gnnpipe.perf import Profile
from gnnpipe.perf.fit import Fitted, Sample, fit_costs, fit_link
from gnnpipe.perf.hardware import hardware_profile
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes
from gnnpipe.profile.comm_overhead import LOAD_SIZES, Load, exchange_load, message_load
from gnnpipe.profile.comm_times import (
    THOROUGH,
    Probe,
    exchange_times,
    gradient_sum_times,
    message_times,
)
from gnnpipe.profile.steps import BEGIN, UPDATE, boundary_time_per_number_s, measure_steps
from gnnpipe.runtime.comm.cpu_affinity import crowding
from gnnpipe.runtime.comm.launch import launched_world_size
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.memory_use import held_memory
from gnnpipe.setup.prepare import Prepared, prepare

__all__ = ["compute_times", "link_times", "profile_command", "profile_lines", "take_profile"]


def profile_command(config: TrainConfig, save: str | None, hardware: str | None) -> int:
    """Measure, or take the data sheets of ``hardware``; print, and write the file ``save``."""
    for name in ("stages", "shards"):
        if getattr(config, name) != 1:
            raise InputError(
                f"--{name} {getattr(config, name)}: a profile is of no shape and serves every one; "
                "leave it out"
            )
    file = NewFile("--save", save, "profile.json")
    mesh = Mesh.join(1, launched_world_size(), config.device, config.timeout_s)
    if hardware is None:
        with mesh.on_own_cores(), held_memory(mesh.device):
            profile = take_profile(config, mesh)
    else:
        profile = _sheet_profile(config, mesh, hardware)
    if mesh.rank == 0:
        lines = profile_lines(profile)
        if file.write(profile.to_json()):
            lines.append(f"profile: {save}")
        print("\n".join(lines), flush=True)
    mesh.leave()
    return 0


def _sheet_profile(config: TrainConfig, mesh: Mesh, name: str) -> Profile:
    """Of hardware by its data sheet, 'DEVICE:LINK', for the model of the config."""
    prepared = prepare(config, mesh)
    found = hardware_profile(
        name,
        prepared.model_graph,
        dtype=config.dtype,
        comm_dtype=config.comm_dtype,
        matmul_dtype=config.matmul_dtype,
        recompute=config.recompute,
    )
    return replace(found, note=f"dataset {config.dataset}; {found.note}")


def profile_lines(profile: Profile) -> list[str]:
    """The costs as a table, for a person: of each op and 1,000 rows or edges."""
    lines = [f"profile of {profile.machine} ({profile.source}: {profile.note})"]
    for times in profile.compute:
        many = "1 rank" if times.ranks == 1 else f"{times.ranks} ranks at once"
        lines.append(
            f"{many}, {profile.threads} thread{'s' * (profile.threads > 1)} each; ms a step, a "
            "1,000 rows, a 1,000 edges:"
        )
        for kind, op in times.ops.items():
            lines.append(f"  {kind} (fit off by {op.relative_error:.0%})")
            for way in ("forward", "backward"):
                parts = [getattr(op, f"{way}_before"), getattr(op, f"{way}_after")]
                base, row, edge = (
                    sum(getattr(part, name) for part in parts)
                    for name in ("base_s", "per_row_s", "per_edge_s")
                )
                lines.append(f"    {way:8}  {base * 1e3:8.3f}  {row * 1e6:8.4f}  {edge * 1e6:8.4f}")
    for name in ("message", "exchange", "gradient_sum"):
        link: LinkTimes | None = getattr(profile, name)
        if link is not None:
            lines.append(
                f"{name.replace('_', ' ')}: {link.latency_s * 1e6:.0f} us and "
                f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s (fit off by "
                f"{link.relative_error:.0%})"
            )
    if profile.message is None:
        lines.append(
            "links: not measured, one rank is alone; start it with torchrun --nproc-per-node 2"
        )
    return lines


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
    hosts = mesh.gather(machine_key())
    together = max(hosts.count(host) for host in hosts)
    compute = [_compute(config, mesh, graph, model, 1)]
    if together > 1:
        compute.append(_compute(config, mesh, graph, model, together))
    profile = Profile(
        machine=mesh.share(f"{platform.node()}, {_processor()}"),
        source="measured",
        note=mesh.share(
            f"{time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}, dataset "
            f"{config.dataset}, {mesh.world_size} rank{'s' * (mesh.world_size > 1)}"
        ),
        device=mesh.device.type,
        dtype=config.dtype,
        comm_dtype=config.comm_dtype,
        matmul_dtype=config.matmul_dtype,
        kernel=config.kernel,
        recompute=config.recompute,
        threads=torch.get_num_threads(),
        compute=tuple(compute),
        **link_times(mesh, THOROUGH, list(pairwise(range(mesh.world_size))), False),
    )
    shared: Profile = mesh.share(profile)
    return shared


def _compute(
    config: TrainConfig, mesh: Mesh, graph: Graph | None, model: nn.Module | None, ranks: int
) -> ComputeTimes:
    """Of rank 0 alone, or of all ranks at once; on every rank."""
    samples: list[Sample] = []
    boundary_s = 0.0
    has_cores = ranks == 1 or crowding(torch.get_num_threads(), mesh.gather) <= 1
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
                # As many chunks as that: what small ones take is to be seen.
                prepared = prepare(
                    replace(run, chunks=chunks), alone, graph, copy.deepcopy(model), joins=False
                )
                most = max(prepared.graph.num_vertices // LEAST_ROWS, config.chunks)
                samples += measure_steps(_anew(prepared), alone, has_cores)
            except InputError as fault:
                error = fault
        mesh.agree(error)
        most = mesh.share(most)
    if ranks > 1 or mesh.rank == 0:
        boundary_s = boundary_time_per_number_s(mesh.device)
    everyone = [sample for some in mesh.gather(samples) for sample in some]
    return compute_times(fit_costs(everyone), ranks, mesh.share(boundary_s))


def _anew(prepared: Prepared) -> Prepared:
    """Nothing is made once: a profile tells other shapes, too, what an aggregation takes."""
    ops = tuple(replace(op, of_features=False) for op in prepared.model_graph.ops)
    return replace(prepared, model_graph=replace(prepared.model_graph, ops=ops))


def compute_times(fitted: Fitted, ranks: int, boundary_per_number_s: float) -> ComputeTimes:
    """Of so many ranks at once, from the parts that samples were fitted by."""
    return ComputeTimes(
        ranks=ranks,
        ops={kind: _op_times(fitted, kind) for kind in _kinds(fitted)},
        begin=fitted.costs.get(BEGIN, Affine()),
        update=fitted.costs[UPDATE],
        boundary_per_number_s=boundary_per_number_s,
    )


def _kinds(fitted: Fitted) -> list[str]:
    return list(dict.fromkeys(part[0] for part in fitted.costs if isinstance(part, tuple)))


def _op_times(fitted: Fitted, kind: str) -> OpTimes:
    names = [f.name for f in fields(OpTimes) if f.name != "relative_error"]
    costs = {name: fitted.costs.get((kind, name), Affine()) for name in names}
    steps = [name for name in names if name.startswith(("forward", "backward"))]
    errors = [fitted.errors[kind, name] for name in steps if (kind, name) in fitted.errors]
    return OpTimes(**costs, relative_error=max(errors))


def link_times(
    mesh: Mesh, probe: Probe, pairs: Sequence[tuple[int, int]], has_exchanged: bool
) -> dict[str, Any]:
    """Fields of a profile; of the ``pairs`` the one in the middle.

    ``has_exchanged``: what a rank itself does for an exchange is part of the steps already.
    """
    # Otherwise other threads find cores of their own.
    is_crowded = crowding(torch.get_num_threads(), mesh.gather) >= 1
    sizes = probe.sizes_bytes

    def busy(loads: Sequence[Load], messages: int, counts_own: bool) -> Affine:
        if mesh.device.type != "cpu":
            return Affine()  # What computes there is another processor.
        both = [load.own_s * counts_own + load.other_s * is_crowded for load in loads]
        link = fit_link(LOAD_SIZES, both, messages)
        return Affine(link.latency_s, 1 / link.bandwidth_bytes_per_s)

    message = exchange = summed = None
    by_pair = zip(message_times(mesh, probe, pairs), pairs, strict=True)
    if by_speed := sorted(by_pair, key=lambda found: found[0][-1]):
        times, pair = by_speed[len(by_speed) // 2]
        loads = message_load(mesh, pair, probe.repeats)
        message = replace(fit_link(sizes, times), busy=busy(loads, 1, True))
    if peers := mesh.shards - 1:
        link = fit_link(sizes, exchange_times(mesh, probe), peers)
        loads = exchange_load(mesh, probe.repeats)
        exchange = replace(link, busy=busy(loads, peers, not has_exchanged))
        # Little is computed while it travels, so the processors' part in it is not counted.
        summed = fit_link(sizes, gradient_sum_times(mesh, probe), 2 * peers)
    return {"message": message, "exchange": exchange, "gradient_sum": summed}


def _processor() -> str:
    """What the first processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
