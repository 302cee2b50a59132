"""Calls a user's model with the arguments that its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data, HeteroData

from gnnpipe.capture.fx_names import refuse
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.types import AdjacencyForm

_EDGE_NAMES = ("edge_index", "adj_t", "adj", "edges", "edge_index_dict", "adj_t_dict")
"""Usual names of the argument that takes the edges."""
_DATA_NAMES = ("data", "batch", "graph", "g")
"""Usual names of an only argument that takes a PyG ``Data``."""


class Arguments(Enum):
    """Kinds of arguments that a forward takes."""

    FEATURES_AND_EDGES = auto()
    """``forward(x, edge_index, ...)``."""
    FEATURES = auto()
    """``forward(x)``: the model has no use for edges."""
    DATA = auto()
    """``forward(data)``: one PyG ``Data`` or ``HeteroData``."""


def method_of(model: nn.Module, graph: Graph) -> str:
    """'encode' for link prediction if the model has it, as PyG's models do; else 'forward'."""
    encodes = inspect.ismethod(getattr(model, "encode", None))  # False for a layer named encode.
    return "encode" if graph.pairs is not None and encodes else "forward"


def parameters_of(model: nn.Module, method: str) -> tuple[str, list[inspect.Parameter]]:
    """Name and parameters of the method that the arguments reach."""
    owner = model
    if method == "encode" and isinstance(model, pyg.GAE):
        owner, method = model.encoder, "forward"  # GAE.encode passes its arguments on.
    found = list(inspect.signature(getattr(owner, method)).parameters.values())
    return f"{type(owner).__name__}.{method}", found


def arguments_of(model: nn.Module, method: str) -> Arguments:
    """Kind of the method's arguments; ``InputError`` if it takes no features."""
    name, parameters = parameters_of(model, method)
    first, second = (*parameters[:2], None, None)[:2]
    if first is None or first.name in _EDGE_NAMES or first.kind is first.KEYWORD_ONLY:
        refuse(
            f"{name}({', '.join(p.name for p in parameters)}) should take features and then "
            "edge_index (or adj_t), or one PyG Data",
            "wrap it in a module with forward(self, x, edge_index), which may ignore edge_index",
        )
    if first.kind is first.VAR_POSITIONAL:
        return Arguments.FEATURES_AND_EDGES
    # A second argument without a default takes the edges, whatever its name.
    if second is not None and (second.name in _EDGE_NAMES or second.default is second.empty):
        return Arguments.FEATURES_AND_EDGES
    # An annotation is a string under ``from __future__ import annotations``.
    kind = getattr(first.annotation, "__name__", str(first.annotation)).rpartition(".")[2]
    is_data = kind in ("Data", "HeteroData") or (first.name in _DATA_NAMES and kind != "Tensor")
    return Arguments.DATA if is_data else Arguments.FEATURES


def called(model: nn.Module, method: str, form: AdjacencyForm) -> Callable[..., Any]:
    """Returns a function of features, edges and edge data that calls the method.

    ``form``: the form of the edges, which a ``Data`` has as ``edge_index`` or as ``adj_t``.
    """
    # The model for 'forward', so that hooks run.
    found: Callable[..., Any] = model if method == "forward" else getattr(model, method)
    kind = arguments_of(model, method)
    if kind is Arguments.FEATURES_AND_EDGES:
        return found
    if kind is Arguments.FEATURES:

        def of_features(x: Any, edges: Any, **edge_data: Any) -> Any:
            try:
                return found(x)
            except AttributeError as error:
                if not str(error).endswith(("attribute 'x'", "attribute 'edge_index'")):
                    raise
                refuse(
                    f"{parameters_of(model, method)[0]} gets the features alone ({error})",
                    "call its argument data, or give it the type Data, to get a PyG Data",
                )

        return of_features

    def of_data(x: Any, edges: Any, **edge_data: Any) -> Any:
        try:
            return found(_data(x, edges, edge_data, form))
        except AttributeError as error:
            if "Storage" not in str(error):
                raise
            refuse(
                f"{parameters_of(model, method)[0]} reads an attribute that its argument lacks "
                f"({error})",
                "the argument has x, edge_index (or adj_t), num_nodes and the edge data of the "
                "graph; make other values columns of x",
            )

    return of_data


def _data(x: Any, edges: Any, edge_data: dict[str, Any], form: AdjacencyForm) -> Data | HeteroData:
    """A PyG object with features, edges and edge data, which may be recorded values."""
    name = "edge_index" if form is AdjacencyForm.EDGE_INDEX else "adj_t"
    if not isinstance(x, dict):
        return Data(num_nodes=x.size(0), x=x, **{name: edges}, **edge_data)
    data = HeteroData()
    for vertex_type, rows in x.items():
        data[vertex_type].x = rows
        data[vertex_type].num_nodes = rows.size(0)
    for relation, ends in edges.items():
        data[relation][name] = ends
    for field, by_relation in edge_data.items():
        for relation, values in by_relation.items():
            data[relation][field.removesuffix("_dict")] = values
    return data
