"""Optimizers of one rank: one that the settings name, or the user's own.

A rank steps only the weights of its stage. A user's optimizer is made for the whole model, so that
its parameter groups can be chosen by name or by module; each group then keeps the weights that this
stage has.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gnnpipe.config import TrainConfig
from gnnpipe.config.fields import flag
from gnnpipe.errors import InputError

OptimizerChoice: TypeAlias = type[Optimizer] | Callable[[nn.Module], Optimizer] | Optimizer
"""An optimizer class, a function that makes an optimizer for the whole model, or an optimizer of
the model's parameters."""

_UNUSABLE = {
    torch.optim.LBFGS: "computes the loss several times in a step",
    torch.optim.SparseAdam: "needs sparse gradients",
}


def check_optimizer(config: TrainConfig, choice: OptimizerChoice | None) -> None:
    """Raise ``InputError`` for an argument ``optimizer`` or settings that cannot be used."""
    if choice is None:
        choice = _configured(config)
    if isinstance(choice, type):
        if not issubclass(choice, Optimizer):
            raise InputError(
                f"optimizer: is the class {choice.__name__}, not a torch.optim.Optimizer; "
                "try torch.optim.AdamW"
            )
        _check_usable(choice)
        _arguments(config, choice)
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
    is_fused: bool,
) -> Optimizer:
    """Return the optimizer of a stage.

    Args:
        config: Names the optimizer if ``choice`` is ``None``, and gives the learning rate, weight
            decay and momentum of a class.
        choice: The user's optimizer; of an optimizer of the model's parameters a copy is used.
        module: The whole model.
        own: The weights of the stage by their name in ``module``; may be empty.
        is_fused: Use the fused kernels of Adam and AdamW.

    Raises:
        InputError: ``choice`` returns no optimizer, or one of weights that ``module`` lacks.
    """
    if choice is None:
        choice = _configured(config)
    if isinstance(choice, type):
        arguments = _arguments(config, choice)
        if choice in (torch.optim.Adam, torch.optim.AdamW):
            arguments["fused"] = is_fused
        # A group, because a stage may have no weights: a group may be empty, a plain list may not.
        optimizer: Optimizer = choice([{"params": own.values()}], **arguments)
        return optimizer
    given = choice if isinstance(choice, Optimizer) else choice(module)
    if not isinstance(given, Optimizer):
        raise InputError(
            f"optimizer: returned an object of type {type(given).__name__}, not a "
            "torch.optim.Optimizer"
        )
    _check_usable(type(given))
    return _for_stage(given, module, own)


def _configured(config: TrainConfig) -> type[Optimizer]:
    kind: type[Optimizer] = getattr(torch.optim, config.optimizer)
    return kind


def _arguments(config: TrainConfig, kind: type[Optimizer]) -> dict[str, Any]:
    """Return the settings that a class takes; ``InputError`` for a setting that it ignores."""
    parameters = inspect.signature(kind).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    found: dict[str, Any] = {}
    for name in ("lr", "weight_decay", "momentum"):
        value = getattr(config, name)
        is_default = value == getattr(TrainConfig, name)
        if name in (p.name for p in parameters) or (takes_all and not is_default):
            found[name] = value
        elif not is_default:
            raise InputError(
                f"{flag(name)} {value}: not used by the optimizer {kind.__name__}; leave it out, "
                "or try another optimizer"
            )
    return found


def _check_usable(kind: type[Optimizer]) -> None:
    reason = next((why for base, why in _UNUSABLE.items() if issubclass(kind, base)), "")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        reason = reason or "needs a closure in its step"
    if reason:
        raise InputError(
            f"optimizer: {kind.__name__} {reason}, which gnnpipe does not support; try "
            "torch.optim.AdamW"
        )


def _for_stage(given: Optimizer, module: nn.Module, own: Mapping[str, nn.Parameter]) -> Optimizer:
    """Return a copy of ``given`` with the weights of the stage in place of the whole model's.

    A copy, because a profile makes the optimizers of several stages from one.
    """
    names: dict[int, list[str]] = defaultdict(list)  # several for a weight that modules share
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    optimizer: Optimizer = object.__new__(type(given))
    optimizer.__dict__.update(
        {k: copy.copy(v) if isinstance(v, dict) else v for k, v in given.__dict__.items()}
    )
    optimizer.param_groups, optimizer.state = [], defaultdict(dict)
    for number, group in enumerate(given.param_groups):
        mine: dict[nn.Parameter, str] = {}
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InputError(
                    f"optimizer: group {number} has a parameter of shape {list(parameter.shape)} "
                    "that is not the model's; make the optimizer from the parameters of the model"
                )
            here = [name for name in names[id(parameter)] if name in own]
            if not here:
                continue
            mine[own[here[0]]] = here[0]
            if parameter in given.state:
                optimizer.state[own[here[0]]] = {
                    key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                    for key, value in given.state[parameter].items()
                }
        named = {"param_names": list(mine.values())} if "param_names" in group else {}
        optimizer.param_groups.append(group | {"params": list(mine)} | named)
    return optimizer
