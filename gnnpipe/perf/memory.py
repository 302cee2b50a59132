"""How much memory a rank will take, by formula, before anything is allocated.

Counted per rank: the graph's structure, the features (first stage), history tables with snapshots
and gradients, what autograd keeps of every own row until backward, weights with their gradients and
Adam's two moments, the pilot rows of a forecast and the kept weights of a best epoch. Of training
and evaluation what takes more is counted. Not counted: the interpreter and torch themselves, and
what reading the data takes before training; ``gnnpipe info`` says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gnnpipe.perf.evaluation_memory import evaluation_bytes
from gnnpipe.plan import LossRows, ModelGraph, Op, Plan, precomputed_aggregations, shared_tables

__all__ = ["ON_TOP", "MemoryEstimate", "estimate_memory", "human_bytes"]

ON_TOP = "the interpreter and torch, about 0.5 GiB, come on top, and on CPUs holes of the heap"
"""For whoever shows an estimate."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank."""

    structure: int
    features: int
    history: int
    activations: int
    weights: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.structure + self.features + self.history + self.activations + self.weights


def estimate_memory(
    plan: Plan,
    model: ModelGraph,
    stage: int,
    *,
    own_rows: Mapping[str, int],
    halo_rows: Mapping[str, int],
    own_edges: int,
    live_share: float,
    own_pairs: int,
    feature_entries: int,
    sparse_features: bool,
    symmetric: bool,
    snapshot: bool,
    pilot_rows: Mapping[str, int],
    pilot_edges: int,
    pilot_feature_entries: int,
    extra_weights: int,
    number_bytes: int,
    row_bytes: int,
    recompute: bool,
    copied_share: float,
    loss_numbers: int,
    loss_rows: LossRows,
    is_exact: bool,
) -> MemoryEstimate:
    """For a rank of ``stage`` whose shard owns n rows, reads h halo rows, and has E edges into it.

    ``own_rows`` and ``halo_rows`` by the type that tables go by, '' if there is but one;
    ``live_share``: of its edges those that gradients are brought back over, cut out of the whole
    for that (0: all of them, out of the whole); ``own_pairs``: pairs that the shard scores.
    ``feature_entries``: stored numbers of the own rows' features; ``pilot_rows``, ``pilot_edges``
    and ``pilot_feature_entries``: this shard's pilot rows, edges into them, and stored numbers of
    their features; ``extra_weights``: copies of the weights beside those that are trained;
    ``row_bytes``: of a number in the tables, ``number_bytes`` of any other; ``copied_share``: rows
    that a chunk reads from others, per own row, which convolutions on blocks keep a copy of;
    ``loss_numbers``: those that the loss keeps of the shard's training vertices; ``loss_rows``: of
    this shard; ``is_exact``: the program has no stale reads.
    """
    first, last = plan.stages[stage]
    ops = model.ops[first:last]
    rows = {t: own + halo_rows[t] for t, own in own_rows.items()}
    n = sum(own_rows[t] for t in {op.vertex_type for op in model.ops})
    linear = any(op.is_linear for op in ops if op.aggregates and not op.is_mean)
    copies = 1 if symmetric and plan.shards == 1 else 2
    entries = own_edges + n
    precomputed = precomputed_aggregations(model, plan, row_bytes != number_bytes, is_exact)
    shared = shared_tables(
        model, plan, precomputed, loss_rows.ops, row_bytes != number_bytes, is_exact
    )
    structure = 0
    if linear:
        read_rows = sum(rows[t] for t in {op.vertex_type for op in model.ops})
        # Where each row begins: in the whole, and of several chunks in each chunk.
        pointer = 4 * (1 + (plan.chunks > 1))
        structure = copies * entries * (4 + row_bytes) + pointer * (n + read_rows)
        if any(op.aggregates and op.name in loss_rows.ops for op in ops):
            structure += _loss_row_structure(loss_rows, row_bytes) + pointer * (
                loss_rows.rows + read_rows
            )
        counts = {False: entries, True: loss_rows.edges + loss_rows.rows}
        cut_out = {(op.structure, op.name in loss_rows.ops) for op in ops if op.name in shared}
        for _, is_asked in cut_out if live_share else ():
            structure += int(live_share * counts[is_asked] * (4 + row_bytes)) + 4 * read_rows
            # A byte, two numbers and half of a third one while that is made, chunk by chunk.
            structure += 13 * counts[is_asked] // plan.chunks
    structure += pilot_edges * (4 + row_bytes) if linear else 0
    if not all(op.is_linear or op.is_mean or op.over_pairs for op in ops):
        structure += 16 * (entries + pilot_edges)
        # Attention without messages has the edges by source, too, and loops of its own.
        structure += max(op.structure_per_edge for op in ops) * entries
    if any(op.over_pairs for op in ops):
        # Both ends, label and part, and the rows that they were cut from.
        structure += own_pairs * (16 + 2 + 12)
    features = 0
    if any(op.reads_features for op in ops):
        # Sparse rows are kept with their transpose; both as (index, value).
        each = 2 * (4 + number_bytes) if sparse_features else number_bytes
        features = (feature_entries + pilot_feature_entries) * each
    alone = plan.chunks == 1 and plan.shards == 1
    # Where nothing is rounded, the rows of a single chunk are their own table.
    tables = 0 if alone and row_bytes == number_bytes else 2 if snapshot else 1
    features += number_bytes * sum(
        op.features_kept * own_rows[op.vertex_type] for op in ops if op.name in precomputed
    )
    pushing = [op for op in ops if op.aggregates and not op.is_mean and op.name not in precomputed]
    numbers = 0
    for op in pushing:
        read, reading = rows[op.pushed_type], loss_rows.rows_of(op.name, own_rows[op.vertex_type])
        # Gradients are kept of the rows that read, where the aggregation is a product; a single
        # chunk's go at once.
        is_transient = op.is_linear and plan.chunks == 1
        grads = 0 if is_transient else reading if op.is_linear else read
        numbers += op.push_width * (tables * read + grads)
    history = numbers * row_bytes
    # Of the last epoch, what pilots pushed, and what they read where that is a product; of the last
    # tables, unless another stage asks for it, nothing is read.
    depths = dict(zip((op.name for op in ops), model.depths(first, last), strict=True))
    end = math.inf if plan.sends(stage) else max(depths.values())
    history += sum(
        op.push_width
        * (
            op.moves * pilot_rows[op.pushed_type]
            + (op.is_linear and depths[op.name] < end) * pilot_rows[op.vertex_type]
        )
        * number_bytes
        for op in pushing
    )
    in_tables = _kept_in_tables(
        ops,
        pushing if tables and row_bytes == number_bytes else [],
        shared,
        own_rows,
        loss_rows,
        recompute,
    )
    kept = {
        op.name: loss_rows.kept_numbers(op, own_rows[op.vertex_type], recompute)
        - in_tables[op.name]
        for op in ops
    }
    activations = sum(
        kept[op.name]
        - op.rows_spared * (op.name in precomputed) * own_rows[op.vertex_type]
        + (0 if recompute else op.kept_per_edge * entries)
        for op in ops
        if not op.over_pairs
    )
    if loss_rows.ops & {op.name for op in ops}:
        activations += _copied_widths(model, loss_rows) * loss_rows.rows
    activations += sum(
        int(
            (op.push_width + op.kept_per_read_row * (not recompute))
            * copied_share
            * own_rows[op.vertex_type]
        )
        for op in ops
        if op.aggregates and not (op.is_linear or op.is_mean or op.over_pairs)
    )
    # What comes from other stages is kept until its gradients are, and those until all have left.
    # What leaves is kept anyway; only if it is rounded, that is a copy, which stays as long.
    is_rounded = row_bytes != number_bytes
    staying = (*plan.receives(stage), *(plan.sends(stage) if is_rounded else ()))
    activations += sum(
        width * own_rows[t.types.get(name, "")] for t in staying for name, width in t.widths.items()
    )
    # What backward makes of one chunk on the way, or a recall of the pilot rows. What is behind an
    # op has been let go by then.
    widest = max((op.passing_per_row for op in ops), default=0)
    of_loss = 0 if plan.sends(stage) else loss_numbers
    activations += of_loss
    passing, gone = widest * sum(pilot_rows.values()), of_loss // plan.chunks
    for op in reversed(ops):
        made = op.passing_per_row * loss_rows.rows_of(op.name, n)
        # Gradients of what is kept of a chunk's edges; recomputed, that itself is no sooner there.
        made += op.kept_per_edge * entries * (1 + recompute)
        passing = max(passing, made // plan.chunks - gone)
        gone += kept[op.name] // plan.chunks
    activations += passing
    if plan.chunks > 1:
        # Gradients of the encoded features wait for those of the other chunks, but for features
        # that are aggregated before they are encoded.
        activations += sum(
            (
                op.flops_per_feature // 2
                - op.push_width * (op.name in precomputed and op.reads_features)
            )
            * own_rows[op.vertex_type]
            for op in ops
            if op.flops_per_feature
        )
    for op in ops:
        if op.over_pairs:
            # Of every chunk the rows that it reads; scores, and what ``decode`` keeps of a pair.
            each = 1 + sum(op.kept_widths.values())
            activations += op.push_width * (rows[op.pushed_type] + own_rows[op.vertex_type])
            activations += each * own_pairs
    held = evaluation_bytes(
        plan,
        ops,
        list(depths.values()),
        stage,
        pushing,
        own_rows=own_rows,
        table_rows=rows,
        number_bytes=number_bytes,
        row_bytes=row_bytes,
    )
    # Weight, gradient and Adam's two.
    weights = sum(op.num_parameters for op in ops) * (4 + extra_weights) * number_bytes
    most = max(activations * number_bytes, held)
    return MemoryEstimate(structure, features, history, most, weights)


def _loss_row_structure(loss_rows: LossRows, row_bytes: int) -> int:
    """Bytes of the loss rows' matrix and its transpose, with a loop for each row.

    And of each row its dropout key, its vertex and its place in the chunk.
    """
    return 2 * (loss_rows.edges + loss_rows.rows) * (4 + row_bytes) + 20 * loss_rows.rows


def _copied_widths(model: ModelGraph, loss_rows: LossRows) -> int:
    """Numbers of a loss row that row-wise ops read from in front of the last aggregation."""
    widths = {value: width for op in model.ops for value, width in op.outputs.items()}
    limited = [op for op in model.ops if op.name in loss_rows.ops]
    read = {value for op in limited if not op.aggregates for value in op.inputs}
    return sum(widths[value] for value in read - {v for op in limited for v in op.outputs})


def _kept_in_tables(
    ops: Sequence[Op],
    pushing: Sequence[Op],
    shared: Collection[str],
    own_rows: Mapping[str, int],
    loss_rows: LossRows,
    recompute: bool,
) -> dict[str, int]:
    """Of what each op keeps, the numbers that are in a table of one of ``pushing`` anyway."""
    found = dict.fromkeys((op.name for op in ops), 0)
    for op in pushing:
        if op.name in shared:
            # What was aggregated is where its gradient will be.
            found[op.name] += op.push_width * loss_rows.rows_of(op.name, own_rows[op.vertex_type])
        # Recomputed, only what is read is kept; and of rows asked for, what is held is a copy.
        is_kept = not recompute or (op.holds_pushed and op.name not in loss_rows.ops)
        if op.push_maker in found and is_kept:
            found[op.push_maker] += op.push_width * own_rows[op.pushed_type]
    return found


def human_bytes(size: float) -> str:
    """A size in the unit that fits.

    >>> human_bytes(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
