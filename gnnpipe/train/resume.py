"""Going on with a run: which settings may change, what must not, and the rows known so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.settings import flag
from gnnpipe.train.checkpoint.files import StoredCheckpoint
from gnnpipe.train.checkpoint.folder import newest_whole
from gnnpipe.train.record import EpochRow
from gnnpipe.train.scoring import Scores
from gnnpipe.train.staleness import Staleness

__all__ = ["Start", "find_start", "resumed_config", "state_of"]

FIXED = (
    "split", "symmetrize", "task", "model", "layers", "hidden", "heads", "dropout",
    "alpha", "theta", "seed", "dtype", "comm_dtype", "metric",
)  # fmt: skip
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
            "of a run"
        )
    values = {k.replace("-", "_"): v for k, v in TrainConfig.read_toml(path).items()}
    for name, value in changes.items():
        if name in FIXED and name in values and value != values[name]:
            raise InputError(
                f"{flag(name)} {value}: the run in {str(run)!r} has {values[name]}, and would be "
                "another one; leave it out, or start anew without --resume"
            )
    return TrainConfig.from_dict(values | {"out": str(run)} | dict(changes))


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    stored: StoredCheckpoint
    epoch: int
    """Epochs that are done."""
    rows: tuple[EpochRow, ...]
    """Theirs."""
    best: tuple[int, Scores] | None
    """The best epoch so far, and its scores."""
    identity: Mapping[str, Any]
    """What the graph and the model were known by."""
    lr_factor: float
    """What faults have made of the learning rate."""

    def check(self, identity: Mapping[str, Any]) -> None:
        """``InputError`` if graph or model are others than those that the run began with."""
        for what, value in self.identity.items():
            if identity.get(what) != value:
                raise InputError(
                    f"--resume: the {what} is another than that of {self.stored.path} "
                    f"({identity.get(what)}, not {value}); go on with what the run began with"
                )

    def refilling(self, config: TrainConfig) -> TrainConfig:
        """``config`` with one exact epoch first, where tables are read that are not stored."""
        has_tables = any(n.startswith(("rows/", "mean/")) for n in self.stored.tensors)
        if has_tables or config.chunks == 1 or config.techniques.exact:
            return config
        return replace(config, exact_epochs=max(config.techniques.exact_epochs, self.epoch + 1))


def find_start(run: Path, epochs: int, mesh: Mesh, needs_one: bool) -> tuple[Start | None, str]:
    """The newest whole checkpoint of a run, on every rank; and what there is to say about it.

    ``needs_one``: raise ``InputError`` if there is none, instead of starting at the first epoch.
    """
    stored, text, error = None, "", None
    if mesh.rank == 0:
        stored, faults = newest_whole(run)
        told = "".join(f"damaged checkpoint: {fault}\n" for fault in faults)
        if stored is None:
            text = told + f"{run} holds no whole checkpoint: starting at the first epoch"
            if needs_one:
                error = (
                    f"--resume {str(run)!r}: holds no whole checkpoint"
                    + (f" ({faults[0]})" if faults else "")
                    + "; start anew without --resume"
                )
        else:
            text = told + f"going on from {stored.path}"
    error = mesh.share(error)
    if error:
        raise InputError(error)
    path = mesh.share(stored.path if stored else None)
    if path is None:
        return None, text
    fault = None
    if stored is None:
        try:
            # Rank 0 has read every byte; here it is only asked whether the folder is the same.
            stored = StoredCheckpoint(path, verifies=False)
        except InputError as found:
            fault = InputError(f"{found}; --out must be a folder that all ranks share")
    mesh.agree(fault)
    assert stored is not None
    start = _start(stored)
    if start.epoch >= epochs:
        raise InputError(
            f"--resume {str(run)!r}: {start.epoch} of {epochs} epochs are done; to train longer, "
            f"try --epochs {2 * start.epoch}"
        )
    return start, text


def state_of(
    rows: list[EpochRow],
    best: tuple[int, Scores] | None,
    identity: Mapping[str, Any],
    lr_factor: float,
) -> dict[str, Any]:
    """What a checkpoint holds beside tensors; JSON, with NaN as Python writes it."""
    return {
        "epoch": rows[-1].epoch,
        "rows": [asdict(row) for row in rows],
        "best": None if best is None else {"epoch": best[0], "scores": asdict(best[1])},
        "identity": dict(identity),
        "lr_factor": lr_factor,
    }


def _start(stored: StoredCheckpoint) -> Start:
    state = stored.state
    try:
        best = state["best"]
        rows = tuple(map(_row, state["rows"]))
        if not rows or [row.epoch for row in rows] != list(range(1, state["epoch"] + 1)):
            raise ValueError("epochs do not follow each other")
        return Start(
            stored, state["epoch"], rows,
            None if best is None else (int(best["epoch"]), Scores(**best["scores"])),
            dict(state["identity"]), float(state["lr_factor"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{stored.path}: its state is not that of a run ({error!r})") from None


def _row(values: Mapping[str, Any]) -> EpochRow:
    fields = dict(values)
    if fields["scores"] is not None:
        fields["scores"] = Scores(**fields["scores"])
    if fields["staleness"] is not None:
        s = fields["staleness"]
        fields["staleness"] = Staleness(
            float(s["stale_reads"]), tuple(s["drift"]), tuple(s["moved"]), tuple(s["missed"])
        )
    row = EpochRow(**fields)
    numbers = (row.loss, row.epoch_time_s, row.eval_time_s, row.lr)
    if not isinstance(row.epoch, int) or not all(isinstance(n, float) for n in numbers):
        raise ValueError("a row is not one of numbers")
    return row
