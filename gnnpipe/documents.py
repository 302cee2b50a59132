"""Reads JSON and TOML files as dataclasses.

An ``InputError`` names the file, the field and its value, and says what to try. ``source`` stands
for the file in a message, with the flag that names it, as in "--plan 'plan.json'".
"""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from gnnpipe.errors import InputError
from gnnpipe.files import read_text
from gnnpipe.registry import nearest

T = TypeVar("T")

MAX_NUMBER = 1e30
"""Largest number in a file; sums and products with counts of rows stay finite."""

MAX_WHOLE = 10**18
"""Largest whole number in a file."""


@contextmanager
def named(what: str, source: str) -> Iterator[None]:
    """Put ``source`` in the place of ``what`` at the beginning of an ``InputError`` of the block.

    >>> with named("plan", "--plan 'a.json'"):
    ...     raise InputError("plan: chunks 0: must be at least 1")
    Traceback (most recent call last):
    gnnpipe.errors.InputError: --plan 'a.json': chunks 0: must be at least 1
    """
    try:
        yield
    except InputError as error:
        text = str(error)
        if not text.startswith(f"{what}: "):
            raise
        raise InputError(source + text.removeprefix(what)) from None


def document_text(path: str | Path, source: str, hint: str) -> str:
    """Return the text of a file; ``InputError`` ends with ``hint``."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: cannot be read ({error}); {hint}") from None


def parse_toml(text: str, source: str, hint: str) -> dict[str, Any]:
    """Return the values of a TOML text."""
    found: dict[str, Any] = _parsed(tomllib.loads, text, f"{source}: not valid TOML", hint)
    return found


def parse_json(text: str, version: int | None, source: str, hint: str) -> dict[str, Any]:
    """Return the fields of a JSON object without its "version", which must be ``version``.

    ``None``: the object has no version.
    """
    data = _parsed(_load_json, text, f"{source}: not JSON", hint)
    if not isinstance(data, dict):
        raise InputError(f"{source}: is {shown(data)}, not a JSON object; {hint}")
    if version is None:
        return data
    if "version" not in data:
        raise InputError(f"{source}: version is missing; {hint}")
    found = data.pop("version")
    if found != version:
        raise InputError(
            f"{source}: version {shown(found)}: another gnnpipe wrote the file, and this one reads "
            f"version {version}; {hint}"
        )
    return data


def _parsed(parse: Callable[[str], Any], text: str, what: str, hint: str) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:  # ValueError: also for numbers of many digits
        raise InputError(f"{what} ({error}); {hint}") from None


def _load_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is given twice in one object")
    return found


def read_dataclass(kind: type[T], data: Any, where: str) -> T:
    """Return JSON or TOML ``data`` as a dataclass; ``InputError`` names the field that is wrong.

    Fields that have a default may be left out. Types of fields: str, bool; int from 0 to
    ``MAX_WHOLE`` (also written as 8e9); float from 0 to ``MAX_NUMBER``; a ``StrEnum``; dataclasses;
    tuples and mappings (with str or int keys) of these types; and any of these types or None.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where} {shown(data)}: must be an object, in TOML a table in [ ]")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise InputError(f"{where}: {shown(name)} is not a field; {nearest(name, known)}")
    for name, f in known.items():
        if name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{where}: {name} is missing; the fields are {', '.join(known)}")
    return kind(
        **{name: _read(hints[name], value, f"{where}: {name}") for name, value in data.items()}
    )


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        return _read(next(a for a in arguments if a is not types.NoneType), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list, in TOML a table in [[ ]] for each entry")
        return tuple(_read(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        key, entry = arguments
        return {
            _key(key, k, where): _read(entry, v, f"{where}: {k[:40]}") for k, v in value.items()
        }
    if is_dataclass(hint):
        return read_dataclass(typing.cast(type, hint), value, where)
    return _read_scalar(hint, value, where)


def _key(kind: type, key: str, where: str) -> Any:
    if kind is not int:
        return key
    is_whole = key.isascii() and key.isdecimal() and len(key) < 19
    # Otherwise "1" and "01" would be one key.
    if not is_whole or key != str(int(key)):
        raise InputError(
            f"{where}: {shown(key)}: must be a whole number, at least 0, without leading zeros"
        )
    return int(key)


def _read_scalar(kind: type, value: Any, where: str) -> Any:
    if issubclass(kind, StrEnum):
        if value not in list(kind):
            raise _wrong(where, value, f"one of {', '.join(kind)}")
        return kind(value)
    if kind in (str, bool):
        if type(value) is not kind:
            raise _wrong(where, value, "text" if kind is str else "true or false")
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        # NaN compares as false.
        if not is_number or not 0 <= value <= MAX_NUMBER:
            raise _wrong(where, value, f"a number from 0 to {MAX_NUMBER:g}")
        return float(value)
    if not is_number or not 0 <= value <= MAX_WHOLE or value != int(value):
        raise _wrong(where, value, f"a whole number from 0 to {MAX_WHOLE:g}")
    return int(value)


def _wrong(where: str, value: Any, what: str) -> InputError:
    return InputError(f"{where} {shown(value)}: must be {what}")


def shown(value: Any, most: int = 40) -> str:
    """Return a value as text of at most ``most`` characters.

    >>> shown("a" * 50)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
