"""Reads a small text file whole, and nothing else that a path may lead to.

A pipe or a device never ends, or never begins; a file of gigabytes is not the settings of a run.
Both would hang the reader long before its parser could complain.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["MOST_BYTES", "read_text"]

MOST_BYTES = 1 << 20
"""Of a file that a person or a run writes: a config, a plan."""


def read_text(path: str | Path) -> str:
    """The text of a plain UTF-8 file of at most ``MOST_BYTES``.

    ``OSError`` or ``ValueError`` says in a few words why it cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("not a plain file")
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise OSError(os.strerror(error.errno or 0)) from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
