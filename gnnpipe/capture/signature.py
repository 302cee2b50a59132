"""Finds the arguments that a user's model gets: features, edges, and edge data by name."""

from __future__ import annotations

import torch
from torch import nn

from gnnpipe.capture.call import Arguments, arguments_of, method_of, parameters_of
from gnnpipe.capture.fx_names import refuse
from gnnpipe.capture.preserve import detached_copy
from gnnpipe.capture.trial.sample_graph import make_sample
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.output import warn


def edge_inputs(model: nn.Module, method: str, graph: Graph) -> list[str]:
    """Parameters of a method of the model that get the graph's edge data of the same name.

    A method that takes one PyG ``Data`` gets all edge data in it. With several vertex types,
    'edge_attr_dict' or 'edge_attr' gets a dict by relation. A parameter
    with a default is left out, with a warning, if the model fails with it on a sample and works
    without it (PyG's PNA takes ``edge_attr``, and uses it only with ``edge_dim``).

    Raises:
        InputError: Unless the method takes what ``Arguments`` lists, and has defaults for all
            other parameters that the graph lacks.
    """
    kind = arguments_of(model, method)
    name, parameters = parameters_of(model, method)
    named = [p for p in parameters[2:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    known = list(graph.edge_data)
    if graph.types is not None:
        kinds = {field.partition("__")[0] for field in graph.derived}
        known = [name for kind in kinds for name in (f"{kind}_dict", kind)]
    if graph.has_weighted_adjacency:
        # Passed as the values of the matrix.
        known = [name for name in known if name.removesuffix("_dict") != "edge_weight"]
    if kind is Arguments.DATA:
        return [field for field in known if graph.types is None or field.endswith("_dict")]
    if kind is Arguments.FEATURES:
        return []
    for p in named:
        if p.default is p.empty and p.name not in known:
            refuse(
                f"{name} needs {p.name!r}, which the graph lacks",
                "add it to the graph if it is data of edges, give it a default, or wrap the "
                "model in a module that passes it",
            )
    needed = [p.name for p in named if p.name in known and p.default is p.empty]
    optional = [p.name for p in named if p.name in known and p.default is not p.empty]
    return [*needed, *_that_work(model, method_of(model, graph), graph, needed, optional)]


def _that_work(
    model: nn.Module, method: str, graph: Graph, needed: list[str], optional: list[str]
) -> list[str]:
    """``optional`` fields, or none of them if the model fails with them and works without."""
    fault = _fault(model, method, graph, [*needed, *optional]) if optional else None
    if fault is None or _fault(model, method, graph, needed) is not None:
        return optional
    warn(
        f"model: {type(model).__name__} is called without {' and '.join(optional)}, with which it "
        f"fails ({str(fault).removeprefix('model: ')})"
    )
    return []


def _fault(model: nn.Module, method: str, graph: Graph, names: list[str]) -> InputError | None:
    """The error of a copy of the model on a sample with these fields of edge data."""
    try:
        tried = detached_copy(model).eval()
        dtype = next((p.dtype for p in tried.parameters()), torch.float32)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            make_sample(model, graph, names).call(tried, method, dtype)
    except InputError as error:
        return error
    return None
