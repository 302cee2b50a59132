"""Functions that a recording calls; most are placeholders for work that the runtime does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect
from torch_geometric.utils import spmm

from gnnpipe.capture.fx_names import is_input
from gnnpipe.graph.operators import BY_EDGES, EVERYONE, SUM, WEIGHTED

PRODUCTS = (
    *(torch.sparse.mm, torch.mm, torch.matmul, torch.spmm, operator.matmul, "mm", "matmul"),
    spmm,
)
"""Functions and methods that multiply matrices."""

F = TypeVar("F", bound=Callable[..., Any])


def recorded(function: F) -> F:
    """Decorator: called with a traced first argument, the function records a call of itself."""

    @wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, fx.Proxy):
            return x.tracer.create_proxy("call_function", call, (x, *args), kwargs)
        return function(x, *args, **kwargs)

    return call  # type: ignore[return-value]


def aggregate(x: Any, *, structure: str, edge_weight: Any = None, observed_by: str = "") -> Any:
    """Aggregates rows x [N, ...] over a structure with fixed weights (``graph.operators``).

    ``edge_weight``: the recording's input of that name, or a value made of the edges; None: all
    weights are 1. ``observed_by``: 'path:statistic' of the module that keeps running statistics of
    the result. Edges that forward made are kept as ``edges`` until ``edge_work`` takes them out.
    """
    assert isinstance(x, fx.Proxy), "the runtime aggregates"
    name = structure if edge_weight is None else structure + WEIGHTED
    settings: dict[str, Any] = {"observed_by": observed_by}
    if structure not in (EVERYONE, SUM):
        name += getattr(x.tracer, "relation", "")
        edges = getattr(x.tracer, "derived_edges", None)
        is_given = edge_weight is None or is_input(edge_weight.node, "edge_weight")
        settings |= {} if edges is None else {"edges": edges}
        settings |= {} if is_given and edges is None else {"edge_weight": edge_weight}
    settings["structure"] = name
    return x.tracer.create_proxy("call_function", aggregate, (x,), settings)


@recorded
def drop(x: Any, *, probability: float, site: int = -1) -> Any:
    """Dropout of rows in training. ``site``: number of the call, part of the mask's key."""
    del probability, site
    return x


@recorded
def of_vertices(weight: Any, *, vertex_type: str) -> Any:
    """Rows of a weight [N, ...] that has one row for each vertex."""
    del vertex_type
    return weight


@recorded
def of_all(total: Any) -> Any:
    """The value [...] of a sum over all vertices, from equal rows [n, ...] or from a single row."""
    return total[0]


def num_vertices(*, vertex_type: str, count: int) -> int:
    """The number of all vertices of a type."""
    del vertex_type
    return count


@recorded
def by_mode(training: Any, evaluation: Any) -> Any:
    """``training`` in training, else ``evaluation``."""
    del evaluation
    return training


@recorded
def in_training(now: Any, kept: Any) -> Any:
    """Batch statistics ``now`` [1, F] in training, running ones ``kept`` [F] in evaluation."""
    del kept
    return now


@recorded
def filled(values: Any, is_new: Any, value: float) -> Any:
    """Values [E, ...] of edges, and ``value`` for the edges that ``is_new`` [E] marks."""
    return values.masked_fill(is_new.view(-1, *[1] * (values.dim() - 1)), value)


@recorded
def mixed(first: Any, second: Any, is_second: Any) -> Any:
    """Values [E, ...] of edges: ``second`` for the edges that ``is_second`` [E] marks."""
    return torch.where(is_second.view(-1, *[1] * (first.dim() - 1)), second, first)


@has_side_effect
def assign(value: Any, *, buffer: str) -> Any:
    """The value that forward assigns to a buffer of this name; nothing reads the call."""
    del buffer
    return value


def copied(old: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """The value of ``old`` after ``old.copy_(new)``."""
    del non_blocking
    return new.to(old.dtype).expand_as(old).clone()


def without_gradient(value: Any) -> Any:
    """A value without its gradient, if it is a tensor."""
    return value.detach() if isinstance(value, Tensor) else value


def is_of_all(call: fx.Node) -> bool:
    """Whether an aggregation is over all vertices, whatever the edges are."""
    structure = str(call.kwargs["structure"])
    return structure.startswith(EVERYONE) and not structure.startswith(BY_EDGES)


def is_sum(call: fx.Node) -> bool:
    """Whether a call adds the chunks' parts of a sum over all vertices."""
    return call.target is aggregate and call.kwargs["structure"] == SUM


def is_mean(call: fx.Node) -> bool:
    """Whether a call's value is the same for all rows: over all vertices, or running statistics."""
    if call.target is in_training:
        return is_mean(call.all_input_nodes[0])
    return call.target is aggregate and str(call.kwargs["structure"]).startswith(EVERYONE)


def with_items(x: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of x with ``x[index] = value``."""
    found = x.clone()
    found[index] = value
    return found
