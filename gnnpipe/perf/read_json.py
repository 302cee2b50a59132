"""Dataclasses of plain data from JSON that nobody has looked at: every fault names its field."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from gnnpipe.errors import InputError

__all__ = ["read_dataclass"]

T = TypeVar("T")

MOST = 1e30
"""Of a number: what is added up and multiplied by counts of rows stays finite."""


def read_dataclass(kind: type[T], data: Any, where: str) -> T:
    """``data``, from JSON, as a ``kind``; ``InputError`` says where what is missing or wrong.

    Fields may be text, bool, whole numbers and numbers from 0 to ``MOST``, other dataclasses,
    tuples and mappings from text of these, and any of them or none.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where}: must be an object, not {_shown(data)}")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    missing = [name for name in names if name not in data]
    unknown = [name for name in data if name not in names]
    if missing or unknown:
        what, name = ("is missing", missing[0]) if missing else ("is no field", unknown[0])
        raise InputError(f"{where}: {name!r} {what}; the fields are {', '.join(names)}")
    return kind(**{name: _read(hints[name], data[name], f"{where}: {name}") for name in names})


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        hint = next(a for a in arguments if a is not types.NoneType)
        return _read(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where}: must be a list, not {_shown(value)}")
        return tuple(_read(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise InputError(f"{where}: must be an object, not {_shown(value)}")
        return {k: _read(arguments[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if is_dataclass(hint):
        return read_dataclass(typing.cast(type, hint), value, where)
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # nan compares as false.
        if not is_number or not 0 <= value <= MOST:
            raise InputError(f"{where}: must be a number from 0 to {MOST:g}, not {_shown(value)}")
        return float(value)
    if type(value) is not hint or (hint is int and value < 0):
        names = {int: "a whole number of at least 0", str: "text", bool: "true or false"}
        raise InputError(f"{where}: must be {names[hint]}, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
