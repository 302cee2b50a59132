"""Chooses the model of a run and checks that config, graph and model fit each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import scipy.sparse as sp
import torch
from torch import nn

from gnnpipe.capture import RecordedModel, WholeModel, capture
from gnnpipe.capture.call import names_read_by
from gnnpipe.capture.link_decoder import PairModel, without_pairs
from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.data.pyg import is_dataset
from gnnpipe.errors import InputError
from gnnpipe.graph.cache import check_cache_dir
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.partition import PARTITIONERS
from gnnpipe.models import MODELS, Model
from gnnpipe.ops.bf16_matmul import is_worth_rounding
from gnnpipe.output import warn
from gnnpipe.plan import Plan
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.built_in_model import built_in_model, check_built_in
from gnnpipe.setup.user_model import is_user_model, make_user_model, num_inputs
from gnnpipe.tasks.loss import ERRORS, LossFn, has_both, has_labels, validation_labels
from gnnpipe.tasks.scoring import hits_k, is_ranking


def check_parts(config: TrainConfig, graph: Any, model: nn.Module | None) -> Graph | None:
    """The given graph; ``InputError`` for a wrong argument, before any file is read."""
    if not isinstance(config, TrainConfig):
        kind = type(config).__name__
        raise InputError(f"config: is a {kind}, not a gnnpipe.TrainConfig; try TrainConfig()")
    if config.partitioner != "auto":
        PARTITIONERS[config.partitioner]
    check_cache_dir(config.cache_dir)
    if model is None:
        if config.model.startswith("passed-in:"):
            raise InputError(
                f"--model {config.model!r}: this run's model was passed in from Python; pass it "
                "again: Trainer(config, model=model); to resume a run also pass "
                "config=resumed_config(run) and resume=run"
            )
        if is_user_model(config.model):
            num_inputs(config)
        else:
            check_built_in(config)
    elif config.model_args:
        raise InputError(
            f"--model-args {config.model_args!r}: no effect on a model that is passed in; give "
            "them to the model"
        )
    elif isinstance(model, type):
        raise InputError(f"model: is the class {model.__name__}; pass an instance of it")
    elif not isinstance(model, nn.Module):
        raise InputError(
            f"model: is a {type(model).__name__}, not a torch.nn.Module; or try --model with one "
            f"of {', '.join(MODELS)}"
        )
    found = passed_graph(graph)
    if found is None:
        return None
    fields_of_data = ("split", "symmetrize", "remove_self_loops", "coalesce", "task")
    given = [flag(n) for n in fields_of_data if _is_given(config, n)]
    if given:
        raise InputError(
            f"{', '.join(given)}: no effect on a graph that is passed in; leave it out here, and "
            "give it to Graph.from_pyg"
        )
    return found


def passed_graph(graph: Any) -> Graph | None:
    """A given graph as it is, and a ``Dataset``, ``Data`` or ``HeteroData`` by ``Graph.from_pyg``.

    Raises ``InputError`` for anything else but ``None``.
    """
    if graph is None or isinstance(graph, Graph):
        return graph
    if not is_dataset(graph) and not hasattr(graph, "stores"):
        raise InputError(
            f"graph: is a {type(graph).__name__}, not a gnnpipe.Graph; try Graph.from_pyg(data)"
        )
    return Graph.from_pyg(graph)


def check_labels(graph: Graph, call: str) -> None:
    """Raise ``InputError`` if a graph has no labels, which ``call`` needs."""
    if not has_labels(graph):
        raise InputError(
            f"graph {graph.name!r}: no y, which {call} needs; try data.y = a class for each "
            "vertex, [N], or T labels of 0 and 1, [N, T]"
        )


def check_trainable(graph: Graph, call: str, loss_fn: LossFn | None) -> None:
    """Raise ``InputError`` if a graph has no split, or no labels and the loss needs labels."""
    if loss_fn is None and not has_labels(graph):
        raise InputError(
            f"graph {graph.name!r}: no y, which {call} needs; try data.y = a class for each "
            "vertex, [N], or T labels of 0 and 1, [N, T]; or loss_fn=, a function of the model's "
            "rows, to train without labels"
        )
    if graph.pairs is None and not graph.train_mask.any():
        raise InputError(
            f"graph {graph.name!r}: no split (train_mask, val_mask, test_mask), which {call} "
            "needs; try Graph.from_pyg(data, split='60/20/20')"
        )


def check_can_fit(model: nn.Module | None, graph: Graph | None, loss_fn: LossFn | None) -> None:
    """Raise ``InputError`` in inference mode, which has no gradients, and for missing labels."""
    if graph is not None:
        check_trainable(graph, "fit()", loss_fn)
    if torch.is_inference_mode_enabled():
        raise InputError(
            "Trainer: fit() was called under torch.inference_mode(), where nothing is learned; "
            "call it outside (predict() and evaluate() work inside)"
        )
    for name, weight in () if model is None else model.named_parameters():
        if not nn.parameter.is_lazy(weight) and weight.is_inference():
            raise InputError(
                f"model: its weight {name} was made under torch.inference_mode() and can have no "
                "gradient; make the model outside"
            )


def last_epoch_of(
    config: TrainConfig, epochs: int | None, done: int, has_own_scheduler: bool = False
) -> int:
    """Return the epoch up to which ``fit(epochs)`` trains after ``done`` epochs.

    Raises ``InputError`` for a wrong number, and if the learning rate ends earlier.
    """
    is_number = isinstance(epochs, int) and not isinstance(epochs, bool)
    if epochs is not None and not (is_number and epochs > 0):
        raise InputError(f"fit: epochs = {epochs!r}; give a whole number of at least 1")
    last_epoch = done + (config.epochs if epochs is None else epochs)
    if not has_own_scheduler:
        check_rate_lasts(config, config.steps_per_epoch, last_epoch)
    return last_epoch


def check_rate_lasts(config: TrainConfig, steps: int, last_epoch: int) -> None:
    """Raise ``InputError`` if the learning rate is 0 before ``last_epoch``.

    ``steps``: optimizer steps an epoch.
    """
    if last_epoch > config.epochs and config.lr_schedule_with(steps) == "cosine":
        raise InputError(
            f"--lr-schedule {config.lr_schedule}: the learning rate is 0 after --epochs "
            f"{config.epochs}, and fit is to train up to epoch {last_epoch}; make the Trainer with "
            f"epochs={last_epoch} and call fit(epochs=...) for a part of them, or pass a scheduler"
        )


def check_exact_epochs(config: TrainConfig, plan: Plan, last_epoch: int) -> None:
    """Raise ``InputError`` if a run planned as exact would not be exact up to ``last_epoch``."""
    if last_epoch <= config.epochs:
        return
    planned, longer = (
        replace(config, epochs=epochs).staleness_settings_for(plan.chunks, plan.schedule)
        for epochs in (config.epochs, last_epoch)
    )
    if planned != longer:
        raise InputError(
            f"--epochs {config.epochs}: so few epochs are all exact (--exact-epochs), but not all "
            f"epochs up to {last_epoch}; make the Trainer with epochs={last_epoch} and call "
            "fit(epochs=...) for a part of them, or with staleness='exact'"
        )


def _is_given(config: TrainConfig, name: str) -> bool:
    return bool(getattr(config, name) != getattr(TrainConfig, name))


def check_validation(
    config: TrainConfig, graph: Graph, metric: str, loss_fn: LossFn | None
) -> None:
    """``InputError`` if a setting needs labels or a validation metric, and the graph has none."""
    if config.label_inputs and loss_fn is not None and not has_labels(graph):
        raise InputError(
            f"--label-inputs {config.label_inputs:g}: {graph.name} has no labels; leave it out"
        )
    reason = why_not_validated(graph, metric)
    for given, is_set in (
        (f"--patience {config.patience}", config.patience > 0),
        (f"--target-metric {config.target_metric}", config.target_metric is not None),
        ("--keep-weights best", config.kept_epoch == "best"),
        ("--lr-schedule plateau", config.lr_schedule == "plateau"),
    ):
        if is_set and reason:
            raise InputError(f"{given}: {reason}")
    _check_target(config.target_metric, metric)


def _check_target(target: float | None, metric: str) -> None:
    """``InputError`` for a value that the metric of a useful model cannot have."""
    if target is None:
        return
    is_above = target > 1 and metric not in ERRORS
    if is_above or (target <= 0 and metric != "r2"):
        allowed = "more than 0" if metric in ERRORS else "at most 1" if is_above else "more than 0"
        raise InputError(f"--target-metric {target:g}: must be {allowed} for {metric}")


def why_not_validated(graph: Graph, metric: str) -> str:
    """Returns why the validation part has no usable metric, and what to try; '' if it has one."""
    if not has_labels(graph):
        return f"{graph.name} has no labels, and so no scores; leave it out"
    known = validation_labels(graph)
    what = "vertices" if graph.pairs is None else "pairs"
    if not len(known):
        return f"{graph.name} has no validation {what}; try --split 60/20/20"
    if is_ranking(metric) and not has_both(known):
        return (
            f"{'ROC AUC' if metric == 'rocauc' else metric} needs positive and negative validation "
            f"{what}, and {graph.name} does not have both; try --metric accuracy"
        )
    negatives = int((known == 0).sum())
    if negatives < hits_k(metric):
        return (
            f"{metric} is 1 for {negatives} negative validation pairs, as {graph.name} has; try "
            "--metric mrr"
        )
    return ""


def made_model(model: nn.Module | None, config: TrainConfig, graph: Graph) -> nn.Module:
    """Returns the given model, or the one that ``--model`` names, drawn from ``config.seed``."""
    if model is not None:
        return model
    if not is_user_model(config.model):
        return built_in_model(config, graph)
    torch.manual_seed(config.seed)
    return make_user_model(config, graph)


def with_vertex_data(graph: Graph, model: nn.Module) -> Graph:
    """Returns the graph with the vertex data that the model reads in its features."""
    if not graph.vertex_data:
        return graph.with_vertex_columns(())
    return graph.with_vertex_columns(names_read_by(model, graph))


def choose_model(
    model: nn.Module,
    config: TrainConfig,
    graph: Graph,
    world: World,
    dtype: torch.dtype,
    must_record: bool,
    reads_stale_rows: bool = False,
) -> Model:
    """Returns the model, recorded; or as it is if it cannot be and need not be recorded.

    The weights are equal on every rank. ``must_record``: the model runs in chunks or on several
    ranks. ``reads_stale_rows``: as in ``capture``.
    """
    _warn_of_other_type(model, dtype, world)
    error: InputError | None = None
    chosen: Model | None = None
    digest = ""
    # Before recording: ``to`` creates new buffers, which the recording must share.
    model.to(dtype).train()
    try:
        found: RecordedModel | WholeModel
        try:
            is_rounded, has_labels = config.matmul_dtype == "bf16", bool(config.label_inputs)
            found = capture(model, graph, is_rounded, has_labels, reads_stale_rows)
            digest, width = found.digest, found.width
        except InputError as reason:
            if must_record:
                raise
            found = WholeModel(model, graph, str(reason), dtype)
            _check_whole(config, found)
            width = found.width
        if graph.pairs is None and width != graph.num_classes and graph.num_classes:
            raise InputError(_wrong_width(width, graph))
        chosen = _scored(found, found.num_ops, width, graph)
    except InputError as fault:
        error = fault
    world.agree(error)
    assert chosen is not None
    if len(set(world.gather(digest))) > 1:
        raise InputError("model: its forward differs between ranks; build the same on each")
    if world.world_size > 1:
        model.load_state_dict(world.share(model.state_dict()))
    return chosen


def _wrong_width(width: int, graph: Graph) -> str:
    text = f"model: gives {width} numbers for each vertex, but the graph has {graph.label_text}"
    if graph.is_multi_label or graph.is_regression:
        return text
    if width > graph.num_classes:
        return f"{text}; if more classes exist, Graph.from_pyg(data, num_classes={width})"
    return f"{text}; each class needs a logit: the prediction is the argmax over all classes"


def reason_not_recorded(model: Model) -> str:
    """Returns why a model runs as it is; '' if it can be cut into chunks and stages."""
    inner = without_pairs(model)
    return inner.reason if isinstance(inner, WholeModel) else ""


def _check_whole(config: TrainConfig, model: WholeModel) -> None:
    """``InputError`` for settings that change a recorded model's work."""
    given = {
        "--recompute": config.recompute,
        "--matmul-dtype bf16": config.matmul_dtype == "bf16",
        "--comm-dtype bf16": config.comm_dtype == "bf16",
        "--order metis": config.order == "metis",
    }
    wrong = [text for text, is_given in given.items() if is_given]
    if wrong:
        reason = model.reason.removeprefix("model: ")
        raise InputError(
            f"{', '.join(wrong)}: no effect on a model that runs as it is; leave it out. The model "
            f"cannot be recorded: {reason}"
        )


def _warn_of_other_type(model: nn.Module, dtype: torch.dtype, world: World) -> None:
    """Warns of weights in a number type that is neither ``--dtype`` nor torch's default."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    other = kinds - {dtype, torch.get_default_dtype()}
    if other and world.rank == 0:
        found = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in other))
        warn(
            f"model: has weights in {found}, trained in --dtype {str(dtype).removeprefix('torch.')}"
            "; float32 and float64 can be chosen"
        )


def _scored(model: Model, num_ops: int, width: int, graph: Graph) -> Model:
    """Returns the model; for link prediction, with the op that scores pairs of rows."""
    return model if graph.pairs is None else PairModel(model, num_ops, width)


def without_unread(graph: Graph, model: Model, world: World) -> Graph:
    """Returns the graph without edge data that the model does not read; warns on rank 0."""
    fields = graph.edge_data if graph.types is None else graph.derived
    read = {field.partition("__")[0] for field in model.edge_inputs if field in fields}
    given = dict.fromkeys(field.partition("__")[0] for field in fields)
    unread = [field for field in given if field not in read]
    if unread and world.rank == 0:
        ending = "" if graph.types is None else "_dict"
        arguments = ", ".join(f"{field}{ending}=None" for field in unread)
        how = f"forward(x{ending}, edge_index{ending}, {arguments})"
        if graph.has_weighted_adjacency:
            how = "convolutions that multiply by adj_t"
        warn(
            f"graph {graph.name!r}: {model.name} does not use its {' and '.join(unread)}; a PyG "
            f"model with {how} could use it"
        )
    return graph.reduced_to(model.edge_inputs)


def with_edge_work(graph: Graph, model: Model, config: TrainConfig, world: World) -> Graph:
    """Returns the graph with the edges that the model's forward makes, on every rank alike."""
    inner = without_pairs(model)
    error: InputError | None = None
    try:
        if isinstance(inner, RecordedModel):
            graph = inner.graph_to_run(graph, number_dtype(config), config.seed)
    except InputError as fault:
        error = fault
    world.agree(error)
    return graph


def aggregates_first(model: Model) -> bool:
    """Returns whether linear maps were put behind aggregations when the model was recorded."""
    inner = without_pairs(model)
    return isinstance(inner, RecordedModel) and inner.aggregates_first


def edges_are_random(model: Model) -> bool:
    """Returns whether the model's forward makes other edges in every epoch, or in evaluation."""
    inner = without_pairs(model)
    return isinstance(inner, RecordedModel) and inner.edges_are_random


def rounding_lines(config: TrainConfig, model: Model, graph: Graph) -> list[str]:
    """Returns a line for each kind of number that is rounded to bf16."""
    kinds = {"rows in the tables and on the wire": config.comm_dtype}
    if _rounds(model, graph):
        kinds["products with weights, except the last,"] = config.matmul_dtype
    return [f"{what} are rounded to bf16" for what, kind in kinds.items() if kind == "bf16"]


def _rounds(model: Model, graph: Graph) -> bool:
    types = [""] if graph.types is None else list(graph.types.features)
    return model.has_bf16_products([t for t in types if not sp.issparse(graph.features(t))])


def warn_of_vain_settings(
    config: TrainConfig, plan: Plan, model: Model, graph: Graph, world: World
) -> None:
    """Warns on rank 0 of settings without effect.

    ``--matmul-dtype bf16`` that rounds no product or is no faster, and settings for a model whose
    maker takes no config.
    """
    if world.rank:
        return
    _warn_of_unread_settings(config)
    if config.matmul_dtype != "bf16":
        return
    rows = max(1, graph.num_vertices // (plan.chunks * plan.most_shards))
    found = ""
    if not _rounds(model, graph):
        found = (
            f"no product of {model.name} is rounded here (products with sparse features, inside of "
            "unchanged convolutions, and the last product keep --dtype); leave it out"
        )
    elif not is_worth_rounding(world.device, rows, config.hidden):
        found = (
            f"no faster here than float32, for {rows} rows of {config.hidden}; leave it out, or "
            "see docs/how-to/speed-up-a-run.md"
        )
    if found:
        warn(f"--matmul-dtype bf16: {found}")


def _warn_of_unread_settings(config: TrainConfig) -> None:
    if not is_user_model(config.model) or num_inputs(config) > 1:
        return
    given = [name for name in ("layers", "hidden", "dropout") if _is_given(config, name)]
    if given:
        words = ", ".join(f"{flag(name)} {getattr(config, name)}" for name in given)
        warn(
            f"{words}: no effect, as {config.model} does not take the config; leave it out, let "
            "the function take the graph and the config, or name an argument of it: "
            f'--model-args "{given[0]}=..."'
        )


def number_dtype(config: TrainConfig) -> torch.dtype:
    """Returns the number type of weights and sums."""
    return torch.float64 if config.dtype == "float64" else torch.float32


def row_dtype(config: TrainConfig) -> torch.dtype:
    """Returns the number type of rows in messages and in the history tables."""
    return torch.bfloat16 if config.comm_dtype == "bf16" else number_dtype(config)


def settled_config(config: TrainConfig, plan: Plan) -> TrainConfig:
    """Returns the config with the plan's choice in place of ``--comm-dtype auto``.

    ``InputError`` if the plan was found for rows in bf16, which change results, and the config does
    not allow these.
    """
    if config.comm_dtype == "auto":
        return replace(config, comm_dtype=plan.comm_dtype or "same")
    if plan.comm_dtype == "bf16" and config.comm_dtype == "same":
        raise InputError(
            "plan: was found for rows in bf16, which change results; add --comm-dtype bf16, or "
            "plan anew"
        )
    return config
