"""Runs a distributed program on simulated ranks, and counts the numbers that are sent.

Written from the meaning of states and collectives alone. Rows that a rank does not have are NaN, so
an aggregation that reads one is seen in its result. Backward goes through the program in reverse:
autograd goes through the work of one rank at a time, and the adjoints of the collectives move the
gradients between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from gnnpipe.planner.distributed_program import (
    Collective,
    Conversion,
    DistributedProgram,
    OpKind,
    PrimitiveOp,
    Property,
    State,
)


@dataclass
class Problem:
    """A graph, features and weights for the ops of a program."""

    ops: tuple[PrimitiveOp, ...]
    matrix: torch.Tensor
    """[N, N]"""
    features: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    target: torch.Tensor

    @classmethod
    def random(cls, ops, seed, vertices=11):
        draw = np.random.default_rng(seed)

        def normal(*size):
            return torch.from_numpy(draw.normal(size=size))

        is_edge = torch.from_numpy(draw.random((vertices,) * 2) < 0.25)
        matrix = normal(vertices, vertices) * is_edge
        width = {op.name: op.width for op in ops}
        features = {op.name: normal(vertices, op.width) for op in ops if op.kind is OpKind.FEATURES}
        weights = {
            op.name: normal(width[op.inputs[0]], op.width) for op in ops if op.kind is OpKind.DENSE
        }
        target = normal(vertices, width[ops[-1].inputs[0]])
        return cls(ops, matrix, features, weights, target)

    def plain(self) -> dict[str, torch.Tensor]:
        """The values of all ops on one device."""
        found: dict[str, torch.Tensor] = {}
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

    def plain_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the loss, by the names of features and of ops with a weight."""
        leaves = self.features | self.weights
        for leaf in leaves.values():
            leaf.requires_grad_()
        gradients = torch.autograd.grad(self.plain()[self.ops[-1].name].sum(), leaves.values())
        for leaf in leaves.values():
            leaf.requires_grad_(False)
        return dict(zip(leaves, gradients, strict=True))

    @staticmethod
    def local(op, inputs, weight, target):
        """Work without the graph."""
        if op.kind is OpKind.DENSE:
            return inputs[0] @ weight
        if op.kind is OpKind.ELEMENTWISE:
            return torch.tanh(inputs[0])
        if op.kind is OpKind.ROW_WISE:
            return inputs[0] / (1 + inputs[0].abs().sum(1, keepdim=True))
        if op.kind is OpKind.ADD:
            return sum(inputs)
        if op.kind is OpKind.CONCAT:
            return torch.cat(inputs, 1)
        assert op.kind is OpKind.LOSS
        return ((inputs[0] - target) ** 2).sum().reshape(1, 1)


def attention(matrix, own, read):
    """Sums of neighbours' rows with weights that depend on both ends; ``matrix`` [own, read]."""
    out = []
    for i in range(len(own)):
        neighbours = np.flatnonzero(matrix[i])
        score = torch.exp(torch.tanh(read[neighbours].sum(1) + own[i].sum()))
        out.append(score @ read[neighbours] / score.sum() if len(neighbours) else 0 * own[i])
    return torch.stack(out) if out else own[:0]


@dataclass
class Ranks:
    """Simulated ranks that execute a program."""

    problem: Problem
    row_counts: list[int]
    column_shares: list[float]
    sent: np.ndarray = field(init=False)
    """[G, G], numbers sent forward, from and to."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """After ``backward``: by the names of features and of ops with a weight."""

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
        weight = problem.weights.get(op.name)
        return [
            self.on_rank(op, rule, [value[g] for value in inputs], weight, g)
            for g in range(self.count)
        ]

    def on_rank(self, op, rule, own, weight, g):
        """The work of one rank on its parts of the inputs; ``weight``: the whole one."""
        problem, target = self.problem, self.problem.target
        if op.kind in (OpKind.AGGREGATION, OpKind.ATTENTION):
            return self.aggregate(op, rule, own[0], g)
        if op.kind is OpKind.DENSE and rule.gives is State.COLUMNS:
            weight = weight[:, self.columns(op.width)[g]]
        if op.kind is OpKind.DENSE and rule.needs is State.COLUMNS:
            weight = weight[self.columns(len(weight))[g]]
        if op.kind is OpKind.LOSS:
            target = target[self.rows[g]]
            if rule.needs is State.REPLICATED:
                own = [own[0][self.rows[g]]]
        return problem.local(op, own, weight, target)

    def backward(self, program: DistributedProgram) -> None:
        """Run the adjoints of the program's instructions in reverse; ``run`` comes first.

        The gradient of a replicated value, or of one with halo rows, is a sum over ranks; that of
        partial sums is the same on every rank.
        """
        ops = {op.name: op for op in program.ops}
        held: dict[Property, list[torch.Tensor]] = {}
        last = Property(program.ops[-1].name, State.PARTIAL)
        held[last] = [torch.ones(1, 1, dtype=torch.float64) for _ in range(self.count)]
        for instruction in reversed(program.instructions):
            gradients = held.pop(instruction.gives, None)
            if gradients is None:
                continue  # a state that no instruction needs
            op, work = ops[instruction.op], instruction.work
            if isinstance(work, Conversion):
                found = {Property(op.name, work.source): self.adjoint(work, gradients)}
            else:
                found = self.backward_of(op, work, gradients)
            for needed, more in found.items():
                before = held.get(needed)
                held[needed] = more if before is None else list(map(torch.add, before, more))

    def adjoint(self, conversion, gradients):
        """Gradients in the source state, from those in the target state."""
        _, source, target = conversion
        if source is State.REPLICATED:
            # A slice sends nothing: other ranks add their parts later.
            widths = [gradient.shape[1] for gradient in gradients]
            width, found = sum(widths) if target is State.COLUMNS else widths[0], []
            for g, gradient in enumerate(gradients):
                part = torch.zeros(len(self.problem.matrix), width, dtype=torch.float64)
                if target is State.ROWS:
                    part[self.rows[g]] = gradient
                else:
                    part[:, self.columns(width)[g]] = gradient
                found.append(part)
            return found
        whole = self.whole_gradient(gradients, target)
        if source is State.PARTIAL:
            return [whole] * self.count
        return self.distribute(whole, source)

    def whole_gradient(self, gradients, state):
        """The gradient of the whole value, from the gradients on the ranks."""
        if state in (State.HALO, State.REPLICATED):
            return sum(gradients)
        return self.assemble(gradients, State.REPLICATED if state is State.PARTIAL else state)

    def backward_of(self, op, rule, gradients):
        """Gradients of the inputs; those of weights and features are kept."""
        if op.kind is OpKind.FEATURES:
            self.gradients[op.name] = self.whole_gradient(gradients, rule.gives)
            return {}
        weight = self.problem.weights.get(op.name)
        by_input = {Property(name, rule.needs): [] for name in op.inputs}
        of_weight = []
        for g, gradient in enumerate(gradients):
            own = [self.values[name][g].detach().clone().requires_grad_() for name in by_input]
            leaf = None if weight is None else weight.detach().clone().requires_grad_()
            result = self.on_rank(op, rule, own, leaf, g)
            leaves = own if leaf is None else [*own, leaf]
            found = torch.autograd.grad(result, leaves, gradient, materialize_grads=True)
            for gradients_of, more in zip(by_input.values(), found, strict=False):
                gradients_of.append(more)
            if leaf is not None:
                of_weight.append(found[-1])
        if of_weight:
            if not rule.sums_weights:
                # Each rank has a part of the weight, and nothing is left to add.
                assert max(np.count_nonzero(torch.stack(of_weight), axis=0).ravel()) <= 1
            self.gradients[op.name] = sum(of_weight)
        return by_input

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
        return [value.clone() for _ in range(self.count)]

    def assemble(self, held, state):
        """The whole value, from any state."""
        if state is State.ROWS:
            return torch.cat(held)
        if state is State.COLUMNS:
            return torch.cat(held, 1)
        if state is State.PARTIAL:
            return sum(held)
        if state is State.HALO:
            return torch.cat([h[rows] for h, rows in zip(held, self.rows, strict=True)])
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
        held = torch.full_like(whole, np.nan)
        held[self.rows[g]] = whole[self.rows[g]]
        needed = np.flatnonzero(self.problem.matrix[self.rows[g]].any(0))
        for i, rows in enumerate(self.rows):
            read = np.intersect1d(needed, rows)
            held[read] = whole[read]
            if i != g:
                self.sent[i, g] += len(read) * whole.shape[1]
        return held
