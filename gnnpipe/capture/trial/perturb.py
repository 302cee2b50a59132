"""Moves weights before a model is tried out: one that is zero would hide what it multiplies.

A gate that starts at zero, a last layer that does, the scale of a residual's norm: as initialised
they make a convolution that reads other vertices' degrees look like one that does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["names_of_weights", "stir"]

_BY = 0.1
"""Far above rounding, and so small that what must be positive mostly stays so."""


def names_of_weights(owner: nn.Module, module: nn.Module) -> dict[str, str]:
    """By the path of every weight in ``module``, which shares them, its name in ``owner``."""
    names = {id(p): name for name, p in owner.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {path: names[id(p)] for path, p in every if id(p) in names}


@torch.no_grad()
def stir(module: nn.Module, names: Mapping[str, str]) -> None:
    """Add to every weight [...] a small random number that depends on its name alone.

    ``names``: by path in the module; so a model and its recording are moved alike.
    """
    for path, weight in module.named_parameters():
        if path in names and weight.is_floating_point():
            generator = torch.Generator().manual_seed(zlib.crc32(names[path].encode()))
            noise = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
            weight.add_(_BY * noise.to(weight.dtype))
