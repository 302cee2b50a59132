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

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from gnnpipe.errors import InputError
from gnnpipe.files import read_text

MOST_DEVICES = 100_000
"""A larger count is rejected as a typing error."""


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

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("cluster: devices: the list is empty; give at least one [[devices]]")
        for low, high in self.pairs:
            if not 0 <= low < high < len(self.devices):
                raise InputError(
                    f"cluster: pairs.ranks [{low}, {high}]: give two ranks below "
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
        try:
            values = tomllib.loads(read_text(Path(path)))
        except OSError as error:
            raise InputError(f"{source}: cannot be read ({error}); give a TOML file") from None
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{source}: not valid TOML ({error}); see docs/how-to/predict-epoch-time.md"
            ) from None
        try:
            return cls._from(values)
        except InputError as error:
            raise InputError(f"{source}: {str(error).removeprefix('cluster: ')}") from None

    @classmethod
    def _from(cls, values: dict[str, Any]) -> Cluster:
        groups = values.get("devices")
        # A single device needs no link.
        is_single = (
            isinstance(groups, list)
            and len(groups) == 1
            and isinstance(groups[0], dict)
            and groups[0].get("count", 1) == 1
        )
        needed = {"devices"} if is_single else {"devices", "link"}
        _check_fields(values, "the file", needed, {"link", "pairs"} - needed)
        devices: list[Device] = []
        for group in _tables(values["devices"], "devices"):
            _check_fields(group, "devices", {"speed", "memory_bytes"}, {"count"})
            count = _whole(group.get("count", 1), "devices: count")
            if not 1 <= count <= MOST_DEVICES - len(devices):
                raise InputError(f"devices: count {count}: give 1 to {MOST_DEVICES:,} in all")
            memory = _whole(group["memory_bytes"], "devices: memory_bytes")
            devices += [Device(_number(group["speed"], "devices: speed"), memory)] * count
        pairs = {}
        for group in _tables(values.get("pairs", []), "pairs"):
            link, ranks = _link(group, "pairs", {"ranks"}), group["ranks"]
            if not isinstance(ranks, list) or len(ranks) != 2:
                raise InputError(f"pairs: ranks {ranks!r}: give two ranks, like [0, 1]")
            low, high = sorted(_whole(rank, "pairs: ranks") for rank in ranks)
            pairs[low, high] = link
        if "link" not in values:
            return cls(tuple(devices), NO_LINK, pairs)
        if not isinstance(values["link"], dict):
            raise InputError("link: is not a table; write [link] and its fields below")
        return cls(tuple(devices), _link(values["link"], "link", set()), pairs)


def _link_lines(link: Link) -> list[str]:
    return [f"{f.name} = {getattr(link, f.name)!r}" for f in fields(Link)]


def _link(values: dict[str, Any], where: str, others: set[str]) -> Link:
    """Return the link of a table, which also has the fields ``others``."""
    names = [f.name for f in fields(Link)]
    _check_fields(values, where, {*names, *others}, set())
    return Link(*(_number(values[name], f"{where}: {name}") for name in names))


def _tables(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise InputError(f"{where}: is not a list of tables; write [[{where}]] before each")
    return value


def _check_fields(values: dict[str, Any], where: str, needed: set[str], optional: set[str]) -> None:
    known = ", ".join(sorted(needed | optional))
    for name in sorted(needed - values.keys()):
        raise InputError(f"{where}: {name} is missing; the fields are {known}")
    for name in sorted(values.keys() - needed - optional):
        raise InputError(f"{where}: {name[:40]!r} is not a field; the fields are {known}")


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
        raise InputError(f"{where} {str(value)[:40]!r}: give a number, like 1.0")
    return float(value)


def _whole(value: Any, where: str) -> int:
    # TOML reads 80e9 as a float.
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    if not is_whole or abs(value) > 10**18:
        raise InputError(f"{where} {str(value)[:40]!r}: give a whole number")
    return int(value)


def _check(where: str, name: str, value: float, least: float, most: float = 1e30) -> None:
    # Within these bounds every time stays finite.
    if not least <= value <= most:
        raise InputError(f"cluster: {where}: {name} {value}: must be {least:g} to {most:g}")


NO_LINK = Link(1e30, 0.0)
"""The link of a cluster of one device, which sends nothing."""
