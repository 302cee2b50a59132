"""Going on with a run: which settings may change, what must not, and the rows known so far."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gnnpipe.checkpoint.reader import StoredCheckpoint
from gnnpipe.checkpoint.retention import is_unfinished, newest_whole
from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.errors import InputError
from gnnpipe.files import like_run_in, read_text
from gnnpipe.run.exact_epochs import ExactEpochs
from gnnpipe.run.metrics_csv import EpochRow, rows_of
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.executor import CommBytes
from gnnpipe.setup.prepare import Prepared
from gnnpipe.tasks.scoring import Scores

__all__ = [
    "METRICS",
    "STATE",
    "Start",
    "cut_of",
    "find_start",
    "identity_of",
    "note_launch",
    "patience_is_out",
    "restarted",
    "resumed_config",
    "seconds_so_far",
    "state_text",
]


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


STATE, METRICS = "state.json", "metrics.csv"
"""What a checkpoint holds beside tensors."""

FIXED = (
    "split",
    "symmetrize",
    "task",
    "model",
    "layers",
    "hidden",
    "heads",
    "dropout",
    "alpha",
    "theta",
    "seed",
    "dtype",
    "comm_dtype",
    "matmul_dtype",
    "metric",
)
"""Settings that say which run it is."""


def resumed_config(run: str | Path, changes: Mapping[str, Any]) -> TrainConfig:
    """The config of the run in a folder, with what is to be different from now on.

    ``changes`` by field. Without ``out`` the run goes on in its own folder. Raises ``InputError``
    if there is no run, or if a change would make it another one.
    """
    path = Path(run) / "config.toml"
    if not path.is_file():
        raise InputError(
            f"--resume {str(run)!r}: holds no run (there is no config.toml in it); give the folder "
            f"of a run{like_run_in(path.parent)}"
        )
    values = TrainConfig.read_toml(path)
    for name, value in changes.items():
        if name in FIXED and name in values and value != values[name]:
            raise InputError(
                f"{flag(name)} {value}: the run in {str(run)!r} has {values[name]}, and would be "
                "another one; leave it out, or start anew without --resume"
            )
    # A prediction is no part of the run: what is asked for now counts, and a profile that has gone
    # does not keep it from going on.
    if changes.get("profile"):
        values["predict"] = True
    elif changes.get("predict") is False or not Path(values.get("profile", "")).is_file():
        values.pop("profile", None)
    return TrainConfig.from_dict(values | {"out": str(run)} | dict(changes))


FoundStart = tuple["Start | None", str]


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    stored: StoredCheckpoint
    rows: tuple[EpochRow, ...]
    """Of the epochs that are done."""
    best: tuple[int, Scores] | None
    """The best epoch so far, and its scores."""
    identity: Mapping[str, Any]
    """What the graph, the model and the run were known by."""
    lr_factor: float
    """What faults have made of the learning rate."""
    sent_bytes: tuple[int, ...]
    """Of the last epoch, over all ranks, by axis."""
    cut: Mapping[str, Any]
    """Of what ``cut_of`` gave then."""
    lengths: tuple[float, ...]
    """Of the gradients of the last epochs."""
    was_faulty: bool
    """The last epoch made no step."""
    has_jumped: bool
    """Its gradients were suddenly long."""

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return len(self.rows)

    def recut(self, cut: Mapping[str, Any]) -> str:
        """What there is to say if the same shape is cut otherwise now; '' if it is not."""
        numbers = ("chunks", "shards")
        if dict(self.cut) == dict(cut) or any(self.cut.get(n) != cut[n] for n in numbers):
            return ""
        return (
            "the graph is cut otherwise than before (another METIS, --order or --partitioner?): "
            "the run goes on, but not to the bit"
        )

    def is_over(self, config: TrainConfig) -> bool:
        """Whether nothing is left to be trained: by epochs, or by patience."""
        return self.epoch >= config.epochs or patience_is_out(config, self.rows, self.best)

    def check(self, identity: Mapping[str, Any]) -> None:
        """``InputError`` if graph or model are others than those that the run began with."""
        for what, value in identity.items():
            if what not in self.identity or self.identity[what] != value:
                name = flag(what) if what in FIXED else f"the {what} of the run"
                raise InputError(
                    f"{name}: is {value} now, and {self.identity.get(what)} in {self.stored.path}; "
                    "go on with the dataset, model and settings that the run began with (see "
                    f"{self.stored.path.parents[1] / 'config.toml'}), or start anew without "
                    "--resume"
                )

    def refilling(self, config: TrainConfig) -> TrainConfig:
        """``config`` with one exact epoch first, where tables are read that are not stored."""
        has_tables = any(n.startswith(("rows/", "mean/")) for n in self.stored.tensors)
        if has_tables or config.chunks == 1 or config.staleness_settings.is_exact:
            return config
        return replace(
            config, exact_epochs=max(config.staleness_settings.exact_epochs, self.epoch + 1)
        )


def identity_of(config: TrainConfig, prepared: Prepared) -> dict[str, Any]:
    """What must not change while a run lives."""
    state = prepared.model.module.state_dict()
    shapes = [(name, list(t.shape), str(t.dtype)) for name, t in sorted(state.items())]
    return {
        **{name: getattr(config, name) for name in FIXED},
        "model": prepared.model.name,
        "weights": f"{zlib.crc32(repr(shapes).encode()):08x}",
        "graph": prepared.digest,
    }


def cut_of(prepared: Prepared) -> dict[str, Any]:
    """Which vertex is in which chunk and shard: its numbers, and a digest."""
    chunking = prepared.cut
    digest = zlib.crc32(chunking.ptr.tobytes(), zlib.crc32(chunking.perm.tobytes()))
    return {"chunks": chunking.chunks, "shards": chunking.shards, "digest": f"{digest:08x}"}


def patience_is_out(
    config: TrainConfig, rows: Sequence[EpochRow], best: tuple[int, Scores] | None
) -> bool:
    """Whether the last epoch was evaluated, and the best one is too long ago."""
    if not config.patience or best is None or rows[-1].scores is None:
        return False
    return rows[-1].epoch - best[0] >= config.patience


def find_start(run: Path, config: TrainConfig, mesh: Mesh, needs_one: bool) -> FoundStart:
    """The newest whole checkpoint of a run, on every rank; and what there is to say about it.

    ``needs_one``: raise ``InputError`` if there is none, or if nothing is left to do.
    """
    start, text, error = None, "", None
    if mesh.rank == 0:
        starts: list[Start] = []
        _, faults = newest_whole(run, lambda stored: starts.append(_start(stored)))
        start = starts[0] if starts else None
        text = "".join(f"damaged checkpoint: {fault}\n" for fault in faults)
        if start is None:
            text += f"{run} holds no whole checkpoint: starting at the first epoch"
            if needs_one:
                why = "--checkpoint-every 10 writes them"
                if is_unfinished(run):
                    why = "the first one was begun, and the run ended before it was written"
                error = f"--resume {str(run)!r}: holds no whole checkpoint"
                error += f" ({faults[0] if faults else why})"
                error += "; start anew with another --out, or without that folder"
        else:
            text += f"going on from {start.stored.path}"
            # One that was killed before its result was written has only that left to do.
            is_whole = (run / "result.json").exists() or start.rows[-1].scores is None
            if needs_one and start.is_over(config) and is_whole:
                how = f"{start.epoch} epochs are done, --epochs is {config.epochs}; try "
                how += f"--epochs {2 * start.epoch}"
                if start.epoch < config.epochs:
                    how = f"--patience {config.patience} has ended it; try more"
                error = f"--resume {str(run)!r}: {how}"
    error, path = mesh.share((error, start.stored.path if start else None))
    if error:
        raise InputError(error)
    if path is None:
        return None, text
    fault: InputError | None = None
    if start is None:
        try:
            # Rank 0 has read every byte; here it is only asked whether the folder is the same.
            start = _start(StoredCheckpoint(path, verifies=False))
        except InputError as found:
            fault = InputError(f"{found}; --out must be a folder that all ranks share")
    mesh.agree(fault)
    assert start is not None
    return start, text


def state_text(
    best: tuple[int, Scores] | None,
    identity: Mapping[str, Any],
    lr_factor: float,
    sent_bytes: Sequence[int],
    cut: Mapping[str, Any],
    exact_epochs: ExactEpochs,
) -> str:
    """What a checkpoint holds beside tensors and rows; JSON, with NaN as Python writes it."""
    return json.dumps(
        {
            "best": None if best is None else {"epoch": best[0], "scores": asdict(best[1])},
            "identity": dict(identity),
            "lr_factor": lr_factor,
            "sent_bytes": list(sent_bytes),
            "cut": dict(cut),
            "lengths": list(exact_epochs.lengths),
            "was_faulty": exact_epochs.was_faulty,
            "has_jumped": exact_epochs.has_jumped,
        }
    )


def _start(stored: StoredCheckpoint) -> Start:
    try:
        state = json.loads(stored.text(STATE))
        rows = rows_of(stored.text(METRICS))
        if f"epoch-{len(rows):06d}" != stored.path.name or not rows:
            raise ValueError(f"{len(rows)} rows")
        best = state["best"]
        if best is not None:
            names = {f.name for f in fields(Scores)}
            scores = {name: float(best["scores"][name]) for name in names}
            if not 0 < int(best["epoch"]) <= len(rows):
                raise ValueError(f"best epoch {best['epoch']}")
            best = int(best["epoch"]), Scores(**scores)
        factor = float(state["lr_factor"])
        if not 0 < factor <= 1:
            raise ValueError(f"lr_factor {factor}")
        sent = tuple(int(number) for number in state["sent_bytes"])
        if len(sent) != len(fields(CommBytes)):
            raise ValueError(f"sent_bytes {sent}")
        identity, cut = dict(state["identity"]), dict(state["cut"])
        lengths = tuple(float(number) for number in state.get("lengths", ()))
        if not all(0 <= length < math.inf for length in lengths):
            raise ValueError(f"lengths {lengths}")
        why = (bool(state.get(name, False)) for name in ("was_faulty", "has_jumped"))
        return Start(stored, tuple(rows), best, identity, factor, sent, cut, lengths, *why)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise InputError(f"{stored.path}: its state is not that of a run ({error})") from None
