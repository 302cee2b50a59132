"""The plan: which ops form which stage, how many shards and chunks, in which order.

Planners write one and the runtime reads one; nothing else passes between them. A plan is plain data
and survives JSON, so a run can be repeated from the file in its folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gnnpipe.errors import InputError

__all__ = ["Plan", "Transfer"]

VERSION = 3


@dataclass(frozen=True)
class Transfer:
    """Values that ``source`` sends to ``target`` for every chunk; their gradients come back."""

    source: int
    target: int
    widths: Mapping[str, int]
    types: Mapping[str, str] = field(default_factory=dict)
    """The type of the vertices of each value, where there are several types."""


@dataclass(frozen=True)
class Plan:
    """S stages x G shards x K chunks of a model; the mesh has S * G ranks."""

    stages: tuple[tuple[int, int], ...]
    """Per stage its ops as (first, one past the last)."""
    steps: tuple[int, ...]
    """Per stage the number of its steps (see ``schedule.program``)."""
    shards: int
    chunks: int
    schedule: str
    """Name of the schedule (see ``schedule.schedules``)."""
    transfers: tuple[Transfer, ...]

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0][0] != 0:
            raise InputError("plan: the first stage must begin with op 0")
        for (first, last), following in zip(self.stages, (*self.stages[1:], None), strict=True):
            if first >= last or (following is not None and following[0] != last):
                raise InputError(f"plan: stages {list(self.stages)} do not tile the ops")
        if len(self.steps) != len(self.stages) or min(self.steps) < 1:
            raise InputError(f"plan: steps {list(self.steps)} do not fit {len(self.stages)} stages")
        if self.shards < 1 or self.chunks < 1:
            raise InputError("plan: shards and chunks must be at least 1")
        for t in self.transfers:
            if not 0 <= t.source < t.target < self.num_stages:
                raise InputError(f"plan: transfer {t.source} to {t.target} is not between stages")

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stages)

    @property
    def num_ops(self) -> int:
        """Ops of the model."""
        return self.stages[-1][1]

    @property
    def world_size(self) -> int:
        """Ranks: S * G."""
        return self.num_stages * self.shards

    def sends(self, stage: int) -> list[Transfer]:
        """What ``stage`` sends forward."""
        return [t for t in self.transfers if t.source == stage]

    def receives(self, stage: int) -> list[Transfer]:
        """What ``stage`` gets from earlier stages."""
        return [t for t in self.transfers if t.target == stage]

    def to_json(self) -> str:
        """The plan as text, with a version."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """A plan from ``to_json``'s text; ``InputError`` names what is wrong with it."""
        try:
            data: dict[str, Any] = dict(json.loads(text))
            if data.pop("version") != VERSION:
                raise InputError(f"{source}: written by another version; expected {VERSION}")
            data["stages"] = tuple((_whole(a), _whole(b)) for a, b in data["stages"])
            data["steps"] = tuple(map(_whole, data["steps"]))
            data["shards"], data["chunks"] = _whole(data["shards"]), _whole(data["chunks"])
            data["transfers"] = tuple(
                Transfer(
                    _whole(t["source"]),
                    _whole(t["target"]),
                    {str(k): _whole(v) for k, v in t["widths"].items()},
                    {str(k): str(v) for k, v in t["types"].items()},
                )
                for t in data["transfers"]
            )
            return cls(**data)
        except InputError as error:
            raise InputError(f"{error}; try the plan.json of a run, or no plan") from None
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise InputError(f"{source}: not a plan ({why}); try the plan.json of a run") from None


def _whole(value: Any) -> int:
    """A number of a plan, which is never a fraction, a word or a truth value."""
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value
