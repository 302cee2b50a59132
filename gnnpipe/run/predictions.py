"""Writes the predictions of all ranks to one .npy file, without gathering them on any rank."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from gnnpipe.errors import InputError
from gnnpipe.files import NewFile, how_to_write
from gnnpipe.runtime.comm.world import World

Part = tuple[npt.NDArray[np.int64], npt.NDArray[Any]]
"""Row numbers [R] in the file, and the rows [R, C]."""


def check_new_file(path: str | Path, world: World) -> None:
    """Raise ``InputError`` on every rank if ``path`` exists or cannot hold an array."""
    error = None
    try:
        NewFile("--out", str(path), "predictions.npy")
        if Path(path).suffix != ".npy":
            raise InputError(f"--out {str(path)!r}: give a name that ends in .npy")
    except InputError as fault:
        error = fault
    world.agree(error)


def write_predictions(
    path: Path, world: World, num_rows: int, compute: Callable[[], Iterable[Part]]
) -> int:
    """Write the rows that ``compute`` returns on each rank to a new file [num_rows, C].

    All ranks must see the folder of the file, which is checked before ``compute`` is called. The
    file has another name until all rows are in it. Returns C. Raises ``InputError`` on every rank
    if the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{world.share(secrets.token_hex(4))}.partial")
    try:
        _create(partial, path, world)
        parts = list(compute())
        width = _fill(partial, path, world, num_rows, parts)
        if world.rank == 0:
            os.replace(partial, path)
        world.share(None)  # the file has its name on every rank
    finally:
        if world.rank == 0:
            partial.unlink(missing_ok=True)
    return width


def _create(partial: Path, path: Path, world: World) -> None:
    """Create the empty file on rank 0, and check that all ranks see it."""
    error = None
    try:
        if world.rank == 0:
            partial.touch(exist_ok=False)
    except OSError as fault:
        error = _cannot_write(path, fault)
    world.agree(error)
    if not partial.exists():
        error = InputError(
            f"--out {str(path)!r}: this rank does not see the file that rank 0 has created; give a "
            "path on a disk that all machines share"
        )
    world.agree(error)


def _fill(partial: Path, path: Path, world: World, num_rows: int, parts: list[Part]) -> int:
    """Write the header on rank 0, then the rows of all ranks; return the number of columns."""
    found = {(rows.shape[1], rows.dtype.str) for _, rows in parts}
    ((width, dtype),) = set().union(*world.gather(found))
    error = None
    try:
        if world.rank == 0:
            open_memmap(partial, mode="w+", dtype=np.dtype(dtype), shape=(num_rows, width))
            _reserve(partial)
    except OSError as fault:
        error = _cannot_write(path, fault)
    world.agree(error)
    try:
        table = open_memmap(partial, mode="r+")
        for numbers, rows in parts:
            table[numbers] = rows
        table.flush()
    except OSError as fault:
        error = _cannot_write(path, fault)
    world.agree(error)
    return int(width)


def _reserve(file: Path) -> None:
    """Reserve the disk space: on a full disk, a write to mapped memory would end the process."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with open(file, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)


def _cannot_write(path: Path, fault: OSError) -> InputError:
    return InputError(
        f"--out {str(path)!r}: cannot be written ({fault.strerror}); {how_to_write(fault.errno)} "
        "or give another"
    )
