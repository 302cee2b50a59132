"""Resumes a run: checks the new settings against the old ones and reads the run's state."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch_geometric

from gnnpipe.checkpoint.reader import StoredCheckpoint
from gnnpipe.checkpoint.retention import has_unfinished, newest_whole
from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.config.settings import BY_CHUNK_SETTINGS
from gnnpipe.errors import InputError
from gnnpipe.files import like_run_in, read_text
from gnnpipe.perf import CommVolume
from gnnpipe.planner import PLANNERS
from gnnpipe.run.early_stopping import target_is_reached
from gnnpipe.run.exact_epochs import ExactEpochs
from gnnpipe.run.metrics_csv import EpochRow, rows_of
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepared import Prepared
from gnnpipe.setup.user_model import absolute_name
from gnnpipe.tasks.loss import ERRORS
from gnnpipe.tasks.scoring import Scores
from gnnpipe.version import __version__

NOTE = ".launch.json"


def restarted(config: TrainConfig, world: World) -> Path | None:
    """Return the run folder, on every rank, if torchrun has restarted this run; else ``None``."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and not config.out:
        raise InputError(
            f"--out: torchrun --max-restarts {restarts} needs a known folder to resume from; give "
            "--out a folder"
        )
    is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and config.out != "off"
    path = Path(config.out)
    is_ours = is_again and (path / "config.toml").exists() and _noted(path)[0] == _launch()
    return path if world.share(is_ours) else None


def note_launch(run: Path, ranks: int, is_new: bool) -> None:
    """Record the launch that made the run folder, and the ranks of the launch that runs now.

    By the launch, a restart recognizes the folder. The plan may use fewer than the ``ranks``.
    """
    launch, started = (_launch(), time.time()) if is_new else _noted(run)[:2]
    if launch or ranks > 1:
        text = json.dumps({"launch": launch, "started": started, "ranks": ranks})
        (run / NOTE).write_text(text, encoding="utf-8")


def last_run(resumed: Sequence[Path]) -> tuple[Path | None, int]:
    """Return the first folder, if any, and the number of ranks of the last launch of its run.

    The number is 0 if it was not recorded.
    """
    return (resumed[0], _noted(resumed[0])[2]) if resumed else (None, 0)


def seconds_so_far(run: Path) -> float:
    """Return the time since the launch that created the run folder."""
    return max(time.time() - _noted(run)[1], 0.0)


def _noted(run: Path) -> tuple[str, float, int]:
    try:
        note = json.loads(read_text(run / NOTE))
        return str(note["launch"]), float(note["started"]), int(note.get("ranks", 0))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", time.time(), 0


def _launch() -> str:
    """Return an id that all restarts of a torchrun launch share; '' without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name not in ("", "none"):
        return name
    if not name:
        return ""
    parent = os.getppid()
    try:
        # Process ids are reused; together with the start time they are unique.
        stat = Path(f"/proc/{parent}/stat").read_text(encoding="ascii", errors="replace")
        return f"process {parent} of {stat.rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return f"process {parent}"


STATE, METRICS = "state.json", "metrics.csv"
"""Text files in a checkpoint."""

FIXED = (
    *(f.name for f in fields(TrainConfig) if f.metadata["group"] == "model"),
    *("split", "symmetrize", "remove_self_loops", "coalesce", "task", "seed"),
    *("dtype", "comm_dtype", "matmul_dtype", "metric", "optimizer"),
)
"""Settings that must not change when a run is resumed."""


def resumed_config(run: str | Path, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the config of the run in a folder with ``changes`` by field.

    Without a change of ``out`` the run continues in its folder. Raises ``InputError`` if the folder
    contains no run, or if a setting in ``changes`` must not change.
    """
    changes = changes or {}
    path = Path(run) / "config.toml"
    if not path.is_file():
        raise InputError(
            f"--resume {str(run)!r}: contains no run (no config.toml); give the folder of a "
            f"run{like_run_in(path.parent)}"
        )
    values = TrainConfig.read_toml(path)
    for name, value in changes.items():
        if name == "model":
            value = absolute_name(value)
        if name in FIXED and name in values and value != values[name]:
            before = "none" if values[name] == "" else values[name]
            raise InputError(
                f"{flag(name)} {value}: the run in {str(run)!r} has {before}, which a "
                "resumed run cannot change; leave it out, or start a new run without --resume"
            )
    own_plan = Path(run) / "plan.json"
    if "plan" not in changes and values.get("plan", "uniform") not in PLANNERS:
        # The file that was given may be gone or changed; the folder has the plan that was run.
        values["plan"] = str(own_plan) if own_plan.exists() else values["plan"]
    if changes.get("plan", "uniform") != "uniform":
        # The shape of the run so far; the new plan has one of its own.
        for name in ("stages", "shards", "chunks", "row_way", *BY_CHUNK_SETTINGS):
            values.pop(name, None)
    if changes.get("plan") == "auto":
        values.pop("profile", None)  # speeds are measured anew
    # The prediction is not part of the run: the new settings count, and a profile that has been
    # deleted does not prevent resuming.
    if changes.get("profile"):
        values["predict"] = True
    elif changes.get("predict") is False or not Path(values.get("profile", "")).is_file():
        values.pop("profile", None)
    return TrainConfig.from_dict(values | {"out": str(run)} | dict(changes))


FoundStart = tuple["Start | None", str]


@dataclass(frozen=True)
class Start:
    """State of a run at a checkpoint."""

    stored: StoredCheckpoint
    rows: tuple[EpochRow, ...]
    """Rows of the completed epochs."""
    best: tuple[int, Scores] | None
    """The best epoch and its scores."""
    identity: Mapping[str, Any]
    """Result of ``identity_of`` when the checkpoint was written."""
    lr_factor: float
    """Factor on the learning rate, reduced by ``--on-nan restore``."""
    sent_bytes: tuple[int, ...]
    """Bytes sent in the last epoch, over all ranks, by axis."""
    cut: Mapping[str, Any]
    """Result of ``cut_of`` when the checkpoint was written."""
    lengths: tuple[float, ...]
    """Gradient norms of the last epochs."""
    was_faulty: bool
    """Whether the last epoch made no optimizer step."""
    has_jumped: bool
    """Whether the gradient norm of the last epoch was far above the median."""

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return len(self.rows)

    def changes(self, cut: Mapping[str, Any], identity: Mapping[str, Any]) -> Iterator[str]:
        """Yield a message if libraries, optimizer steps or the partition differ."""
        # Older checkpoints store neither libraries nor steps.
        before = self.identity.get(LIBRARIES, identity[LIBRARIES])
        if before != identity[LIBRARIES]:
            yield (
                f"the checkpoint was written with {before}, and the run goes on with "
                f"{identity[LIBRARIES]}: whether the model has changed is not checked, and results "
                "may not be bitwise reproducible; for both, resume with the earlier versions"
            )
        if self.cut.get("steps", cut["steps"]) != cut["steps"]:
            yield (
                f"optimizer steps differ from before: {cut['steps']}; before: {self.cut['steps']}: "
                "from here on the run trains in another way"
            )
        is_recut = self.cut.get("digest") != cut["digest"]
        if is_recut and all(self.cut.get(name) == cut[name] for name in ("chunks", "shards")):
            yield (
                "the partition differs from before (another plan, METIS version, --order or "
                "--partitioner?): the run continues, but its results are not bitwise reproducible"
            )

    def is_over(self, config: TrainConfig) -> bool:
        """Return whether the run has ended: all epochs are done, or a setting has stopped it."""
        return self.epoch >= config.epochs or bool(stopped_by(config, self.rows, self.best))

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raise ``InputError`` if the graph or the model differ from those of the run."""
        for what, value in identity.items():
            if what == LIBRARIES or (what in _UNKNOWN and what not in self.identity):
                continue
            if what == DIGEST and self.identity.get(LIBRARIES) != identity[LIBRARIES]:
                continue
            if what not in self.identity or self.identity[what] != value:
                path = self.stored.path
                config = path.parents[1] / "config.toml"
                name = flag(what) if what in FIXED else f"the {what} of the run"
                fault = f"{name}: is {value} now, and {self.identity.get(what)} in {path}"
                if what in _CHECKSUMS:
                    fault = f"{_CHECKSUMS[what]} differ from those in {path}"
                raise InputError(
                    f"{fault}; resume with the dataset, model and settings of the run (see "
                    f"{config}), or start a new run without --resume"
                )

    @property
    def refill_epochs(self) -> int:
        """Epochs that must be exact, to fill history tables that the checkpoint does not store."""
        has_tables = any(n.startswith(("rows/", "mean/")) for n in self.stored.tensors)
        return 0 if has_tables else self.epoch + 1


_FIRST_CHOICES = {
    "optimizer": "Adam",
    "scheduler": "by --lr-schedule",
    "remove_self_loops": False,
    "coalesce": False,
    "require_capture": False,
    "label_inputs": 0.0,
    "label_iterations": 0,
}
"""Parts of the identity that checkpoints from before there was a choice do not have."""


DIGEST, LIBRARIES = "operations", "recorded by"
"""Parts of the identity: the model's digest, and the libraries that recorded the model. Another
version may record the same model in another way."""


_CHECKSUMS = {
    "graph": "graph: its vertices, edges, labels, split or data that the model reads",
    "weights": "model: names, shapes or number types of its weights",
    DIGEST: "model: operations of its forward, or settings of its modules such as a dropout rate,",
}
"""Parts of the identity that are checksums: what has changed if one of them differs."""

_UNKNOWN = ("choice of the optimizer", "loss", DIGEST, LIBRARIES)
"""Parts of the identity that older checkpoints do not tell."""


def identity_of(
    config: TrainConfig,
    prepared: Prepared,
    optimizer: torch.optim.Optimizer,
    has_own_scheduler: bool,
) -> dict[str, Any]:
    """Return what must not change when a run is resumed: settings, model, optimizer and graph."""
    state = prepared.model.module.state_dict()
    shapes = [(name, list(t.shape), str(t.dtype)) for name, t in sorted(state.items())]
    return {
        **{name: getattr(config, name) for name in FIXED},
        "model": prepared.model.name,
        "optimizer": type(optimizer).__name__,
        "choice of the optimizer": "passed in" if prepared.optimizer else "by --optimizer",
        "scheduler": "passed in" if has_own_scheduler else "by --lr-schedule",
        "loss": "passed in" if prepared.loss_fn else "that of the labels",
        "graph": prepared.digest,
        "weights": f"{zlib.crc32(repr(shapes).encode()):08x}",
        DIGEST: prepared.model.digest,
        LIBRARIES: f"gnnpipe {__version__}, torch {torch.__version__}, "
        f"PyG {torch_geometric.__version__}",
    }


def cut_of(prepared: Prepared) -> dict[str, Any]:
    """Return the numbers of chunks and shards, a digest of the partition, and optimizer steps."""
    chunking, program = prepared.chunking, prepared.program
    digest = zlib.crc32(chunking.ptr.tobytes(), zlib.crc32(chunking.perm.tobytes()))
    steps = f"{program.consistency.optimizer_steps or 1} an epoch"
    if prepared.spans_epochs:
        steps += f" with --schedule {prepared.plan.schedule}"
    if program.largest_gap:
        steps += f" --weights {prepared.config.weights}"
    return {
        "chunks": chunking.chunks,
        "shards": chunking.shards,
        "digest": f"{digest:08x}",
        "steps": steps,
    }


def stopped_by(
    config: TrainConfig, rows: Sequence[EpochRow], best: tuple[int, Scores] | None
) -> str:
    """Return the setting that ends the run after the last of ``rows``; '' if none does.

    The last epoch was evaluated, and has reached ``--target-metric``, or the best one is
    ``--patience`` epochs ago.
    """
    if rows[-1].scores is None:
        return ""
    if target_is_reached(config, rows[-1].scores):
        return f"--target-metric {config.target_metric:g}"
    if config.patience and best is not None and rows[-1].epoch - best[0] >= config.patience:
        return f"--patience {config.patience}"
    return ""


def find_start(run: Path, config: TrainConfig, world: World, needs_one: bool) -> FoundStart:
    """Return the state in the newest complete checkpoint, on every rank, and a message.

    ``needs_one``: raise ``InputError`` if there is none, or if the run has ended.
    """
    start, text, error = None, "", ""
    if world.rank == 0:
        start, faults = _newest_start(run)
        text = "".join(f"damaged checkpoint: {fault}\n" for fault in faults)
        if start is None:
            text += f"{run} has no complete checkpoint: starting at the first epoch"
        else:
            text += f"resuming from {start.stored.path}"
        if needs_one:
            error = _reason_against(run, config, start, faults)
    error, path = world.share((error, start.stored.path if start else None))
    if error:
        raise InputError(f"--resume {str(run)!r}: {error}")
    if path is None:
        return None, text
    fault: InputError | None = None
    if start is None:
        try:
            # Rank 0 has verified the content; here only the folder is compared.
            start = _start(StoredCheckpoint(path, verifies=False))
        except InputError as found:
            fault = InputError(f"{found}; --out must be a folder that all ranks can read")
    world.agree(fault)
    assert start is not None
    return start, text


def _newest_start(run: Path) -> tuple[Start | None, list[str]]:
    """Return the state in the newest complete checkpoint, and the faults of newer ones."""
    starts: list[Start] = []
    _, faults = newest_whole(run, lambda stored: starts.append(_start(stored)))
    return (starts[0] if starts else None), faults


def _reason_against(
    run: Path, config: TrainConfig, start: Start | None, faults: Sequence[str]
) -> str:
    """Return why the run cannot be resumed and what to do; '' if it can."""
    if start is None:
        reason = "--checkpoint-every 10 writes them"
        if has_unfinished(run):
            reason = "the run ended while the first one was being written"
        reason = faults[0] if faults else reason
        return f"has no complete checkpoint ({reason}); start a new run with another --out"
    # A run that was killed before it wrote its result only has to write it.
    has_ended = (run / "result.json").exists() or start.rows[-1].scores is None
    if not (has_ended and start.is_over(config)):
        return ""
    setting = stopped_by(config, start.rows, start.best)
    if setting and start.epoch < config.epochs:
        return f"{setting} has stopped the run; try {'less' if config.metric in ERRORS else 'more'}"
    return (
        f"{start.epoch} epochs are done, --epochs is {config.epochs}; to train on, give more, such "
        f"as --epochs {2 * start.epoch}"
    )


def state_text(
    best: tuple[int, Scores] | None,
    identity: Mapping[str, Any],
    lr_factor: float,
    sent_bytes: Sequence[int],
    cut: Mapping[str, Any],
    exact_epochs: ExactEpochs,
) -> str:
    """Return the state file of a checkpoint: JSON, with NaN as Python writes it."""
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
        if len(sent) != len(fields(CommVolume)):
            raise ValueError(f"sent_bytes {sent}")
        identity, cut = _FIRST_CHOICES | state["identity"], dict(state["cut"])
        lengths = tuple(float(number) for number in state.get("lengths", ()))
        if not all(0 <= length < math.inf for length in lengths):
            raise ValueError(f"lengths {lengths}")
        why = (bool(state.get(name, False)) for name in ("was_faulty", "has_jumped"))
        return Start(stored, tuple(rows), best, identity, factor, sent, cut, lengths, *why)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise InputError(f"{stored.path}: not the state of a run ({error})") from None
