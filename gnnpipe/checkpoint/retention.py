"""The checkpoints of a run: which is the newest that is whole, and which may go.

They lie in ``checkpoints/epoch-000120`` of the run's folder.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from gnnpipe.checkpoint.reader import StoredCheckpoint
from gnnpipe.checkpoint.writer import is_aside
from gnnpipe.errors import InputError

__all__ = [
    "checkpoint_path",
    "drop_old",
    "has_unfinished",
    "newest_whole",
    "remove_unfinished",
    "resume_advice",
]


def checkpoint_path(run: Path, epoch: int) -> Path:
    """Where the checkpoint behind an epoch (from 1) lies."""
    return run / "checkpoints" / f"epoch-{epoch:06d}"


def _all(run: Path) -> list[Path]:
    """Newest first."""
    try:
        found = list((run / "checkpoints").iterdir())
    except OSError:
        return []
    named = [(m, p) for p in found if (m := re.fullmatch(r"epoch-(\d{6,12})", p.name))]
    return [p for _, p in sorted(named, key=lambda pair: int(pair[0][1]), reverse=True)]


def resume_advice(run: Path) -> str:
    """What somebody can do whose run has ended early: go on, if there is something to go on from.

    >>> resume_advice(Path("nowhere"))
    'start again with another --out, or without nowhere (it holds no checkpoint)'
    """
    if found := _all(run):
        return f"go on with --resume {run} (the newest checkpoint is {found[0].name})"
    return f"start again with another --out, or without {run} (it holds no checkpoint)"


def newest_whole(
    run: Path, check: Callable[[StoredCheckpoint], object] = lambda stored: None
) -> tuple[StoredCheckpoint | None, list[str]]:
    """The newest checkpoint that is whole, if there is one; and what is wrong with newer ones.

    ``check`` raises ``InputError`` for what is whole and still none of this run.
    """
    faults: list[str] = []
    for path in _all(run):
        try:
            stored = StoredCheckpoint(path)
            check(stored)
            return stored, faults
        except InputError as error:
            faults.append(str(error))
    return None, faults


def drop_old(run: Path, kept: int, epoch: int) -> None:
    """Remove all but the newest ``kept`` up to ``epoch``; what cannot be removed stays.

    What is newer than that was passed over as damaged, and does not count.
    """
    for path in [p for p in _all(run) if int(p.name[6:]) <= epoch][kept:]:
        shutil.rmtree(path, ignore_errors=True)


def has_unfinished(run: Path) -> bool:
    """Whether a checkpoint was begun, and the run ended before it was whole."""
    with contextlib.suppress(OSError):
        return any(is_aside(path) for path in (run / "checkpoints").iterdir())
    return False


def remove_unfinished(run: Path) -> None:
    """Remove what an interrupted write has left."""
    with contextlib.suppress(OSError):
        for path in (run / "checkpoints").iterdir():
            if is_aside(path):
                shutil.rmtree(path, ignore_errors=True)
