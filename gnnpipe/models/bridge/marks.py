"""Calls that stand in a recorded model for what the runtime does.

While a model is traced they leave a call in its graph; when the sample is run they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

__all__ = ["aggregate", "drop"]


def _mark(function: Callable[..., Any], x: Any, **settings: Any) -> Any:
    return x.tracer.create_proxy("call_function", function, (x,), settings)


def aggregate(x: Any, *, structure: str) -> Any:
    """The rows x [N, ...] aggregated over a structure with fixed weights."""
    if isinstance(x, fx.Proxy):
        return _mark(aggregate, x, structure=structure)
    raise RuntimeError("an aggregation is done by the runtime")


def drop(x: Any, *, probability: float, site: int = -1) -> Any:
    """Dropout of rows while training; outside of it, x itself."""
    if isinstance(x, fx.Proxy):
        return _mark(drop, x, probability=probability, site=site)
    found: Tensor = x
    return found
