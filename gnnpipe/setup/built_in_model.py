"""The built-in model that ``--model`` names."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.config.model_args import model_args
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.machine import memory_bytes
from gnnpipe.models import MODELS
from gnnpipe.output import human_bytes
from gnnpipe.registry import nearest


def built_in_model(config: TrainConfig, graph: Graph) -> nn.Module:
    """Returns the built-in model that the config names, with weights drawn from ``config.seed``.

    Raises ``InputError`` if the graph has no number of classes or several types of vertices, or if
    the weights alone take more memory than this machine has.
    """
    if not graph.num_classes and graph.pairs is None:
        raise InputError(
            f"--model {config.model}: {graph.name} has no labels, so the width of the last layer "
            "is not known; try Graph.from_pyg(data, num_classes=...)"
        )
    if graph.types is not None:
        raise InputError(
            f"--model {config.model}: {graph.name} has several types of vertices; pass a PyG model "
            "whose forward takes (x_dict, edge_index_dict)"
        )
    # For link prediction, the width of the final rows.
    num_classes = config.hidden if graph.pairs is not None else graph.num_classes
    _check_weights(config, graph.num_features, num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return _make(config, graph.num_features, num_classes)


def _make(config: TrainConfig, num_features: int, num_classes: int) -> nn.Module:
    """Makes the built-in model that the config names; ``InputError`` for wrong arguments."""
    if config.model.endswith(".py"):
        raise InputError(
            f"--model {config.model!r}: names no function; try {config.model}:make_model"
        )
    kind, given = MODELS[config.model], model_args(config.model_args)
    shared = {name: getattr(config, name) for name in ("layers", "hidden", "dropout")}
    known = set(inspect.signature(kind).parameters) - {"num_features", "num_classes"}
    start = f"--model-args {config.model_args!r}: "
    for name in given:
        if name in shared:
            raise InputError(f"{start}{name} is a setting of its own; try --{name} {given[name]}")
        if name not in known:
            hint = nearest(name, known - shared.keys()) if known - shared.keys() else "leave it out"
            raise InputError(f"{start}{config.model} has no argument {name!r}; {hint}")
    try:
        return kind(num_features, num_classes, **shared, **given)
    except (InputError, TypeError, ValueError) as error:
        fault = str(error)
        if not isinstance(error, InputError):
            fault = f"an argument is of a wrong type ({error})"
        raise InputError(
            f"--model {config.model} with --layers {config.layers}, --hidden {config.hidden} and "
            f"--model-args {config.model_args!r}: {fault}"
        ) from None


def check_built_in(config: TrainConfig) -> None:
    """``InputError`` for wrong arguments of the built-in model; nothing is read."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        _make(replace(config, layers=1), num_features=1, num_classes=1)


def _check_weights(config: TrainConfig, num_features: int, num_classes: int) -> None:
    """``InputError`` if the weights alone exceed this machine's memory."""
    hidden, number_bytes = config.hidden, 8 if config.dtype == "float64" else 4
    # No built-in model has four times as many weights; building one to count takes a while.
    rough = 4 * hidden * (num_features + config.layers * (hidden + 8) + num_classes)
    if rough * number_bytes < memory_bytes():
        return

    def numbers_of(layers: int) -> int:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = _make(replace(config, layers=layers), num_features, num_classes)
        return sum(p.numel() for p in model.parameters())

    numbers, others = numbers_of(min(config.layers, 2)), max(config.layers - 2, 0)
    if others:  # from the second layer on, one more layer is always as large
        numbers += others * (numbers_of(3) - numbers)
    size_bytes = numbers * number_bytes
    if size_bytes > memory_bytes():
        raise InputError(
            f"--hidden {config.hidden}: {config.model} with --layers {config.layers} then has "
            f"{numbers:,} weights, {human_bytes(size_bytes)}, and this machine has "
            f"{human_bytes(memory_bytes())}; try --hidden 64"
        )
