"""One rank's part of a checkpoint: a file of its tensors in torch's format, and what is where."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix

from gnnpipe.files import open_plain

__all__ = ["RankFile", "checksum_of", "write_rank_file"]


@dataclass(frozen=True)
class RankFile:
    """What has been written; plain data, to be sent."""

    name: str
    checksum: str
    tensors: dict[str, dict[str, Any]]
    """By name: dtype, shape, and the file, offset and length in bytes where it lies."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def write_rank_file(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> RankFile:
    """Write ``tensors`` (on the CPU), one at least, to a new file of ``folder``, and to its disk.

    Raises ``OSError``, or what torch raises in its stead.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors))
    # As torch names a rank's file.
    plan = replace(planner.create_local_plan(), storage_data=_StoragePrefix(f"__{rank}_"))
    written = FileSystemWriter(folder).write_data(plan, planner).value()
    name = written[0].storage_data.relative_path
    entries = {}
    for result in written:
        tensor = tensors[result.index.fqn]
        entries[result.index.fqn] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "file": name,
            "offset": result.storage_data.offset,
            "length": result.storage_data.length,
        }
    return RankFile(name, checksum_of(folder / name), entries)


def checksum_of(path: Path) -> str:
    """SHA-256 of a file; ``OSError`` or ``ValueError`` where it cannot be read."""
    with open_plain(path) as file:
        digest = hashlib.sha256()
        # Into the same memory again: what is given back to the system stops all threads.
        block = memoryview(bytearray(1 << 20))
        while size := file.readinto(block):
            digest.update(block[:size])
        return digest.hexdigest()
