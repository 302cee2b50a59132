"""Run folder: everything that is needed to repeat a run, and its results.

config.toml, plan.json and program.txt are written before the first epoch, every epoch adds a row to
metrics.csv, and result.json and model.pt are written at the end. A folder that contains another run
is never changed.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
import torch_geometric
from torch import nn

from gnnpipe.checkpoint.retention import resume_advice
from gnnpipe.config import TrainConfig
from gnnpipe.errors import FailedError, InputError
from gnnpipe.files import how_to_write, seed_runs
from gnnpipe.graph.graph import Graph
from gnnpipe.plan import Plan
from gnnpipe.run.metrics_csv import EpochRow
from gnnpipe.run.resume import note_launch
from gnnpipe.runtime.comm.world import World
from gnnpipe.version import __version__


def in_its_folder(config: TrainConfig, run: str | Path | None) -> TrainConfig:
    """Return the config with the folder of the resumed ``run``, if any, where it has none."""
    is_folder = run is not None and Path(run).is_dir()
    return replace(config, out=str(run)) if is_folder and not config.out else config


def run_path(
    config: TrainConfig,
    graph: Graph | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
) -> Path:
    """Return the path of the run folder: ``--out``, or a new folder below runs/.

    ``graph`` and ``model``: those that are passed in, or the function that makes the model.
    """
    if config.out:
        return Path(config.out)
    dataset = Path(config.dataset).stem if graph is None else graph.name or "graph"
    name = Path(config.model).name
    if model is not None:
        name = getattr(model, "__name__", type(model).__name__)
    both = (part[:40] for part in (dataset.lower(), name))
    what = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in both)
    base = Path("runs") / f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


class RunFolder:
    """Writes the folder of one run; only rank 0 has one."""

    def __init__(self, path: Path, is_resumed: bool = False, ranks: int = 1) -> None:
        """Check the folder before any work: ``InputError`` if it is in use or cannot be written.

        ``is_resumed``: the run in the folder is to be continued. ``ranks``: number of ranks of the
        launch.
        """
        self.path, self.is_resumed, self._ranks = path, is_resumed, ranks
        self._columns: list[str] = []
        self._lock: int | None = None
        if os.path.lexists(path) and not path.is_dir():
            raise InputError(f"--out {str(path)!r}: is a file; give a folder")
        if path.is_dir() and any(path.iterdir()) and not is_resumed:
            raise InputError(
                f"--out {str(path)!r}: holds another run (or other files); give a new folder, or "
                f"continue the run with --resume {(seed_runs(path) or [path])[0]}"
            )
        existing = path
        while not os.path.lexists(existing):
            existing = existing.parent
        if not existing.is_dir() or not _writable(existing):
            raise InputError(
                f"--out {str(path)!r}: {str(existing)!r} cannot be written; give another folder"
            )
        if is_resumed:
            self._claim()

    def _claim(self) -> None:
        """Lock the folder against other processes; the lock ends with this process in any case."""
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks
            self.release()
            raise InputError(
                f"--out {str(self.path)!r}: another process is writing this run; wait until it "
                "ends, or give another folder"
            ) from None

    def reclaim(self) -> None:
        """Lock the folder again, to continue its run: ``InputError`` if that cannot be done."""
        self.is_resumed = True
        if not (self.path / "config.toml").is_file():
            raise InputError(
                f"--out {str(self.path)!r}: the run's files have been removed; make a new Trainer"
            )
        self._claim()

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Turn a failed write (a full disk) into ``FailedError``; earlier files remain."""
        try:
            yield
        except OSError as error:
            raise FailedError(
                f"--out {str(self.path)!r}: cannot be written any more ({error.strerror}); "
                f"{how_to_write(error.errno)} and {resume_advice(self.path)}"
            ) from error

    def open(self, config: TrainConfig, plan: Plan, program: str) -> None:
        """Create the folder and write config, plan and program.

        This and all later writes raise ``FailedError`` if the disk is full.
        """
        with self._disk():
            self._open(config, plan, program)

    def _open(self, config: TrainConfig, plan: Plan, program: str) -> None:
        text = config.to_toml()
        if self.is_resumed:
            before = (self.path / "config.toml").read_text(encoding="utf-8")
            if before != text:
                number = 1 + sum(1 for _ in self.path.glob("config-before-*.toml"))
                _replace(self.path / f"config-before-{number}.toml", before)
            _replace(self.path / "config.toml", text)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with open(self.path / "config.toml", "x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                raise InputError(
                    f"--out {str(self.path)!r}: another run has just taken it; give a new folder"
                ) from None
            self._claim()
        _replace(self.path / "plan.json", plan.to_json())
        note_launch(self.path, self._ranks, is_new=not self.is_resumed)
        _replace(self.path / "program.txt", program)

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.csv"

    def add(self, row: EpochRow) -> None:
        """Append a row to metrics.csv and flush the file."""
        cells = row.cells()
        with self._disk():
            if not self._columns or not set(cells) <= set(self._columns):
                self._widen(list(cells))
            with open(self._metrics, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(cells)

    def _widen(self, columns: list[str]) -> None:
        """Add columns to metrics.csv: a run resumed with another shape may have more."""
        rows: list[dict[str, str]] = []
        if self._columns:
            with open(self._metrics, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        self._columns += [name for name in columns if name not in self._columns]
        self._write(rows)

    def metrics_text(self, rows: Sequence[EpochRow]) -> str:
        """Return the text of metrics.csv; written anew from ``rows`` if the file is missing."""
        with self._disk():
            if not self._metrics.exists():
                self.rewrite(rows)
            return self._metrics.read_text(encoding="utf-8")

    def rewrite(self, rows: Sequence[EpochRow]) -> None:
        """Write metrics.csv with these rows only."""
        cells = [row.cells() for row in rows]
        self._columns = list(dict.fromkeys(name for row in cells for name in row))
        with self._disk():
            self._write(cells)

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        _replace(self._metrics, text.getvalue())

    def close(self, result: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        """Write result.json and the trained weights, model.pt (a ``state_dict``)."""
        aside = self.path / ".aside-model.pt"
        text = json.dumps(plain(result), indent=1, allow_nan=False)
        with self._disk():
            # Serialized in memory first: torch's own writer hides the error of a full disk.
            buffer = io.BytesIO()
            # Copies: of a view, torch saves all of the memory that it lies in.
            torch.save({name: value.clone() for name, value in weights.items()}, buffer)
            aside.write_bytes(buffer.getbuffer())
            os.replace(aside, self.path / "model.pt")
            _replace(self.path / "result.json", text + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    aside = path.with_name(f".aside-{path.name}")
    with open(aside, "w", newline="", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def claim_folder(
    config: TrainConfig,
    world: World,
    graph: Graph | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    resumed: Path | None = None,
) -> tuple[RunFolder | None, Path | None]:
    """Return the checked run folder on rank 0, and its path on every rank.

    ``graph`` and ``model`` as in ``run_path``; ``resumed``: folder of the run that is resumed. Both
    results are ``None`` with ``--out off``. An ``InputError`` of rank 0 is raised on every
    rank.
    """
    folder, error = None, None
    if world.rank == 0 and config.out != "off":
        try:
            path = run_path(config, graph, model)
            is_resumed = resumed is not None and path.resolve() == resumed.resolve()
            folder = RunFolder(path, is_resumed, world.world_size)
        except InputError as fault:
            error = str(fault)
    failed, path = world.share((error, folder.path if folder else None))
    if failed:
        raise InputError(failed)
    return folder, path


def reclaim_folder(folder: RunFolder | None, world: World) -> None:
    """Lock the folder again on rank 0; an ``InputError`` is raised on every rank."""
    error = None
    try:
        if folder is not None:
            folder.reclaim()
    except InputError as fault:
        error = str(fault)
    if failed := world.share(error):
        raise InputError(failed)


def _writable(folder: Path) -> bool:
    """Return whether a file can be created (permissions ignore root and read-only disks)."""
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".gnnpipe-")
        os.close(handle)
        os.unlink(name)
    except OSError:
        return False
    return True


def plain(value: Any) -> Any:
    """Return ``value`` with numbers that are not finite replaced by ``None``, for JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def versions() -> dict[str, str]:
    """Return the versions of the packages that the run uses."""
    return {
        "gnnpipe": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
