"""Writes one checkpoint, by all ranks: aside, and renamed when it is whole.

Every rank writes a file of its own; when all have, the first one adds the tables of contents. What
the ranks tell each other is a few lines, for this goes on while they train.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from gnnpipe.checkpoint.rank_file import RankFile, checksum_of, write_rank_file
from gnnpipe.checkpoint.reader import MANIFEST, VERSION, metadata_of
from gnnpipe.checkpoint.writer_process import AsyncWriter

__all__ = ["is_aside", "write_checkpoint"]

_ASIDE = ".aside-"
_TORCHS_TABLE = ".metadata"

T = TypeVar("T")


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, Tensor] | Exception,
    texts: Mapping[str, str],
    group: dist.ProcessGroup | None,
    beside: AsyncWriter | None = None,
) -> None:
    """Write this rank's ``tensors`` (on the CPU), and of the first rank ``texts``, to ``path``.

    An error in place of ``tensors`` is why this rank has none; it is a fault like any other.
    Called by all ranks of ``group`` (gloo, used by nobody else meanwhile); alone with ``None``. No
    two ranks may give the same name. ``beside``: the process that has the same tensors, staged, and
    writes them. A fault of any rank is raised as ``OSError`` on all of them, and then nothing is at
    ``path``.
    """
    rank = 0 if group is None else dist.get_rank(group)
    aside = path.with_name(_ASIDE + path.name)

    def write() -> RankFile:
        if isinstance(tensors, Exception):
            raise tensors
        aside.mkdir(parents=True, exist_ok=True)
        done = beside.write(aside, rank) if beside is not None else None
        return done or write_rank_file(aside, rank, tensors)

    parts = _on_all(group, write)
    _on_all(group, lambda: _finish(path, aside, parts, texts) if rank == 0 else None)


def is_aside(path: Path) -> bool:
    """Whether a folder is what an interrupted write has left."""
    return path.name.startswith(_ASIDE)


def _on_all(group: dist.ProcessGroup | None, act: Callable[[], T]) -> Sequence[T]:
    """Act on every rank, and hear from all; the first fault is raised on all."""
    done: T | None = None
    fault = None
    try:
        done = act()
    except Exception as error:
        words = getattr(error, "strerror", None) or " ".join(str(error).split())
        fault = (getattr(error, "errno", None) or 0, words or type(error).__name__)
    everyone = [(done, fault)]
    if group is not None:
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, (done, fault), group=group)
    for _, found in everyone:
        if found is not None:
            raise OSError(*found)
    return [one for one, _ in everyone]  # type: ignore[misc]


def _finish(path: Path, aside: Path, parts: Sequence[RankFile], texts: Mapping[str, str]) -> None:
    """The first rank's: what is where, checksums, and the name."""
    tensors: dict[str, dict[str, Any]] = {}
    for part in parts:
        held = aside / part.name
        last = max(entry["offset"] + entry["length"] for entry in part.tensors.values())
        if not held.is_file() or held.stat().st_size < last:
            raise OSError(
                0,
                "what other ranks have written is not there; --out must be on a disk "
                "that all ranks share",
            )
        tensors |= part.tensors
    _write_whole(aside / _TORCHS_TABLE, pickle.dumps(metadata_of(tensors)))
    for name, text in texts.items():
        _write_whole(aside / name, text.encode())
    sums = {part.name: part.checksum for part in parts}
    sums |= {name: checksum_of(aside / name) for name in (_TORCHS_TABLE, *texts)}
    content = json.dumps({"version": VERSION, "files": sums, "tensors": tensors})
    checksum = hashlib.sha256(content.encode()).hexdigest()
    _write_whole(aside / MANIFEST, f"{checksum}\n{content}".encode())
    if path.exists():
        shutil.rmtree(path)  # of an epoch that is trained again, after a damaged one
    os.rename(aside, path)
    _settle(path.parent)


def _write_whole(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _settle(folder: Path) -> None:
    """A rename is on disk when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
