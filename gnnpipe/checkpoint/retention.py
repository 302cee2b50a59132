"""The checkpoints of a run on disk: names, the newest complete one, removal of old ones.

A run keeps them in folders ``checkpoints/epoch-000120``.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from gnnpipe.checkpoint.reader import StoredCheckpoint
from gnnpipe.errors import InputError

_UNFINISHED = ".unfinished-"


def checkpoint_path(run: Path, epoch: int) -> Path:
    """Return the folder of the checkpoint after an epoch (from 1)."""
    return run / "checkpoints" / f"epoch-{epoch:06d}"


def unfinished_path(run: Path, epoch: int) -> Path:
    """Return the folder that the checkpoint is in until complete."""
    path = checkpoint_path(run, epoch)
    return path.with_name(_UNFINISHED + path.name)


IN_PYTHON = "in Python: Trainer(resumed_config(run), ..., resume=run)"
"""The Python call that does what the flag --resume does, for messages."""


def resume_advice(run: Path) -> str:
    """Return how to go on with a run that has ended early.

    >>> resume_advice(Path("nowhere"))
    'start again, with another --out, or after removing nowhere (it holds no checkpoint)'
    """
    if found := _newest_first(run):
        return f"go on with --resume {run} (the newest checkpoint is {found[0].name}); {IN_PYTHON}"
    return f"start again, with another --out, or after removing {run} (it holds no checkpoint)"


def newest_whole(
    run: Path, check: Callable[[StoredCheckpoint], object] = lambda stored: None
) -> tuple[StoredCheckpoint | None, list[str]]:
    """Return the newest undamaged checkpoint, if any, and the faults of newer ones.

    ``check`` raises ``InputError`` for an undamaged checkpoint that does not belong to the run.
    """
    faults: list[str] = []
    for path in _newest_first(run):
        try:
            stored = StoredCheckpoint(path)
            check(stored)
            return stored, faults
        except InputError as error:
            faults.append(str(error))
    return None, faults


def newest_epoch(run: Path) -> int:
    """Return the epoch of the newest checkpoint, damaged or not; 0 if there is none."""
    return max((_epoch_of(path) for path in _newest_first(run)), default=0)


def drop_old(run: Path, keep: int, epoch: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to ``epoch``, as far as the disk allows.

    Newer ones were found damaged at the start, and do not count.
    """
    for path in [p for p in _newest_first(run) if _epoch_of(p) <= epoch][keep:]:
        shutil.rmtree(path, ignore_errors=True)


def has_unfinished(run: Path) -> bool:
    """Return whether a run ended while a checkpoint was written."""
    return bool(_unfinished(run))


def remove_unfinished(run: Path) -> None:
    """Remove what interrupted writes have left."""
    for path in _unfinished(run):
        shutil.rmtree(path, ignore_errors=True)


def _epoch_of(path: Path) -> int:
    return int(path.name.removeprefix("epoch-"))


def _newest_first(run: Path) -> list[Path]:
    named = [(m, p) for p in _entries(run) if (m := re.fullmatch(r"epoch-(\d{6,12})", p.name))]
    return [p for _, p in sorted(named, key=lambda pair: int(pair[0][1]), reverse=True)]


def _unfinished(run: Path) -> list[Path]:
    return [path for path in _entries(run) if path.name.startswith(_UNFINISHED)]


def _entries(run: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list((run / "checkpoints").iterdir())
    return []
