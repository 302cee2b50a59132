"""What a path from outside may lead to: a plain file, a small text, a folder.

A pipe or a device never ends, or never begins; a file of gigabytes is not the settings of a run; a
file in the place of a folder is found out by whoever writes first. All of these are told here,
before a parser or a download begins.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from gnnpipe.errors import InputError

__all__ = [
    "MOST_TEXT_BYTES",
    "NewFile",
    "check_folder",
    "how_to_write",
    "like_run_in",
    "open_plain",
    "read_text",
    "seed_runs",
]

MOST_TEXT_BYTES = 1 << 20
"""Of a file that a person or a run writes: a config, a plan."""


def open_plain(path: str | Path) -> BufferedReader:
    """A file opened to be read; ``ValueError`` for a pipe, a device or a folder."""
    # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("not a plain file")
    return open(handle, "rb")


def read_text(path: str | Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The text of a plain UTF-8 file of at most ``most_bytes``.

    ``OSError`` or ``ValueError`` says in a few words why it cannot be read.
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
    """``InputError`` if ``path``, which ``flag`` names, is no folder and cannot become one.

    One that cannot be written will do: others may have filled it.
    """
    existing = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not existing.is_dir():
        raise InputError(f"{flag} {given!r}: {str(existing)!r} is no folder; {hint}")


class NewFile:
    """A file that a flag asks for, or none; checked before any work is done for it."""

    def __init__(self, flag: str, given: str | None, example: str) -> None:
        """``InputError`` if there is something already, or nothing can be."""
        self._flag = flag
        self._path = None if given is None else Path(given)
        if self._path is None:
            return
        if given == "":
            raise InputError(f"{flag} '': give a file, like {example}")
        if os.path.lexists(self._path):
            raise InputError(f"{flag} {given!r}: is there already; give a new name")
        if not self._path.parent.is_dir():
            raise InputError(f"{flag} {given!r}: {str(self._path.parent)!r} is no folder; make it")

    def write(self, text: str) -> bool:
        """Whether there was one to be written."""
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
    """Where several seeds were trained the folder of one of them, as the end of a hint; else ''."""
    runs = seed_runs(path)
    return f", like {runs[0]}" if runs else ""


def seed_runs(path: Path) -> list[Path]:
    """The runs in a folder that ``--seeds`` was trained into."""
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
    """What to do about the ``errno`` of a write that failed.

    >>> how_to_write(errno.ENOSPC)
    'make room'
    """
    return _REMEDIES.get(number or 0, "make room")
