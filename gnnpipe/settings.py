"""What a setting is: a field with a help text and a border, and the checks that go with it.

``config`` defines the fields; the command line reads their metadata. Every fault names the flag,
the value and what to try.
"""

from __future__ import annotations

import math
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from gnnpipe.errors import InputError

__all__ = ["check_border", "flag", "setting", "typed"]

Number = int | float


def setting(
    default: Any,
    text: str,
    *,
    group: str,
    low: Number | None = None,
    above: Number | None = None,
    below: Number | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with its help text and its border: low <= v, above < v, v < below."""
    meta = {
        "help": text, "group": group, "low": low, "above": above, "below": below,
        "choices": choices,
    }  # fmt: skip
    return field(default=default, metadata=meta)


def flag(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")


def typed(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the field's type, taking whole numbers for floats; else an ``InputError``."""
    optional = isinstance(hint, types.UnionType)
    if value is None and optional:
        return None
    want = next(t for t in typing.get_args(hint) if t is not type(None)) if optional else hint
    if not isinstance(value, bool):  # numpy's numbers are as good as Python's
        if want is int and isinstance(value, numbers.Integral):
            return int(value)
        if want is float and isinstance(value, numbers.Real):
            return float(value)
    if want is str and isinstance(value, Path):
        return str(value)
    if not isinstance(value, want) or (isinstance(value, bool) and want is not bool):
        raise InputError(f"{flag(name)} {value!r}: must be of type {want.__name__}")
    return value


def check_border(name: str, value: Any, meta: Mapping[str, Any]) -> None:
    """``InputError`` if the value is outside the field's border or choices."""
    if value is None:
        return
    name = flag(name)
    if meta["choices"] and value not in meta["choices"]:
        raise InputError(f"{name} {value!r}: must be one of {', '.join(meta['choices'])}")
    if isinstance(value, bool | str):
        return
    if not math.isfinite(value):
        raise InputError(f"{name} {value}: must be a finite number")
    if meta["low"] is not None and value < meta["low"]:
        raise InputError(f"{name} {value}: must be at least {meta['low']}")
    if meta["above"] is not None and value <= meta["above"]:
        raise InputError(f"{name} {value}: must be more than {meta['above']}")
    if meta["below"] is not None and value >= meta["below"]:
        raise InputError(f"{name} {value}: must be less than {meta['below']}")
