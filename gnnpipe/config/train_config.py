"""Every setting of a run, defined once.

A field here is a Python argument (``TrainConfig(layers=16)``), a TOML key (``layers = 16``) and a
flag (``--layers 16``): the command line is built from the metadata below, and the checks here hold
for all three. Nothing in this file needs the graph or the device; what depends on those is checked
where they are known.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from gnnpipe.config.fields import check_border, flag, setting, typed
from gnnpipe.config.staleness import PRESETS, StalenessSettings
from gnnpipe.errors import InputError
from gnnpipe.files import read_text
from gnnpipe.registry import nearest

__all__ = ["RunSettings", "TrainConfig", "check_stages", "check_verifiable", "parse_split"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The part of ``TrainConfig`` that is not about the model or its training."""

    out: str = setting(
        "",
        "folder of the run (default runs/<dataset>-<model>-<time>; 'off' writes none)",
        group="output",
    )
    quiet: bool = setting(False, "print nothing while training", group="output")
    predict: bool = setting(
        True,
        "predict the time of an epoch, to be set beside the measured one: by --profile, or by a "
        "short profile taken before the first epoch (about 2 s, or 5 % of the run's time; not on "
        "GPUs, nor for less than 10 epochs)",
        group="output",
    )
    profile: str = setting(
        "", "predict from this file of `gnnpipe profile --save` instead", group="output"
    )
    device: str = setting(
        "auto",
        "auto, cpu or cuda (one GPU a rank, of those that CUDA_VISIBLE_DEVICES names)",
        group="ranks",
        choices=("auto", "cpu", "cuda"),
    )
    kernel: str = setting(
        "auto",
        "what multiplies the adjacency with rows: embedding-bag, csr (torch's), torch-sparse (if "
        "installed), triton (on GPUs), measured (the fastest of them here; may differ from run to "
        "run, and with it the last digits), or auto: embedding-bag on CPUs, triton on GPUs",
        group="ranks",
        choices=("auto", "measured", "embedding-bag", "csr", "torch-sparse", "triton"),
    )
    timeout_s: float = setting(
        120.0,
        "seconds a rank waits for another before the run is ended; one that gives no sign of life "
        "is given up after an eighth of it",
        group="ranks",
        above=0,
        high=1e6,
    )

    check_weights: bool = setting(
        False,
        "whenever the model is evaluated, compare the weights that shards hold in common",
        group="ranks",
    )

    checkpoint_every: int | None = setting(
        None,
        "epochs from one checkpoint to the next (default: as many as take about ten minutes; 0: "
        "none, except when the run is told to stop)",
        group="checkpoints",
        low=0,
    )
    keep: int = setting(
        2, "checkpoints that remain; older ones are removed", group="checkpoints", low=1
    )
    checkpoint_tables: bool = setting(
        True,
        "keep the history tables in checkpoints; without them they are small, and the first epoch "
        "after --resume is walked exactly, to fill the tables again",
        group="checkpoints",
    )
    time_limit_s: float = setting(
        0.0,
        "seconds after which the run writes a checkpoint and ends with exit code 75, as it does on "
        "SIGTERM (0: no limit)",
        group="checkpoints",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunSettings):
    """The settings of one training run; see ``gnnpipe train --help`` for the same in words.

    Raises ``InputError`` naming the field, the value and what to try.
    """

    dataset: str = setting(
        "debian",
        "graph to train on: a name (see `gnnpipe info --list`) or a path to an .npz file",
        group="data",
    )
    data_dir: str = setting("", "folder that holds downloaded datasets", group="data")
    split: str = setting(
        "given",
        "train/val/test split: 'given' (the dataset's own) or percentages like 60/20/20, seeded",
        group="data",
    )
    symmetrize: bool = setting(
        False, "add the reverse of every edge of a directed graph", group="data"
    )
    task: str = setting(
        "labels",
        "what is learned: labels of the vertices, or links: which pairs of vertices are joined by "
        "an edge (--split is then that of the edges; 'given' is 85/5/10)",
        group="data",
        choices=("labels", "links"),
    )

    model: str = setting("gcn", "gcn, sage, gcnii, resgcn or gat", group="model")
    layers: int = setting(2, "number of GNN layers L", group="model", low=1, high=10_000)
    hidden: int = setting(64, "hidden width H", group="model", low=1, high=1_000_000)
    heads: int = setting(4, "attention heads (gat); must divide --hidden", group="model", low=1)
    dropout: float = setting(0.5, "dropout probability", group="model", low=0, below=1)
    alpha: float = setting(0.1, "gcnii: share of h0 in every layer", group="model", low=0, below=1)
    theta: float = setting(
        0.5,
        "gcnii: strength of the weight matrix, beta = log(theta / layer + 1)",
        group="model",
        above=0,
    )

    epochs: int = setting(200, "epochs to train", group="training", low=1)
    lr: float = setting(0.01, "learning rate (Adam)", group="training", above=0)
    weight_decay: float = setting(0.0, "L2 penalty (Adam)", group="training", low=0)
    seed: int = setting(
        0,
        "seed of weights, dropout, chunk order and splits",
        group="training",
        low=0,
        high=2**32 - 1,
    )
    dtype: str = setting(
        "float32",
        "number type of weights and rows (features: of float32)",
        group="training",
        choices=("float32", "float64"),
    )
    matmul_dtype: str = setting(
        "same",
        "number type of products with weights, but for the last: same (as --dtype), or "
        "bf16 (8 bits of precision; faster where the processor computes in bf16)",
        group="training",
        choices=("same", "bf16"),
    )
    comm_dtype: str = setting(
        "same",
        "number type of the rows on the wire and in the tables: same (as --dtype), or bf16 (half "
        "the bytes, 8 bits of precision, of edge weights and aggregated rows too)",
        group="training",
        choices=("same", "bf16"),
    )
    lr_schedule: str = setting(
        "constant",
        "learning rate over the epochs: constant, cosine (half a cosine down, 0 after the last "
        "epoch) or plateau (halved when the validation metric is no better for --lr-patience "
        "epochs)",
        group="training",
        choices=("constant", "cosine", "plateau"),
    )
    warmup_epochs: int = setting(
        0,
        "epochs at the start in which the learning rate rises in equal steps",
        group="training",
        low=0,
    )
    lr_patience: int = setting(50, "see --lr-schedule plateau", group="training", low=1)
    clip_norm: float = setting(
        0.0,
        "gradients longer than this, over all weights, are made so long (0: never)",
        group="training",
        low=0,
    )
    on_nan: str = setting(
        "stop",
        "when loss or gradients are no numbers: stop, skip (leave out the step) or restore (go on "
        "from the last checkpoint with half the learning rate)",
        group="training",
        choices=("stop", "skip", "restore"),
    )

    eval_every: int = setting(
        10, "evaluate every n-th epoch and the last (0: only the last)", group="evaluation", low=0
    )
    metric: str = setting(
        "auto",
        "what is reported beside accuracy, and chooses the best epoch: accuracy, rocauc, f1-micro "
        "or f1-macro; of numbers r2, mae or rmse; auto: f1-micro for several labels, rocauc for "
        "links and for two classes with one below 30 %, r2 for numbers, else accuracy",
        group="evaluation",
        choices=("auto", "accuracy", "rocauc", "f1-micro", "f1-macro", "r2", "mae", "rmse"),
    )
    patience: int = setting(
        0,
        "stop after so many epochs without a better validation metric (0: never)",
        group="evaluation",
        low=0,
    )
    keep_weights: str | None = setting(
        None,
        "weights at the end: those of the last epoch or of the best by the validation metric "
        "(default: best with --patience, else last)",
        group="evaluation",
        choices=("last", "best"),
    )

    stages: int = setting(1, "pipeline stages S the layers are cut into", group="shape", low=1)
    shards: int = setting(1, "shards G: ranks that share one stage", group="shape", low=1)
    chunks: int = setting(
        1, "chunks K of the vertices, walked one by one (exact: or together)", group="shape", low=1
    )
    partitioner: str = setting(
        "metis", "how vertices are cut: metis, range or random", group="shape"
    )
    order: str = setting(
        "auto",
        "order of the vertices inside a chunk: metis (neighbours together: faster out of cache), "
        "given, or auto (metis from 16,384 vertices on, if they are cut by it)",
        group="shape",
        choices=("auto", "metis", "given"),
    )
    cache_dir: str = setting(
        "",
        "folder of cached partitions (default ~/.cache/gnnpipe; 'off' keeps none)",
        group="shape",
    )

    recompute: bool = setting(
        False,
        "keep only what each layer reads until backward, and make the rest again there, dropout "
        "and all: less memory, the same results, one more forward pass of the dense work",
        group="shape",
    )

    staleness: str = setting(
        "auto",
        "auto: stale rows are forecast; none: no technique; paper: all three of GNNPipe; exact: "
        "layer by layer, no stale read. Without effect when K = 1",
        group="staleness",
        choices=("auto", "none", "paper", "exact"),
    )
    shuffle_chunks: bool | None = setting(
        None,
        "walk the chunks in a new order every epoch (default: by --staleness)",
        group="staleness",
    )
    snapshot_every: int | None = setting(
        None,
        "stale reads come from a snapshot refreshed every n epochs; 1: from the last epoch "
        "(default: by --staleness)",
        group="staleness",
        low=1,
    )
    scale_live_gradients: float | None = setting(
        None,
        "factor on gradients that arrive from other chunks (default: by --staleness)",
        group="staleness",
        above=0,
    )
    probes_per_column: int | None = setting(
        None,
        "vertices that pass ahead each epoch to forecast the stale rows of all others, for each "
        "column of a row; 0: no forecast (default: by --staleness)",
        group="staleness",
        low=0,
    )
    exact_epochs: int | None = setting(
        None,
        "epochs at the start that are walked layer by layer, without stale reads "
        "(default: by --staleness)",
        group="staleness",
        low=0,
    )
    exact_above: float | None = setting(
        None,
        "where the gradients of an epoch were longer than this times the median of the last 20, "
        "walk the next one layer by layer; and cut gradients to twice that median; 0: neither "
        "(default: by --staleness)",
        group="staleness",
        low=0,
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(TrainConfig)
        for f in fields(self):
            value = typed(f.name, getattr(self, f.name), hints[f.name])
            object.__setattr__(self, f.name, value)
            check_border(f.name, value, f.metadata)
        parse_split(self.split)
        check_together(self)

    @property
    def kept_epoch(self) -> str:
        """Whose weights remain: 'last' or 'best'."""
        return self.keep_weights or ("best" if self.patience else "last")

    @property
    def world_size(self) -> int:
        """Ranks the shape needs: S * G."""
        return self.stages * self.shards

    @property
    def staleness_settings(self) -> StalenessSettings:
        """The preset of ``staleness`` with what was set one by one; a single chunk needs none."""
        if self.chunks == 1:
            return PRESETS["none"]
        given = {
            name: getattr(self, name)
            for name in (
                "shuffle_chunks",
                "snapshot_every",
                "scale_live_gradients",
                "probes_per_column",
                "exact_epochs",
                "exact_above",
            )
            if getattr(self, name) is not None
        }
        found = dataclasses.replace(PRESETS[self.staleness], **given)
        # A run of exact epochs alone is an exact run.
        return PRESETS["exact"] if found.exact_epochs >= self.epochs else found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config") -> TrainConfig:
        """A config from plain values, refusing names that are not fields."""
        cls._refuse_unknown(values, source)
        return cls(**{k.replace("-", "_"): v for k, v in values.items()})

    @classmethod
    def _refuse_unknown(cls, values: Mapping[str, Any], source: str) -> None:
        known = {f.name for f in fields(cls)}
        for key in values:
            name = key.replace("-", "_")
            if name not in known:
                raise InputError(f"{source}: unknown key {key!r}; {nearest(key, known)}")
            if name != key and name in values:
                raise InputError(f"{source}: both {key!r} and {name!r}; leave one out")

    @classmethod
    def read_toml(cls, path: str | Path) -> dict[str, Any]:
        """The keys that a TOML file sets, checked to be fields (values are checked on use)."""
        source = f"--config {str(path)!r}"
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise InputError(f"{source}: cannot be read ({error}); give a TOML file") from None
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # int() has a limit on digits of its own
            raise InputError(
                f"{source}: not valid TOML ({error}); try lines like layers = 4"
            ) from None
        cls._refuse_unknown(values, source)
        return values

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, ``None`` where the default follows from another field."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """Return the config as TOML, without the fields that are ``None`` (their default)."""
        return tomli_w.dumps({k: v for k, v in self.to_dict().items() if v is not None})


def parse_split(split: str) -> tuple[float, float, float] | None:
    """Fractions of a split such as '60/20/20', or ``None`` for 'given'."""
    if split == "given":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", split)
    if match:
        parts = [float(g) for g in match.groups()]
        if parts[0] > 0 and math.isclose(sum(parts), 100):
            return parts[0] / 100, parts[1] / 100, parts[2] / 100
    hint = "try 'given' or three percentages that add up to 100, like 60/20/20"
    raise InputError(f"--split {split!r}: {hint}")


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
            ("shuffle_chunks", False),
            ("snapshot_every", 1),
            ("scale_live_gradients", 1),
            ("probes_per_column", 0),
            ("exact_epochs", 0),
            ("exact_above", 0),
        ):
            if getattr(config, name) not in (None, idle):
                raise InputError(
                    f"{flag(name)} {getattr(config, name)}: has no meaning with --staleness "
                    f"exact, where nothing is stale; drop one of the two, or try {_off(name, idle)}"
                )
    found = config.staleness_settings
    if found.probes_per_column and found.snapshot_every > 1:
        name = "probes_per_column" if config.snapshot_every is None else "snapshot_every"
        hint = "--snapshot-every 1" if config.snapshot_every is None else "--staleness paper"
        raise InputError(
            f"{flag(name)} {getattr(config, name)}: a forecast carries rows over from the last "
            f"epoch, not from a snapshot; drop it, or try {hint}"
        )
