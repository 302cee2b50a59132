"""The devices for which ``--plan auto`` searches outside a run, and the times of ops on these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.perf import Profile
from gnnpipe.perf.hardware import hardware_memory_bytes, hardware_profile
from gnnpipe.plan import ModelGraph
from gnnpipe.plan.cluster import Cluster

_TIMES = "--hardware DEVICE:LINK, like h100:100gbe, or --profile FILE of `gnnpipe profile --save`"

MOST_SEARCHED = 4096
"""Devices that a plan may be searched for."""

STAND_IN = "a100:100gbe"
"""Data sheets for the memory of a plan, which does not depend on times."""


@dataclass(frozen=True)
class Hardware:
    """The devices that a plan is searched for."""

    profile: Profile | None = None
    sheets: str | None = None
    """Data sheets in place of a profile, 'DEVICE:LINK'."""
    cluster: Cluster | None = None
    devices: int | None = None
    """Number of devices, without a cluster."""

    @property
    def num_devices(self) -> int:
        """Devices of the cluster, or as many as are given."""
        return len(self.cluster.devices) if self.cluster is not None else self.devices or 1

    def device_bytes(self) -> Sequence[int]:
        """Return the memory of every device; empty if it is not known."""
        if self.cluster is not None:
            return [device.memory_bytes for device in self.cluster.devices]
        if self.sheets is not None:
            return [hardware_memory_bytes(self.sheets)] * self.num_devices
        return []

    def profile_of(self, model: ModelGraph, config: TrainConfig) -> Profile:
        """Return the profile, or that of the data sheets."""
        return self.profile or hardware_profile(self.sheets or STAND_IN, model, config)


def hardware_of(
    config: TrainConfig,
    sheets: str | None,
    cluster: Cluster | None,
    devices: int | None,
    profile: Profile | None = None,
) -> Hardware:
    """Return the devices for a search outside a run; ``InputError`` names all that is missing.

    Reads the config's profile if neither ``sheets`` nor ``profile`` gives the times of the ops.
    """
    if cluster is not None and devices is not None:
        raise InputError(
            f"--devices {devices}: {cluster.source} says how many there are; leave one out"
        )
    if devices is not None and not 1 <= devices <= MOST_SEARCHED:
        raise InputError(f"--devices {devices}: must be 1 to {MOST_SEARCHED:,}")
    if cluster is not None and len(cluster.devices) > MOST_SEARCHED:
        raise InputError(
            f"{cluster.source}: number of devices {len(cluster.devices)}: must be at most "
            f"{MOST_SEARCHED:,} for --plan auto"
        )
    missing = []
    if cluster is None and devices is None:
        missing.append("the number of devices (--devices N, or --cluster FILE)")
    if sheets is None and profile is None and not config.profile:
        missing.append(f"the times of the ops ({_TIMES})")
    if missing:
        raise InputError(f"--plan auto: give {' and '.join(missing)}")
    return Hardware(profile_or_sheets(config, sheets, profile), sheets, cluster, devices)


def profile_or_sheets(
    config: TrainConfig, sheets: str | None, profile: Profile | None = None
) -> Profile | None:
    """Return the given profile or the config's, and None if data sheets give the times of the ops.

    Raises ``InputError`` unless one of them does, and for an unknown device or link.
    """
    has_profile = profile is not None or config.profile != ""
    if sheets is None and not has_profile:
        raise InputError(f"simulate: give the times of the ops ({_TIMES})")
    if sheets is None:
        return profile or Profile.read_to_use(config.profile)
    if has_profile:
        raise InputError(
            f"--hardware {sheets}: --profile gives the times of the ops, too; leave one out"
        )
    hardware_memory_bytes(sheets)  # raises for an unknown name
    return None
