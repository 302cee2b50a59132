"""Perturbs weights before a trial run: a factor of zero would hide an error in what it multiplies.

Examples are a gate, a last layer or a norm's scale that is initialised with zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import nn

_BY = 0.1
"""Far above rounding, and small enough that positive weights mostly stay positive."""


def names_of_weights(owner: nn.Module, module: nn.Module) -> dict[str, str]:
    """Names in ``owner`` by path in ``module``, for the weights that both share."""
    names = {id(p): name for name, p in owner.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {path: names[id(p)] for path, p in every if id(p) in names}


@torch.no_grad()
def perturb_weights(module: nn.Module, names: Mapping[str, str]) -> None:
    """Add small random numbers to every weight, seeded by the weight's name.

    ``names``: names by path in the module, so that a model and its recording stay equal.
    """
    for path, weight in module.named_parameters():
        if path in names and weight.is_floating_point():
            generator = torch.Generator().manual_seed(zlib.crc32(names[path].encode()))
            noise = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
            weight.add_(_BY * noise.to(weight.dtype))
