"""Proves that a distributed program computes its last op; shares no code with the search."""

from __future__ import annotations

from collections.abc import Set

from gnnpipe.errors import InputError
from gnnpipe.planner.distributed_program import (
    CONVERSIONS,
    RULES,
    Conversion,
    DistributedProgram,
    Instruction,
    PrimitiveOp,
    Property,
    Rule,
    State,
    check_ops,
)


def check_program(program: DistributedProgram, goal: State) -> None:
    """Walk a program and verify every precondition, every postcondition and the goal.

    Every op is computed exactly once, by a rule of its kind, and no property is made twice.

    Args:
        program: The program.
        goal: State in which the value of the last op must be at the end.

    Raises:
        InputError: The first violation, with the number of the instruction.
    """
    check_ops(program.ops)
    ops = {op.name: op for op in program.ops}
    holds: set[Property] = set()
    computed: set[str] = set()
    for number, instruction in enumerate(program.instructions):
        where = f"program: instruction {number} ({instruction})"
        if instruction.op not in ops:
            raise InputError(f"{where}: there is no such op")
        _check_triple(where, instruction, ops[instruction.op])
        for needed in instruction.needs:
            _check_holds(where, needed, holds)
        if isinstance(instruction.work, Rule):
            if instruction.op in computed:
                raise InputError(f"{where}: was computed before")
            computed.add(instruction.op)
        if instruction.gives in holds:
            raise InputError(f"{where}: its result is there already")
        holds.add(instruction.gives)
    for name in ops:
        if name not in computed:
            raise InputError(f"program: op {name!r} is never computed")
    _check_holds("program: at the end", Property(program.ops[-1].name, goal), holds)


def _check_holds(where: str, needed: Property, holds: Set[Property]) -> None:
    if needed not in holds:
        states = [p.state.value for p in sorted(holds, key=str) if p.value == needed.value]
        there = f"it is there as {', '.join(states)}" if states else "it is not there"
        raise InputError(f"{where}: needs {needed.value} as {needed.state.value}; {there}")


def _check_triple(where: str, instruction: Instruction, op: PrimitiveOp) -> None:
    """Check that pre- and postcondition are those of the instruction's rule or conversion."""
    work = instruction.work
    if isinstance(work, Conversion):
        is_known = work in CONVERSIONS
        needs = {(op.name, work.source)}
        gives = (op.name, work.target)
    else:
        is_known = work in RULES[op.kind]
        needs = {(value, work.needs) for value in op.inputs}  # type: ignore[misc]
        gives = (op.name, work.gives)
    if not is_known:
        raise InputError(f"{where}: there is no such way for {op.kind.value}")
    if set(instruction.needs) != needs or instruction.gives != gives:
        raise InputError(f"{where}: its conditions are not those of its work")
