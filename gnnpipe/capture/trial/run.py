"""Runs a recording on the sample: on all rows and on each half of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing

from gnnpipe.capture.edge_work.modules import EdgeFragment, EdgeModule, EdgeUpdate, Propagate
from gnnpipe.capture.fx_names import (
    AS_IS,
    EDGES,
    attribute,
    edges_read,
    first_line,
    is_input,
    name_of,
    refuse,
    refuse_conv,
)
from gnnpipe.capture.markers import aggregate, by_mode, in_training, num_vertices, of_vertices
from gnnpipe.capture.preserve import detached_copy, random_state
from gnnpipe.capture.rewrite import cut_vertex_weights, vertex_weights
from gnnpipe.capture.rules.convolutions import RULES
from gnnpipe.capture.stage.block_conv import BlockConv, DropoutKind, DropoutKinds, DropoutMode, Form
from gnnpipe.capture.stage.step_calls import flat
from gnnpipe.capture.trial.block_memory import BlockMemory, block_memory
from gnnpipe.capture.trial.sample_graph import Sample
from gnnpipe.errors import InputError
from gnnpipe.graph.blocks import Block
from gnnpipe.graph.operators import (
    BY_EDGES,
    EVERYONE,
    SUM,
    edges_into,
    relation_ends,
    weighted_rows,
)
from gnnpipe.models.rows import Rows
from gnnpipe.ops.saved_tensors import tensors_in

Found = dict[fx.Node, Any]
"""Values by the call that made them."""


class SampleRun:
    """Values of a recording's calls in three runs."""

    def __init__(self, graph: fx.Graph, module: nn.Module, sample: Sample) -> None:
        """``module``: the weights and submodules that the calls of ``graph`` name."""
        self.graph, self.module, self.sample = graph, module, sample
        self.whole: Found = {}
        self.parts: tuple[Found, Found] = ({}, {})
        self.of_edges: dict[fx.Node, str] = {}
        """Calls whose values have one row for each edge, with the input of these edges."""
        self.is_training = True
        self._matrices: dict[str, Tensor] = {}
        """Matrices of aggregations, by structure."""
        self.types: dict[fx.Node, str] = {}
        """Vertex types of the rows of the calls' values."""
        self.block_memory: dict[fx.Node, BlockMemory] = {}
        """Memory of the convolutions that make no messages."""
        for name, value in sample.vertex_values.items():
            module.register_buffer(name, value)

    def make(
        self, call: fx.Node, depends: bool, of_edges: bool, vertex_type: str
    ) -> tuple[bool, Form | None, tuple[DropoutKind, ...]]:
        """Compute a call's value in all runs.

        Returns whether rows are the first dimension and, for an unchanged convolution, its form and
        dropouts (see ``Facts``). ``of_edges``: the value has one row for each edge.
        """
        sample = self.sample
        self.types[call] = vertex_type
        if of_edges:
            known = (self.of_edges[s] for s in call.all_input_nodes if s in self.of_edges)
            of_input = sample.edges_of_value.get(str(call.target), EDGES)
            self.of_edges[call] = next(known, of_input)
        form: Form | None = None
        drops: tuple[DropoutKind, ...] = ()
        are_first = True
        value: Any
        if edges_read(call) is not None:
            value, form, drops = self._convolve(call)
        else:
            value = self.value(call)
        halves: list[Any] = [None, None]
        if form or call.op == "placeholder" or call.target in (aggregate, of_vertices):
            if not is_input(call, EDGES):
                of_call = self.of_edges.get(call)
                parts = (
                    sample.halves(vertex_type) if of_call is None else sample.edge_halves(of_call)
                )
                halves = [value[part] for part in parts]
        elif not depends:
            halves = [value, value]
        else:
            halves = [self.call(call, part) for part in self.parts]
            of_call = self.of_edges.get(call)
            count = sample.counts[vertex_type] if of_call is None else sample.num_edges(of_call)
            are_first = _are_rows_first(call, value, halves, count, of_edges)
        self.whole[call] = value
        for part, half in zip(self.parts, halves, strict=True):
            part[call] = half
        return are_first, form, drops

    def value(self, call: fx.Node) -> Any:
        """A call's value on all rows."""
        if call.op == "placeholder":
            return self.sample.inputs[str(call.target)]
        if call.target is aggregate:
            return self._aggregate(self.whole[call.all_input_nodes[0]], call)
        return self.call(call, self.whole)

    def in_parts(self, call: fx.Node, vertex_type: str) -> tuple[Any, list[Any]]:
        """A call's values on all rows and on each half of the rows; kept for later calls."""
        self.types[call] = vertex_type
        self.whole[call] = self.call(call, self.whole)
        halves = [self.call(call, part) for part in self.parts]
        for part, half in zip(self.parts, halves, strict=True):
            part[call] = half
        return self.whole[call], halves

    def is_local_number(self, call: fx.Node) -> bool:
        """Whether a value is a number that differs between all rows and a part of the rows."""
        values = [self.whole[call], *(part[call] for part in self.parts)]
        return all(type(v) in (int, float) for v in values) and len(set(values)) > 1

    def counted_rows(self, number: fx.Node) -> list[fx.Node]:
        """The calls that count rows, among a local number and the numbers that it depends on."""
        sources = [s for s in number.all_input_nodes if self.is_local_number(s)]
        if sources:
            return list(dict.fromkeys(base for s in sources for base in self.counted_rows(s)))
        return [number] if self.whole[number] in self.sample.counts.values() else []

    def _aggregate(self, x: Tensor, call: fx.Node) -> Tensor:
        kind = str(call.kwargs["structure"])
        if kind == EVERYONE:
            return x.mean(0, keepdim=True).expand_as(x)
        if kind == SUM:
            return x.expand(self.sample.counts[self.types[call]], *x.shape)
        graph = self.sample.graph
        if kind.startswith(BY_EDGES):
            name = relation_ends(graph.relations, kind)[1]
            weights = torch.from_numpy(edges_into(graph, kind)[graph.row_types[name]])
            return ((weights @ x) / weights.sum()).expand_as(x)
        source, target = relation_ends(graph.relations, kind)
        if kind not in self._matrices:
            rows, chosen = weighted_rows(graph, kind), graph.row_types
            ends = rows[chosen[target]][:, chosen[source]]
            self._matrices[kind] = torch.from_numpy(ends.toarray())
        matrix = self._matrices[kind]
        if len(x) != matrix.shape[1]:
            found = self.types.get(call.all_input_nodes[0], "") or "another type"
            edges = f"the edges lead from {source} to {target}"
            refuse(f"{name_of(call)} is given rows of {found}, but {edges}", call=call)
        return (matrix @ flat(x)).reshape(len(matrix), *x.shape[1:])

    def call(self, call: fx.Node, values: Found) -> Any:
        """A call's value, given the values that it reads."""
        args: Any = fx.node.map_arg(call.args, values.__getitem__)
        kwargs: Any = fx.node.map_arg(call.kwargs, values.__getitem__)
        target: Any = call.target
        if target in (by_mode, in_training) and not self.is_training:
            return args[1]
        if target is num_vertices:
            return self.sample.counts[str(call.kwargs["vertex_type"])]
        try:
            if call.op == "call_function":
                return target(*args, **kwargs)
            if call.op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            if call.op == "call_module":
                return self.module.get_submodule(target)(*args, **kwargs)
            return attribute(self.module, target)
        except Exception as error:
            refuse(f"{name_of(call)} fails on a sample: {first_line(error)}", call=call)

    def _convolve(self, call: fx.Node) -> tuple[Tensor, Form, tuple[DropoutKind, ...]]:
        """Result, form and dropouts of an unchanged convolution."""
        is_module = call.op == "call_module"
        conv = self.module.get_submodule(str(call.target)) if is_module else None
        if not isinstance(conv, MessagePassing | EdgeModule):
            refuse_edge_work(name_of(call), call)
        index = edges_read(call)
        assert index is not None
        source, target = self.sample.ends[str(index.target)]
        counts, edges = self.sample.counts, self.sample.edges[str(index.target)]
        num_self_loops = int((edges[0] == edges[1]).sum()) if source == target else 0
        sizes = counts[source], counts[target], edges.shape[1], num_self_loops
        with DropoutKinds(*sizes) as kinds:
            whole = self.call(call, self.whole)
        if not isinstance(whole, Tensor):
            hint = "return the rows alone; read attention weights outside of training"
            refuse(f"{name_of(call)} returns more than its rows", hint, call)
        read = {k: self.whole[k] for k in call.all_input_nodes if k not in self.of_edges}
        rows = {
            k: v
            for k, v in read.items()
            if isinstance(v, Tensor)
            and self.types[k] in (source, target)
            and v.shape[:1] == (counts[self.types[k]],)
        }
        shapes = {k: tuple(v.shape[1:]) for k, v in rows.items()}
        reason = ""
        for form in Form:
            try:
                block_conv = BlockConv(conv, call, shapes, form, kinds.found, 0, self.of_edges)
                if all(self._agrees(block_conv, index, rows, whole, half) for half in (0, 1)):
                    if block_conv.can_avoid_messages:
                        given = self._half(block_conv, index, rows, 0)[0]
                        self.block_memory[call] = block_memory(block_conv, *given)
                    break
                reason = "the rows differ"
            except Exception as error:
                reason = reason or str(error)
        else:
            refuse_conv(
                f"{_name_of_block_work(conv, call)} does not give the same rows from a chunk and "
                f"its neighbours as from the whole graph: {reason}",
                _advice(conv),
                call,
                type(conv),
            )
        return whole, form, tuple(kinds.found)

    def _agrees(
        self,
        block_conv: BlockConv,
        index: fx.Node,
        rows: dict[fx.Node, Tensor],
        whole: Tensor,
        half: int,
    ) -> bool:
        """Whether a block of half of the vertices and the rows that they read gives equal rows."""
        given, own = self._half(block_conv, index, rows, half)
        return torch.allclose(block_conv(*given), whole[own], 1e-9, 1e-12)

    def _half(
        self, block_conv: BlockConv, index: fx.Node, rows: dict[fx.Node, Tensor], half: int
    ) -> tuple[tuple[Tensor, Block, Rows, Tensor | None, tuple[Any, ...]], Tensor]:
        """Arguments of a convolution on half of the vertices, and the numbers of these [n]."""
        sample, name = self.sample, str(index.target)
        source, target = sample.ends[name]
        halves = sample.halves(target)
        own = torch.arange(sample.counts[target])[halves[half]]
        edges = sample.edges[name]
        into = torch.isin(edges[1], own)
        order = torch.unique(edges[0, into])
        if source == target:
            order = torch.cat([own, order[~torch.isin(order, own)]])
        edges = torch.stack([_places(order)[edges[0, into]], _places(own)[edges[1, into]]])
        nothing = torch.empty(0, dtype=torch.int64)
        size = len(order), len(own)
        block = Block(edges, nothing, nothing.bool()[:, None], size, is_fused=True)
        received = torch.cat([flat(rows[k][order]) for k in block_conv.pushed], dim=1)
        mine = rows[block_conv.own][own] if block_conv.own is not None else None
        carried = tuple(self.whole[value][into] for value in block_conv.carried)
        return (received, block, Rows(keys=own, features=None), mine, carried), own


def copied_modules(recording: fx.GraphModule) -> nn.Module:
    """A copy of the modules, weights and constants of a recording, float64 and in training."""
    found, calls = nn.Module(), {"_graph", "_code", "_lineno_map", "meta"}
    vars(found).update({k: v for k, v in vars(recording).items() if k not in calls})
    return detached_copy(found).double().train()


def values_on_sample(
    recording: fx.GraphModule, sample: Sample
) -> tuple[Found, set[fx.Node]] | None:
    """The values of all calls on a sample, in training without dropout; None if a call fails.

    Also returns the calls that draw random numbers. An aggregation over edges that forward makes
    has the value of its rows.
    """
    module = copied_modules(recording)
    cut_vertex_weights(module, vertex_weights(recording.graph), sample.counts)
    run = SampleRun(recording.graph, module, sample)
    run.types = dict.fromkeys(recording.graph.nodes, "")
    random_calls = set()
    with torch.no_grad(), DropoutMode():
        for call in recording.graph.nodes:
            if call.op == "output":
                break
            try:
                before = random_state()
                is_made = call.target is aggregate and len(call.all_input_nodes) > 1
                run.whole[call] = run.whole[call.all_input_nodes[0]] if is_made else run.value(call)
            except InputError:
                return None
            if random_state() != before:
                random_calls.add(call)
    return run.whole, random_calls


def _name_of_block_work(conv: nn.Module, call: fx.Node) -> str:
    if isinstance(conv, EdgeFragment):
        return "work on the edges"
    kind = conv.conv if isinstance(conv, Propagate | EdgeUpdate) else conv
    return f"{name_of(call)} ({type(kind).__name__})"


def _advice(conv: nn.Module) -> str:
    if getattr(conv, "flow", "source_to_target") != "source_to_target":
        return "it sends from target to source: reverse the edges (edge_index.flip(0)) instead"
    norms = [m for m in conv.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms and isinstance(conv, pyg.EdgeConv):
        return (
            "it holds a BatchNorm1d that cannot be taken apart: let there be one, right behind the "
            "first linear layer of its nn, and read x, not a pair"
        )
    if norms and not isinstance(conv, pyg.GINConv):
        return (
            f"it holds a {type(norms[0]).__name__}, whose statistics would be those of a chunk: "
            "put the norm behind the convolution, or use LayerNorm inside"
        )
    if type(conv) in RULES:
        return (
            "it normalises over the whole graph, which is supported only with its default settings "
            "and with edge_weight as the graph has it: compute the weights before the graph is made"
        )
    return "it may read degrees or statistics of the whole graph, or draw random numbers"


def refuse_edge_work(what: str, call: fx.Node) -> NoReturn:
    """Raise ``InputError`` about work on the edges outside of a convolution."""
    hint = "put this into a MessagePassing, or prepare the edges before the graph is made"
    refuse(f"{what} works on the edges outside of a convolution", hint, call)


def _are_rows_first(
    call: fx.Node, value: Any, half_values: list[Any], count: int, of_edges: bool
) -> bool:
    """Whether rows are the first dimension of every tensor in a row-wise call's value.

    Raises ``InputError`` unless the values of both halves are the parts of the whole value. Only
    tensors are compared; a count or a shape matters in the calls that use it. ``of_edges``: rows
    are edges.
    """
    one, many = ("edge", "edges") if of_edges else ("vertex", "vertices")
    halves = [list(tensors_in(half)) for half in half_values]
    are_first = True
    for index, tensor in enumerate(tensors_in(value)):
        places = [d for d, size in enumerate(tensor.shape) if size == count]
        if not places:
            refuse(
                f"{name_of(call)} does not keep one row for each {one} (it gives "
                f"{list(tensor.shape)} for {count} {many})",
                "only vertex-wise work and convolutions can be cut into chunks",
                call,
            )
        parts = [half[index] for half in halves]
        if not any(_are_parts(parts, tensor, place) for place in places):
            refuse(
                f"{name_of(call)} mixes {many} or draws random numbers",
                "it would give another result chunk by chunk. Make it work row by row, " + AS_IS,
                call,
            )
        are_first &= places[0] == 0
    return are_first


def _are_parts(parts: Sequence[Tensor], whole: Tensor, dim: int) -> bool:
    """Whether tensors, concatenated in a dimension, equal ``whole`` but for rounding."""
    try:
        joined = torch.cat(list(parts), dim)
    except (RuntimeError, IndexError):
        return False
    if joined.shape != whole.shape:
        return False
    return torch.equal(joined, whole) or torch.allclose(
        joined.double(), whole.double(), 1e-9, 1e-12, equal_nan=True
    )


def _places(order: Tensor) -> Tensor:
    """Position of each number in ``order``."""
    found = torch.full((int(order.max()) + 1,), -1)
    found[order] = torch.arange(len(order))
    return found
