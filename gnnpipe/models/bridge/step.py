"""One step of a stage as one generated function.

It takes the chunk's ``Rows``, the values that were handed on and what was aggregated, and returns
the rows to push and the values that go on. Inside a stage values keep their shape; between stages,
and where they are pushed, a row is flat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.models.bridge.cut import Cut
from gnnpipe.models.bridge.marks import drop, in_training
from gnnpipe.models.bridge.recording import FEATURES, attribute
from gnnpipe.models.feature_linear import dense_features, feature_linear
from gnnpipe.models.layer import Rows, Values
from gnnpipe.models.piece import Received

__all__ = ["StepFunction"]


class StepFunction:
    """One step as a function; the stage's modules are its submodules."""

    def __init__(self, cut: Cut, step: int) -> None:
        self._cut_facts = cut.model.facts
        self._modules: dict[str, Any] = {}
        graph = fx.Graph()
        self._rows = graph.placeholder("rows")
        self._graph, self._made = graph, {}
        before = cut.entering if step == 0 else cut.carried(step - 1)
        arrived = [op for op in cut.running(step) if cut.model.aggregates(op)]
        for value in before:
            held = graph.placeholder(value.name)
            self._made[value] = self._shaped(held, value) if step == 0 else held
        inputs = [
            (graph.placeholder(f"{op.name}_rows"), graph.placeholder(f"{op.name}_block"))
            for op in arrived
        ]
        for op, (found, block) in zip(arrived, inputs, strict=True):
            self._made[op] = self._arrive(cut, op, found, block)
        for op in cut.running(step):
            self._make(cut.model.recording, op)
        pushing = cut.pushing(step)
        pushed = tuple(self._flat(cut.model.recording, cut.pushed(op)) for op in pushing)
        leaving = cut.carried(step)
        ends = step == cut.num_steps - 1
        handed = tuple(self._call(_flat, self._made[v]) if ends else self._made[v] for v in leaving)
        graph.output((pushed, handed))
        self.function = fx.GraphModule(self._modules, graph)
        self._before = [v.name for v in before]
        self._arrived = [op.name for op in arrived]
        self._pushing = [op.name for op in pushing]
        result = cut.model.result
        self._leaving = ["x" if ends and v is result else v.name for v in leaving]
        # Nodes of the whole recording would be copied along with the piece.
        del self._graph, self._made, self._rows, self._cut_facts, self._modules

    def __call__(
        self, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """The rows to push, by aggregation, and the values that go on."""
        given: list[Any] = [rows, *(values[name] for name in self._before)]
        for name in self._arrived:
            given += [received[name].rows, received[name].block]
        pushed, handed = self.function(*given)
        return (
            dict(zip(self._pushing, pushed, strict=True)),
            dict(zip(self._leaving, handed, strict=True)),
        )

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.call_function(function, args, kwargs)

    def _shaped(self, held: fx.Node, value: fx.Node) -> fx.Node:
        shape = self._cut_facts[value].shape
        return held if len(shape) == 1 else self._call(_shaped, held, shape)

    def _arrive(self, cut: Cut, op: fx.Node, found: fx.Node, block: fx.Node) -> fx.Node:
        if op not in cut.blocks:
            return self._shaped(found, op)
        path = f"{op.name}_on_block"
        self._modules[path] = cut.blocks[op]
        own = cut.blocks[op].own
        args = [found, block, self._rows] + ([] if own is None else [self._value(own)])
        return self._graph.call_module(path, tuple(args))

    def _flat(self, recording: fx.GraphModule, values: list[fx.Node]) -> fx.Node:
        flat = [self._call(_flat, self._make(recording, value)) for value in values]
        return flat[0] if len(flat) == 1 else self._call(torch.cat, flat, dim=1)

    def _value(self, call: fx.Node) -> fx.Node:
        """A value that is there already; features as a dense tensor."""
        if call.op == "placeholder":
            return self._call(_dense_features, self._rows)
        return self._made[call]

    def _make(self, recording: fx.GraphModule, call: fx.Node) -> fx.Node:
        """The value of a call in this step, made if it is not there."""
        if call in self._made or call.op == "placeholder":
            return self._value(call)
        if call.op == "get_attr":
            self._modules[str(call.target)] = attribute(recording, str(call.target))
            self._made[call] = self._graph.get_attr(str(call.target))
        elif self._is_feature_linear(recording, call):
            self._made[call] = self._linear_of_features(recording, call)
        else:
            for source in call.all_input_nodes:
                self._made_or_features(recording, source)
            if call.op == "call_module":
                self._modules[str(call.target)] = recording.get_submodule(str(call.target))
            copied = self._graph.node_copy(call, self._value)
            if call.target in _OF_ROWS:
                target: Any = _OF_ROWS[call.target]
                copied.target = target
                copied.args = (self._rows, *copied.args)
            self._made[call] = copied
        return self._made[call]

    def _made_or_features(self, recording: fx.GraphModule, call: fx.Node) -> None:
        if call.op != "placeholder":
            self._make(recording, call)

    def _is_feature_linear(self, recording: fx.GraphModule, call: fx.Node) -> bool:
        """A linear map of the features themselves, which may be sparse."""
        first = call.args[0] if call.args else None
        if not (isinstance(first, fx.Node) and first.target == FEATURES):
            return False
        if call.op == "call_module":
            module = recording.get_submodule(str(call.target))
            return isinstance(module, nn.Linear | Linear) and len(call.args) == 1
        return call.target is F.linear

    def _linear_of_features(self, recording: fx.GraphModule, call: fx.Node) -> fx.Node:
        if call.op == "call_module":
            path = f"{call.target}_of_features"
            self._modules[path] = _FeatureLinear(recording.get_submodule(str(call.target)))
            return self._graph.call_module(path, (self._rows,))
        for source in call.all_input_nodes[1:]:
            self._make(recording, source)
        rest = fx.node.map_arg(call.args[1:], self._value)
        kwargs = fx.node.map_arg(call.kwargs, self._value)
        return self._call(_linear_of_features, self._rows, *rest, **kwargs)


class _FeatureLinear(nn.Module):
    """The user's linear layer on the input features."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Rows) -> Tensor:
        return _linear_of_features(rows, self.linear.weight, self.linear.bias)


def _linear_of_features(rows: Rows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert rows.features is not None
    return feature_linear(rows.features, weight, bias)


def _dense_features(rows: Rows) -> Tensor:
    assert rows.features is not None
    return dense_features(rows.features)


def _drop(rows: Rows, x: Tensor, probability: float, site: int) -> Tensor:
    return rows.dropout(x.flatten(1), probability, site).reshape(x.shape)


def _in_training(rows: Rows, now: Tensor, kept: Tensor) -> Tensor:
    return now if rows.training or rows.pilot else kept.to(now.dtype).expand_as(now)


_OF_ROWS = {drop: _drop, in_training: _in_training}
"""Marks that must know which rows they work on, and what they do."""


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(len(x), *shape)
