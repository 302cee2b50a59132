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

__all__ = ["check_border", "check_text", "flag", "setting", "typed"]

Number = int | float

HIGH = {int: 10**9, float: 1e30}
"""The largest number that a setting without a border of its own may be: beyond lies a slip of the
keyboard, and what float32 or a clock cannot hold."""

KINDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def setting(
    default: Any,
    text: str,
    *,
    group: str,
    low: Number | None = None,
    above: Number | None = None,
    below: Number | None = None,
    high: Number | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with its help text and its border: low <= v <= high, above < v < below."""
    meta = {
        "help": text,
        "group": group,
        "low": low,
        "above": above,
        "below": below,
        "high": high,
        "choices": choices,
    }
    return field(default=default, metadata=meta)


def flag(name: str) -> str:
    """The command line's name of a field: its unit is said in the help."""
    return "--" + name.removesuffix("_s").replace("_", "-")


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
        text = repr(value)
        text = text if len(text) <= 60 else f"{text[:60]}..."
        raise InputError(f"{flag(name)} {text}: must be {KINDS[want.__name__]}")
    return value


def check_text(name: str, value: str) -> None:
    """Text that no file name or TOML file can hold, or that is not what it looks like."""
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in value):
        raise InputError(f"{name} {value!r}: holds a character that is no text; leave it out")
    if len(value) > 4000 or max(len(part.encode()) for part in value.split("/")) > 255:
        raise InputError(f"{name} {value[:40]!r}...: is longer than a path can be; give a shorter")
    if value != value.strip():
        raise InputError(f"{name} {value!r}: has a space at an end; try {value.strip()!r}")


def check_border(name: str, value: Any, meta: Mapping[str, Any]) -> None:
    """``InputError`` if the value is outside the field's border or choices."""
    if value is None:
        return
    name = flag(name)
    if meta["choices"] and value not in meta["choices"]:
        raise InputError(f"{name} {value!r}: must be one of {', '.join(meta['choices'])}")
    if isinstance(value, str):
        check_text(name, value)
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
    high = HIGH[type(value)] if meta["high"] is None else meta["high"]
    if value > high:
        raise InputError(f"{name} {value}: must be at most {high:,}")
