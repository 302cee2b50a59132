"""Weights with one row for each vertex: a learned embedding, LINKX's first linear map.

The marker ``of_vertices`` makes rows of them. Every rank of a stage keeps the whole weight; a chunk
reads the rows of its vertices and adds its gradient to them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from gnnpipe.capture.fx_names import attribute, refuse
from gnnpipe.capture.markers import of_vertices


def mark_vertex_weights(
    recording: fx.GraphModule, model: nn.Module, counts: Mapping[str, int]
) -> None:
    """Insert ``of_vertices`` behind weights of the user or of ``nn.Embedding`` with N rows.

    ``counts``: N by vertex type. Rules insert the marker themselves.
    """
    for call in list(recording.graph.nodes):
        if call.op != "get_attr":
            continue
        path = str(call.target)
        weight = attribute(recording, path)
        is_weight = isinstance(weight, nn.Parameter) and weight.dim() >= 2
        if not is_weight or len(weight) not in counts.values():
            continue
        # In the recording's own module tree the owner may be a plain nn.Module.
        owner = model.get_submodule(path.removeprefix("model.").rpartition(".")[0])
        is_library = type(owner).__module__.startswith(("torch.", "torch_geometric."))
        if is_library and not isinstance(owner, nn.Embedding):
            continue
        with recording.graph.inserting_after(call):
            rows = recording.graph.call_function(
                of_vertices, (call,), {"vertex_type": _type_of(path, len(weight), counts)}
            )
        rows.stack_trace = call.stack_trace
        call.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)


def _type_of(path: str, count: int, counts: Mapping[str, int]) -> str:
    """The type with this number of vertices; if several have it, the one named in the path."""
    types = [name for name, found in counts.items() if found == count]
    named = [name for name in types if name in path.split(".")]
    if len(types) > 1 and len(named) != 1:
        refuse(
            f"{path.removeprefix('model.')} has {count} rows, and {' and '.join(types)} have as "
            "many vertices",
            "keep it in a ModuleDict or ParameterDict under the type's name",
        )
    return (named or types)[0]


def check_vertex_weights(recording: fx.GraphModule, counts: Mapping[str, int]) -> None:
    """Raises ``InputError`` for a weight whose number of rows is not that of the vertices."""
    for path, vertex_type in vertex_weights(recording).items():
        found, n = len(attribute(recording, path)), counts[vertex_type]
        if found != n:
            kind = f"{vertex_type} vertices".strip()
            refuse(f"{path.removeprefix('model.')} has {found} rows, but the graph has {n} {kind}")


def vertex_weights(recording: fx.GraphModule) -> dict[str, str]:
    """Vertex types by the paths of all weights with one row for each vertex."""
    marks = (c for c in recording.graph.nodes if c.target is of_vertices)
    return {str(m.all_input_nodes[0].target): str(m.kwargs["vertex_type"]) for m in marks}


def cut_vertex_weights(
    module: nn.Module, paths: Mapping[str, str], counts: Mapping[str, int]
) -> None:
    """Resize these weights to the numbers of vertices in ``counts``.

    Rows repeat where the sample has more vertices than the graph.
    """
    for path, vertex_type in paths.items():
        owner_path, _, name = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        weight = owner.get_parameter(name)
        chosen = torch.arange(counts[vertex_type]) % len(weight)
        setattr(owner, name, nn.Parameter(weight.detach()[chosen]))
