"""Argument parser: flags generated from the fields of ``TrainConfig``, and errors in one line."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag, scalar_type
from gnnpipe.errors import InputError
from gnnpipe.registry import nearest

EXAMPLES = {"int": ("a whole number", "16"), "float": ("a number", "0.01")}


class Parser(argparse.ArgumentParser):
    """Reports errors as ``InputError``, in one line that names the flag and what to try."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as an ``InputError``."""
        switch = re.fullmatch(
            r"argument (--[\w-]+)/(--no-[\w-]+): ignored explicit argument (.*)", message
        )
        if switch:
            raise InputError(_takes_no_value(*switch.groups()))
        message = message.removeprefix("argument ")
        raise InputError(f"{message}; see `{self.prog} --help`")

    def refuse(
        self, unknown: Sequence[str], arguments: Sequence[str], commands: Mapping[str, Parser]
    ) -> NoReturn:
        """Raise ``InputError`` for the first of the ``unknown`` arguments, with a suggestion."""
        word = unknown[0]
        name = word.split("=")[0]
        others = [n for n, c in commands.items() if name in c._option_string_actions]
        # A word that begins a flag of this command, such as --layer for --layers, is a slip.
        is_slip = any(flag.startswith(name) for flag in self._option_string_actions)
        if others and word.startswith("--") and not is_slip:
            raise InputError(
                f"{word}: not a flag of `{self.prog}` but of `gnnpipe {others[0]}`; leave it out"
            )
        if word.startswith("-") and word.strip("-"):
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = nearest(word.strip("-"), [flag.strip("-") for flag in flags])
            if hint.startswith("known"):
                hint = f"see `{self.prog} --help`"
            hint = hint.replace("did you mean '", "did you mean '--")
            raise InputError(f"{word}: unknown flag; {hint}")
        at = list(arguments).index(word)
        before = self._option_string_actions.get(arguments[at - 1]) if at else None
        if isinstance(before, argparse.BooleanOptionalAction):
            on, off = before.option_strings
            raise InputError(_takes_no_value(on, off, repr(word)))
        raise InputError(f"{word!r}: a value without a flag; see `{self.prog} --help`")


def _takes_no_value(on: str, off: str, value: str) -> str:
    return f"{on} {value}: takes no value; try {on} or {off} alone"


def number(kind: type) -> Callable[[str], Any]:
    """Return an argparse ``type`` that reads ``kind`` and gives an example when it cannot."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            what, example = EXAMPLES[kind.__name__]
            raise argparse.ArgumentTypeError(
                f"{text[:60]!r} is not {what}, like {example}"
            ) from None

    return read


def add_settings(
    command: Parser, defaults: Mapping[str, Any], names: Collection[str] | None = None
) -> None:
    """Add ``--config`` and a flag for every field of ``TrainConfig``, in groups.

    ``defaults``: defaults of this command that differ from those of ``TrainConfig``. ``names``: add
    the flags of these fields only, whose defaults are those of a run.
    """
    if names is None:
        command.add_argument("--config", help="TOML file with any of the settings below")
    hints = typing.get_type_hints(TrainConfig)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        if names is not None and field.name not in names:
            continue
        kind = scalar_type(hints[field.name])
        text = field.metadata["help"].replace("%", "%%")
        default = defaults.get(field.name, field.default)
        if default not in (None, "") and names is None:
            text += f" (default {default})"
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": number(kind), "metavar": kind.__name__.upper()}
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = command.add_argument_group(group)
        groups[group].add_argument(flag(field.name), **options)


def config_of(
    options: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Return the config: ``defaults``, overridden by the TOML file, overridden by the flags.

    With ``--resume``, all of these override the config of the resumed run.
    """
    values = dict(defaults or {})
    if options.config is not None:
        values |= TrainConfig.read_toml(options.config)
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    values |= {name: value for name, value in vars(options).items() if name in names}
    if getattr(options, "resume", None) is not None:
        from gnnpipe.run.resume import resumed_config

        config = resumed_config(options.resume, values)
    else:
        config = TrainConfig.from_dict(values)
    return config
