"""Checks of paths and JSON objects that users give: regular files of limited size, folders, fields.

The checks come before a parser or a download starts: reading from a pipe or a device may block for
ever, and a file where a folder is expected would only be noticed at the first write.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from gnnpipe.errors import InputError

MOST_TEXT_BYTES = 1 << 20
"""Size limit of text files such as configs and plans."""


def open_plain(path: str | Path) -> BufferedReader:
    """Open a regular file for reading; ``ValueError`` for a pipe, a device or a folder."""
    # Without O_NONBLOCK, opening a pipe waits for a process that writes to the pipe.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("not a regular file")
    return open(handle, "rb")


def read_text(path: str | Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most ``most_bytes``.

    Raises ``OSError`` or ``ValueError`` with a short reason.
    """
    try:
        with open_plain(path) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise OSError(os.strerror(error.errno or 0)) from None
    if len(data) > most_bytes:
        raise ValueError(f"larger than {most_bytes >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def check_folder(flag: str, given: str, path: Path, hint: str = "give a folder") -> None:
    """Raise ``InputError`` if ``path``, the value of ``flag``, cannot be a folder.

    A folder without write permission is accepted: the files to read may exist already.
    """
    existing = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not existing.is_dir():
        raise InputError(f"{flag} {given!r}: {str(existing)!r} is not a folder; {hint}")


class NewFile:
    """The file that a flag names, or none; checked before the work whose result it will hold."""

    def __init__(self, flag: str, given: str | None, example: str) -> None:
        """Raise ``InputError`` if the file exists or its folder does not."""
        self._flag = flag
        self._path = None if given is None else Path(given)
        if self._path is None:
            return
        if given == "":
            raise InputError(f"{flag} '': give a file, like {example}")
        if os.path.lexists(self._path):
            raise InputError(f"{flag} {given!r}: exists already; give a new name")
        if not self._path.parent.is_dir():
            raise InputError(
                f"{flag} {given!r}: {str(self._path.parent)!r} is not a folder; create it"
            )

    def write(self, text: str) -> bool:
        """Write the file, if the flag was given; return whether it was."""
        if self._path is None:
            return False
        try:
            self._path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{self._flag} {str(self._path)!r}: cannot be written ({error.strerror}); give "
                "another"
            ) from None
        return True


def like_run_in(path: Path) -> str:
    """Return the end of a hint that names a run in ``path``, or '' if ``path`` holds none."""
    runs = seed_runs(path)
    return f", like {runs[0]}" if runs else ""


def seed_runs(path: Path) -> list[Path]:
    """Return the folders of the runs that ``train --seeds`` made in ``path``."""
    return sorted(p.parent for p in path.glob("seed-*/config.toml"))


_REMEDIES = {
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "allow more open files",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "make it writable",
}


def how_to_write(number: int | None) -> str:
    """Return advice for the ``errno`` of a failed write.

    >>> how_to_write(errno.ENOSPC)
    'free some space'
    """
    return _REMEDIES.get(number or 0, "free some space")


class Fields:
    """A JSON object with checked access by name and type; an ``InputError`` names the field."""

    def __init__(self, values: Any, where: str) -> None:
        """``where``: the file and the field that contain the object."""
        if not isinstance(values, dict):
            raise InputError(f"{where}: is not a JSON object; try another run")
        self._values, self.where = values, where

    def _as(self, name: str, is_kind: Callable[[Any], bool], kind: str) -> Any:
        if name not in self._values:
            raise InputError(
                f"{self.where}: has no {name}; another version of gnnpipe wrote it, run again"
            )
        value = self._values[name]
        if not is_kind(value):
            shown = repr(value)
            shown = shown if len(shown) < 60 else shown[:57] + "..."
            raise InputError(f"{self.where}: {name} {shown}; must be {kind}")
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        found: str = self._as(name, lambda v: isinstance(v, str), "text")
        return found

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        found: bool = self._as(name, lambda v: isinstance(v, bool), "true or false")
        return found

    def number(self, name: str, least: float = -math.inf) -> float:
        """Return a finite number of at least ``least``."""
        words = "a number" if least == -math.inf else f"a number, at least {least:g}"
        return float(self._as(name, lambda v: _is_number(v) and v >= least, words))

    def whole(self, name: str, least: int = 0, most: float = math.inf) -> int:
        """Return a whole number from ``least`` to ``most``."""
        words = f"a whole number, at least {least}" + f" and at most {most}" * (most < math.inf)
        found: int = self._as(name, lambda v: _is_whole(v) and least <= v <= most, words)
        return found

    def wholes(self, name: str, count: int) -> list[int]:
        """Return a list of ``count`` whole numbers."""
        found: list[int] = self._as(
            name,
            lambda v: isinstance(v, list) and len(v) == count and all(map(_is_whole, v)),
            f"{count} whole numbers",
        )
        return found

    def optional_number(self, name: str) -> float | None:
        """Return a number, or ``None`` for null."""
        found = self._as(name, lambda v: v is None or _is_number(v), "a number or null")
        return None if found is None else float(found)

    def numbers(self, name: str) -> list[float]:
        """Return a list of numbers."""
        found = self._as(
            name, lambda v: isinstance(v, list) and all(map(_is_number, v)), "a list of numbers"
        )
        return [float(v) for v in found]

    def fields(self, name: str) -> Fields:
        """Return a nested object."""
        found = self._as(name, lambda v: isinstance(v, dict), "a JSON object")
        return Fields(found, f"{self.where}: {name}")

    def list_of_fields(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        found = self._as(name, lambda v: isinstance(v, list), "a list")
        return [Fields(v, f"{self.where}: {name} {i}") for i, v in enumerate(found)]


def _is_number(value: Any) -> bool:
    # The limit also excludes NaN and whole numbers that no float can hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_whole(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int)
