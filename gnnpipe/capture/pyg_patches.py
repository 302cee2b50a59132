"""Patches of PyG that hold while a model is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import hetero_conv

__all__ = ["patched_pyg"]


@contextmanager
def patched_pyg() -> Iterator[None]:
    """Makes aggregations and HeteroConv traceable.

    ``Aggregation`` overrides ``__call__``, which hides it from the tracer; HeteroConv branches on
    whether a result is a tuple, which a traced value does not know.
    """
    original = pyg.Aggregation.__call__

    def traced_call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, fx.Proxy):
            tracer: Any = x.tracer
            return tracer.call_module(self, self.forward, (x, *args), kwargs)
        return original(self, x, *args, **kwargs)

    pyg.Aggregation.__call__ = traced_call
    grouping, hetero_conv.group = hetero_conv.group, _group
    try:
        yield
    finally:
        pyg.Aggregation.__call__ = original
        hetero_conv.group = grouping


def _group(values: list[Any], how: str | None) -> Any:
    """PyG's ``hetero_conv.group`` without the branch on tuples."""
    if not values:
        return None
    if how is None:
        return torch.stack(values, dim=1)
    if len(values) == 1:
        return values[0]
    if how == "cat":
        return torch.cat(values, dim=-1)
    found = getattr(torch, how)(torch.stack(values, dim=0), dim=0)
    return found[0] if how in ("min", "max") else found
