"""Weights that have a row for each vertex: LINKX's first map, an embedding that is learned.

In a recording they are rows like any other, made by a mark of their own. Every rank of a stage
keeps the whole weight; a chunk takes its vertices' rows of it, and leaves its gradient there.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from gnnpipe.models.bridge.marks import of_vertices
from gnnpipe.models.bridge.recording import attribute

__all__ = ["cut_vertex_weights", "mark_vertex_weights", "vertex_weights"]


def mark_vertex_weights(recording: fx.GraphModule, model: nn.Module, num_vertices: int) -> None:
    """A weight of the user's own, or of an ``nn.Embedding``, with a row for each vertex is rows.

    Rules mark theirs by themselves.
    """
    for call in list(recording.graph.nodes):
        if call.op != "get_attr":
            continue
        path = str(call.target)
        weight = attribute(recording, path)
        if not isinstance(weight, nn.Parameter) or weight.dim() < 2 or len(weight) != num_vertices:
            continue
        # The recording has plain modules in the place of those that it only reads a weight of.
        owner = model.get_submodule(path.removeprefix("model.").rpartition(".")[0])
        is_library = type(owner).__module__.startswith(("torch.", "torch_geometric."))
        if is_library and not isinstance(owner, nn.Embedding):
            continue
        with recording.graph.inserting_after(call):
            rows = recording.graph.call_function(of_vertices, (call,))
        rows.stack_trace = call.stack_trace
        call.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)


def vertex_weights(recording: fx.GraphModule) -> set[str]:
    """Paths of the weights that have a row for each vertex."""
    marks = (c for c in recording.graph.nodes if c.target is of_vertices)
    return {str(mark.all_input_nodes[0].target) for mark in marks}


def cut_vertex_weights(module: nn.Module, paths: Collection[str], count: int) -> None:
    """Leave the first ``count`` rows of these weights."""
    for path in paths:
        owner = module.get_submodule(path.rpartition(".")[0])
        weight = owner.get_parameter(path.rpartition(".")[2])
        setattr(owner, path.rpartition(".")[2], nn.Parameter(weight.detach()[:count].clone()))
