"""Writes a checkpoint between two epochs, by all ranks: aside first, renamed when complete.

Training waits for the write. One checkpoint in ten minutes costs less than 1 % of a run, needs no
copy of the tensors, and a failure is known at once (docs/adr/0033).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from gnnpipe.checkpoint.rank_file import RANK_FILE_END, checksum_of, write_rank_file
from gnnpipe.checkpoint.reader import MANIFEST, manifest_text
from gnnpipe.checkpoint.retention import (
    checkpoint_path,
    drop_old,
    remove_unfinished,
    unfinished_path,
)
from gnnpipe.runtime.comm.mesh import Mesh

T = TypeVar("T")


def write_checkpoint(
    run: Path,
    epoch: int,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, str],
    keep: int,
    mesh: Mesh,
) -> None:
    """Write the checkpoint after ``epoch`` (from 1), and remove all but the newest ``keep``.

    Every rank of ``mesh`` calls this with ``tensors`` of its own; no two ranks may give the same
    name. ``texts`` (content by file name) count on rank 0 only.

    Raises the first fault of any rank as ``OSError`` on all ranks; then no checkpoint of this epoch
    is on disk.
    """
    path, unfinished = checkpoint_path(run, epoch), unfinished_path(run, epoch)
    file = unfinished / f"rank-{mesh.rank}{RANK_FILE_END}"

    def write() -> tuple[str, str]:
        unfinished.mkdir(parents=True, exist_ok=True)
        return file.name, write_rank_file(file, tensors)

    def finish() -> None:
        if mesh.rank == 0:
            _finish(path, unfinished, checksums, texts)

    try:
        checksums = dict(_on_all(mesh, write))
        _on_all(mesh, finish)
    except OSError:
        if mesh.rank == 0:
            remove_unfinished(run)
        raise
    if mesh.rank == 0:
        drop_old(run, keep, epoch)


def _on_all(mesh: Mesh, act: Callable[[], T]) -> list[T]:
    """Return the results of ``act`` on all ranks; raise the first error on all ranks."""
    result: T | None = None
    fault: tuple[int, str] | None = None
    try:
        result = act()
    except Exception as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split())
        fault = getattr(error, "errno", None) or 0, text or type(error).__name__
    everyone: list[tuple[T, tuple[int, str] | None]] = mesh.gather((result, fault))
    for _, found in everyone:
        if found is not None:
            raise OSError(*found)
    return [one for one, _ in everyone]


def _finish(
    path: Path, unfinished: Path, checksums: Mapping[str, str], texts: Mapping[str, str]
) -> None:
    """Add texts and manifest, and give the folder its name."""
    for name in checksums:
        if not (unfinished / name).is_file():
            raise OSError(
                0,
                f"{name} of another rank is missing; --out must be on a disk that all ranks share",
            )
    for name, text in texts.items():
        _write_text(unfinished / name, text)
    sums = dict(checksums) | {name: checksum_of(unfinished / name) for name in texts}
    _write_text(unfinished / MANIFEST, manifest_text(sums))
    if path.exists():
        shutil.rmtree(path)  # a damaged one, whose epoch was trained again
    os.rename(unfinished, path)
    # A rename is on disk when its folder is.
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_text(path: Path, content: str) -> None:
    with open(path, "wb") as file:
        file.write(content.encode())
        file.flush()
        os.fsync(file.fileno())
