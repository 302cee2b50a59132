"""What of PyG does not see that it is traced, and is told while it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import hetero_conv

__all__ = ["escapes_closed"]


@contextmanager
def escapes_closed() -> Iterator[None]:
    """Aggregations define ``__call__`` themselves; HeteroConv asks whether a result is a tuple."""
    original = pyg.Aggregation.__call__

    def refuse(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, fx.Proxy):
            tracer: Any = x.tracer
            return tracer.call_module(self, self.forward, (x, *args), kwargs)
        return original(self, x, *args, **kwargs)

    pyg.Aggregation.__call__ = refuse
    grouping, hetero_conv.group = hetero_conv.group, _group
    try:
        yield
    finally:
        pyg.Aggregation.__call__ = original
        hetero_conv.group = grouping


def _group(values: list[Any], how: str | None) -> Any:
    """What HeteroConv makes of several results: PyG's own asks whether a result is a tuple."""
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
