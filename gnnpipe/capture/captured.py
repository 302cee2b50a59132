"""A captured model: the recording as a DAG of ops, cut into pieces.

Three kinds of recorded values are told apart. A value with one row of floating numbers for each
vertex is an OP's: it can be handed from step to step and sent from stage to stage. What depends on
weights alone (a gate, a softmax over layers) and what is no such tensor (a shape, a comparison, the
parts of a split) is computed anew wherever an op needs it, and belongs to that op.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from gnnpipe.capture.fx_names import (
    EDGES,
    FEATURES,
    OUT_OF_PLACE,
    attribute,
    called,
    entry,
    first_line,
    input_number,
    is_input,
)
from gnnpipe.capture.markers import aggregate
from gnnpipe.capture.rules.attention import is_mapped
from gnnpipe.capture.signature import edge_inputs
from gnnpipe.capture.stage.linear import is_linear
from gnnpipe.capture.stage.stage_module import CapturedStageModule
from gnnpipe.capture.trace import trace
from gnnpipe.capture.trial.facts import Facts, probe
from gnnpipe.capture.trial.sample_graph import make_sample
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import EDGE_DATA, Graph
from gnnpipe.graph.operators import EVERYONE, RELATION, WEIGHTED, relation_ends
from gnnpipe.graph.types import Relation
from gnnpipe.models.stage_module import Model

__all__ = ["Captured", "capture"]


def capture(model: nn.Module, graph: Graph, is_rounded: bool = False) -> Captured:
    """Record a PyG model that takes (x, edge_index); ``InputError`` says what stands in the way.

    What the edges of ``graph`` carry is passed to a forward that asks for it by name. Weights and
    buffers are shared with the recording from here on. ``is_rounded``: linear maps of rows, but for
    one that gives the logits, are made in bf16 (``models.products``).
    """
    method = entry(model, graph)
    names = edge_inputs(model, method, graph.edge_data if graph.types is None else {})
    sample = make_sample(model, graph.reduced_to(names))
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        try:
            with torch.no_grad():
                # Lazy weights take their shape from the first rows they see.
                dtype = _dtype(model)
                carried = {
                    k: v.to(dtype) if v.is_floating_point() else v
                    for k, v in sample.edge_data.items()
                }
                called(model, method)(*_floating(sample.arguments, dtype), **carried)
        except Exception as error:
            raise InputError(
                f"model: fails on a sample in plain PyG: {first_line(error)}"
            ) from None
    recording = trace(model, method, names, graph)
    return Captured(
        model,
        recording,
        probe(model, method, recording, sample),
        sample.ends,
        graph.relations,
        is_rounded,
    )


def _floating(arguments: tuple[Any, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Features in another number type."""
    x, edges = arguments
    return {k: v.to(dtype) for k, v in x.items()} if isinstance(x, Mapping) else x.to(dtype), edges


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.get_default_dtype())


class Captured(Model):
    """A user's model with its recording."""

    def __init__(
        self,
        model: nn.Module,
        recording: fx.GraphModule,
        facts: dict[fx.Node, Facts],
        ends: Mapping[str, tuple[str, str]],
        relations: Sequence[Relation],
        is_rounded: bool,
    ) -> None:
        """``ends``: for each input of edges, the types of the vertices at their ends."""
        self.is_rounded = is_rounded
        self.recording, self.facts, self.ends = recording, facts, ends
        self._relations = relations
        self.name = type(model).__name__
        self._module = model

    def __deepcopy__(self, memo: dict[int, Any]) -> Captured:
        """With weights of its own; the recorded calls are shared."""
        twin = copy.deepcopy(self._module, memo)
        root = nn.Module()
        root.add_module("model", twin)
        for call in self.recording.graph.nodes:
            path = str(call.target)
            if call.op == "call_module" and path.endswith(OUT_OF_PLACE):
                owner = root.get_submodule(path.rpartition(".")[0])
                owner.add_module(path.rpartition(".")[2], self.recording.get_submodule(path))
            elif call.op == "call_module" and not path.startswith("model."):
                # A convolution that a rule made; its weights, if any, are the model's.
                made = copy.deepcopy(self.recording.get_submodule(path), memo)
                root.add_module(path, made)
            elif call.op == "get_attr" and not path.startswith("model."):
                # A tensor that forward itself made, out of nothing but numbers.
                setattr(root, path, getattr(self.recording, path))
        recording = fx.GraphModule(root, self.recording.graph)
        return Captured(twin, recording, self.facts, self.ends, self._relations, self.is_rounded)

    @property
    def module(self) -> nn.Module:
        """The user's own module; its weights are those that are trained."""
        return self._module

    @property
    def size_text(self) -> str:
        """Ops and aggregations."""
        return f"{len(self.ops)} ops, {sum(map(self.aggregates, self.ops))} aggregations"

    @property
    def digest(self) -> str:
        """The same on two ranks if and only if they recorded the same calls."""
        return str(self.recording.graph) + str(list(self.facts.values()))

    @cached_property
    def ops(self) -> list[fx.Node]:
        """The recorded calls whose values are rows, in order; the last one gives the logits."""
        return [
            call
            for call in self.recording.graph.nodes
            if call.op not in ("placeholder", "output") and self.facts[call].is_rows
        ]

    @cached_property
    def result(self) -> fx.Node:
        """The call that gives the logits."""
        output = next(n for n in self.recording.graph.nodes if n.op == "output")
        found: fx.Node = output.args[0]
        return found

    @property
    def edge_inputs(self) -> frozenset[str]:
        """What it reads of what edges carry, by the field of ``Graph``."""
        calls = self.recording.graph.nodes
        read = {str(c.target) for c in calls if is_input(c, *EDGE_DATA)}
        names = "".join(str(call.kwargs.get("structure", "")) for call in calls)
        for sign, field in ((WEIGHTED, "edge_weight"), (RELATION, "edge_type")):
            if sign in names:
                read.add(field)
        return frozenset(read)

    def is_fixed(self, value: fx.Node) -> bool:
        """No weight is behind a value: but for dropout it is always the same."""
        return value.op == "placeholder" or value in self._fixed

    @cached_property
    def _fixed(self) -> frozenset[fx.Node]:
        found: set[fx.Node] = set()
        for op in self.ops:
            if all(s in found for s in self.inputs(op)) and not any(self.weights(op)):
                found.add(op)
        return frozenset(found)

    @cached_property
    def scoring(self) -> frozenset[fx.Node]:
        """The linear maps nearest the scores, which are not rounded."""
        found: set[fx.Node] = set()
        seen, waiting = {self.result}, [self.result]
        while waiting:
            call = waiting.pop()
            if is_linear(self.recording, call):
                found.add(call)
            elif not self.facts[call].form or is_mapped(
                self.recording.get_submodule(str(call.target))
            ):
                new = {s for s in self.inputs(call) if s not in seen}
                seen |= new
                waiting += new
        return frozenset(found)

    def maps_features(self, call: fx.Node) -> bool:
        """A linear map of the features themselves, which may be sparse."""
        first = call.args[0] if call.args else None
        is_of_features = isinstance(first, fx.Node) and is_input(first, FEATURES)
        return is_of_features and is_linear(self.recording, call)

    def rounds(self, dense: Collection[str]) -> bool:
        """Some linear map but for those nearest the scores, and of sparse features."""
        return any(
            is_linear(self.recording, op) and op not in self.scoring
            for op in self.ops
            if self.facts[op].vertex_type in dense or not self.maps_features(op)
        )

    def aggregates(self, call: fx.Node) -> bool:
        """The call reads other rows than its own."""
        return call.target is aggregate or bool(self.facts[call].form)

    def helpers(self, op: fx.Node) -> list[fx.Node]:
        """Calls that are made anew for an op, in order: they are not ops."""
        found: dict[fx.Node, None] = {}

        def visit(call: fx.Node) -> None:
            for source in call.all_input_nodes:
                if source.op != "placeholder" and not self.facts[source].is_rows:
                    visit(source)
                    found[source] = None

        visit(op)
        return list(found)

    def inputs(self, op: fx.Node) -> list[fx.Node]:
        """Ops that an op reads, also through its helpers, each once."""
        found: dict[fx.Node, None] = {}
        for call in (*self.helpers(op), op):
            for source in call.all_input_nodes:
                if source.op != "placeholder" and self.facts[source].is_rows:
                    found[source] = None
        return list(found)

    def reads_features(self, op: fx.Node) -> bool:
        """The op, or a helper of it, reads the input features."""
        return any(
            is_input(source, FEATURES)
            for call in (*self.helpers(op), op)
            for source in call.all_input_nodes
        )

    @cached_property
    def _first_names(self) -> dict[int, str]:
        """The name of every weight by its identity; found once, for a deep model has many ops."""
        return {id(p): name for name, p in self._module.named_parameters()}

    @cached_property
    def _buffers(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside weights, by name; moved in place, so found once."""
        state = self._module.state_dict(keep_vars=True).items()
        return {name: value for name, value in state if not isinstance(value, nn.Parameter)}

    def weights(self, op: fx.Node) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that an op uses, by the user's names; one that has several, by the first."""
        first = self._first_names
        for call in (*self.helpers(op), op):
            if call.op == "call_module":
                module = self.recording.get_submodule(str(call.target))
                for parameter in module.parameters():
                    yield first[id(parameter)], parameter
            elif call.op == "get_attr":
                value = attribute(self.recording, str(call.target))
                if isinstance(value, nn.Parameter):
                    yield first[id(value)], value

    def buffers(self, op: fx.Node) -> Iterator[tuple[str, Tensor]]:
        """What else a checkpoint holds that an op reads, or keeps (moving statistics)."""
        calls = (*self.helpers(op), op)
        modules = [str(c.target) for c in calls if c.op == "call_module"]
        modules += [str(op.kwargs.get("observed_by") or "-").partition(":")[0]]
        read = {str(c.target) for c in calls if c.op == "get_attr"}
        for name, value in self._buffers.items():
            path = f"model.{name}"
            if path in read or any(path.startswith(f"{module}.") for module in modules):
                yield name, value

    def over(self, op: fx.Node) -> tuple[str, str, str]:
        """What an aggregation is over: structure, type of the rows it reads, type that reads."""
        vertex_type = self.facts[op].vertex_type
        if op.target is not aggregate:
            index = next(source for source in op.all_input_nodes if is_input(source, EDGES))
            number = input_number(index)
            relation = "" if number is None else f"{RELATION}{number}"
            return f"edges{relation}", *self.ends[str(index.target)]
        structure = str(op.kwargs["structure"])
        if structure.startswith(EVERYONE):  # Over edges, too.
            return structure, vertex_type, vertex_type
        return structure, *relation_ends(self._relations, structure)

    def stage_module(self, first: int, last: int) -> CapturedStageModule:
        """Ops first..last-1."""
        return CapturedStageModule(self, first, last)
