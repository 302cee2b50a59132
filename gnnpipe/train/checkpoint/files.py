"""One checkpoint on disk, by torch.distributed.checkpoint: tensors of all ranks, and plain state.

torch keeps its table of contents as a pickle, and a pickle can run code. So the table is kept a
second time in a manifest of plain JSON, with a checksum of every file, and only that one is read;
torch's own stays for torch's tools. A checkpoint is written aside and renamed when it is whole: a
folder of its name is a checkpoint that was whole once, and the checksums tell if it still is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gnnpipe.errors import InputError
from gnnpipe.files import read_text
from gnnpipe.train.checkpoint.beside import Beside, checksum_of

__all__ = ["StoredCheckpoint", "is_aside", "write_checkpoint"]

VERSION = 1
MANIFEST = "manifest.json"
_ASIDE = ".aside-"
MOST_TEXT_BYTES = 1 << 28
"""Of a manifest, or of the rows of so far."""
_DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64,
              torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}  # fmt: skip


@dataclass(frozen=True)
class _Summed(WriteResult):
    """One tensor that was written, and the checksum of the file that it is in."""

    checksum: str


class _Writer(FileSystemWriter):
    """Writes aside; when all ranks have written, the first one adds the manifest and renames."""

    def __init__(self, path: Path, texts: Mapping[str, str], beside: Beside | None) -> None:
        self._final, self._aside = path, path.with_name(_ASIDE + path.name)
        self._texts, self._beside = texts, beside
        super().__init__(self._aside)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One rank's tensors, by the process beside it if there is one."""
        told = self._beside and self._beside.write(self._aside, plan.storage_data.prefix)
        if told:
            name, checksum, places = told
        else:
            results = super().write_data(plan, planner).value()
            places = {r.index.fqn: astuple(r.storage_data)[1:3] for r in results}
            name = results[0].storage_data.relative_path
            checksum = checksum_of(self._aside / name)
        written: Future[list[WriteResult]] = Future()
        written.set_result([
            _Summed(item.index, length, _StorageInfo(name, offset, length), checksum)
            for item in plan.items
            for offset, length in [places[item.index.fqn]]
        ])  # fmt: skip
        return written

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Called on the first rank alone; an error here is one of every rank."""
        super().finish(metadata, results)
        _check_shared(self._aside, metadata)
        for name, text in self._texts.items():
            _write_whole(self._aside / name, text)
        sums = {r.storage_data.relative_path: r.checksum for rank in results for r in rank}
        names = sorted(p.name for p in self._aside.iterdir())
        content = {
            "version": VERSION,
            "files": {n: sums.get(n) or checksum_of(self._aside / n) for n in names},
            "tensors": _entries(metadata),
        }
        text = json.dumps(content)
        _write_whole(self._aside / MANIFEST, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        if self._final.exists():
            shutil.rmtree(self._final)  # of an epoch that is trained again, after a damaged one
        os.rename(self._aside, self._final)
        _settle(self._final.parent)


class _Reader(FileSystemReader):
    """Takes the table of contents from the manifest, never from torch's pickle."""

    def __init__(self, path: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(path)
        self._tensors = tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is where."""
        found: dict[str, STORAGE_TYPES] = {}
        storage = {}
        for name, entry in self._tensors.items():
            size = torch.Size(entry["shape"])
            origin = torch.Size([0] * len(size))
            properties = TensorProperties(dtype=_DTYPES[entry["dtype"]])
            piece = ChunkStorageMetadata(offsets=origin, sizes=size)
            found[name] = TensorStorageMetadata(properties, size, [piece])
            info = _StorageInfo(entry["file"], entry["offset"], entry["length"])
            storage[MetadataIndex(name, origin)] = info
        return Metadata(found, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str],
    group: dist.ProcessGroup | None,
    beside: Beside | None = None,
) -> None:
    """Write this rank's ``tensors`` (on the CPU), and of the first rank ``texts``, to ``path``.

    ``beside``: the process that has the same tensors, staged, and writes them.

    Called by all ranks of ``group`` (gloo, used by nobody else meanwhile); alone with ``None``. No
    two ranks may give the same name. An error of any rank is raised on all of them, and then
    nothing is at ``path``.
    """
    writer = _Writer(path, texts, beside)
    with _without_warning():
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


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


def is_aside(path: Path) -> bool:
    """Whether a folder is what an interrupted write has left."""
    return path.name.startswith(_ASIDE)


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


def _entries(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Of every tensor where it lies; each was written by one rank, in one piece."""
    found = {}
    for index, info in metadata.storage_data.items():
        described = metadata.state_dict_metadata[index.fqn]
        assert isinstance(described, TensorStorageMetadata)
        found[index.fqn] = {
            "dtype": str(described.properties.dtype).removeprefix("torch."),
            "shape": list(described.size),
            "file": info.relative_path, "offset": info.offset, "length": info.length,
        }  # fmt: skip
    return found


def _check_shared(folder: Path, metadata: Metadata) -> None:
    """What the other ranks have written must be here: else their disk is another."""
    for info in metadata.storage_data.values():
        path = folder / info.relative_path
        if not path.is_file() or path.stat().st_size < info.offset + info.length:
            raise OSError(0, "what other ranks have written is not there; --out must be on a disk "
                          "that all ranks share")  # fmt: skip


def _write_whole(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _settle(folder: Path) -> None:
    """A rename is on disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
