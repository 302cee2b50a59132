"""Optimizers of one rank: one that the settings name, or the user's own.

A rank steps only the weights of its stage. A user's optimizer is made for the whole model, so that
its parameter groups can be chosen by name or by module; each group then keeps the weights that this
stage has.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError

OptimizerChoice: TypeAlias = type[Optimizer] | Callable[[nn.Module], Optimizer] | Optimizer
"""An optimizer class, a function that makes an optimizer for the whole model, or an optimizer of
the model's parameters."""

_UNUSABLE = {
    "LBFGS": "computes the loss several times in a step",
    "SparseAdam": "needs sparse gradients",
}


def check_optimizer(choice: OptimizerChoice) -> None:
    """Raise ``InputError`` for an argument ``optimizer`` that cannot be an optimizer."""
    if isinstance(choice, type):
        if not issubclass(choice, Optimizer):
            raise InputError(
                f"optimizer: is the class {choice.__name__}, not a torch.optim.Optimizer; "
                "try torch.optim.AdamW"
            )
        _check_usable(choice)
    elif isinstance(choice, Optimizer):
        _check_usable(type(choice))
    elif not callable(choice):
        raise InputError(
            f"optimizer: is a {type(choice).__name__}; pass a class such as torch.optim.AdamW, or "
            "a function of the model that returns an optimizer"
        )


def make_optimizer(
    config: TrainConfig,
    choice: OptimizerChoice | None,
    module: nn.Module,
    own: Mapping[str, nn.Parameter],
    device: torch.device,
) -> Optimizer:
    """Return the optimizer of a stage.

    Args:
        config: Names the optimizer if ``choice`` is ``None``, and gives the learning rate, weight
            decay and momentum of a class.
        choice: The user's optimizer.
        module: The whole model.
        own: The weights of the stage by their name in ``module``; may be empty.
        device: Where the weights are.

    Raises:
        InputError: ``choice`` returns no optimizer, or one of weights that ``module`` lacks.
    """
    if choice is None:
        choice = getattr(torch.optim, config.optimizer)
    if isinstance(choice, type):
        settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
        if config.momentum:
            settings["momentum"] = config.momentum
        if choice in (torch.optim.Adam, torch.optim.AdamW):
            settings["fused"] = device.type == "cuda"
        known = inspect.signature(choice).parameters
        named = {name: value for name, value in settings.items() if name in known}
        # A group, because a stage may have no weights: a group may be empty, a plain list may not.
        optimizer: Optimizer = choice([{"params": own.values()}], **named)
        return optimizer
    given = choice if isinstance(choice, Optimizer) else choice(module)
    if not isinstance(given, Optimizer):
        raise InputError(
            f"optimizer: returned a {type(given).__name__}, not a torch.optim.Optimizer"
        )
    _check_usable(type(given))
    return _for_stage(given, module, own)


def _check_usable(kind: type[Optimizer]) -> None:
    if kind.__name__ in _UNUSABLE:
        raise InputError(
            f"optimizer: {kind.__name__} {_UNUSABLE[kind.__name__]}, which gnnpipe does not; try "
            "torch.optim.AdamW"
        )


def _for_stage(
    optimizer: Optimizer, module: nn.Module, own: Mapping[str, nn.Parameter]
) -> Optimizer:
    """Return ``optimizer`` with the weights of the stage in place of the whole model's."""
    names: dict[int, list[str]] = defaultdict(list)  # several for a weight that modules share
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for number, group in enumerate(optimizer.param_groups):
        missing = [p for p in group["params"] if id(p) not in names]
        if missing:
            raise InputError(
                f"optimizer: group {number} has a parameter of shape {list(missing[0].shape)} that "
                "is not the model's; make the optimizer from the parameters of the model it is "
                "given"
            )
        found = {n: own[n] for p in group["params"] for n in names[id(p)] if n in own}
        group["params"] = list(dict.fromkeys(found.values()))
        if "param_names" in group:
            group["param_names"] = list(found)[: len(group["params"])]
    optimizer.state.clear()
    return optimizer
