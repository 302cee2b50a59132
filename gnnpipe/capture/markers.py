"""Calls that stand in a recorded model for what the runtime does.

While a model is traced they leave a call in its graph; when the sample is run they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from gnnpipe.graph.operators import EVERYONE, WEIGHTED

__all__ = ["aggregate", "drop", "in_training", "is_mean", "of_vertices"]


def _mark(function: Callable[..., Any], x: Any, **settings: Any) -> Any:
    return x.tracer.create_proxy("call_function", function, (x,), settings)


def aggregate(x: Any, *, structure: str, edge_weight: Any = None, observed_by: str = "") -> Any:
    """The rows x [N, ...] aggregated over a structure with fixed weights.

    Of which type the edges are, if there are several, the tracer knows. ``edge_weight``: the
    recording's input of that name; none: every edge weighs one.
    ``observed_by``: path of the module that keeps statistics of it, a colon, and which.
    """
    if isinstance(x, fx.Proxy):
        name = structure if edge_weight is None else structure + WEIGHTED
        if structure != EVERYONE:
            name += getattr(x.tracer, "relation", "")
        return _mark(aggregate, x, structure=name, observed_by=observed_by)
    raise RuntimeError("an aggregation is done by the runtime")


def drop(x: Any, *, probability: float, site: int = -1) -> Any:
    """Dropout of rows while training; outside of it, x itself."""
    if isinstance(x, fx.Proxy):
        return _mark(drop, x, probability=probability, site=site)
    found: Tensor = x
    return found


def of_vertices(weight: Any, *, vertex_type: str = "") -> Any:
    """The rows of a weight [N, ...] that has one for each vertex, in the order of the rows."""
    if isinstance(weight, fx.Proxy):
        return _mark(of_vertices, weight, vertex_type=vertex_type)
    return weight


def in_training(now: Any, kept: Any) -> Any:
    """``now`` in training, and ``kept`` [F] in evaluation: [1, F], or as many rows alike."""
    if isinstance(now, fx.Proxy):
        return now.tracer.create_proxy("call_function", in_training, (now, kept), {})
    return now


def is_mean(call: fx.Node) -> bool:
    """A call's value is the same for all rows: a mean over them, or what is kept of those."""
    if call.target is in_training:
        return is_mean(call.all_input_nodes[0])
    return call.target is aggregate and str(call.kwargs["structure"]).startswith(EVERYONE)
