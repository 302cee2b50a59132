"""What a user's forward takes: features, edges, and by name what edges carry."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.errors import InputError

__all__ = ["edge_inputs"]

_EDGE_NAMES = ("edge_index", "adj_t", "adj", "edges", "edge_index_dict", "adj_t_dict")


def edge_inputs(model: nn.Module, method: str, known: Collection[str]) -> list[str]:
    """What edges carry, of ``known``, that forward (or another ``method``) asks for by name.

    ``InputError`` unless it takes features, edges and nothing else that is needed.
    """
    loss_rows = model
    if method == "encode" and isinstance(model, pyg.GAE):
        loss_rows, method = model.encoder, "forward"  # It hands on whatever it is given.
    parameters = list(inspect.signature(getattr(loss_rows, method)).parameters.values())
    name = type(loss_rows).__name__
    # A second argument without a default takes the edges, whatever it is called.
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
