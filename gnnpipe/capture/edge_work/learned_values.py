"""Records PyG's functions of edges for values of edges that depend on weights or features.

``add_self_loops`` and similar functions move values from edge to edge. The program of the edges
calls such a function with the numbers of the edges; the values are then selected by the numbers
that the function returns. The sum of the weights into a vertex, by which ``gcn_norm`` divides, is
an aggregation of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    remove_self_loops,
    scatter,
)

from gnnpipe.capture.edge_work.kinds import is_of_edges_alone, is_of_graph_alone
from gnnpipe.capture.markers import filled, mixed

_REDUCED = ("mean", "add", "sum")
"""Names of ``fill_value`` for which a new self-loop gets a value made of the other values."""

_WITH_LOOPS = (add_remaining_self_loops, add_self_loops, remove_self_loops)


def of_learned_values(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The recorded (edges, values) of a function of edges and learned values; else None."""
    if function is not gcn_norm and function not in _WITH_LOOPS:
        return None
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    found = given.arguments
    edges, values = found["edge_index"], found.get("edge_weight", found.get("edge_attr"))
    if not isinstance(edges, fx.Proxy) or not isinstance(values, fx.Proxy):
        return None
    if not is_of_edges_alone(edges.node) or is_of_graph_alone(values.node):
        return None
    return _norm(**found) if function is gcn_norm else _moved(function, **found)


def _moved(
    function: Callable[..., Any],
    edge_index: Any,
    edge_attr: Any,
    fill_value: Any = None,
    **more: Any,
) -> Any:
    """The result of a function that adds or removes self-loops; None for other new values."""
    is_reduced = isinstance(fill_value, str)
    if isinstance(fill_value, torch.Tensor | fx.Proxy):
        return None
    if is_reduced and (fill_value not in _REDUCED or more["num_nodes"] is None):
        return None
    numbers = torch.arange(1, edge_index.size(1) + 1, device=edge_index.device)
    if function is not remove_self_loops:
        more["fill_value"] = 0  # the number of an edge that is new
    tracer = edge_index.tracer
    made = tracer.create_proxy("call_function", function, (edge_index, numbers), more)
    edges, origin = made[0], made[1]
    values = edge_attr[(origin - 1).clamp(min=0)]
    if function is remove_self_loops:
        return edges, values
    if is_reduced:  # of all values into the vertex, before any loop is added
        settings = {"dim": 0, "dim_size": more["num_nodes"], "reduce": fill_value}
        given = edge_attr, edge_index[1]
        reduced = tracer.create_proxy("call_function", scatter, given, settings)
        return edges, mixed(values, reduced[edges[1]], origin == 0)
    return edges, filled(values, origin == 0, 1.0 if fill_value is None else fill_value)


def _norm(
    edge_index: Any,
    edge_weight: Any,
    num_nodes: Any,
    improved: bool,
    add_self_loops: bool,
    flow: str,
    dtype: Any,
) -> Any:
    """The result of ``gcn_norm``; None if it would count the vertices by the edges."""
    del dtype  # of weights that are made
    if num_nodes is None:
        return None
    if add_self_loops:
        fill = 2.0 if improved else 1.0
        edge_index, edge_weight = _moved(
            add_remaining_self_loops, edge_index, edge_weight, fill, num_nodes=num_nodes
        )
    source, target = edge_index[0], edge_index[1]
    ends = target if flow == "source_to_target" else source
    settings = {"dim": 0, "dim_size": num_nodes, "reduce": "sum"}
    tracer = edge_index.tracer
    degree = tracer.create_proxy("call_function", scatter, (edge_weight, ends), settings)
    root = degree.pow(-0.5)
    root = root.masked_fill(root == float("inf"), 0)
    return edge_index, root[source] * edge_weight * root[target]
