"""Primitive ops of small models, and random programs for them."""

from __future__ import annotations

import random

from gnnpipe.planner.distributed_program import (
    CONVERSIONS,
    RULES,
    DistributedProgram,
    Instruction,
    OpKind,
    PrimitiveOp,
    State,
)

KINDS = [
    OpKind.AGGREGATION,
    OpKind.AGGREGATION,
    OpKind.ATTENTION,
    OpKind.DENSE,
    OpKind.DENSE,
    OpKind.ELEMENTWISE,
    OpKind.ROW_WISE,
    OpKind.ADD,
    OpKind.CONCAT,
]


def random_ops(seed: int, most: int = 6, widths=(4, 6)) -> tuple[PrimitiveOp, ...]:
    """A random DAG behind one or two matrices of features; the loss reads what is read by none."""
    draw = random.Random(seed)
    ops = [PrimitiveOp("x0", OpKind.FEATURES, (), draw.choice(widths))]
    if draw.random() < 0.3:
        ops.append(PrimitiveOp("x1", OpKind.FEATURES, (), draw.choice(widths)))
    if draw.random() < 0.3:
        # A layer of two weights, as SAGE's.
        ops += [PrimitiveOp(name, OpKind.DENSE, ("x0",), 4) for name in ("self", "other")]
        ops.append(PrimitiveOp("sum", OpKind.ADD, ("self", "other"), 4))
    for i in range(draw.randint(1, most)):
        kind = draw.choice(KINDS)
        first = draw.choice(ops[-2:])
        inputs, width = (first,), first.width
        if kind is OpKind.DENSE:
            width = draw.choice(widths)
        if kind in (OpKind.ADD, OpKind.CONCAT):
            alike = [op for op in ops if kind is OpKind.CONCAT or op.width == width]
            inputs = tuple({op.name: op for op in (first, draw.choice(alike))}.values())
            width = sum(op.width for op in inputs) if kind is OpKind.CONCAT else width
        ops.append(PrimitiveOp(f"v{i}", kind, tuple(op.name for op in inputs), width))
    read = {name for op in ops for name in op.inputs}
    left = [op for op in ops if op.name not in read]
    if len(left) > 1:
        names = tuple(op.name for op in left)
        joined = PrimitiveOp("join", OpKind.CONCAT, names, sum(op.width for op in left))
        ops.append(joined)
        left = [joined]
    return (*ops, PrimitiveOp("loss", OpKind.LOSS, (left[0].name,), 1))


def random_program(ops, seed: int) -> DistributedProgram:
    """Rules and collectives by chance; ends with the loss as partial sums."""
    draw = random.Random(seed)
    states: dict[str, list[State]] = {}
    found = []

    def reach(value: str, wanted: State) -> bool:
        """Convert at random until the state is there."""
        for _ in range(30):
            if wanted in states[value]:
                return True
            possible = [
                c
                for c in CONVERSIONS
                if c.source in states[value] and c.target not in states[value]
            ]
            if not possible:
                return False
            conversion = draw.choice(possible)
            found.append(Instruction.convert(value, conversion))
            states[value].append(conversion.target)
        return False

    for op in ops:
        rules = [
            r
            for r in RULES[op.kind]
            if r.needs is not State.PARTIAL or all(State.PARTIAL in states[v] for v in op.inputs)
        ]
        from_partial = [rule for rule in rules if rule.needs is State.PARTIAL]
        rule = draw.choice(from_partial or rules)
        assert all(reach(value, rule.needs) for value in op.inputs)
        found.append(Instruction.compute(op, rule))
        states[op.name] = [rule.gives]
    return DistributedProgram(tuple(ops), tuple(found))
