"""Ranks that torchrun has started again: which run is theirs, and since when.

torchrun starts the same words again after a fault. The folder that they name holds the run of the
first start then; or it holds a run of somebody else's, which the first start has refused. A note in
the folder, of the launch that made it, tells one from the other.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.files import read_text
from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["note_launch", "restarted", "seconds_so_far"]

NOTE = ".launch.json"


def restarted(config: TrainConfig, mesh: Mesh) -> Path | None:
    """The folder of the run to go on with, on every rank, if this is no first start."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and not config.out:
        raise InputError(
            f"--out: torchrun --max-restarts {restarts} can go on only with a run whose folder it "
            "knows; give --out a folder"
        )
    is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and config.out != "off"
    path = Path(config.out)
    is_ours = is_again and (path / "config.toml").exists() and _noted(path)[0] == _launch()
    return path if mesh.share(is_ours) else None


def note_launch(run: Path) -> None:
    """Note in a run's new folder who has made it; only torchrun's launches come again."""
    if _launch():
        text = json.dumps({"launch": _launch(), "started": time.time()})
        (run / NOTE).write_text(text, encoding="utf-8")


def seconds_so_far(run: Path) -> float:
    """Since the launch that made the run's folder began."""
    return max(time.time() - _noted(run)[1], 0.0)


def _noted(run: Path) -> tuple[str, float]:
    try:
        note = json.loads(read_text(run / NOTE))
        return str(note["launch"]), float(note["started"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", time.time()


def _launch() -> str:
    """What all starts of one launch have in common: its id, or who is torchrun; '' without it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name not in ("", "none"):
        return name
    if not name:
        return ""
    parent = os.getppid()
    try:
        # Numbers of processes come again; the moment of the start does not.
        stat = Path(f"/proc/{parent}/stat").read_text(encoding="ascii", errors="replace")
        return f"process {parent} of {stat.rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return f"process {parent}"
