"""Leaves a user's module, and the random generators, as they were before it was tried out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Context that restores attributes, submodules, weights and buffers by reference on exit.

    Forward may assign anything to its module while it is traced or tried out: traced values, rows
    of a sample, a cached graph. The values inside tensors are not restored.
    """
    kept = [
        (
            module,
            dict(module.__dict__),
            {name: dict(module.__dict__[name]) for name in _DICTS if name in module.__dict__},
        )
        for module in model.modules()
    ]
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, attributes, registered in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, entries in registered.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(entries)


_DICTS = ("_parameters", "_buffers", "_modules")


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Context that empties attributes that were ``None`` before and hold tensors on exit.

    For the first call of a lazy module, which sets sizes that must stay (PyG's ``cached=True``).
    """
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
