"""The recorded calls of a model, as a DAG of ops.

A call is an OP if its value has one row of floating-point numbers for each vertex: such values pass
from step to step and from stage to stage. All other calls are HELPERS: they depend on weights alone
(a gate, a softmax over layers) or give no such tensor (a shape, a comparison, a tuple). Each op
that needs a helper computes it again.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from gnnpipe.capture.buffers import assigned, sources_of
from gnnpipe.capture.call_facts import Facts
from gnnpipe.capture.edge_work.modules import EdgeFragment
from gnnpipe.capture.edge_work.program import EdgeWork
from gnnpipe.capture.fx_names import FEATURES, attribute, edges_read, input_number, is_input
from gnnpipe.capture.markers import aggregate, is_sum
from gnnpipe.capture.preserve import detached_copy
from gnnpipe.capture.rules.attention import is_mapped
from gnnpipe.capture.stage.row_work import multiplies, plain_summands
from gnnpipe.capture.stage.step_calls import is_linear
from gnnpipe.graph.graph import EDGE_DATA
from gnnpipe.graph.operators import EVERYONE, LINEAR_KINDS, RELATION, WEIGHTED, relation_ends
from gnnpipe.graph.types import Relation, numbered_name


@dataclass(frozen=True, eq=False)
class Assignment:
    """A value that forward assigns to a buffer in training."""

    buffer: str
    """Name of the buffer in the user's model."""
    value: fx.Node
    sums: tuple[fx.Node, ...]
    """The sums over all vertices that the value is made of."""
    buffers: Mapping[str, Tensor]
    """The buffer, and the buffers that the value is made of, by name."""


def _settings(model: nn.Module) -> Iterator[str]:
    """Numbers and texts among the attributes of PyG's and torch's modules, such as ``alpha``."""
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] in ("torch", "torch_geometric"):
            known = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str))}
            known = {k: v for k, v in sorted(known.items()) if k[0] != "_" and k != "training"}
            yield f"{path} {kind.__qualname__} {known}"


def _checksum(constant: Tensor) -> str:
    """Checksum of a tensor's numbers; of a sparse tensor its shape."""
    if constant.layout is not torch.strided:
        return str(list(constant.shape))
    flat = constant.detach().cpu().reshape(-1).contiguous()
    return f"{flat.dtype} {zlib.crc32(flat.view(torch.uint8).numpy().tobytes()):08x}"


def digest_of(model: nn.Module, calls: fx.GraphModule, edge_work: EdgeWork | None) -> str:
    """Checksum of recorded calls, their constants, and the settings of PyG's and torch's modules.

    Without weights, and without the code of convolutions that are recorded as a single call.
    """
    programs = [calls]
    programs += [] if edge_work is None else [edge_work.program]
    programs += [m.calls for m in calls.modules() if isinstance(m, EdgeFragment)]
    state = {id(t) for t in model.state_dict(keep_vars=True).values()}
    parts = list(_settings(model))
    for program in programs:
        parts.append(str(program.graph))
        for call in program.graph.nodes:
            value = attribute(program, str(call.target)) if call.op == "get_attr" else None
            if isinstance(value, Tensor) and id(value) not in state:
                parts.append(f"{call.target} {_checksum(value)}")
    text = "\n".join(parts)
    return f"{zlib.crc32(text.encode()):08x}"


def inputs_are_fixed(edge_work: EdgeWork | None, features_change: bool) -> bool:
    """Whether features and edges are the same in every epoch and in evaluation."""
    return not features_change and (edge_work is None or not edge_work.is_random)


class Recording:
    """The calls that a model's forward makes, and what each of them does to rows."""

    def __init__(
        self,
        model: nn.Module,
        graph_module: fx.GraphModule,
        facts: dict[fx.Node, Facts],
        ends: Mapping[str, tuple[str, str]],
        relations: Sequence[Relation],
        is_rounded: bool,
        edge_work: EdgeWork | None = None,
        features_change: bool = False,
    ) -> None:
        """``model`` and ``graph_module`` share weights and buffers.

        ``ends``: by edge input, the vertex types of sources and targets. ``is_rounded``: linear
        maps are computed in bf16, except those in ``scoring``. ``edge_work``: makes the edges that
        the calls read. ``features_change``: from epoch to epoch, as labels among them do.
        """
        self.model, self.graph_module, self.facts = model, graph_module, facts
        self.ends, self.relations, self.is_rounded = ends, relations, is_rounded
        self.edge_work, self.features_change = edge_work, features_change

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        """A copy with its own weights; the recorded calls are shared."""
        twin = detached_copy(self.model, memo)
        root = nn.Module()
        root.add_module("model", twin)
        for call in self.graph_module.graph.nodes:
            path = str(call.target)
            if path.startswith("model."):
                continue
            if call.op == "call_module":
                # Made by a rule or by ``make_out_of_place``; shares weights with the model.
                root.add_module(path, copy.deepcopy(self.graph_module.get_submodule(path), memo))
            elif call.op == "get_attr":
                # A constant tensor made in forward.
                setattr(root, path, getattr(self.graph_module, path))
        calls = fx.GraphModule(root, self.graph_module.graph)
        settings = self.ends, self.relations, self.is_rounded, self.edge_work
        return Recording(twin, calls, self.facts, *settings, self.features_change)

    @cached_property
    def ops(self) -> list[fx.Node]:
        """Calls whose values have one row for each vertex, in order; the last gives the logits."""
        return [
            call
            for call in self.graph_module.graph.nodes
            if call.op not in ("placeholder", "output") and self.facts[call].is_rows
        ]

    @cached_property
    def result(self) -> fx.Node:
        """The call that gives the logits."""
        output = next(n for n in self.graph_module.graph.nodes if n.op == "output")
        found: fx.Node = output.args[0]
        return found

    @property
    def edge_inputs(self) -> frozenset[str]:
        """Fields of ``Graph`` with edge data that the calls read."""
        if self.edge_work is not None:
            return self.edge_work.edge_inputs
        calls = self.graph_module.graph.nodes
        read = {str(c.target) for c in calls if is_input(c, *EDGE_DATA)}
        for call in calls:
            kind, _, number = str(call.kwargs.get("structure", "")).partition(RELATION)
            if number:
                read.add("edge_type")
            if kind.endswith(WEIGHTED):
                is_of_relation = bool(number and self.relations)
                of_relation = numbered_name("edge_weight", int(number or 0))
                read.add(of_relation if is_of_relation else "edge_weight")
        return frozenset(read)

    @property
    def edges_are_random(self) -> bool:
        """Whether the calls read other edges in every epoch, or in evaluation."""
        return self.edge_work is not None and self.edge_work.is_random

    def is_fixed(self, value: fx.Node) -> bool:
        """Whether a value depends on no weight, so that only dropout changes it."""
        return value.op == "placeholder" or value in self._fixed

    @cached_property
    def _fixed(self) -> frozenset[fx.Node]:
        found: set[fx.Node] = set()
        for op in self.ops:
            if found.issuperset(self.inputs(op)) and not any(self.weights(op)):
                found.add(op)
        return frozenset(found)

    @cached_property
    def scoring(self) -> frozenset[fx.Node]:
        """The last linear maps before the logits, which stay in full precision."""
        found: set[fx.Node] = set()
        seen, waiting = {self.result}, [self.result]
        while waiting:
            call = waiting.pop()
            if is_linear(self.graph_module, call) or multiplies(call):
                found.add(call)
                sources = [s for s in plain_summands(call) if s.op != "placeholder"]
            elif not self.facts[call].form or is_mapped(
                self.graph_module.get_submodule(str(call.target))
            ):
                sources = self.inputs(call)
            else:
                continue
            new = {s for s in sources if s not in seen}
            seen |= new
            waiting += new
        return frozenset(found)

    def maps_features(self, call: fx.Node) -> bool:
        """Whether a call is a linear map of the input features, which may be sparse."""
        first = call.args[0] if call.args else None
        is_of_features = isinstance(first, fx.Node) and is_input(first, FEATURES)
        return is_of_features and is_linear(self.graph_module, call)

    def has_bf16_products(self, dense: Collection[str]) -> bool:
        """Whether some map in ``ops`` may be in bf16: not in ``scoring``, nor of sparse features.

        ``dense``: vertex types whose features are dense.
        """
        return any(
            (is_linear(self.graph_module, op) or multiplies(op)) and op not in self.scoring
            for op in self.ops
            if self.facts[op].vertex_type in dense or not self.maps_features(op)
        )

    def aggregates(self, call: fx.Node) -> bool:
        """Whether a call reads rows of other vertices, which they push in every epoch."""
        is_aggregation = call.target is aggregate or bool(self.facts[call].form)
        return is_aggregation and not self.aggregates_features(call)

    def aggregates_features(self, call: fx.Node) -> bool:
        """Whether a call is the product of a fixed matrix and the features.

        It is computed once, when the run is set up, and its rows are given like the features.
        """
        are_fixed = inputs_are_fixed(self.edge_work, self.features_change)
        if call.target is not aggregate or not are_fixed:
            return False
        is_one_matrix = call.kwargs["structure"] in LINEAR_KINDS  # not of one of several relations
        return is_one_matrix and is_input(call.all_input_nodes[0], FEATURES)

    def helpers(self, op: fx.Node) -> list[fx.Node]:
        """Calls that are no ops and that an op depends on, in order."""
        found: dict[fx.Node, None] = {}

        def visit(call: fx.Node) -> None:
            for source in call.all_input_nodes:
                is_helper = source.op != "placeholder" and not self.facts[source].is_rows
                if is_helper and source not in found:
                    visit(source)
                    found[source] = None

        visit(op)
        return list(found)

    def inputs(self, op: fx.Node) -> list[fx.Node]:
        """Ops that an op reads, directly or through its helpers, each once."""
        sources = (s for s in self._sources(op) if s.op != "placeholder" and self.facts[s].is_rows)
        return list(dict.fromkeys(sources))

    @cached_property
    def readers(self) -> dict[fx.Node, list[fx.Node]]:
        """The later ops that read each op's value."""
        found: dict[fx.Node, list[fx.Node]] = {op: [] for op in self.ops}
        for op in self.ops:
            for source in self.inputs(op):
                found[source].append(op)
        return found

    def reads_features(self, op: fx.Node) -> bool:
        """Whether an op or a helper of it reads the input features."""
        return any(is_input(source, FEATURES) for source in self._sources(op))

    def _sources(self, op: fx.Node) -> Iterator[fx.Node]:
        for call in (*self.helpers(op), op):
            yield from call.all_input_nodes

    @cached_property
    def _first_names(self) -> dict[int, str]:
        """Names of the weights by ``id``; a shared weight has its first name."""
        return {id(p): name for name, p in self.model.named_parameters()}

    @cached_property
    def _buffers(self) -> dict[str, dict[str, Tensor]]:
        """Buffers by name, for the path of each buffer and module above it; they move in place."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            path = f"model.{name}"
            while path and not isinstance(value, nn.Parameter):
                found.setdefault(path, {})[name] = value
                path = path.rpartition(".")[0]
        return found

    def weights(self, op: fx.Node) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that an op uses, with their names in the user's model."""
        first = self._first_names
        for call in (*self.helpers(op), op):
            if call.op == "call_module":
                module = self.graph_module.get_submodule(str(call.target))
                for parameter in module.parameters():
                    yield first[id(parameter)], parameter
            elif call.op == "get_attr":
                value = attribute(self.graph_module, str(call.target))
                if isinstance(value, nn.Parameter):
                    yield first[id(value)], value

    @cached_property
    def assignments(self) -> dict[fx.Node, list[Assignment]]:
        """The assignments to buffers, by an op of the stage that updates them.

        The op is a sum that the value is made of, else one that reads a buffer, else the last one.
        """
        found: dict[fx.Node, list[Assignment]] = {}
        for mark in assigned(self.graph_module.graph):
            calls = sources_of(mark.all_input_nodes[0])
            sums = tuple(call for call in calls if is_sum(call))
            buffers = dict(self._buffers[f"model.{mark.kwargs['buffer']}"])
            for call in calls:
                buffers |= self._buffers.get(str(call.target), {})
            one = Assignment(str(mark.kwargs["buffer"]), mark.all_input_nodes[0], sums, buffers)
            readers = (op for op in self.ops if buffers.keys() & self._own_buffers(op).keys())
            op = next((op for op in (*sums, *readers)), self.result)
            found.setdefault(op, []).append(one)
        return found

    def buffers(self, op: fx.Node) -> dict[str, Tensor]:
        """Buffers that an op reads or updates (running statistics), by the user's names."""
        found = self._own_buffers(op)
        for first, assignments in self.assignments.items():
            for one in assignments:
                if op is first or op in one.sums:
                    found |= one.buffers
        return found

    def _own_buffers(self, op: fx.Node) -> dict[str, Tensor]:
        calls = (*self.helpers(op), op)
        paths = [str(c.target) for c in calls if c.op in ("call_module", "get_attr")]
        paths.append(str(op.kwargs.get("observed_by", "")).partition(":")[0])
        found: dict[str, Tensor] = {}
        for path in paths:
            found |= self._buffers.get(path, {})
        return found

    def over(self, op: fx.Node) -> tuple[str, str, str]:
        """Structure, source vertex type and target vertex type of an aggregation."""
        vertex_type = self.facts[op].vertex_type
        if op.target is not aggregate:
            index = edges_read(op)
            assert index is not None
            number = input_number(index)
            relation = "" if number is None else f"{RELATION}{number}"
            return f"edges{relation}", *self.ends[str(index.target)]
        structure = str(op.kwargs["structure"])
        if structure.startswith(EVERYONE):  # Also for BY_EDGES.
            return structure, vertex_type, vertex_type
        return structure, *relation_ends(self.relations, structure)
