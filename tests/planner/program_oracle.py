"""Runs a distributed program in numpy on simulated ranks, and counts the numbers that are sent.

Written from the meaning of states and collectives alone. Rows that a rank does not have are NaN, so
an aggregation that reads one is seen in its result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from gnnpipe.planner.distributed_program import (
    Collective,
    Conversion,
    DistributedProgram,
    OpKind,
    PrimitiveOp,
    State,
)


@dataclass
class Problem:
    """A graph, features and weights for the ops of a program."""

    ops: tuple[PrimitiveOp, ...]
    matrix: np.ndarray
    """[N, N]"""
    features: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    target: np.ndarray

    @classmethod
    def random(cls, ops, seed, vertices=11):
        draw = np.random.default_rng(seed)
        matrix = draw.normal(size=(vertices, vertices)) * (draw.random((vertices,) * 2) < 0.25)
        width = {op.name: op.width for op in ops}
        features = {
            op.name: draw.normal(size=(vertices, op.width))
            for op in ops
            if op.kind is OpKind.FEATURES
        }
        weights = {
            op.name: draw.normal(size=(width[op.inputs[0]], op.width))
            for op in ops
            if op.kind is OpKind.DENSE
        }
        target = draw.normal(size=(vertices, width[ops[-1].inputs[0]]))
        return cls(ops, matrix, features, weights, target)

    def plain(self) -> dict[str, np.ndarray]:
        """The values of all ops on one device."""
        found: dict[str, np.ndarray] = {}
        for op in self.ops:
            inputs = [found[name] for name in op.inputs]
            if op.kind is OpKind.FEATURES:
                found[op.name] = self.features[op.name]
            elif op.kind is OpKind.AGGREGATION:
                found[op.name] = self.matrix @ inputs[0]
            elif op.kind is OpKind.ATTENTION:
                found[op.name] = attention(self.matrix, inputs[0], inputs[0])
            else:
                found[op.name] = self.local(op, inputs, self.weights.get(op.name), self.target)
        return found

    @staticmethod
    def local(op, inputs, weight, target):
        """Work without the graph."""
        if op.kind is OpKind.DENSE:
            return inputs[0] @ weight
        if op.kind is OpKind.ELEMENTWISE:
            return np.tanh(inputs[0])
        if op.kind is OpKind.ROW_WISE:
            return inputs[0] / (1 + np.abs(inputs[0]).sum(1, keepdims=True))
        if op.kind is OpKind.ADD:
            return sum(inputs)
        if op.kind is OpKind.CONCAT:
            return np.concatenate(inputs, 1)
        assert op.kind is OpKind.LOSS
        return np.full((1, 1), ((inputs[0] - target) ** 2).sum())


def attention(matrix, own, read):
    """Sums of neighbours' rows with weights that depend on both ends; ``matrix`` [own, read]."""
    out = np.zeros_like(own)
    for i in range(len(own)):
        neighbours = np.flatnonzero(matrix[i])
        if len(neighbours):
            score = np.exp(np.tanh(read[neighbours].sum(1) + own[i].sum()))
            out[i] = score @ read[neighbours] / score.sum()
    return out


@dataclass
class Ranks:
    """Simulated ranks that execute a program."""

    problem: Problem
    row_counts: list[int]
    column_shares: list[float]
    sent: np.ndarray = field(init=False)
    """[G, G], numbers sent forward, from and to."""

    def __post_init__(self):
        ends = np.concatenate([[0], np.cumsum(self.row_counts)])
        self.rows = [np.arange(a, b) for a, b in pairwise(ends)]
        self.count = len(self.rows)
        self.sent = np.zeros((self.count, self.count))
        self.values = {}

    def columns(self, width):
        """Columns of each rank, by its share."""
        ends = np.round(np.concatenate([[0], np.cumsum(self.column_shares)]) * width).astype(int)
        return [np.arange(a, b) for a, b in pairwise(ends)]

    def run(self, program: DistributedProgram) -> None:
        ops = {op.name: op for op in program.ops}
        for instruction in program.instructions:
            op = ops[instruction.op]
            if isinstance(instruction.work, Conversion):
                held = self.values[op.name, instruction.work.source]
                result = self.convert(instruction.work, held)
            else:
                result = self.compute(op, instruction)
            self.values[instruction.gives] = result

    def compute(self, op, instruction):
        problem, rule = self.problem, instruction.work
        if op.kind is OpKind.FEATURES:
            return self.distribute(problem.features[op.name], rule.gives)
        inputs = [self.values[name, rule.needs] for name in op.inputs]
        found = []
        for g in range(self.count):
            own = [value[g] for value in inputs]
            if op.kind in (OpKind.AGGREGATION, OpKind.ATTENTION):
                found.append(self.aggregate(op, rule, own[0], g))
                continue
            weight, target = problem.weights.get(op.name), problem.target
            if op.kind is OpKind.DENSE and rule.gives is State.COLUMNS:
                weight = weight[:, self.columns(op.width)[g]]
            if op.kind is OpKind.DENSE and rule.needs is State.COLUMNS:
                weight = weight[self.columns(len(weight))[g]]
            if op.kind is OpKind.LOSS:
                target = target[self.rows[g]]
                if rule.needs is State.REPLICATED:
                    own = [own[0][self.rows[g]]]
            found.append(problem.local(op, own, weight, target))
        return found

    def aggregate(self, op, rule, read, g):
        matrix, own = self.problem.matrix, read
        if rule.gives is State.ROWS:
            matrix, own = matrix[self.rows[g]], read[self.rows[g]]
        if op.kind is OpKind.ATTENTION:
            return attention(matrix, own, read)
        needed = np.flatnonzero(matrix.any(0))
        return matrix[:, needed] @ read[needed]

    def distribute(self, value, state):
        if state is State.ROWS:
            return [value[rows] for rows in self.rows]
        if state is State.COLUMNS:
            return [value[:, columns] for columns in self.columns(value.shape[1])]
        assert state is State.REPLICATED
        return [value] * self.count

    def assemble(self, held, state):
        """The whole value, from any state."""
        if state is State.ROWS:
            return np.concatenate(held)
        if state is State.COLUMNS:
            return np.concatenate(held, 1)
        if state is State.PARTIAL:
            return sum(held)
        if state is State.HALO:
            return np.concatenate([h[rows] for h, rows in zip(held, self.rows, strict=True)])
        for other in held[1:]:
            np.testing.assert_array_equal(other, held[0])
        return held[0]

    def convert(self, conversion, held):
        collective, source, target = conversion
        whole = self.assemble(held, source)
        width, n = whole.shape[1], len(whole)
        sizes = [len(rows) for rows in self.rows]
        widths = [len(columns) for columns in self.columns(width)]
        if collective is Collective.HALO_EXCHANGE:
            return [self.with_halo(whole, g) for g in range(self.count)]
        for i in range(self.count):
            for j in range(self.count):
                if i == j:
                    continue
                self.sent[i, j] += {
                    Collective.ALL_GATHER: max(sizes) * width,
                    Collective.BROADCASTS: sizes[i] * width,
                    Collective.ALL_TO_ALL: sizes[i] * widths[j]
                    if source is State.ROWS
                    else widths[i] * sizes[j],
                    Collective.REDUCE_SCATTER: sizes[j] * width
                    if target is State.ROWS
                    else n * widths[j],
                    Collective.ALL_REDUCE: 2 * n * width / self.count,
                    Collective.SLICE: 0,
                }[collective]
        return self.distribute(whole, target)

    def with_halo(self, whole, g):
        held = np.full_like(whole, np.nan)
        held[self.rows[g]] = whole[self.rows[g]]
        needed = np.flatnonzero(self.problem.matrix[self.rows[g]].any(0))
        for i, rows in enumerate(self.rows):
            read = np.intersect1d(needed, rows)
            held[read] = whole[read]
            if i != g:
                self.sent[i, g] += len(read) * whole.shape[1]
        return held
