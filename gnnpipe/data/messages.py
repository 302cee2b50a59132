"""Errors and warnings about a data set, each in one line."""

from __future__ import annotations

from typing import NoReturn

from gnnpipe import output
from gnnpipe.errors import InputError


def fail(name: str, wrong: str, hint: str) -> NoReturn:
    """Raise ``InputError`` about the data set ``name``: the fault and a remedy to try."""
    raise InputError(f"dataset {name!r}: {wrong}; try: {hint}")


def warn(name: str, text: str) -> None:
    """Warn about the graph ``name``, at the line outside gnnpipe that led here."""
    output.warn(f"graph {name!r}: {text}")
