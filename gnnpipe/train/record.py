"""The folder of a run: everything that it was and became, enough to repeat it.

config.toml, plan.json and program.txt are written before the first epoch, metrics.csv grows a row
an epoch, result.json and model.pt come last. A folder that holds another run is never touched.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
import torch_geometric

from gnnpipe import __version__
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.train.scoring import Scores
from gnnpipe.train.staleness import Staleness

__all__ = ["EpochRow", "RunFolder", "claim_folder", "plain", "run_path", "versions"]


@dataclass(frozen=True)
class EpochRow:
    """What is known of one epoch."""

    epoch: int
    """From 1."""
    loss: float
    """Over the train vertices, with dropout."""
    scores: Scores | None
    """Where the epoch was evaluated."""
    epoch_time_s: float
    """Training alone."""
    eval_time_s: float
    lr: float
    """Learning rate of its step."""
    staleness: Staleness | None = None
    """Where the shape has stale reads."""

    def cells(self) -> dict[str, Any]:
        """The row of metrics.csv; empty cells where the epoch was not evaluated."""
        s = self.scores
        return {
            "epoch": self.epoch,
            "loss": repr(self.loss),
            **{f.name: _cell(getattr(s, f.name)) if s else "" for f in fields(Scores)},
            "lr": repr(self.lr),
            "epoch_time_s": f"{self.epoch_time_s:.6f}",
            "eval_time_s": f"{self.eval_time_s:.6f}" if s else "",
            **{k: _cell(v) for k, v in (self.staleness.cells() if self.staleness else {}).items()},
        }


def _cell(value: float) -> str:
    """Every digit; nothing where there is no such figure."""
    return "" if math.isnan(value) else repr(value)


def run_path(config: TrainConfig) -> Path:
    """Where the run goes: ``--out``, or a new folder below runs/."""
    if config.out:
        return Path(config.out)
    dataset = "".join(c if c.isalnum() else "-" for c in Path(config.dataset).stem.lower())
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{dataset[:40]}-{config.model}-{stamp}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


class RunFolder:
    """Writes one run's folder; only rank 0 has one."""

    def __init__(self, path: Path) -> None:
        """Check the place before any work: ``InputError`` if it is taken or cannot be written."""
        self.path = path
        if path.exists() and not path.is_dir():
            raise InputError(f"--out {str(path)!r}: is a file; give a folder")
        if path.is_dir() and any(path.iterdir()):
            raise InputError(
                f"--out {str(path)!r}: holds another run (or other files); give a new folder"
            )
        existing = path
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir() or not _writable(existing):
            raise InputError(
                f"--out {str(path)!r}: {str(existing)!r} cannot be written; give another folder"
            )

    def open(self, config: TrainConfig, plan: Plan, program: str) -> None:
        """Make the folder and write what is known before the first epoch."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.path / "config.toml", "x", encoding="utf-8") as file:
                file.write(config.to_toml())
        except FileExistsError:
            raise InputError(
                f"--out {str(self.path)!r}: another run has just taken it; give a new folder"
            ) from None
        (self.path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        (self.path / "program.txt").write_text(program, encoding="utf-8")

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.csv"

    def add(self, row: EpochRow) -> None:
        """Append a row to metrics.csv; it is on disk when this returns."""
        cells = row.cells()
        is_new = not self._metrics.exists()
        with open(self._metrics, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, cells)
            if is_new:
                writer.writeheader()
            writer.writerow(cells)

    def close(self, result: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Write result.json and the trained weights, model.pt (a ``state_dict``)."""
        torch.save(dict(weights), self.path / "model.pt")
        text = json.dumps(plain(result), indent=1, allow_nan=False)
        (self.path / "result.json").write_text(text + "\n", encoding="utf-8")


def claim_folder(config: TrainConfig, mesh: Mesh) -> RunFolder | None:
    """The run's folder on rank 0, checked; an error there ends every rank. ``None`` elsewhere."""
    folder, error = None, None
    if mesh.rank == 0 and config.out != "off":
        try:
            folder = RunFolder(run_path(config))
        except InputError as fault:
            error = str(fault)
    failed = mesh.share(error)
    if failed:
        raise InputError(failed)
    return folder


def _writable(folder: Path) -> bool:
    """Really try: permissions do not tell of read-only disks, nor stop root."""
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".gnnpipe-")
        os.close(handle)
        os.unlink(name)
    except OSError:
        return False
    return True


def plain(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def versions() -> dict[str, str]:
    """What the run was made with."""
    return {
        "gnnpipe": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
