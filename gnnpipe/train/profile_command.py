"""``gnnpipe profile``: what it prints and where the profile goes."""

from __future__ import annotations

from dataclasses import replace

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.files import NewFile
from gnnpipe.perf import Profile
from gnnpipe.perf.hardware import hardware_profile
from gnnpipe.perf.profile import LinkTimes
from gnnpipe.runtime.comm.launch import launched_world_size
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare
from gnnpipe.profile.profile import take_profile

__all__ = ["profile_command", "profile_lines"]


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
        with mesh.on_own_cores():
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
        name, prepared.model_graph, dtype=config.dtype, comm_dtype=config.comm_dtype,
        matmul_dtype=config.matmul_dtype, recompute=config.recompute,
    )  # fmt: skip
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
