"""Placeholder functions in a recording for work that the runtime does.

Called with a traced value (``fx.Proxy``), a marker records a call of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from gnnpipe.graph.operators import EVERYONE, WEIGHTED

__all__ = ["aggregate", "drop", "in_training", "is_mean", "of_vertices"]


def _record(function: Callable[..., Any], x: Any, **settings: Any) -> Any:
    return x.tracer.create_proxy("call_function", function, (x,), settings)


def aggregate(x: Any, *, structure: str, edge_weight: Any = None, observed_by: str = "") -> Any:
    """Aggregates rows x [N, ...] over a structure with fixed weights (``graph.operators``).

    ``edge_weight``: the recording's input of that name; None: all weights are 1. ``observed_by``:
    'path:statistic' of the module that keeps running statistics of the result.
    """
    if isinstance(x, fx.Proxy):
        name = structure if edge_weight is None else structure + WEIGHTED
        if structure != EVERYONE:
            name += getattr(x.tracer, "relation", "")
        return _record(aggregate, x, structure=name, observed_by=observed_by)
    raise RuntimeError("aggregate() is a marker; the runtime aggregates")


def drop(x: Any, *, probability: float, site: int = -1) -> Any:
    """Dropout of rows in training. ``site``: number of the call, part of the mask's key."""
    if isinstance(x, fx.Proxy):
        return _record(drop, x, probability=probability, site=site)
    found: Tensor = x
    return found


def of_vertices(weight: Any, *, vertex_type: str = "") -> Any:
    """Rows of a weight [N, ...] that has one row for each vertex."""
    if isinstance(weight, fx.Proxy):
        return _record(of_vertices, weight, vertex_type=vertex_type)
    return weight


def in_training(now: Any, kept: Any) -> Any:
    """Batch statistics ``now`` [1, F] in training, running ones ``kept`` [F] in evaluation."""
    if isinstance(now, fx.Proxy):
        return now.tracer.create_proxy("call_function", in_training, (now, kept), {})
    return now


def is_mean(call: fx.Node) -> bool:
    """Whether a call's value is the same for all rows: a mean over them, or running statistics."""
    if call.target is in_training:
        return is_mean(call.all_input_nodes[0])
    return call.target is aggregate and str(call.kwargs["structure"]).startswith(EVERYONE)
