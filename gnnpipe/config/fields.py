"""Definition of a setting: a dataclass field with help text and allowed values, and its checks."""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from gnnpipe.errors import InputError

Number = int | float

HIGH = {int: 10**9, float: 1e30}
"""Upper limits of settings that state none: a larger number is a typing error, and may not fit into
float32 or a timer."""

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
    """Return a dataclass field with a help text and limits: low <= v <= high, above < v < below."""
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
    """Return the flag of a field; the unit of a name such as timeout_s is left out."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def scalar_type(hint: Any) -> type:
    """Return ``T`` for the type hint ``T`` or ``T | None``."""
    found: type = next((t for t in typing.get_args(hint) if t is not type(None)), hint)
    return found


def coerce(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as the type of its field; ``InputError`` if it has another type.

    Whole numbers are accepted as floats, and NumPy's numbers like Python's.
    """
    kind = scalar_type(hint)
    if value is None and kind is not hint:
        return None
    if not isinstance(value, bool):
        if kind is int and isinstance(value, numbers.Integral):
            return int(value)
        if kind is float and isinstance(value, numbers.Real):
            return float(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        text = repr(value)
        text = text if len(text) <= 60 else f"{text[:60]}..."
        raise InputError(f"{flag(name)} {text}: must be {KINDS[kind.__name__]}")
    return value


def check_text(name: str, value: str) -> None:
    """Raise ``InputError`` for text that cannot be a path or has a space at an end."""
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in value):
        raise InputError(f"{name} {value!r}: contains a character that is not text; remove it")
    if len(value) > 4000 or max(len(part.encode()) for part in value.split("/")) > 255:
        raise InputError(f"{name} {value[:40]!r}...: is longer than a path can be; shorten it")
    if value != value.strip():
        raise InputError(f"{name} {value!r}: starts or ends with a space; try {value.strip()!r}")


def check_range(name: str, value: Any, meta: Mapping[str, Any]) -> None:
    """Raise ``InputError`` if the value is not within the limits or choices of its field."""
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
