"""Runs a user's model as it is, on the whole graph, as plain PyG would.

For models that cannot be recorded. The model is one op that is neither cut into stages nor run in
chunks. Random numbers come from torch's own generator, whose state a checkpoint stores.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnpipe.capture.call import called, method_of
from gnnpipe.capture.fx_names import by_argument, fields_of
from gnnpipe.capture.preserve import detached_copy, unchanged
from gnnpipe.capture.signature import edge_inputs
from gnnpipe.capture.trial.sample_graph import Sample, make_sample
from gnnpipe.errors import InputError
from gnnpipe.graph.adjacency import adjacency_tensor
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.types import numbered_name
from gnnpipe.models.rows import Rows, Values
from gnnpipe.models.stage_module import Aggregation, Model, Received, StageModule
from gnnpipe.ops.saved_tensors import recorded_saved_tensors, storage_address


class WholeModel(Model):
    """A user's model that is not recorded."""

    num_ops = 1

    def __init__(self, module: nn.Module, graph: Graph, reason: str, dtype: torch.dtype) -> None:
        """``reason``: why the model is not recorded.

        Raises:
            InputError: forward takes other arguments than features, edges and edge data.
        """
        self._module, self.reason = module, reason
        self.name = type(module).__name__
        self.graph, self.dtype = graph, dtype
        self.method = method_of(module, graph)
        self.names = edge_inputs(module, self.method, graph)
        with unchanged(module):
            self.width, self.kept_per_row, self.kept_per_edge = _tried(self)

    @property
    def module(self) -> nn.Module:
        """The user's own module, whose weights are trained."""
        return self._module

    @property
    def edge_inputs(self) -> frozenset[str]:
        """Fields of ``Graph`` with edge data that the model gets."""
        weights = self.graph.weight_fields if self.graph.has_weighted_adjacency else ()
        return frozenset(fields_of(self.names, self.graph).union(weights))

    @property
    def size_text(self) -> str:
        """How the model runs."""
        return "runs as it is"

    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """False: the model's own products are not changed."""
        return False

    def stage_module(self, ops: Sequence[int]) -> WholeStageModule:
        """The whole model, or nothing if ``ops`` is empty."""
        return WholeStageModule(self)


class WholeStageModule(StageModule):
    """The only stage of a model that runs as it is."""

    rounds: Sequence[tuple[Aggregation, ...]] = ()

    def __init__(self, model: WholeModel) -> None:
        self._model, self._module = model, model.module
        self._called = called(model.module, model.method, model.graph)
        self._device = torch.device("cpu")
        self._edges: Any = None
        self._carried: dict[str, Any] = {}
        self._x: dict[str, Tensor] = {}
        self._find_buffers()

    def _find_buffers(self) -> None:
        modules = self._module.modules()
        self._buffers = [(m, k, v) for m in modules for k, v in m._buffers.items() if v is not None]

    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """Call the model on all rows; returns the value ``x`` [N, C]."""
        self._keep_buffers()
        if self._edges is None:
            self._edges, self._carried = _edges_of(self._model, self._device)
        features = {"": rows} if not rows.parts else rows.parts
        for name, part in features.items():
            table = None if part.features is None else part.features.table
            if table is not None and (name not in self._x or table.label_columns is not None):
                self._x[name] = table.dense(0, table.num_rows)
        if self._module.training != rows.training:
            self._module.train(rows.training)
        x = self._x[""] if "" in self._x else dict(self._x)
        found = self._called(x, self._edges, **self._carried)
        if isinstance(found, Mapping):
            found = found.get(self._model.graph.target)
        return {}, {"x": _checked(found, self._model)}

    def _keep_buffers(self) -> None:
        """Moves values that forward has assigned into the buffers' own tensors.

        Not in forward, because backward may still read the values before.
        """
        for module, name, buffer in self._buffers:
            found = module._buffers[name]
            if found is not buffer and found is not None:
                buffer.copy_(found.detach())
                module._buffers[name] = buffer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights."""
        return self._module.named_parameters()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """All weights and persistent buffers."""
        self._keep_buffers()
        yield from self._module.state_dict(keep_vars=True).items()

    def to(self, device: torch.device) -> None:
        """Moves the model."""
        self._module.to(device)
        self._device, self._edges = device, None
        self._find_buffers()


def _edges_of(model: WholeModel, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """The edges as forward takes them, and edge data by the name of the argument."""
    graph, dtype = model.graph, model.dtype
    edge_index = torch.from_numpy(graph.edge_index[:, graph.as_given()]).to(device)
    read = {name: graph.edge_data[name][graph.as_given(name)] for name in model.edge_inputs}
    found = {name: torch.from_numpy(values) for name, values in read.items()}
    data = {k: (v.to(dtype) if v.is_floating_point() else v).to(device) for k, v in found.items()}
    carried = by_argument(model.names, graph, data)
    if graph.types is None:
        weight = data["edge_weight"] if graph.has_weighted_adjacency else None
        size = graph.num_vertices, graph.num_vertices
        return adjacency_tensor(graph.adjacency, edge_index, weight, size, dtype), carried
    counts = graph.vertex_counts
    number = torch.from_numpy(graph.types.number).to(device)
    kind = torch.from_numpy(graph.edge_data["edge_type"][graph.as_given()]).to(device)
    edges = {}
    for place, relation in enumerate(graph.relations):
        ends = number[edge_index[:, kind == place]]
        size = counts[relation[0]], counts[relation[2]]
        has_weights = graph.has_weighted_adjacency
        weight = data.get(numbered_name("edge_weight", place)) if has_weights else None
        edges[relation] = adjacency_tensor(graph.adjacency, ends, weight, size, dtype)
    return edges, carried


def _checked(found: Any, model: WholeModel) -> Tensor:
    """The result [N, C]; ``InputError`` if it is no such tensor."""
    graph = model.graph
    n = graph.vertex_counts[graph.target]
    if isinstance(found, Tensor) and found.dim() == 2 and len(found) == n:
        width = found.shape[1]
        if graph.pairs is not None or width == graph.num_classes or not graph.num_classes:
            return found
        raise InputError(
            f"model: gives {width} numbers for each vertex, but the graph has {graph.label_text}"
        )
    what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise InputError(
        f"model: {model.method} must return one tensor [{n}, classes], not {what}; wrap it in a "
        "module that returns the logits"
    )


def _check_widths(fault: str, sample: Sample, graph: Graph) -> None:
    """Raises ``InputError`` if a product failed because of the width of features or edge features.

    ``fault``: why plain PyG fails on ``sample``.
    """
    shapes = re.search(r"\((\d+)x(\d+) and (\d+)x(\d+)\)", fault)
    if shapes is None or graph.types is not None:
        return
    rows, given, taken = (int(shapes[i]) for i in (1, 2, 3))
    if given == graph.num_features and rows == sample.counts[""]:
        raise InputError(
            f"model: takes {taken} features, but graph {graph.name!r} has {given} (with "
            "--label-inputs, labels are features, too)"
        )
    # edge_attr first: weights and types of edges are one number each, too.
    data = sorted(sample.edge_data.items(), key=lambda item: item[0] != "edge_attr")
    of_edges = [name for name, values in data if values[:1].numel() == given]
    if of_edges and rows >= sample.graph.num_edges:
        raise InputError(
            f"model: takes {taken} numbers for each edge, but {of_edges[0]} of graph "
            f"{graph.name!r} has {given}; build the model for {given} (edge_dim in PyG)"
        )


def _tried(model: WholeModel) -> tuple[int, int, int]:
    """Width of the result, and numbers kept until backward for each row and for each edge.

    Found on a small sample. A model that runs on the real graph alone counts as keeping nothing.
    """
    graph = model.graph
    sample = make_sample(model.module, graph, model.names)
    tried = detached_copy(model.module).float().train()
    known = {storage_address(t) for t in (*tried.parameters(), *tried.buffers())}
    try:
        with recorded_saved_tensors() as saved:
            found = sample.call(tried, model.method, torch.float32)
    except InputError as error:
        _check_widths(str(error), sample, graph)
        return graph.num_classes, 0, 0
    if isinstance(found, Mapping):
        found = found.get(graph.target)
    if not isinstance(found, Tensor) or found.dim() != 2:
        _checked(found, model)
    edges, rows = sample.graph.num_edges, sum(sample.counts.values())
    by_memory = {storage_address(t): t for t in saved if t.layout is torch.strided}
    kept = {True: 0, False: 0}
    for address, tensor in by_memory.items():
        if address not in known and tensor.dim():
            kept[len(tensor) >= edges] += tensor.numel()
    return found.shape[1], round(kept[False] / rows), round(kept[True] / edges)
