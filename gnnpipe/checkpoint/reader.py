"""One checkpoint on disk, by torch.distributed.checkpoint: tensors of all ranks, and plain state.

torch keeps its table of contents as a pickle, and a pickle can run code. So the table is kept a
second time in a manifest of plain JSON, with a checksum of every file, and only that one is read;
torch's own stays for torch's tools. A folder of its name is a
checkpoint that was whole once (see ``write``), and the checksums tell if it still is.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from gnnpipe.checkpoint.rank_file import checksum_of
from gnnpipe.errors import InputError
from gnnpipe.files import read_text

__all__ = ["MANIFEST", "VERSION", "StoredCheckpoint", "metadata_of"]

VERSION = 1
MANIFEST = "manifest.json"
MOST_TEXT_BYTES = 1 << 28
"""Of a manifest, or of the rows of so far."""
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def metadata_of(tensors: Mapping[str, Mapping[str, Any]]) -> Metadata:
    """Torch's table of contents, of what is stored; each tensor in one piece."""
    found: dict[str, STORAGE_TYPES] = {}
    storage = {}
    for name, entry in tensors.items():
        if entry["dtype"] not in _DTYPES:
            raise TypeError(f"{name} is {entry['dtype']}, which a checkpoint cannot hold")
        size = torch.Size(entry["shape"])
        origin = torch.Size([0] * len(size))
        properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
        stage_module = ChunkStorageMetadata(offsets=origin, sizes=size)
        found[name] = TensorStorageMetadata(properties, size, [stage_module])
        info = _StorageInfo(entry["file"], entry["offset"], entry["length"])
        storage[MetadataIndex(name, origin)] = info
    return Metadata(found, storage_data=storage, storage_meta=StorageMeta())


class _Reader(FileSystemReader):
    """Takes the table of contents from the manifest, never from torch's pickle."""

    def __init__(self, path: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(path)
        self._tensors = tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is where."""
        metadata = metadata_of(self._tensors)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


@contextmanager
def _without_warning() -> Iterator[None]:
    """One process may write alone; torch takes that for a mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class StoredCheckpoint:
    """A checkpoint that lies in a folder, to be read by any number of ranks."""

    def __init__(self, path: Path, verifies: bool = True) -> None:
        """Read the manifest; ``InputError`` says what is damaged.

        ``verifies`` every byte by its checksum; otherwise another rank has done so.
        """
        self.path = path
        manifest = _read_manifest(path)
        for name, checksum in manifest["files"].items() if verifies else ():
            try:
                is_whole = checksum_of(path / name) == checksum
            except (OSError, ValueError) as error:
                raise InputError(f"{path / name}: cannot be read ({error})") from None
            if not is_whole:
                raise InputError(f"{path / name}: is damaged (its checksum is another)")
        self.tensors: dict[str, dict[str, Any]] = manifest["tensors"]
        """By name what is stored: dtype, shape, file, offset, length."""

    def text(self, name: str) -> str:
        """One of the texts that were written with it."""
        return _text(self.path / name)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU."""
        wanted: dict[str, Tensor] = {}
        for name in names:
            if name not in self.tensors:
                raise InputError(f"{self.path}: holds no {name!r}; is it of another model?")
            entry = self.tensors[name]
            wanted[name] = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        if wanted:
            try:
                with _without_warning():
                    load(wanted, storage_reader=_Reader(self.path, self.tensors), no_dist=True)
            except CheckpointException as error:
                cause = next(iter(error.failures.values()))[0]
                why = " ".join(str(cause).split())[:120]
                raise InputError(f"{self.path}: cannot be read ({why})") from None
        return wanted


def _read_manifest(path: Path) -> dict[str, Any]:
    checksum, _, text = _text(path / MANIFEST).partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != checksum:
        raise InputError(f"{path / MANIFEST}: is damaged (its checksum is another)")
    try:
        manifest: dict[str, Any] = json.loads(text)
        if manifest["version"] != VERSION:
            raise InputError(
                f"{path}: is of checkpoint version {manifest['version']}, not {VERSION}; go on "
                "with the gnnpipe that wrote it"
            )
        files = manifest["files"]
        for name in files:
            # A checksum can be made by anybody: a name must not lead out of the folder.
            if Path(name).name != name:
                raise InputError(f"{path / MANIFEST}: {name!r} is no file of its folder")
        for name, entry in manifest["tensors"].items():
            numbers = [*entry["shape"], entry["offset"], entry["length"]]
            plain = all(isinstance(n, int) and n >= 0 for n in numbers)
            size = _DTYPES[entry["dtype"]].itemsize
            for n in entry["shape"]:
                size *= n
            held = (path / entry["file"]).stat().st_size if entry["file"] in files else -1
            # torch.save adds to the numbers, and takes nothing away.
            if plain and 0 <= held < entry["offset"] + entry["length"]:
                raise InputError(f"{path / entry['file']}: is cut short, {name!r} is not in it")
            if not plain or not size <= entry["length"] <= held - entry["offset"]:
                raise InputError(f"{path / MANIFEST}: {name!r} is not described as it should be")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path / MANIFEST}: is no manifest ({error!r})") from None
    return manifest


def _text(path: Path) -> str:
    try:
        return read_text(path, MOST_TEXT_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
