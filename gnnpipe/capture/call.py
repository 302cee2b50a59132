"""Calls a user's model with the arguments that its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum, auto
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data, HeteroData

from gnnpipe.capture.fx_names import refuse
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.vertex_data import split_columns

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


def names_read_by(model: nn.Module, graph: Graph) -> set[str]:
    """Names and strings in the code of a model that takes one ``Data``, among them what it reads.

    Empty for other models. The code is that of the user's classes, and of functions that it calls.
    """
    if arguments_of(model, method_of(model, graph)) is not Arguments.DATA:
        return set()
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    waiting = [f for kind in kinds for f in vars(kind).values() if _is_of_user(f)]
    found: set[str] = set()
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        names = _names_in(function.__code__)
        found |= names
        new = {f for name in names if _is_of_user(f := function.__globals__.get(name))} - seen
        seen |= new
        waiting += new
    return found


def _is_of_user(value: Any) -> bool:
    own = "torch", "torch_geometric", "gnnpipe"
    return isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] not in own


def _names_in(code: CodeType) -> set[str]:
    """Names of attributes and globals, and strings, in code and in the functions inside."""
    found, waiting = set(code.co_names), list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple | frozenset):
            waiting += constant
        elif isinstance(constant, CodeType):
            found |= _names_in(constant)
    return found


def called(model: nn.Module, method: str, graph: Graph) -> Callable[..., Any]:
    """Returns a function of features, edges and edge data that calls the method.

    ``graph``: says in which form the edges are, and which features are other data of the vertices.
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
            return found(_data(x, edges, edge_data, graph))
        except AttributeError as error:
            if "Storage" not in str(error):
                raise
            refuse(
                f"{parameters_of(model, method)[0]} reads an attribute that its argument lacks "
                f"({error})",
                "the argument has x, edge_index (or adj_t), num_nodes, the edge data of the graph "
                "and other numbers of vertices, [N] or [N, D]; make other values columns of x",
            )

    return of_data


def _data(x: Any, edges: Any, edge_data: dict[str, Any], graph: Graph) -> Data | HeteroData:
    """A PyG object with features, edges and edge data, which may be recorded values."""
    name = "adj_t" if graph.has_matrix_form else "edge_index"
    if not isinstance(x, dict):
        num_nodes = x.size(0)
        x, others = split_columns(x, graph.vertex_columns)
        return Data(num_nodes=num_nodes, x=x, **{name: edges}, **edge_data, **others)
    data = HeteroData()
    for vertex_type, count in graph.vertex_counts.items():
        data[vertex_type].num_nodes = count
        if vertex_type in x:
            data[vertex_type].x = x[vertex_type]
            data[vertex_type].num_nodes = x[vertex_type].size(0)
    for relation, ends in edges.items():
        data[relation][name] = ends
    for field, by_relation in edge_data.items():
        for relation, values in by_relation.items():
            data[relation][field.removesuffix("_dict")] = values
    return data
