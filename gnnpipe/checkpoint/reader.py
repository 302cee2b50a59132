"""Reads one checkpoint from its folder, under any number of ranks.

The manifest is plain JSON: a version, and the SHA-256 of every file. A folder with the name of a
checkpoint was complete once (see ``write_checkpoint``); the checksums tell whether it still is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from gnnpipe.checkpoint.rank_file import RANK_FILE_END, StoredTensor, checksum_of, read_header
from gnnpipe.errors import InputError
from gnnpipe.files import read_text

VERSION = 2
MANIFEST = "manifest.json"
MAX_TEXT_BYTES = 1 << 28
"""Limit for a manifest or the rows of metrics.csv."""


class StoredCheckpoint:
    """A checkpoint on disk, opened for reading."""

    def __init__(self, path: Path, verifies: bool = True) -> None:
        """Read manifest and headers; ``InputError`` names a damaged file.

        ``verifies``: compare every file with its checksum. One rank does so for all.
        """
        self.path = path
        files = _read_manifest(path)
        for name, checksum in files.items() if verifies else ():
            try:
                is_whole = checksum_of(path / name) == checksum
            except (OSError, ValueError) as error:
                raise InputError(f"{path / name}: cannot be read ({error})") from None
            if not is_whole:
                raise InputError(f"{path / name}: is damaged (its checksum differs)")
        self.tensors: dict[str, StoredTensor] = {}
        """Tensors of all ranks by name."""
        for name in files:
            if name.endswith(RANK_FILE_END):
                self.tensors |= read_header(path / name)

    def text(self, name: str) -> str:
        """Return the content of a text file of the checkpoint."""
        return _text(self.path / name)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these tensors by name, on the CPU."""
        found = {}
        for name in names:
            if name not in self.tensors:
                raise InputError(f"{self.path}: holds no {name!r}; is it of another model?")
            found[name] = self.tensors[name].read()
        return found


def manifest_text(checksums: dict[str, str]) -> str:
    """Return the content of the manifest: its own checksum, then JSON."""
    content = json.dumps({"version": VERSION, "files": checksums})
    return f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}"


def _read_manifest(path: Path) -> dict[str, str]:
    """Return the checksums by file name."""
    checksum, _, text = _text(path / MANIFEST).partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != checksum:
        raise InputError(f"{path / MANIFEST}: is damaged (its checksum differs)")
    try:
        manifest = json.loads(text)
        version, files = manifest["version"], dict(manifest["files"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path / MANIFEST}: is no manifest ({error!r})") from None
    if version != VERSION:
        raise InputError(
            f"{path}: is of checkpoint version {version}, not {VERSION}; go on with the gnnpipe "
            "that wrote it"
        )
    for name in files:
        # Anybody can compute a checksum: a name must not lead out of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"{path / MANIFEST}: {name!r} is no file of its folder")
    return files


def _text(path: Path) -> str:
    try:
        return read_text(path, MAX_TEXT_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
