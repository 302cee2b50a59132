"""Settings that are right one by one and make no sense together.

Each check names the flag to change. What a single value may be stands with its field in ``config``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gnnpipe.config.fields import flag
from gnnpipe.errors import InputError

if TYPE_CHECKING:
    from gnnpipe.config import TrainConfig

__all__ = ["check_stages", "check_together", "check_verifiable"]


def check_together(config: TrainConfig) -> None:
    """``InputError`` on the first contradiction."""
    _check_model(config)
    _check_epochs(config)
    _check_checkpoints(config)
    _check_staleness(config)
    if config.profile and not config.predict:
        raise InputError(
            f"--profile {config.profile!r}: nothing is predicted with --no-predict; drop one of "
            "the two"
        )


def check_verifiable(config: TrainConfig) -> None:
    """``InputError`` where a run rounds and the reference, one device in float64, does not."""
    for name in ("comm_dtype", "matmul_dtype"):
        if getattr(config, name) != "same":
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: rounds, which the reference does not; "
                "verify without it"
            )


def _check_model(config: TrainConfig) -> None:
    if config.hidden % config.heads and config.model == "gat":
        raise InputError(
            f"--heads {config.heads}: does not divide --hidden {config.hidden}; "
            f"try --hidden {math.ceil(config.hidden / config.heads) * config.heads}"
        )
    if config.model == "gat" and config.kernel not in ("auto", "embedding-bag"):
        raise InputError(
            f"--kernel {config.kernel}: gat has no product with the adjacency; leave it out, or "
            "try another --model"
        )


def check_stages(config: TrainConfig) -> None:
    """A model of the config has a layer for each stage; one that is passed in, its own ops."""
    if config.stages > config.layers:
        raise InputError(
            f"--stages {config.stages}: more stages than layers ({config.layers}); "
            f"try --stages {config.layers} or more --layers"
        )


def _check_epochs(config: TrainConfig) -> None:
    """What is counted in epochs must fit in with the rest."""
    if config.warmup_epochs >= config.epochs and config.warmup_epochs:
        raise InputError(
            f"--warmup-epochs {config.warmup_epochs}: no shorter than the run; try less than "
            f"--epochs {config.epochs}"
        )
    is_plateau = config.lr_schedule == "plateau"
    wishes = {
        f"--patience {config.patience}": config.patience,
        f"--lr-patience {config.lr_patience}": config.lr_patience if is_plateau else 0,
        "--keep-weights best": math.inf if config.keep_weights == "best" else 0,
    }
    for wish, epochs in wishes.items():
        if epochs and not config.eval_every:
            raise InputError(
                f"{wish}: nothing is evaluated on the way; try --eval-every {min(10, epochs)}"
            )
        if epochs and epochs < config.eval_every:
            raise InputError(
                f"{wish}: shorter than --eval-every {config.eval_every}; try --eval-every {epochs}"
            )
    if is_plateau and config.lr_patience >= (config.patience or config.epochs):
        end = f"--patience {config.patience}" if config.patience else f"--epochs {config.epochs}"
        raise InputError(
            f"--lr-patience {config.lr_patience}: the run ends before, by {end}; "
            "try less, or --lr-schedule constant"
        )


def _check_checkpoints(config: TrainConfig) -> None:
    if config.out == "off" and config.checkpoint_every:
        raise InputError(
            f"--checkpoint-every {config.checkpoint_every}: nothing is written with --out off; "
            "give --out a folder"
        )
    if config.on_nan == "restore" and not config.checkpoint_tables:
        raise InputError(
            "--on-nan restore: with --no-checkpoint-tables the tables cannot be put back; drop one "
            "of the two"
        )
    if config.on_nan == "restore" and (config.out == "off" or config.checkpoint_every == 0):
        why = "--out off" if config.out == "off" else "--checkpoint-every 0"
        raise InputError(
            f"--on-nan restore: with {why} there is no checkpoint to go back to; try --on-nan skip"
        )


def _off(name: str, idle: float) -> str:
    """The flag that takes a stored setting back."""
    word = flag(name)
    return f"--no-{word.removeprefix('--')}" if idle is False else f"{word} {idle}"


def _check_staleness(config: TrainConfig) -> None:
    if config.staleness == "exact" and config.chunks > 1:
        for name, idle in (
            ("shuffle_chunks", False), ("snapshot_every", 1), ("scale_live_gradients", 1),
            ("pilots_per_column", 0), ("exact_epochs", 0), ("exact_above", 0),
        ):  # fmt: skip
            if getattr(config, name) not in (None, idle):
                raise InputError(
                    f"{flag(name)} {getattr(config, name)}: has no meaning with --staleness "
                    f"exact, where nothing is stale; drop one of the two, or try {_off(name, idle)}"
                )
    found = config.techniques
    if found.pilots_per_column and found.snapshot_every > 1:
        name = "pilots_per_column" if config.snapshot_every is None else "snapshot_every"
        hint = "--snapshot-every 1" if config.snapshot_every is None else "--staleness paper"
        raise InputError(
            f"{flag(name)} {getattr(config, name)}: a forecast carries rows over from the last "
            f"epoch, not from a snapshot; drop it, or try {hint}"
        )
