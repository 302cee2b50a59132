"""How the command line refuses words: one line that names the flag, the word and what to try.

``argparse`` prints its usage and speaks of arguments; a user has typed flags. What the values of
the flags may be stands with the settings.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from gnnpipe.errors import InputError
from gnnpipe.registry import nearest

__all__ = ["Parser", "may_speak", "one_line", "reader"]

KINDS = {"int": ("a whole number", "16"), "float": ("a number", "0.01")}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """``argparse``'s complaint as an ``InputError``."""
        switch = re.fullmatch(
            r"argument (--[\w-]+)/(--no-[\w-]+): ignored explicit argument (.*)", message
        )
        if switch:
            raise InputError(_takes_no_value(*switch.groups()))
        message = message.removeprefix("argument ")
        raise InputError(f"{message}; see `{self.prog} --help`")

    def refuse(
        self, unknown: Sequence[str], words: Sequence[str], commands: Mapping[str, Parser]
    ) -> NoReturn:
        """``unknown`` of the ``words`` are no flags: the first, with what may have been meant."""
        word = unknown[0]
        # As argparse writes --flag=value.
        others = [n for n, c in commands.items() if word.split("=")[0] in c._option_string_actions]
        if others and word.startswith("--"):
            raise InputError(
                f"{word}: no flag of `{self.prog}`, but of `gnnpipe {others[0]}`; leave it out"
            )
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        if word.startswith("-") and word.strip("-"):
            # Without the dashes, which all flags have in common.
            hint = nearest(word.strip("-"), [flag.strip("-") for flag in flags])
            if hint.startswith("known"):
                hint = f"see `{self.prog} --help`"
            hint = hint.replace("did you mean '", "did you mean '--")
            raise InputError(f"{word}: unknown flag; {hint}")
        at = list(words).index(word)
        before = self._option_string_actions.get(words[at - 1]) if at else None
        if isinstance(before, argparse.BooleanOptionalAction):
            on, off = before.option_strings
            raise InputError(_takes_no_value(on, off, repr(word)))
        raise InputError(f"{word!r}: belongs to no flag; see `{self.prog} --help`")


def _takes_no_value(on: str, off: str, value: str) -> str:
    return f"{on} {value}: takes no value; try {on} or {off} alone"


def reader(kind: type) -> Callable[[str], Any]:
    """Reads the value of a flag as ``kind``."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            what, example = KINDS[kind.__name__]
            raise argparse.ArgumentTypeError(
                f"{text[:60]!r} is not {what}, like {example}"
            ) from None

    return read


def one_line(error: Exception) -> str:
    """The text of an error, whatever names it holds, on one line."""
    return " ".join(str(error).split())


def may_speak(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process tells of errors that all ranks have: rank 0, or one that is no rank."""
    rank, world = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "1")
    is_rank = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    return not is_rank or int(rank) == 0
