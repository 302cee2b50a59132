"""Checks the signature of a user's forward: features, edges and, by name, edge data."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.errors import InputError

__all__ = ["edge_inputs"]

_EDGE_NAMES = ("edge_index", "adj_t", "adj", "edges", "edge_index_dict", "adj_t_dict")


def edge_inputs(model: nn.Module, method: str, known: Collection[str]) -> list[str]:
    """Names in ``known`` (fields of edge data) that are parameters of a method of the model.

    Raises ``InputError`` unless the method takes features, then edges, and has defaults for all
    other parameters.
    """
    owner = model
    if method == "encode" and isinstance(model, pyg.GAE):
        owner, method = model.encoder, "forward"  # GAE.encode passes its arguments on.
    parameters = list(inspect.signature(getattr(owner, method)).parameters.values())
    name = type(owner).__name__
    # A second argument without a default takes the edges, whatever its name.
    second = parameters[1] if len(parameters) > 1 else None
    if (
        second is None
        or parameters[0].name in _EDGE_NAMES
        or (second.name not in _EDGE_NAMES and second.default is not second.empty)
    ):
        raise InputError(
            f"model: {name}.{method}({', '.join(p.name for p in parameters)}) should take features "
            f"and then edge_index (or adj_t); wrap it in a module that does"
        )
    named = [p for p in parameters[2:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in named:
        if p.default is p.empty and p.name not in known:
            raise InputError(
                f"model: {name}.{method} needs {p.name!r}, which the graph has not; give it a "
                "default, or wrap the model in a module that passes it"
            )
    return [p.name for p in named if p.name in known]
