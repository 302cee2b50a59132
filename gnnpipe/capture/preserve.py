"""Leaves a user's module, and the random generators, as they were before a trial."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.inspector import Inspector

from gnnpipe.ops.saved_tensors import tensors_in

M = TypeVar("M", bound=nn.Module | None)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context that restores attributes, submodules, weights and buffers by reference on exit.

    Forward may assign anything to its module while it is traced or tried out, and add to its lists,
    dicts and sets: traced values, rows of a sample, a cached graph. The values inside tensors are
    not restored.
    """
    kept = [(module, dict(vars(module))) for module in model.modules()]
    filled = _contents(value for _, attributes in kept for value in attributes.values())
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)
        _refill(filled)


def random_state() -> tuple[Any, ...]:
    """The state of the random generators of torch, Python and numpy; equal if none was drawn."""
    state = torch.random.get_rng_state().numpy().tobytes()
    numbers = [np.asarray(part).tobytes() for part in np.random.get_state()]
    return state, random.getstate(), *numbers


def detached_copy(model: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy of a module (or ``None``), whose attributes may be results of an earlier forward.

    ``copy.deepcopy`` refuses such tensors; their copies have no autograd graph. ``memo``: as there.
    """
    memo = {} if memo is None else memo
    for module in () if model is None else model.modules():
        for value in vars(module).values():
            # Most of a module are empty dicts, which ``deepcopy`` takes long for.
            if type(value) in (dict, OrderedDict) and not value:
                memo[id(value)] = type(value)()
            elif isinstance(value, Inspector):
                memo[id(value)] = value  # what PyG knows of the class of a convolution
        for tensor in tensors_in(vars(module)):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, memo)


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Context that empties attributes that were ``None`` before and hold tensors on exit.

    Lists, dicts and sets of the user's get back their content. For the first call of a lazy
    module, which sets sizes that must stay (PyG's ``cached=True``).
    """
    known = vars(nn.Module())
    filled = _contents(
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in known
    )
    empty = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if value is None
    ]
    yield
    for module, name in empty:
        value = vars(module)[name]
        if isinstance(value, Tensor | tuple) or type(value).__name__ == "SparseTensor":
            setattr(module, name, None)
    _refill(filled)


def _contents(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Returns the lists, dicts and sets among the values, each with a copy of its content."""
    found = (value for value in values if isinstance(value, list | dict | set))
    return [(value, value.copy() if value else ()) for value in found]


def _refill(filled: list[tuple[Any, Any]]) -> None:
    """Gives lists, dicts and sets their content back."""
    for value, content in filled:
        if not value and not content:
            continue
        value.clear()
        value.extend(content) if isinstance(value, list) else value.update(content)
