"""Validates combinations of settings; every error names the flag, its value and what to try."""

from __future__ import annotations

import math
import re

from gnnpipe.config.fields import flag
from gnnpipe.config.model_args import model_args
from gnnpipe.config.settings import BY_CHUNK, LOGGERS, Settings
from gnnpipe.errors import InputError


def parse_split(split: str) -> tuple[float, float, float] | None:
    """Return the fractions of a split such as '60/20/20', or ``None`` for 'given'."""
    if split == "given":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", split)
    if match:
        parts = [float(g) for g in match.groups()]
        if parts[0] > 0 and math.isclose(sum(parts), 100):
            return parts[0] / 100, parts[1] / 100, parts[2] / 100
    hint = "try 'given' or three percentages that add up to 100, like 60/20/20"
    raise InputError(f"--split {split!r}: {hint}")


def check_combinations(config: Settings) -> None:
    """Raise ``InputError`` for the first pair of settings that contradict each other."""
    _check_model(config)
    _check_recomputation(config)
    _check_epochs(config)
    _check_checkpoints(config)
    check_staleness(config, config.chunks, config.schedule)
    _check_plan(config)
    if config.plan in ("uniform", "auto"):  # the schedule of a plan file is checked with its plan
        check_schedule(config, config.chunks, config.schedule)
    _check_labels(config)
    unknown = [name for name in config.loggers if name not in LOGGERS]
    if unknown:
        also = " (metrics.csv in the run folder is always written)" if "csv" in unknown else ""
        raise InputError(
            f"--log {config.log!r}: {unknown[0]!r} is not known{also}; try {', '.join(LOGGERS)} or "
            f"both: {','.join(LOGGERS)}"
        )
    if config.profile and not config.predict:
        raise InputError(
            f"--profile {config.profile!r}: not used with --no-predict; leave one of the two out"
        )


def check_verifiable(config: Settings) -> None:
    """Raise ``InputError`` if the reference cannot follow the run: bf16, or labels as inputs."""
    if config.label_inputs:
        raise InputError(
            f"--label-inputs {config.label_inputs:g}: not followed by the reference; verify the "
            "model without it"
        )
    for name in ("comm_dtype", "matmul_dtype"):
        if getattr(config, name) != "same":
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: rounds, which the reference does not; "
                "verify without it"
            )


def check_timed(config: Settings) -> None:
    """Raise ``InputError`` for label iterations, whose passes a predicted epoch does not have."""
    if config.label_iterations:
        raise InputError(
            f"--label-iterations {config.label_iterations}: a predicted epoch has no such passes; "
            "leave it out"
        )


def _check_model(config: Settings) -> None:
    model_args(config.model_args)
    if config.model == "gat" and config.kernel not in ("auto", "embedding-bag"):
        raise InputError(
            f"--kernel {config.kernel}: not used by gat, which computes attention without a "
            "sparse-dense product; leave it out, or try another --model"
        )


def _check_recomputation(config: Settings) -> None:
    if config.recompute_every != 1 and not config.recompute:
        raise InputError(
            f"--recompute-every {config.recompute_every}: has no effect without --recompute; give "
            "both, or leave it out"
        )


def _check_epochs(config: Settings) -> None:
    """Check the settings that are counted in epochs against each other."""
    if config.warmup_epochs >= config.epochs and config.warmup_epochs:
        raise InputError(
            f"--warmup-epochs {config.warmup_epochs}: as long as the run or longer; try less than "
            f"--epochs {config.epochs}"
        )
    is_plateau = config.lr_schedule == "plateau"
    epochs_of = {
        f"--patience {config.patience}": config.patience,
        f"--lr-patience {config.lr_patience}": config.lr_patience if is_plateau else 0,
        "--keep-weights best": math.inf if config.keep_weights == "best" else 0,
        f"--target-metric {config.target_metric}": math.inf if config.target_metric else 0,
    }
    for text, epochs in epochs_of.items():
        if epochs and not config.eval_every:
            raise InputError(
                f"{text}: needs evaluations during training; try --eval-every {min(10, epochs)}"
            )
        if epochs and epochs < config.eval_every:
            raise InputError(
                f"{text}: shorter than --eval-every {config.eval_every}; try --eval-every {epochs}"
            )
    if is_plateau and config.lr_patience >= (config.patience or config.epochs):
        end = f"--patience {config.patience}" if config.patience else f"--epochs {config.epochs}"
        raise InputError(
            f"--lr-patience {config.lr_patience}: the run ends earlier, by {end}; "
            "try less, or --lr-schedule constant"
        )


def _check_checkpoints(config: Settings) -> None:
    if config.out == "off" and config.checkpoint_every:
        raise InputError(
            f"--checkpoint-every {config.checkpoint_every}: nothing is written with --out off; "
            "give --out a folder"
        )
    if config.on_nan == "restore" and not config.checkpoint_tables:
        raise InputError(
            "--on-nan restore: needs the history tables, which --no-checkpoint-tables leaves out; "
            "leave one of the two out"
        )
    if config.on_nan == "restore" and (config.out == "off" or config.checkpoint_every == 0):
        why = "--out off" if config.out == "off" else "--checkpoint-every 0"
        raise InputError(
            f"--on-nan restore: {why} writes no checkpoint to restore; try --on-nan skip"
        )


UNUSED_IN_EXACT = {
    "shuffle_chunks": False,
    "snapshot_every": 1,
    "scale_live_gradients": 1,
    "probes": 0,
    "exact_epochs": 0,
    "exact_above": 0,
}
"""Settings that have no effect in an exact run, and the value that says the same."""


def check_staleness(config: Settings, chunks: int, schedule: str) -> None:
    """``InputError`` if the settings of stale rows contradict each other with a plan.

    ``chunks`` and ``schedule``: of the plan.
    """
    if schedule in BY_CHUNK:
        _check_staleness_by_chunk(config, schedule)
        return
    is_exact = config.staleness == "exact" and chunks > 1
    for name, neutral in UNUSED_IN_EXACT.items() if is_exact else ():
        value = getattr(config, name)
        if value not in (None, neutral):
            word = flag(name)
            off = f"--no-{word.removeprefix('--')}" if neutral is False else f"{word} {neutral}"
            raise InputError(
                f"{word} {value}: has no effect with --staleness exact, where nothing is stale; "
                f"leave one of the two out, or try {off}"
            )
    found = config.staleness_settings_for(chunks, schedule)
    if found.probes and found.snapshot_every > 1:
        name = "probes" if config.snapshot_every is None else "snapshot_every"
        hint = "--snapshot-every 1" if config.snapshot_every is None else "--staleness paper"
        raise InputError(
            f"{flag(name)} {getattr(config, name)}: a forecast starts from the embeddings of the "
            f"previous epoch, not from a snapshot; leave it out, or try {hint}"
        )


def _check_staleness_by_chunk(config: Settings, schedule: str) -> None:
    """Check that no technique for stale rows is asked for with steps by chunk."""
    if config.staleness in ("paper", "exact"):
        raise InputError(
            f"--staleness {config.staleness}: not used with --schedule {schedule}, where stale "
            "rows are used as they are and gradients stay in their chunk; leave one of the two out"
        )
    for name, neutral in UNUSED_IN_EXACT.items():
        value = getattr(config, name)
        if name != "shuffle_chunks" and value not in (None, neutral):
            raise InputError(
                f"{flag(name)} {value}: has no effect with --schedule {schedule}, where stale rows "
                "are used as they are and gradients stay in their chunk; leave one of the two out"
            )


def check_schedule(config: Settings, chunks: int, schedule: str) -> None:
    """``InputError`` if settings contradict a plan with this ``schedule`` and K ``chunks``."""
    if schedule == "async" and config.label_inputs:
        raise InputError(
            f"--label-inputs {config.label_inputs:g}: changes the features in every epoch, and "
            "with --schedule async chunks of two epochs are in flight; try --schedule 1f1b"
        )
    if config.weights != "predict" and schedule != "async":
        raise InputError(
            f"--weights {config.weights}: has no effect with --schedule {schedule}, where "
            "every pass computes with the newest weights; try --schedule async"
        )
    if schedule in BY_CHUNK and chunks > 1 and not config.checkpoint_tables:
        raise InputError(
            f"--no-checkpoint-tables: --schedule {schedule} has no epochs that fill the history "
            "tables again after --resume; leave it out"
        )
    if config.passes_ahead > 1 and schedule not in BY_CHUNK:
        raise InputError(
            f"--passes-ahead {config.passes_ahead}: --schedule {schedule} runs all forward passes "
            "first; leave it out, or try --schedule 1f1b or async"
        )
    every = config.steps_every
    if every is None:
        return
    if schedule not in BY_CHUNK:
        raise InputError(
            f"--steps-every {every}: --schedule {schedule} takes one optimizer step an "
            "epoch; try --schedule 1f1b or async"
        )
    if chunks % every:
        divisors = [str(n) for n in range(1, chunks + 1) if chunks % n == 0]
        raise InputError(
            f"--steps-every {every}: does not divide --chunks {chunks}; try {', '.join(divisors)}"
        )


def _check_labels(config: Settings) -> None:
    """Check the settings of labels that are inputs against the others."""
    if config.label_iterations and not config.label_inputs:
        raise InputError(
            f"--label-iterations {config.label_iterations}: has no effect without --label-inputs; "
            "try --label-inputs 0.5"
        )
    if config.label_inputs and config.task == "links":
        raise InputError(
            f"--label-inputs {config.label_inputs:g}: links have no labels of vertices; leave it "
            "out with --task links"
        )
    if config.profile:
        check_timed(config)


def _check_plan(config: Settings) -> None:
    shape = {"stages": config.stages, "shards": config.shards, "chunks": config.chunks}
    given = [f"{flag(name)} {value}" for name, value in shape.items() if value > 1]
    given += [f"--row-way {config.row_way}"] * (config.row_way != "halo")
    given += [f"--schedule {config.schedule}"] * (config.schedule != "fill-drain")
    if config.plan == "auto" and given:
        raise InputError(
            f"{', '.join(given)}: no effect with --plan auto, which finds the shape; leave out "
            "either these or --plan auto"
        )
    if config.comm_dtype == "auto" and config.plan == "uniform":
        raise InputError(
            "--comm-dtype auto: only --plan auto or a plan file decides on it; give same or bf16"
        )
    if config.plan != "uniform" and given:
        raise InputError(
            f"{', '.join(given)}: no effect with --plan {config.plan!r}, whose file gives the "
            "shape; leave out either these or --plan"
        )
    if config.passes_ahead > 1 and config.stages == 1 and config.plan == "uniform":
        raise InputError(
            f"--passes-ahead {config.passes_ahead}: with --stages 1 no stage is ahead of another; "
            "leave it out"
        )
    if config.row_way != "halo" and config.shards == 1:
        raise InputError(
            f"--row-way {config.row_way}: with --shards 1 no rows travel among shards; try "
            "--shards 2, or --row-way halo"
        )
