"""What an evaluation holds beside what training keeps between two epochs.

It is walked layer by layer, without gradients: every step needs the table that it reads and the one
that it pushes into, whole, and of all chunks what waits for the next step. Where a stage has few
layers and training makes few rows behind the last aggregation, that is more than an epoch takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gnnpipe.plan import Op, Plan

__all__ = ["evaluation_bytes"]


def evaluation_bytes(
    plan: Plan,
    ops: Sequence[Op],
    depths: Sequence[int],
    stage: int,
    pushing: Collection[Op],
    *,
    own_rows: Mapping[str, int],
    table_rows: Mapping[str, int],
    number_bytes: int,
    row_bytes: int,
) -> int:
    """Of a stage's ops with their ``depths``; rows by the type of the vertices.

    ``pushing``: the ops that have a table.
    """
    last = max(depths, default=0)
    at_depth: list[list[Op]] = [[] for _ in range(last + 2)]
    for op, depth in zip(ops, depths, strict=True):
        at_depth[depth].append(op)
    with_table = {op.name for op in pushing}
    carried = [0] * (last + 1)
    for value in _waiting(plan, ops, depths, stage, row_bytes == number_bytes):
        for step in range(value.made, value.read):
            carried[step] += value.width * own_rows[value.vertex_type]
    # What leaves the stage, or the model, is kept to the end.
    leaving = {name for t in plan.sends(stage) for name in t.widths} or set(ops[-1].outputs)
    carried[last] += sum(
        width * own_rows[op.vertex_type]
        for op in ops
        for name, width in op.outputs.items()
        if name in leaving
    )
    most, is_alone = 0, plan.chunks == 1 and plan.shards == 1
    for step in range(last + 1):
        read, written = (
            sum(o.push_width * table_rows[o.pushed_type] for o in found if o.name in with_table)
            for found in (at_depth[step], at_depth[step + 1])
        )
        aggregating = [op for op in at_depth[step] if op.aggregates]
        passing = sum(o.push_width * own_rows[o.vertex_type] // plan.chunks for o in aggregating)
        # Chunk by chunk what waited for this step gives way to what waits for the next one.
        waiting = max(carried[step - 1] if step else 0, carried[step])
        # Who is alone reads all at once, and lets the table go.
        tables = max(read, written) if is_alone else read + written
        most = max(most, tables * row_bytes + (waiting + passing) * number_bytes)
    return most


@dataclass(frozen=True)
class _Value:
    """Made in one step and read in a later one."""

    width: int
    vertex_type: str
    made: int
    read: int


def _waiting(
    plan: Plan, ops: Sequence[Op], depths: Sequence[int], stage: int, is_in_place: bool
) -> list[_Value]:
    """What waits for a later step of the stage."""
    found = []
    made = {
        name: (width, t.types.get(name, ""), 0)
        for t in plan.receives(stage)
        for name, width in t.widths.items()
    }
    names = {op.name for op in ops}
    last_read: dict[str, int] = {}
    for op, depth in zip(ops, depths, strict=True):
        for name in op.inputs:
            # An aggregation reads its inputs one step before it gives something.
            last_read[name] = max(last_read.get(name, 0), depth - op.aggregates)
        # Of what is the same for all rows a single one waits, which is nothing.
        if not op.is_one_row:
            made |= {name: (width, op.vertex_type, depth) for name, width in op.outputs.items()}
        # While its rows are in the table anyway, a row that is held takes nothing more.
        in_table = is_in_place and op.holds_pushed and op.push_maker in names
        if op.aggregates and not in_table:
            held = sum(op.kept_widths.values())
            found.append(_Value(held, op.vertex_type, depth - 1, depth))
    found += [_Value(*value, last_read.get(name, 0)) for name, value in made.items()]
    return found
