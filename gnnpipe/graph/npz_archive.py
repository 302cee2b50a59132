"""Reads arrays from an .npz file of unknown origin safely.

``numpy.load`` allocates the size that a header claims before it checks the size of the file: 400
bytes can claim terabytes. Here each header is read first, and an array is made only if its type is
plain, its size is that of its entry and all arrays fit into memory. No pickle is read, and entries
are never written under their own names.
"""

from __future__ import annotations

import shutil
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from gnnpipe.machine import memory_bytes

UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    EOFError,
    KeyError,
    IndexError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors of reading a file that is missing, truncated, pickled, locked or of another kind."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""The fixed part of an entry's header, which ends in the lengths of its name and extra field."""

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Entries:
    """The arrays of an open .npz file by name, read one by one."""

    def __init__(self, packed: zipfile.ZipFile) -> None:
        self._packed = packed
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in packed.infolist():
            name = info.filename.removesuffix(".npy")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"entry {name[:60]!r} is packed in a way that numpy does not use")
            if name in self._infos:
                raise ValueError(f"two entries named {name[:60]!r}")
            self._infos[name] = info

    @property
    def names(self) -> Collection[str]:
        """The names of all arrays."""
        return self._infos.keys()

    def size_bytes(self, name: str) -> int:
        """Unpacked size of an array with its header. ``KeyError`` if there is none."""
        return self._infos[name].file_size

    def read(self, names: Collection[str]) -> dict[str, Any]:
        """These arrays; ``ValueError`` if they do not fit into memory together."""
        total, most = sum(map(self.size_bytes, names)), memory_bytes()
        if total > most:
            raise ValueError(
                f"its arrays take {total / 2**30:,.1f} GiB, and this machine has "
                f"{most / 2**30:,.1f}"
            )
        return {name: self._array(name) for name in names}

    def mapped(self, name: str, file: IO[bytes]) -> Any:
        """An array, memory-mapped from the open ``file`` of the archive; read if it is packed.

        Changes in memory do not reach the file.
        """
        info = self._infos[name]
        with self._entry(name) as entry:
            shape, is_fortran, dtype = _header(entry, name)
            header_bytes = entry.tell()
        file.seek(info.header_offset)
        local = file.read(_LOCAL_HEADER.size)
        name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local)[-2:]
        offset = info.header_offset + len(local) + name_bytes + extra_bytes + header_bytes
        is_packed = info.compress_type != zipfile.ZIP_STORED
        if is_packed or not shape or 0 in shape or offset % dtype.alignment:
            return self._array(name)
        order: Any = "F" if is_fortran else "C"
        return np.asarray(np.memmap(file, dtype, "c", offset, shape, order))

    def unpack(self, name: str, file: IO[bytes]) -> None:
        """Write an array that is too large for memory to ``file``, as .npy."""
        with self._entry(name) as entry:
            shutil.copyfileobj(entry, file, 1 << 24)

    def _array(self, name: str) -> Any:
        with self._entry(name) as entry:
            return np.lib.format.read_array(entry, allow_pickle=False)

    @contextmanager
    def _entry(self, name: str) -> Iterator[IO[bytes]]:
        """An entry at its beginning, after a check of its header."""
        info = self._infos[name]
        with self._packed.open(info) as entry:
            size_bytes = _promised_bytes(entry, name)
            if entry.tell() + size_bytes != info.file_size:
                raise ValueError(
                    f"{name} promises {size_bytes:,} bytes and holds "
                    f"{info.file_size - entry.tell():,}"
                )
            entry.seek(0)
            yield entry


def _promised_bytes(entry: IO[bytes], name: str) -> int:
    """Size of an array according to its header; reads ``entry`` to the end of the header."""
    shape, _, dtype = _header(entry, name)
    size_bytes = dtype.itemsize
    for length in shape:
        if length < 0:
            raise ValueError(f"{name} has shape {shape}")
        size_bytes *= length
    return size_bytes


def _header(entry: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran's order, and type of an array; reads the header of ``entry``."""
    version = np.lib.format.read_magic(entry)
    if version not in _READ_HEADER:
        raise ValueError(f"{name} is in format {version} of .npy, which is not known")
    shape, is_fortran, dtype = _READ_HEADER[version](entry)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which could run code (allow_pickle=False)")
    return shape, is_fortran, dtype


@contextmanager
def opened(file: IO[bytes]) -> Iterator[Entries]:
    """The arrays in an open .npz file."""
    with zipfile.ZipFile(file) as packed:
        yield Entries(packed)


def read_arrays(file: IO[bytes], wanted: Collection[str] | None = None) -> Mapping[str, Any]:
    """The arrays of an open .npz file by name: all, or those wanted and ``None`` for the others.

    One of ``UNREADABLE`` says what is wrong with it.
    """
    with opened(file) as entries:
        names = entries.names if wanted is None else [n for n in entries.names if n in wanted]
        found = entries.read(names)
        return {name: found.get(name) for name in entries.names}
