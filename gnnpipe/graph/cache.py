"""Caches partitions on disk, under a hash of everything that decides the result.

METIS takes seconds to minutes on a large graph, and all ranks of all runs need the same partition
at the same time. So a file is written under another name and renamed; its checksum is verified
before its content is parsed; and if a file cannot be read, or the folder cannot be written, the
graph is partitioned again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnpipe.files import check_folder
from gnnpipe.graph.npz_archive import UNREADABLE, read_arrays

_Arrays = dict[str, npt.NDArray[Any]]


def default_folder() -> Path | None:
    """``$XDG_CACHE_HOME/gnnpipe`` or ``~/.cache/gnnpipe``; ``None`` for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG rules: a relative path is to be ignored
        return Path(base) / "gnnpipe"
    try:
        return Path.home() / ".cache" / "gnnpipe"
    except RuntimeError:
        return None


def folder_of(cache_dir: str) -> Path | None:
    """The folder that ``--cache-dir`` names: '' the default one, 'off' none."""
    if cache_dir == "off":
        return None
    return Path(os.path.expanduser(cache_dir)) if cache_dir else default_folder()


def check_cache_dir(cache_dir: str) -> None:
    """``InputError`` if ``--cache-dir`` names a file."""
    path = folder_of(cache_dir)
    if path is not None and cache_dir:
        check_folder("--cache-dir", cache_dir, path, "give one, or 'off'")


def content_key(settings: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """A hash, 64 hex digits, of plain settings and of arrays of any shape.

    The same numbers give the same key whether they are stored in 32 or in 64 bits.
    """
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for name, array in sorted(arrays.items()):
        narrow = _narrow(array)
        digest.update(f"{name} {narrow.dtype.str} {narrow.shape}".encode())
        digest.update(np.ascontiguousarray(narrow).data)
    return digest.hexdigest()


def recall(folder: Path | None, key: str) -> _Arrays | None:
    """The arrays kept under ``key``; ``None`` when there are none or their file is damaged."""
    if folder is None:
        return None
    try:
        data = _path(folder, key).read_bytes()
        checksum, payload = data[:32], data[32:]
        if checksum != _checksum(key, payload):
            return None
        return dict(read_arrays(io.BytesIO(payload)))
    except UNREADABLE:
        return None


def keep(folder: Path | None, key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Store ``arrays`` (integers) under ``key``; without effect where that is not possible."""
    if folder is None:
        return
    content = io.BytesIO()
    narrow: dict[str, Any] = {name: _narrow(array) for name, array in arrays.items()}
    np.savez(content, **narrow)
    payload = content.getvalue()
    aside = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=folder, prefix=".aside-")
        with os.fdopen(handle, "wb") as file:
            file.write(_checksum(key, payload))
            file.write(payload)
        os.replace(aside, _path(folder, key))
    except (OSError, ValueError):
        if aside:
            with contextlib.suppress(OSError):
                os.unlink(aside)


def _path(folder: Path, key: str) -> Path:
    return folder / f"chunking-{key[:32]}.bin"


def _checksum(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``array`` in int32 where its values allow, else in int64."""
    limit = np.iinfo(np.int32).max
    small = array.dtype.itemsize <= 4 or array.size == 0
    if small or (array.max() <= limit and array.min() >= -limit):
        return array.astype(np.int32, copy=False)
    return array.astype(np.int64, copy=False)
