"""Errors and warnings about a data set, each in one line."""

from __future__ import annotations

import sys
import warnings
from typing import NoReturn

from gnnpipe.errors import InputError


def fail(name: str, wrong: str, hint: str) -> NoReturn:
    """Raise ``InputError`` about the data set ``name``: the fault and a remedy to try."""
    raise InputError(f"dataset {name!r}: {wrong}; try: {hint}")


def warn(name: str, text: str) -> None:
    """Warn about the graph ``name``, at the line outside gnnpipe that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "gnnpipe":
        frame, level = frame.f_back, level + 1
    warnings.warn(f"graph {name!r}: {text}", UserWarning, stacklevel=level)
