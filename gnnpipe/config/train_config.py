"""Configuration of a training run: checked values, read from Python, TOML or flags.

Every field is a Python argument (``TrainConfig(layers=16)``), a TOML key (``layers = 16``) and a
flag (``--layers 16``). What depends on the graph or the device is checked during set-up.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from gnnpipe.config.fields import check_range, coerce
from gnnpipe.config.settings import Settings
from gnnpipe.config.validation import check_combinations, parse_split
from gnnpipe.documents import document_text, parse_toml
from gnnpipe.errors import InputError
from gnnpipe.registry import nearest


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """The settings of one training run; ``gnnpipe train --help`` explains each.

    Raises:
        InputError: a value is of the wrong type, out of range or contradicts another value.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Settings)
        for f in fields(self):
            value = coerce(f.name, getattr(self, f.name), hints[f.name])
            object.__setattr__(self, f.name, value)
            check_range(f.name, value, f.metadata)
        parse_split(self.split)
        check_combinations(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the config with these values; ``InputError`` for a name that is not a field."""
        return cls(**cls._field_names(values, "config"))

    @classmethod
    def _field_names(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return ``values`` with '-' in names replaced by '_'; every name must be a field."""
        known = {f.name for f in fields(cls)}
        for key in values:
            name = key.replace("-", "_")
            if name in ("heads", "alpha", "theta"):
                raise InputError(
                    f"{source}: {key!r} is an argument of the model; try model_args = "
                    f"'{name}={values[key]}', or leave it out. (A run of an earlier version can be "
                    "read by that version alone: its weights have other names.)"
                )
            if name not in known:
                raise InputError(f"{source}: unknown key {key!r}; {nearest(key, known)}")
            if name != key and name in values:
                raise InputError(f"{source}: both {key!r} and {name!r}; leave one out")
        return {key.replace("-", "_"): value for key, value in values.items()}

    @classmethod
    def read_toml(cls, path: str | Path) -> dict[str, Any]:
        """Return the values in a TOML file by field name; the values are not checked yet."""
        source = f"--config {str(path)!r}"
        text = document_text(path, source, "give a TOML file")
        values = parse_toml(text, source, "try lines like layers = 4")
        return cls._field_names(values, source)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name; ``None``: the default follows from other fields."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """Return the config as TOML, without the fields that are ``None`` (their default)."""
        return tomli_w.dumps({k: v for k, v in self.to_dict().items() if v is not None})
