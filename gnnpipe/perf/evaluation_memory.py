"""Memory of an evaluation, in addition to what training keeps between two epochs.

Evaluation runs layer by layer, without gradients. A step needs the whole table that the step reads,
the whole table that the step pushes into, and the values of all chunks that later steps read. If a
stage has few layers and training is limited to loss rows, an evaluation needs more memory than an
epoch of training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gnnpipe.plan import Op, StageDag


@dataclass(frozen=True)
class StageTables:
    """The ops of a stage, and the rows of a shard by vertex type."""

    dag: StageDag
    ops: Sequence[Op]
    depths: Sequence[int]
    """The step in which each op ends."""
    stage: int
    pushing: Collection[Op]
    """Ops with a history table."""
    own_rows: Mapping[str, int]
    table_rows: Mapping[str, int]
    number_bytes: int
    row_bytes: int

    @property
    def last_step(self) -> int:
        """Number of the stage's last step."""
        return max(self.depths, default=0)


def evaluation_bytes(stage: StageTables) -> int:
    """Returns the most bytes that a step of an evaluation needs."""
    plan, waiting = stage.dag.plan, _waiting_numbers(stage)
    is_alone = plan.chunks == 1 and plan.shards == 1
    steps = stage.last_step + 1
    tables_read, aggregated = [0] * (steps + 1), [0] * steps
    with_table = {op.name for op in stage.pushing}
    for op, depth in zip(stage.ops, stage.depths, strict=True):
        if op.name in with_table:
            tables_read[depth] += op.push_width * stage.table_rows[op.pushed_type]
        if op.aggregates:
            aggregated[depth] += op.push_width * stage.own_rows[op.vertex_type] // plan.chunks
    most = 0
    for step in range(steps):
        read, written, passing = tables_read[step], tables_read[step + 1], aggregated[step]
        # Chunk by chunk, values for this step are freed and values for the next step are made.
        waits = max(waiting[step - 1] if step else 0, waiting[step])
        # A single chunk on one shard reads all rows at once, and frees the table.
        tables = max(read, written) if is_alone else read + written
        most = max(most, tables * stage.row_bytes + (waits + passing) * stage.number_bytes)
    return most


def _waiting_numbers(stage: StageTables) -> list[int]:
    """Return for each step the numbers kept after it for a later step or for the output."""
    found = [0] * (stage.last_step + 1)
    for value in _waiting_values(stage):
        for step in range(value.made, value.read):
            found[step] += value.width * stage.own_rows[value.vertex_type]
    # Values that leave the stage, or the model, are kept to the end.
    sent = {name for t in stage.dag.sends(stage.stage) for name in t.widths}
    leaving = sent or set(stage.ops[-1].outputs)
    for op in stage.ops:
        for name, width in op.outputs.items():
            found[-1] += (name in leaving) * width * stage.own_rows[op.vertex_type]
    return found


@dataclass(frozen=True)
class _Value:
    """A value that is made in one step and read in a later one."""

    width: int
    vertex_type: str
    made: int
    read: int


def _waiting_values(stage: StageTables) -> list[_Value]:
    ops, depths, found = stage.ops, stage.depths, []
    names = {op.name for op in ops}
    made = {
        name: (width, t.types.get(name, ""), 0)
        for t in stage.dag.receives(stage.stage)
        for name, width in t.widths.items()
    }
    last_read: dict[str, int] = {}
    for op, depth in zip(ops, depths, strict=True):
        for name in op.inputs:
            # An aggregation reads its inputs one step before its result is made.
            last_read[name] = max(last_read.get(name, 0), depth - op.aggregates)
        # A value that is the same for all rows is a single row, which is negligible.
        if not op.is_one_row:
            made |= {name: (width, op.vertex_type, depth) for name, width in op.outputs.items()}
        # A kept row that is a row of an unrounded table takes no further memory.
        is_rounded = stage.row_bytes != stage.number_bytes
        in_table = not is_rounded and op.holds_pushed and op.push_maker in names
        if op.aggregates and not in_table:
            held = sum(op.kept_widths.values())
            found.append(_Value(held, op.vertex_type, depth - 1, depth))
    found += [_Value(*value, last_read.get(name, 0)) for name, value in made.items()]
    return found
