"""Fuses row-wise calls of a recording: sums of products, LayerNorm, ReLU and dropout as one call.

A fused call takes the place of its last call and keeps that call's name; the calls before it, which
nothing else reads, are removed. The trial compares the fused recording with the model.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch_geometric.nn.dense.linear import Linear

from gnnpipe.capture.call_facts import Facts
from gnnpipe.capture.fx_names import FEATURES, attribute, edges_read, is_input
from gnnpipe.capture.markers import aggregate, drop
from gnnpipe.capture.rewrite import AFTER_AGGREGATION
from gnnpipe.capture.stage.row_work import (
    batch_norm_relu,
    gcnii_norm_relu,
    layer_norm_relu,
    mixed_map,
    summed,
)
from gnnpipe.capture.stage.step_calls import HOOKS, normalise


def fuse(recording: fx.GraphModule, facts: dict[fx.Node, Facts]) -> list[fx.Node]:
    """Fuse calls of a recording.

    Args:
        recording: Changed in place.
        facts: Facts of all calls; those of removed calls are removed.

    Returns:
        New calls, and calls that compute more than before, each after its sources. The caller
        computes their facts.
    """
    fusion = _Fusion(recording, facts)
    for call in list(recording.graph.nodes):
        fusion.try_norm(call)
    for call in reversed(list(recording.graph.nodes)):
        fusion.try_sum(call)
    for call in fusion.dead:
        recording.graph.erase_node(call)
        del facts[call]
    return fusion.made


@dataclass
class _Sum:
    """Summands of a value [R, F]."""

    pairs: list[tuple[fx.Node, Any]] = field(default_factory=list)
    """Rows [R, F_i], and the weight [F, F_i] of their product as a call or a path, or None."""
    biases: list[Any] = field(default_factory=list)
    """Biases [F] as calls or paths."""
    inner: list[fx.Node] = field(default_factory=list)
    """Calls that the sum replaces, each after its readers."""


class _Fusion:
    """Fuses one call after the other; replaced calls stay in the graph until the end (``dead``)."""

    def __init__(self, recording: fx.GraphModule, facts: Mapping[fx.Node, Facts]) -> None:
        self._recording, self._facts = recording, facts
        self.made: list[fx.Node] = []
        """Calls whose facts are missing or old (see ``fuse``)."""
        self._depth: dict[fx.Node, int] = {}
        """Most aggregations on a path from an input to the call, with the call itself."""
        for call in recording.graph.nodes:
            before = max((self._depth[source] for source in call.all_input_nodes), default=0)
            aggregates = call.target is aggregate or edges_read(call) is not None
            self._depth[call] = before + aggregates
        self.dead: dict[fx.Node, None] = {}
        """Calls that were replaced, each after its readers, so that all can be erased in order."""

    def try_norm(self, call: fx.Node) -> None:
        """Fuse LayerNorm, the ReLU ``call`` and a dropout, with the sum before the norm."""
        if not self._is_relu(call):
            return
        layer_norm = call.args[0]
        if not isinstance(layer_norm, fx.Node) or not self._is_inner(layer_norm, call):
            return
        if layer_norm.target is normalise:
            self._replace_norm(call, layer_norm)
            return
        norm = self._norm_of(layer_norm)
        rows = layer_norm.args[0] if layer_norm.args else None
        if norm is None or not isinstance(rows, fx.Node) or not self._is_matrix(rows):
            return
        last, inner, settings = self._with_dropout(call)
        inner = [*inner, layer_norm]
        arguments = {"norm": norm, **settings}
        if rows.target is mixed_map and self._is_inner(rows, layer_norm):
            with last.graph.inserting_before(last):
                norm = fx.node.map_aggregate(norm, self._weight)
            last.op, last.target, last.args = "call_function", gcnii_norm_relu, rows.args
            last.kwargs = {**rows.kwargs, **arguments, "norm": norm}
            self.made.append(last)
            self.dead |= dict.fromkeys([*inner, rows])
            return
        found = self._sum_of(rows, layer_norm)
        if found is None:
            found = _Sum([(rows, None)])
        self._replace(last, layer_norm_relu, found, inner, arguments)

    def _with_dropout(self, relu: fx.Node) -> tuple[fx.Node, list[fx.Node], dict[str, Any]]:
        """The last call of a ReLU and a dropout, the call before, and the dropout's settings."""
        (following,) = relu.users if len(relu.users) == 1 else (None,)
        if following is not None and following.target is drop:
            return following, [relu], dict(following.kwargs)
        return relu, [], {"probability": 0.0}

    def _replace_norm(self, relu: fx.Node, norm: fx.Node) -> None:
        """Fuse a normalisation over all vertices, the ReLU behind it and a dropout."""
        if not self._is_matrix(norm):
            return
        last, inner, settings = self._with_dropout(relu)
        last.op, last.target, last.args = "call_function", batch_norm_relu, norm.args
        last.kwargs = settings
        self.made.append(last)
        self.dead |= dict.fromkeys([*inner, norm])

    def try_sum(self, call: fx.Node) -> None:
        """Fuse the additions and products that end with the addition ``call``."""
        if call in self.dead or not self._is_add(call) or not self._is_matrix(call):
            return
        found = self._sum_of(call, None)
        if found is None or not any(weight is not None for _, weight in found.pairs):
            return
        self._replace(call, summed, found, [])

    def _replace(
        self,
        last: fx.Node,
        function: Any,
        found: _Sum,
        inner: list[fx.Node],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Turn ``last`` into a call of ``function`` on the summands ``found``.

        ``inner``: calls between the sum and ``last``; they are replaced, too. ``settings``: further
        keyword arguments; a path in them stands for a weight.
        """
        graph = last.graph
        with graph.inserting_before(last):
            pairs = [(x, self._weight(weight)) for x, weight in found.pairs]
            biases = [self._weight(bias) for bias in found.biases]
            bias = biases[0] if biases else None
            for other in biases[1:]:
                bias = graph.call_function(operator.add, (bias, other))
                self.made.append(bias)
            given = fx.node.map_aggregate(dict(settings or {}), self._weight)
        last.op, last.target = "call_function", function
        last.args = tuple(one for pair in pairs for one in pair)
        last.kwargs = {"bias": bias, **given}
        self.made.append(last)
        self.dead |= dict.fromkeys(one for one in (*inner, *found.inner) if one is not last)

    def _weight(self, value: Any) -> Any:
        """A new call that reads the weight at a path; other values as they are."""
        if not isinstance(value, str):
            return value
        call = self._recording.graph.get_attr(value)
        self.made.append(call)
        return call

    def _sum_of(self, value: fx.Node, reader: fx.Node | None) -> _Sum | None:
        """The summands of rows [R, F]; None if one of them is neither rows, product nor bias.

        ``reader``: the call that is fused with the sum; the additions are inner calls only if
        nothing else reads them. None: the sum is the last call, and may have any readers.
        """
        found = _Sum()
        width = self._facts[value].width
        for summand in self._summands(value, reader, found.inner):
            facts = self._facts[summand]
            if not facts.depends and not facts.is_rows:
                if not self._is_vector(summand, width):
                    return None
                found.biases.append(summand)
            elif not self._is_matrix(summand) or facts.width != width:
                return None
            elif (product := self._product_of(summand)) is not None:
                rows, weight, bias = product
                found.pairs.append((rows, weight))
                found.biases += [] if bias is None else [bias]
                found.inner.append(summand)
            else:
                found.pairs.append((summand, None))
        return found if found.pairs else None

    def _summands(
        self, value: fx.Node, reader: fx.Node | None, inner: list[fx.Node]
    ) -> Iterator[fx.Node]:
        """Yields the summands of a value in order; appends the additions to ``inner``."""
        depth, waiting = self._depth[value], [(value, reader)]
        while waiting:
            one, its_reader = waiting.pop()
            is_inner = its_reader is None or self._is_inner(one, its_reader)
            # A sum of an earlier step is not split: it takes less memory than its summands.
            if not (is_inner and self._is_add(one) and self._depth[one] == depth):
                yield one
                continue
            inner.append(one)
            waiting += [(n, one) for n in reversed(one.args) if isinstance(n, fx.Node)]

    def _product_of(self, call: fx.Node) -> tuple[fx.Node, Any, Any] | None:
        """Rows, weight and bias of a linear map that one call alone reads; else None.

        Maps of the input features are left out, because these may be sparse, and maps that were put
        behind an aggregation (``AFTER_AGGREGATION``).
        """
        rows = call.args[0] if call.args else None
        (reader,) = call.users if len(call.users) == 1 else (None,)
        is_map = reader is not None and self._is_inner(call, reader)
        if not (is_map and isinstance(rows, fx.Node) and self._is_matrix(rows)):
            return None
        if is_input(rows, FEATURES) or AFTER_AGGREGATION in call.meta:
            return None
        if call.op == "call_module":
            module = self._recording.get_submodule(str(call.target))
            if type(module) not in (nn.Linear, Linear) or len(call.args) != 1 or _has_hooks(module):
                return None
            bias = None if module.bias is None else f"{call.target}.bias"
            return rows, f"{call.target}.weight", bias
        if call.target is not F.linear:
            return None
        given = dict(zip(("weight", "bias"), call.args[1:], strict=False)) | dict(call.kwargs)
        weight = given.get("weight")
        if not isinstance(weight, fx.Node) or self._facts[weight].depends:
            return None
        return rows, weight, given.get("bias")

    def _norm_of(self, call: fx.Node) -> tuple[Any, Any, float] | None:
        """Scale, shift and epsilon if a call is a LayerNorm over the columns, else None."""
        if call.op != "call_module":
            return None
        module = self._recording.get_submodule(str(call.target))
        if type(module) is not nn.LayerNorm or _has_hooks(module):
            return None
        assert isinstance(module, nn.LayerNorm)
        if module.bias is None or len(module.normalized_shape) != 1:
            return None
        return f"{call.target}.weight", f"{call.target}.bias", module.eps

    def _is_relu(self, call: fx.Node) -> bool:
        if call.op == "call_module":
            module = self._recording.get_submodule(str(call.target))
            is_relu = type(module) is nn.ReLU and not _has_hooks(module)
        else:
            is_relu = call.target in (F.relu, torch.relu, "relu")
        return is_relu and bool(call.args)

    def _is_add(self, call: fx.Node) -> bool:
        """Whether a call adds two recorded values."""
        is_sum = call.target in (operator.add, torch.add, "add")
        values = [one for one in call.args if isinstance(one, fx.Node)]
        return is_sum and len(values) == len(call.args) == 2 and not call.kwargs

    def _is_inner(self, call: fx.Node, reader: fx.Node) -> bool:
        """Whether ``reader`` alone reads a call, once."""
        return list(call.users) == [reader] and reader.args.count(call) == 1

    def _is_matrix(self, call: fx.Node) -> bool:
        """Whether a value is rows [R, F]."""
        facts = self._facts.get(call)
        return facts is not None and facts.is_rows and len(facts.shape) == 1

    def _is_vector(self, call: fx.Node, width: int) -> bool:
        """Whether a value is a weight [``width``] of the model."""
        if call.op != "get_attr":
            return False
        found = attribute(self._recording, str(call.target))
        return isinstance(found, nn.Parameter) and found.shape == (width,)


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)
