"""Cluster file: the devices and links that a plan runs on, in TOML.

Written by hand, or by `gnnpipe profile --save-cluster`.

[[devices]]                      # one per rank, in rank order
count = 4
speed = 1.0                      # relative to the profiled device
memory_bytes = 17_179_869_184

[link]                           # between any two devices; not needed for one device
bandwidth_bytes_per_s = 1.25e9
latency_s = 50e-6

[[pairs]]                        # except between two ranks
ranks = [0, 1]
bandwidth_bytes_per_s = 25e9
latency_s = 10e-6
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby

from gnnpipe.documents import document_text, named, parse_toml, read_dataclass, shown
from gnnpipe.errors import InputError

_HINT = "give a TOML file as in docs/how-to/predict-epoch-time.md"

MOST_DEVICES = 100_000
"""A larger number is rejected as a typing error."""


@dataclass(frozen=True)
class Device:
    """Device of one rank."""

    speed: float
    """Relative to the device on which the profile was measured."""
    memory_bytes: int

    def __post_init__(self) -> None:
        _check("devices", "speed", self.speed, 1e-6, 1e6)
        _check("devices", "memory_bytes", self.memory_bytes, 1)


@dataclass(frozen=True)
class Link:
    """Connection of two devices, in one direction."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        _check("link", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, 1)
        _check("link", "latency_s", self.latency_s, 0)


@dataclass(frozen=True)
class Cluster:
    """Devices by rank, and the links between them."""

    devices: tuple[Device, ...]
    link: Link
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Links that differ from ``link``, by their two ranks, the lower first."""
    source: str = field(default="cluster", compare=False)
    """The file, with its flag, for messages."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("cluster: devices []: is empty; give at least one [[devices]]")
        for low, high in self.pairs:
            if not 0 <= low < high < len(self.devices):
                raise InputError(
                    f"cluster: pairs: ranks [{low}, {high}]: give two ranks below "
                    f"{len(self.devices)}, the lower first"
                )

    def between(self, rank: int, other: int) -> Link:
        """Return the link between two ranks."""
        return self.pairs.get((min(rank, other), max(rank, other)), self.link)

    def to_toml(self, comment: str = "") -> str:
        """Return the text of a cluster file; ``comment``: lines at its beginning."""
        lines = [f"# {line}".rstrip() for line in comment.splitlines()]
        for device, alike in groupby(self.devices):
            lines += ["[[devices]]", f"count = {len(list(alike))}", f"speed = {device.speed!r}"]
            lines.append(f"memory_bytes = {device.memory_bytes}")
        if len(self.devices) > 1:
            lines += ["[link]", *_link_lines(self.link)]
        for ranks, link in sorted(self.pairs.items()):
            lines += ["[[pairs]]", f"ranks = {list(ranks)}", *_link_lines(link)]
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, path: str) -> Cluster:
        """Read a cluster file; ``InputError`` names the file, the wrong field and its value."""
        source = f"--cluster {path!r}"
        values = parse_toml(document_text(path, source, _HINT), source, _HINT)
        with named("cluster", source):
            file = read_dataclass(_File, values, "cluster")
            devices = file.members()
            if len(devices) > 1 and file.link is None:
                raise InputError(
                    "cluster: link is missing; below [link], give bandwidth_bytes_per_s and "
                    "latency_s between any two devices"
                )
            return cls(devices, file.link or NO_LINK, file.links(), source)


def _link_lines(link: Link) -> list[str]:
    return [f"{f.name} = {getattr(link, f.name)!r}" for f in fields(Link)]


@dataclass(frozen=True)
class _Devices:
    """A table of the file: equal devices."""

    speed: float
    memory_bytes: int
    count: int = 1


@dataclass(frozen=True)
class _Pair:
    """A table of the file: the link between two ranks."""

    ranks: tuple[int, ...]
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class _File:
    """The content of a cluster file."""

    devices: tuple[_Devices, ...]
    link: Link | None = None
    pairs: tuple[_Pair, ...] = ()

    def members(self) -> tuple[Device, ...]:
        """Return the devices by rank."""
        found: list[Device] = []
        for i, group in enumerate(self.devices):
            with named("cluster: devices", f"cluster: devices[{i}]"):
                _check("devices", "count", group.count, 1, MOST_DEVICES)
                found += [Device(group.speed, group.memory_bytes)] * group.count
            if len(found) > MOST_DEVICES:
                raise InputError(
                    f"cluster: devices[{i}]: count {group.count}: makes {len(found):,} devices in "
                    f"all; give at most {MOST_DEVICES:,}"
                )
        return tuple(found)

    def links(self) -> dict[tuple[int, int], Link]:
        """Return the links by their two ranks."""
        found: dict[tuple[int, int], Link] = {}
        for i, pair in enumerate(self.pairs):
            where, ranks = f"cluster: pairs[{i}]", sorted(pair.ranks)
            fault = ""
            if len(set(ranks)) != 2 or len(ranks) != 2:
                fault = "must be two different ranks, like [0, 1]"
            elif tuple(ranks) in found:
                fault = "were given before; give each pair once"
            if fault:
                raise InputError(f"{where}: ranks {shown([*pair.ranks])}: {fault}")
            with named("cluster: link", where):
                found[ranks[0], ranks[1]] = Link(pair.bandwidth_bytes_per_s, pair.latency_s)
        return found


def _check(where: str, name: str, value: float, least: float, most: float = 1e30) -> None:
    # Within these bounds every time stays finite.
    if not least <= value <= most:
        raise InputError(f"cluster: {where}: {name} {value}: must be {least:g} to {most:g}")


NO_LINK = Link(1e30, 0.0)
"""The link of a cluster of one device, which sends nothing."""
