"""Splits the ops of a model into primitive ops, with their times on the profiled device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gnnpipe.errors import InputError
from gnnpipe.perf.profile import OpTimes
from gnnpipe.perf.workload import Workload
from gnnpipe.plan import Op
from gnnpipe.plan.model_graph import KEPT_FLOPS
from gnnpipe.planner.distributed_program import OpKind, PrimitiveOp


class Work(NamedTuple):
    """Times of a primitive op for the whole graph on the profiled device; zero: for free."""

    forward_s: float = 0.0
    """In proportion to the part of the graph."""
    backward_s: float = 0.0
    base_s: float = 0.0
    """Forward and backward, of any part of the graph."""
    num_weights: int = 0
    once_s: float = 0.0
    """Once an epoch, of any part of the graph."""


FREE = Work()


@dataclass
class PrimitiveModel:
    """Primitive ops of a model, and their work."""

    ops: list[PrimitiveOp] = field(default_factory=list)
    work: dict[str, Work] = field(default_factory=dict)
    """By name of the primitive op."""

    def add(self, op: PrimitiveOp, work: Work = FREE) -> str:
        """Append an op; return its name."""
        self.ops.append(op)
        self.work[op.name] = work
        return op.name


def primitive_model(workload: Workload) -> PrimitiveModel:
    """Split every op of a model into aggregation, dense product and row-wise work.

    The profile has one time per row for the product and the row-wise work of an op, which is split
    in proportion to ``flops_per_row`` and ``KEPT_FLOPS`` for each kept number. An aggregation
    aggregates the first input; other inputs are added to its result. A mean over all vertices
    counts as row-wise work.

    Raises:
        InputError: The profile lacks a kind of op, or the graph has several types of vertices.
    """
    if len(workload.num_vertices) > 1:
        raise InputError(
            "plan: sharding is searched for graphs of one vertex type; this graph has "
            f"{len(workload.num_vertices)}"
        )
    found = PrimitiveModel()
    made: dict[str, str] = {}
    features = ""
    if any(op.reads_features for op in workload.model.ops):
        width = workload.model.num_features
        features = found.add(PrimitiveOp("features", OpKind.FEATURES, (), width))
    for op, kind in zip(workload.model.ops, workload.kinds, strict=True):
        _Splitter(workload, op, kind, found).split(made, features)
    last = made[next(iter(workload.model.ops[-1].outputs))]
    found.add(PrimitiveOp("loss", OpKind.LOSS, (last,), 1))
    return found


@dataclass
class _Splitter:
    """Splits one op of a model."""

    workload: Workload
    op: Op
    kind: str
    found: PrimitiveModel

    def split(self, made: dict[str, str], features: str) -> None:
        """Append the primitive ops; ``made``: the primitive op of each value of the model."""
        op = self.op
        inputs = list(dict.fromkeys(made[value] for value in op.inputs))
        if op.is_given:
            inputs.append(self._add("features", OpKind.FEATURES, [], self._width, FREE))
        dense, row_wise, edges = self._times()
        encoded = ""
        if op.reads_features:
            width = op.push_width or self._width
            encoded = self._add("encode", OpKind.DENSE, [features], width, self._entry_times())
            inputs.append(encoded)
        width = self._width
        if op.aggregates and not op.is_mean:
            first, *others = inputs
            if not op.is_linear:
                # Attention scores rows that were multiplied with the weight.
                width = op.push_width
                first = self._add("dense", OpKind.DENSE, [first], width, dense)
            kind = OpKind.AGGREGATION if op.is_linear else OpKind.ATTENTION
            value = self._add("aggregate", kind, [first], op.push_width, edges)
            if others:
                value = self._add("mix", OpKind.ADD, [value, *others], op.push_width, FREE)
            if op.is_linear and op.flops_per_row:
                value = self._add("dense", OpKind.DENSE, [value], width, dense)
        else:
            value = self._joined(inputs)
            if op.flops_per_row:
                value = self._add("dense", OpKind.DENSE, [value], width, dense)
        value = self._add("rows", OpKind.ROW_WISE, [value], width, row_wise)
        made |= dict.fromkeys(op.outputs, value)

    @property
    def _width(self) -> int:
        return next(iter(self.op.outputs.values()))

    def _add(self, part: str, kind: OpKind, inputs: list[str], width: int, work: Work) -> str:
        name = f"{self.op.name}.{part}"
        unique = tuple(dict.fromkeys(inputs))
        return self.found.add(PrimitiveOp(name, kind, unique, width, self.op.name), work)

    def _joined(self, inputs: list[str]) -> str:
        """Return the sum of the inputs, or their rows side by side if a product reads these."""
        if len(inputs) == 1:
            return inputs[0]
        widths = {one.name: one.width for one in self.found.ops}
        if self.op.flops_per_row or any(widths[name] != self._width for name in inputs):
            total = sum(widths[name] for name in inputs)
            return self._add("concat", OpKind.CONCAT, inputs, total, FREE)
        return self._add("add", OpKind.ADD, inputs, self._width, FREE)

    def _entry_times(self) -> Work:
        """Return the times of the product with the input features."""
        times = self._profiled
        entries = self.workload.feature_entries.get(self.op.vertex_type, 0)
        forward = (times.forward_before + times.forward_after).per_entry_s * entries
        rows = sum(self.workload.num_vertices.values())
        backward = times.finish.per_entry_s * entries + times.finish.per_row_s * rows
        weights = self.workload.model.num_features * (self.op.push_width or self._width)
        return Work(forward, backward, 0.0, weights, times.finish.base_s)

    @property
    def _profiled(self) -> OpTimes:
        compute = self.workload.profile.compute_of(self.workload.ranks_at_once)
        return compute.times_of(self.op, self.kind)

    def _times(self) -> tuple[Work, Work, Work]:
        """Return the work of the dense product, of the row-wise part and of the aggregation."""
        op, times = self.op, self._profiled
        rows = sum(self.workload.num_vertices.values())
        edges = sum(self.workload.num_edges.values()) * (op.aggregates and not op.is_mean)
        forward = times.forward_before + times.forward_after
        backward = times.backward_before + times.backward_after
        product, others = op.flops_per_row, KEPT_FLOPS * max(op.kept_per_row, 1)
        share = product / (product + others)
        weights = op.num_parameters
        if op.reads_features:
            weights = max(weights - self.workload.model.num_features * op.push_width, 0)
        by_row = forward.per_row_s * rows, backward.per_row_s * rows
        base_s = forward.base_s + backward.base_s
        return (
            Work(by_row[0] * share, by_row[1] * share, 0.0, weights if product else 0),
            Work(by_row[0] * (1 - share), by_row[1] * (1 - share), base_s),
            Work(forward.per_edge_s * edges, backward.per_edge_s * edges),
        )
