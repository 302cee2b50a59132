"""Fields of ``TrainConfig``: default, help text, allowed values and help group of every setting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from gnnpipe.config.fields import flag, setting

# Every setting belongs to a group of the help text.
_data = partial(setting, group="data")
_model = partial(setting, group="model")
_training = partial(setting, group="training")
_evaluation = partial(setting, group="evaluation")
_shape = partial(setting, group="shape")
_staleness = partial(setting, group="staleness")
_ranks = partial(setting, group="ranks")
_output = partial(setting, group="output")
_checkpoints = partial(setting, group="checkpoints")


@dataclass(frozen=True)
class StalenessSettings:
    """Settings that decide which rows are stale and how training compensates for stale rows.

    GNNPipe's three techniques are ``shuffle_chunks``, ``snapshot_every`` and
    ``scale_live_gradients`` (arXiv 2308.10087, section 4). The forecast and the exact epochs are
    described in docs/adr/0011-stale-rows-are-forecast.md and 0019-exact-epochs-behind-jumps.md.
    """

    shuffle_chunks: bool
    """Whether every epoch walks the chunks in a new random order."""
    snapshot_every: int
    """Epochs between two refreshes of the snapshot that stale reads come from."""
    scale_live_gradients: float
    """Factor on gradients that arrive from other chunks."""
    is_exact: bool
    """Whether every epoch is run layer by layer, so that no row is stale."""
    probes: int = 0
    """Probe vertices of the forecast, of each vertex type; 0: no forecast."""
    exact_epochs: int = 0
    """Number of epochs at the start that are run layer by layer."""
    exact_above: float = 0.0
    """An exact epoch follows an epoch whose gradient norm exceeds this factor times the median
    gradient norm of the last epochs; 0: never."""


LOGGERS = ("tensorboard", "wandb")
"""Names in ``--log``."""

# The released code of arXiv 2308.10087 refreshes the snapshot every 23 epochs.
PRESETS = {
    "none": StalenessSettings(False, 1, 1.0, False),
    "paper": StalenessSettings(True, 23, 2.0, False),
    "auto": StalenessSettings(True, 1, 1.5, False, probes=512, exact_epochs=1, exact_above=3.0),
    "exact": StalenessSettings(False, 1, 1.0, True),
}

BY_CHUNK = {"1f1b": 0, "async": 1}
"""Schedules in which gradients stay in their chunk, and their chunks per optimizer step unless
``--steps-every`` is given (0: all). No technique for stale rows applies."""

BY_CHUNK_SETTINGS = ("schedule", "steps_every", "passes_ahead", "weights")
"""Settings of these schedules."""

OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
"""Names in ``torch.optim``."""


def chunks_per_step(schedule: str, chunks: int, steps_every: int | None) -> int:
    """Return how many of K ``chunks`` an optimizer step is for; ``steps_every``: the setting."""
    return (steps_every or BY_CHUNK[schedule] or chunks) if schedule in BY_CHUNK else chunks


RANKS_MAY_DIFFER = frozenset({"data_dir", "cache_dir", "out", "quiet"})
"""Settings that each rank may have of its own: folders of its machine, and output of rank 0."""


PREDICTION_SETTINGS = (
    *("dataset", "data_dir", "stages", "shards", "chunks", "cache_dir", "device", "timeout_s"),
    "quiet",
)
"""Settings of a prediction that may differ from those of the run that trained the model."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting of a run, in the order of ``gnnpipe train --help``."""

    dataset: str = _data(
        "debian",
        "graph to train on: a name (`gnnpipe info --list` lists the built-in ones), or the path of "
        "an .npz file, a .pt file of PyG, a folder of tables (edges.csv) or a folder in OGB's "
        "layout",
    )
    data_dir: str = _data("", "folder for downloaded datasets (default ~/.cache/gnnpipe/datasets)")
    split: str = _data(
        "given",
        "train/val/test split: 'given' (the split of the dataset) or percentages such as 60/20/20, "
        "drawn with --seed",
    )
    symmetrize: bool = _data(False, "add the reverse of every edge of a directed graph")
    remove_self_loops: bool = _data(
        False, "remove the self-loops of the dataset (models such as gcn still add their own)"
    )
    coalesce: bool = _data(False, "keep one of all edges that join the same two vertices")
    task: str = _data(
        "labels",
        "what the model predicts: labels (of vertices) or links (whether an edge joins two "
        "vertices; --split then splits the edges, and 'given' means 85/5/10)",
        choices=("labels", "links"),
    )

    model: str = _model(
        "gcn",
        "gcn, sage, gcnii, resgcn or gat; or a model of your own: net.py:make_model or "
        "package.module:make_model, called with the graph and the config",
    )
    require_capture: bool = _model(
        False,
        "refuse a model of your own that cannot be recorded, even on one rank in one chunk, where "
        "it would run as it is",
    )
    layers: int = _model(2, "number of GNN layers L", low=1, high=10_000)
    hidden: int = _model(64, "hidden width H", low=1, high=1_000_000)
    dropout: float = _model(0.5, "dropout probability", low=0, below=1)
    model_args: str = _model(
        "",
        "further keyword arguments of the model, such as 'heads=8' (gat) or 'alpha=0.2, theta=1.0' "
        "(gcnii), or those of a model of your own; values are Python literals",
    )

    label_inputs: float = _model(
        0.0,
        "give the model the labels of training vertices as C more features: in every epoch each "
        "training vertex is drawn with this probability; its label is then an input and not "
        "trained on (0: off). In evaluation all training labels are inputs",
        low=0,
        below=1,
    )
    label_iterations: int = _model(
        0,
        "with --label-inputs: further passes before each training or evaluation pass; after each, "
        "the predicted probabilities are the label inputs of all vertices without one",
        low=0,
        high=100,
    )

    epochs: int = _training(200, "number of epochs", low=1)
    optimizer: str = _training(
        "Adam",
        "optimizer of torch.optim, with torch's defaults but for the settings below",
        choices=OPTIMIZERS,
    )
    lr: float = _training(0.01, "learning rate", above=0)
    weight_decay: float = _training(
        0.0, "weight decay: an L2 penalty, but decoupled from the gradient in AdamW", low=0
    )
    momentum: float = _training(0.0, "momentum (SGD and RMSprop)", low=0, below=1)
    seed: int = _training(
        0, "random seed of weights, dropout, chunk order and splits", low=0, high=2**32 - 1
    )
    dtype: str = _training(
        "float32",
        "number type of weights and embeddings (features are always read as float32)",
        choices=("float32", "float64"),
    )
    matmul_dtype: str = _training(
        "same",
        "number type of matrix products with weights, except the last layer's: same (as --dtype) "
        "or bf16 (8 bits of precision; faster on processors with bf16 instructions)",
        choices=("same", "bf16"),
    )
    comm_dtype: str = _training(
        "same",
        "number type of embeddings that are sent or stored in history tables: same (as --dtype) or "
        "bf16 (half the bytes, 8 bits of precision; also used for edge weights and aggregated "
        "rows). auto: with --plan auto bf16 where it saves time, with a plan file as the file says",
        choices=("same", "bf16", "auto"),
    )
    lr_schedule: str = _training(
        "auto",
        "learning rate schedule: constant, cosine (half a cosine, down to 0 after the last epoch), "
        "plateau (halved when the validation metric has not improved for --lr-patience epochs) or "
        "auto (cosine with several optimizer steps an epoch, else constant)",
        choices=("auto", "constant", "cosine", "plateau"),
    )
    warmup_epochs: int = _training(
        0, "epochs at the start over which the learning rate rises linearly to --lr", low=0
    )
    lr_patience: int = _training(
        50,
        "epochs without a better validation metric before --lr-schedule plateau halves the "
        "learning rate",
        low=1,
    )
    weights: str = _training(
        "predict",
        "with --schedule async: weights of the passes between whose forward and backward the stage "
        "steps. predict (forward with the weights that backward is predicted to find, PipeOptim), "
        "latest (the newest ones), stash (backward with those of forward, PipeDream), 2bw (one "
        "step old on all stages, PipeDream-2BW), spectrain or xpipe (predict otherwise)",
        choices=("predict", "latest", "stash", "2bw", "spectrain", "xpipe"),
    )
    clip_norm: float = _training(
        0.0,
        "clip the global gradient norm to this value (0: off); with --schedule async each stage "
        "clips the norm of its own gradients",
        low=0,
    )
    on_nan: str = _training(
        "stop",
        "what to do when loss or gradients are not finite: stop the run, skip the optimizer step, "
        "or restore the last checkpoint and continue with half the learning rate",
        choices=("stop", "skip", "restore"),
    )

    eval_every: int = _evaluation(
        10, "evaluate after every n-th epoch and after the last (0: only after the last)", low=0
    )
    metric: str = _evaluation(
        "auto",
        "metric reported besides accuracy and used to select the best epoch: accuracy, rocauc, "
        "ap (average precision), f1-micro or f1-macro; for links also mrr or hits@10 to hits@100; "
        "for regression r2, mae or rmse. auto: f1-micro for multi-label data, rocauc for links and "
        "for two classes of which one has less than 30 % of the labels, r2 for regression, "
        "accuracy otherwise",
        choices=(
            *("auto", "accuracy", "rocauc", "ap", "f1-micro", "f1-macro"),
            *("mrr", "hits@10", "hits@20", "hits@50", "hits@100"),
            *("r2", "mae", "rmse"),
        ),
    )
    patience: int = _evaluation(
        0, "stop after this many epochs without a better validation metric (0: never)", low=0
    )
    target_metric: float | None = _evaluation(
        None,
        "stop after the first evaluation whose validation metric is at least this (mae and rmse: "
        "at most); --plan auto then plans for the time until it, and may choose the schedule async",
    )
    keep_weights: str | None = _evaluation(
        None,
        "weights to keep at the end: of the last epoch, or of the best epoch by the validation "
        "metric (default: best with --patience, otherwise last)",
        choices=("last", "best"),
    )

    plan: str = _shape(
        "uniform",
        "planner that places the model on ranks: uniform (equal stages of consecutive layers, by "
        "--stages, --shards and --chunks), auto (finds stages, shards and chunks for the ranks "
        "that there are), or the path of a plan.json, as a run writes it",
    )
    stages: int = _shape(1, "number of pipeline stages S that the layers are divided into", low=1)
    shards: int = _shape(1, "number of shards G: ranks that share the vertices of a stage", low=1)
    chunks: int = _shape(
        1, "number of chunks K of the vertices, processed one after another", low=1
    )
    schedule: str = _shape(
        "fill-drain",
        "order of the chunks' passes: fill-drain (all forward, then all backward; with --staleness "
        "exact layer by layer), 1f1b (forward and backward in turn, at most as many chunks in "
        "flight as stages: less memory) or async (1f1b without a drain before optimizer steps, one "
        "step a chunk: fewer epochs, no bubble). In 1f1b and async, gradients stay in their chunk",
        choices=("fill-drain", "1f1b", "async"),
    )
    steps_every: int | None = _shape(
        None,
        "chunks per optimizer step with --schedule 1f1b or async; must divide --chunks (default: 1 "
        "with async, all chunks with 1f1b)",
        low=1,
    )
    passes_ahead: int = _shape(
        1,
        "forward passes by which a stage is ahead of the next one, with --schedule 1f1b or async; "
        "with n, messages between stages that take up to (n - 1) / 2 of a chunk's forward and "
        "backward on a stage cause no waiting, n times as many chunks are in flight, and with async"
        " come n times as many optimizer steps between forward and backward",
        low=1,
    )
    row_way: str = _shape(
        "halo",
        "how rows of neighbours travel among two or more shards: halo (exactly the rows that other "
        "shards read), gather (all rows) or columns (each shard gets some columns of all rows, and "
        "the whole matrix; for layers with fixed edge weights, without stale rows)",
        choices=("halo", "gather", "columns"),
    )
    partitioner: str = _shape(
        "auto",
        "how vertices are partitioned into chunks and shards: metis, range, random, mixed (metis, "
        "but each chunk is two of its parts, drawn at random) or auto (mixed if the optimizer "
        "steps several times an epoch, otherwise metis)",
    )
    order: str = _shape(
        "auto",
        "order of the vertices inside a chunk: metis (neighbours close together, faster when the "
        "embeddings exceed the CPU cache), given (as in the dataset) or auto (metis for at least "
        "16,384 vertices with a partitioner that uses METIS, and with one chunk only in a run long "
        "enough to save the time of METIS; otherwise given)",
        choices=("auto", "metis", "given"),
    )
    cache_dir: str = _shape(
        "", "folder for cached partitions (default ~/.cache/gnnpipe; 'off': no cache)"
    )
    recompute: bool = _shape(
        False,
        "activation checkpointing: store only the input of each layer and recompute the rest in "
        "the backward pass; less memory and identical results for one more forward pass of the "
        "dense work. With --schedule async on several stages only with --weights stash or 2bw",
    )
    recompute_every: int = _shape(
        1,
        "with --recompute: how many layers (steps of a stage) to recompute together from the input "
        "of the first, so that the inputs of the others are not stored either; 0: the number that "
        "costs least time of those that fit into memory by estimate; for models of hundreds of "
        "layers, see docs/how-to/reduce-memory.md",
        low=0,
    )

    staleness: str = _staleness(
        "auto",
        "how stale embeddings are treated when K > 1: auto (forecast them), none (use them as they "
        "are), paper (GNNPipe's three techniques) or exact (run layer by layer, so that nothing "
        "is stale)",
        choices=("auto", "none", "paper", "exact"),
    )
    shuffle_chunks: bool | None = _staleness(
        None, "process the chunks in a new random order in every epoch (default: by --staleness)"
    )
    snapshot_every: int | None = _staleness(
        None,
        "read stale embeddings from a snapshot that is refreshed every n epochs; 1: as the last "
        "epoch left them (default: by --staleness)",
        low=1,
    )
    scale_live_gradients: float | None = _staleness(
        None, "factor on gradients that arrive from other chunks (default: by --staleness)", above=0
    )
    probes: int | None = _staleness(
        None,
        "probe vertices for the forecast of stale embeddings. At the start of an epoch n sampled "
        "vertices are computed with the new weights; an affine map fitted to their change updates "
        "all other rows. 0: no forecast (default: by --staleness)",
        low=0,
    )
    exact_epochs: int | None = _staleness(
        None,
        "number of epochs at the start that run layer by layer, without stale embeddings "
        "(default: by --staleness)",
        low=0,
    )
    exact_above: float | None = _staleness(
        None,
        "run an exact epoch after an epoch whose gradient norm exceeds this factor times the "
        "median of the last 20 epochs, and clip the gradient norm to twice that median; 0: "
        "neither (default: by --staleness)",
        low=0,
    )

    device: str = _ranks(
        "auto",
        "auto, cpu or cuda (one GPU per rank, from those in CUDA_VISIBLE_DEVICES)",
        choices=("auto", "cpu", "cuda"),
    )
    kernel: str = _ranks(
        "auto",
        "kernel of the sparse-dense product: embedding-bag, csr (torch's), torch-sparse (if "
        "installed), triton (on GPUs), measured (the fastest of these on this machine; the choice, "
        "and with it the last digits of the results, may differ between runs) or auto "
        "(embedding-bag on CPUs, triton on GPUs)",
        choices=("auto", "measured", "embedding-bag", "csr", "torch-sparse", "triton"),
    )
    timeout_s: float = _ranks(
        120.0,
        "seconds that a rank waits for another rank before the run fails; a rank without a "
        "heartbeat counts as lost after an eighth of this time",
        above=0,
        high=1e6,
    )
    check_weights: bool = _ranks(
        False, "at every evaluation, check that all shards of a stage have the same weights"
    )

    out: str = _output(
        "", "run folder (default runs/<dataset>-<model>-<time>; 'off': write nothing)"
    )
    log: str = _output(
        "",
        "also send losses, learning rate, times and scores to tensorboard (files in the run "
        "folder), to wandb, or to both: tensorboard,wandb (metrics.csv is always written)",
    )
    quiet: bool = _output(
        False, "print nothing while training; the commands still print the result at the end"
    )
    predict: bool = _output(
        True,
        "predict the epoch time, to be compared with the measured one: from --profile, or from a "
        "short profile before the first epoch (about 2 s or 5 % of the run; not on GPUs and not "
        "for fewer than 10 epochs)",
    )
    profile: str = _output(
        "", "predict the epoch time from this file, written by `gnnpipe profile --save`"
    )

    checkpoint_every: int | None = _checkpoints(
        None,
        "epochs between two checkpoints (default: as many as take about ten minutes; 0: no "
        "checkpoint unless the run is told to stop)",
        low=0,
    )
    keep: int = _checkpoints(2, "number of checkpoints to keep; older ones are deleted", low=1)
    checkpoint_tables: bool = _checkpoints(
        True,
        "store the history tables in checkpoints; without them checkpoints are small, and the "
        "first epoch after --resume is exact to fill the tables again (not with --schedule 1f1b or "
        "async)",
    )
    time_limit_s: float = _checkpoints(
        0.0,
        "seconds after which the run writes a checkpoint and ends with exit code 75, as on SIGTERM "
        "(0: no limit)",
        low=0,
    )

    def common_settings(self) -> dict[str, object]:
        """Settings that all ranks must have in common, by flag; of a path only the last part."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in RANKS_MAY_DIFFER]
        found = {flag(name): getattr(self, name) for name in names}
        return {k: v.rsplit("/", 1)[-1] if isinstance(v, str) else v for k, v in found.items()}

    @property
    def loggers(self) -> tuple[str, ...]:
        """The names in ``log``."""
        return tuple(self.log.split(",")) if self.log else ()

    @property
    def plans_for_target(self) -> bool:
        """Whether a plan is searched for the least time to a validation metric."""
        return self.plan == "auto" and self.target_metric is not None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch, unless a plan file has another schedule."""
        return self.chunks // chunks_per_step(self.schedule, self.chunks, self.steps_every)

    def lr_schedule_with(self, steps: int) -> str:
        """The learning rate schedule for ``steps`` optimizer steps an epoch."""
        if self.lr_schedule != "auto":
            return self.lr_schedule
        return "cosine" if steps > 1 else "constant"

    @property
    def kept_epoch(self) -> str:
        """The epoch whose weights are kept: 'last' or 'best'."""
        return self.keep_weights or ("best" if self.patience else "last")

    def staleness_settings_for(self, chunks: int, schedule: str) -> StalenessSettings:
        """The preset ``staleness``, overridden by the fields that are set.

        ``chunks`` and ``schedule``: of the plan.
        """
        if chunks == 1:
            return PRESETS["none"]  # nothing is stale
        if schedule in BY_CHUNK:
            is_shuffled = self.shuffle_chunks is not False
            return dataclasses.replace(PRESETS["none"], shuffle_chunks=is_shuffled)
        names = [f.name for f in dataclasses.fields(StalenessSettings) if f.name != "is_exact"]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        found = dataclasses.replace(PRESETS[self.staleness], **given)
        # A run that consists of exact epochs only is an exact run.
        return PRESETS["exact"] if found.exact_epochs >= self.epochs else found
