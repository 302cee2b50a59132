"""Estimates the memory of a rank from sizes, before anything is allocated.

Counted: the graph's structure, features (first stage), history tables with snapshots and gradients,
tensors kept until backward, weights with gradients and Adam's two moments, probe vertices of a
forecast, and the peak while the rank is built; of training and evaluation whichever needs more.
Not counted: the interpreter and torch, and the graph as it was read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property

from gnnpipe.perf.segment_memory import input_numbers, kept_by_forward, most_in_backward
from gnnpipe.plan import (
    ALL_ROWS,
    LossRows,
    ModelGraph,
    Op,
    Plan,
    RowWay,
    Segments,
    StageDag,
    shared_tables,
)

ON_TOP = "the interpreter and torch, about 0.5 GiB, come on top, and on CPUs holes of the heap"
"""For messages that show an estimate."""

_INDEX_BYTES, _FLOAT64_BYTES, _LONG_BYTES = 4, 8, 8


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank."""

    structure: int
    features: int
    history: int
    activations: int
    weights: int
    setup: int = 0
    """Peak while the rank is built, minus the sum of all other parts; at least 0."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(astuple(self))

    @property
    def on_device(self) -> int:
        """The sum without the peak while the rank is built, for searches and simulations.

        A rank is built in the memory of its host, which holds the whole graph.
        """
        return self.total - self.setup


@dataclass(frozen=True)
class ShardSizes:
    """Sizes of the part of the graph that a shard owns; rows by vertex type ('' for one type)."""

    own_rows: Mapping[str, int]
    halo_rows: Mapping[str, int]
    own_edges: int
    """Edges into own rows."""
    graph_edges: int
    """Edges of the whole graph."""
    feature_entries: int
    """Stored numbers of the own rows' features."""
    loss_rows: LossRows
    loss_numbers: int
    """Numbers that the loss keeps until backward for the shard's training vertices."""
    own_pairs: int = 0
    """Pairs that the shard scores."""
    live_share: float = 0.0
    """Share of the own edges that are read live, and whose entries are copied for backward; 0 in an
    exact program, which copies none."""
    copied_share: float = 0.0
    """Rows that chunks read from other chunks, per own row; convolutions on blocks copy these."""
    probe_rows: Mapping[str, int] | None = None
    """Probe vertices; None: no forecast."""
    probe_edges: int = 0
    probe_feature_entries: int = 0
    label_numbers: int = 0
    """Numbers in label columns of the own and probe rows' features."""
    graph_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of the whole graph. This and the next two are for rows that travel by columns."""
    graph_loss_rows: LossRows = ALL_ROWS
    """Loss rows of the whole graph."""
    columns_share: float = 0.0
    """Share of the shard in the columns."""

    @property
    def table_rows(self) -> dict[str, int]:
        """Own and halo rows."""
        return {t: own + self.halo_rows[t] for t, own in self.own_rows.items()}


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a run that decide what a rank holds."""

    sparse_features: bool
    symmetric: bool
    """Every matrix equals its transpose; with a single shard one copy serves for both."""
    snapshot: bool
    """Stale rows come from a snapshot, a second table."""
    recompute: bool
    """In all stages; a plan may also say so for some stages (``StagePlan.recompute``)."""
    recompute_every: int = field(default=1, kw_only=True)
    """Steps that are recomputed together, if ``recompute`` is true."""
    is_exact: bool
    """The program has no stale reads."""
    number_bytes: int
    row_bytes: int
    """Bytes of a number in the tables; ``number_bytes`` of all other numbers."""
    extra_weights: int = 0
    """Copies of the weights beside those that are trained."""
    in_flight: tuple[int, ...] = ()
    """By stage, chunks between forward and backward, if gradients stay in their chunk; empty: all
    chunks, and a table of gradients for each table of rows."""
    mask_group_bytes: int = 0
    """Dropout masks of one kind of rows that are drawn ahead if some chunks are ``in_flight``."""
    version_copies: tuple[int, ...] = ()
    """By stage, copies of the weights of other versions, and of the gradients; empty: none."""

    @property
    def rounds_rows(self) -> bool:
        """Tables hold rounded rows."""
        return self.row_bytes != self.number_bytes


def estimate_memory(
    dag: StageDag, model: ModelGraph, stage: int, sizes: ShardSizes, settings: MemorySettings
) -> MemoryEstimate:
    """Returns the estimate for a rank of ``stage`` with a shard of these ``sizes``."""
    rank = RankMemory(dag, model, stage, sizes, settings)
    parts = MemoryEstimate(
        rank.structure(), rank.features(), rank.history(), rank.activations(), rank.weights()
    )
    return replace(parts, setup=max(0, rank.setup_peak(parts.structure) - parts.total))


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank, part by part, in bytes; ``estimate_memory`` puts the parts together."""

    dag: StageDag
    model: ModelGraph
    stage: int
    sizes: ShardSizes
    settings: MemorySettings

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.dag.plan

    @property
    def recompute(self) -> bool:
        """Only inputs of steps are kept until backward."""
        return self.settings.recompute or self.plan.stages[self.stage].recompute

    @cached_property
    def ops(self) -> Sequence[Op]:
        """The ops of the stage."""
        return self.model.select(self.plan.stages[self.stage].ops)

    @cached_property
    def depths(self) -> dict[str, int]:
        """The step in which each op ends."""
        steps = self.model.depths(self.plan.stages[self.stage].ops)
        return dict(zip((op.name for op in self.ops), steps, strict=True))

    @cached_property
    def shared(self) -> frozenset[str]:
        """Ops whose gradients share a table with the aggregated rows."""
        limited, settings = self.sizes.loss_rows.ops, self.settings
        if settings.in_flight:
            return frozenset()
        rounds_rows, is_exact = settings.rounds_rows, settings.is_exact
        return shared_tables(self.model, self.plan, limited, rounds_rows, is_exact)

    @cached_property
    def by_columns(self) -> frozenset[str]:
        """Ops whose rows travel by columns."""
        return frozenset(op for op, way in self._ways.items() if way is RowWay.COLUMNS)

    @cached_property
    def _ways(self) -> dict[str, RowWay]:
        """How the rows of each op travel among the shards."""
        plan = self.plan
        return {self.model.ops[i].name: plan.way(i) for i in plan.stages[self.stage].ops}

    @cached_property
    def pushing(self) -> list[Op]:
        """Ops with a history table."""
        return [op for op in self.ops if op.aggregates and not op.is_mean]

    @cached_property
    def given(self) -> list[Op]:
        """Ops whose values are aggregated features, one for each matrix."""
        return list({op.structure: op for op in self.ops if op.is_given}.values())

    @cached_property
    def entries(self) -> int:
        """Edges into own rows, and a self-loop for each row."""
        rows = self.sizes.own_rows
        return self.sizes.own_edges + sum(rows[t] for t in self.model.vertex_types)

    @property
    def kept_share(self) -> float:
        """Share of the chunks that are between forward and backward at once."""
        if not self.settings.in_flight:
            return 1.0
        return min(self.settings.in_flight[self.stage] / self.plan.chunks, 1.0)

    @property
    def num_tables(self) -> int:
        """History tables of an op; 0 for a single unrounded chunk: its rows are the table."""
        if self.is_alone and not self.settings.rounds_rows:
            return 0
        return 2 if self.settings.snapshot else 1

    @property
    def is_alone(self) -> bool:
        """A single chunk on a single shard."""
        return self.plan.chunks == 1 and self.shards == 1

    @property
    def shards(self) -> int:
        """G of the stage."""
        return self.plan.stages[self.stage].shards

    @property
    def is_linear(self) -> bool:
        """Some aggregation is a product with a matrix of the shard."""
        return any(op.is_linear and op.name not in self.by_columns for op in self.pushing)

    @property
    def has_blocks(self) -> bool:
        """Some aggregation runs on blocks of edges."""
        return not all(op.is_linear or op.is_mean or op.over_pairs for op in self.ops)

    def structure(self) -> int:
        """Matrices with transposes, or blocks of edges; pairs."""
        sizes, entry = self.sizes, _INDEX_BYTES + self.settings.row_bytes
        found = self._whole_matrices()
        if self.is_linear:
            linear = (op for op in self.ops if op.aggregates and op.is_linear and not op.is_mean)
            ways = {self._ways[op.name] for op in linear} - {RowWay.COLUMNS}
            found += len(ways) * self._matrices() + sizes.probe_edges * entry
        if self.has_blocks:
            found += 16 * (self.entries + sizes.probe_edges)
            # Attention without messages also stores the edges by source, with self-loops.
            found += max(op.structure_per_edge for op in self.ops) * self.entries
        if any(op.over_pairs for op in self.ops):
            # Both ends; label and part; and the matrix rows from which the pairs were taken.
            found += sizes.own_pairs * (16 + 2 + 12)
        return found

    def _whole_matrices(self) -> int:
        """Matrices of the whole graph, for rows that travel by columns."""
        if not self.by_columns:
            return 0
        sizes, entry = self.sizes, _INDEX_BYTES + self.settings.row_bytes
        pointer = _INDEX_BYTES * (1 + (self.plan.chunks > 1))
        rows, limited = sum(sizes.graph_rows.values()), sizes.graph_loss_rows
        copies = 1 if self.settings.symmetric else 2
        found = copies * ((sizes.graph_edges + rows) * entry + pointer * rows)
        if self.by_columns & limited.ops:
            found += 2 * (limited.edges + limited.rows) * entry + pointer * (limited.rows + rows)
            found += 20 * sizes.loss_rows.rows
        return found

    def _matrices(self) -> int:
        sizes, entry = self.sizes, _INDEX_BYTES + self.settings.row_bytes
        loss_rows, chunks = sizes.loss_rows, self.plan.chunks
        own = sum(sizes.own_rows[t] for t in self.model.vertex_types)
        read = sum(sizes.table_rows[t] for t in self.model.vertex_types)
        copies = 1 if self.settings.symmetric and self.shards == 1 else 2
        # Row pointers: of the whole matrix, and of each chunk if there are several.
        pointer = _INDEX_BYTES * (1 + (chunks > 1))
        found = copies * self.entries * entry + pointer * (own + read)
        loss_entries = loss_rows.edges + loss_rows.rows
        if any(op.name in loss_rows.ops - self.by_columns for op in self.ops if op.aggregates):
            # A matrix and its transpose; per row its dropout key, vertex and place in the chunk.
            found += 2 * loss_entries * entry + 20 * loss_rows.rows
            found += pointer * (loss_rows.rows + read)
        cut = [o for o in self.ops if o.name in self.shared]
        if self.settings.in_flight:
            cut = [o for o in self.pushing if o.is_linear]
        cut_out = {(o.structure, o.name in loss_rows.ops) for o in cut}
        for _, is_limited in cut_out if sizes.live_share else ():
            count = loss_entries if is_limited else self.entries
            found += int(sizes.live_share * count * entry) + _INDEX_BYTES * read
            # Temporaries while the entries of one chunk are copied: 13 bytes per entry.
            found += 13 * count // chunks
        return found

    def features(self) -> int:
        """Input features and what is aggregated of them; sparse ones with their transpose.

        A sparse number is stored as (index, value). Label columns are copied in a byte a number;
        beside sparse features they are dense.
        """
        number, sizes, found = self.settings.number_bytes, self.sizes, 0
        for op in self.given:
            rows = sizes.own_rows[op.vertex_type] + (sizes.probe_rows or {}).get(op.vertex_type, 0)
            found += sum(op.outputs.values()) * rows * number
        if any(op.reads_features for op in self.ops):
            each = 2 * (_INDEX_BYTES + number) if self.settings.sparse_features else number
            found += (sizes.feature_entries + sizes.probe_feature_entries) * each
            found += sizes.label_numbers * (1 + number * self.settings.sparse_features)
        return found

    def history(self) -> int:
        """Tables of pushed rows and their gradients."""
        sizes, found = self.sizes, 0
        for op in self.pushing:
            read = self._table_rows(op)
            reading = sizes.loss_rows.rows_of(op.name, sizes.own_rows[op.vertex_type])
            if op.name in self.by_columns:
                reading = sizes.graph_loss_rows.rows_of(op.name, sizes.graph_rows[op.vertex_type])
            # A product records gradients of its output rows (a single chunk frees these at
            # once), a convolution on blocks gradients of all rows that are read.
            is_transient = op.is_linear and self.plan.chunks == 1
            is_transient = is_transient or bool(self.settings.in_flight)
            grads = 0 if is_transient else reading if op.is_linear else read
            numbers = self._table_width(op) * (self.num_tables * read + grads)
            found += numbers * self.settings.row_bytes
        copies = 3 if self.settings.snapshot else 2
        return found + sum(copies * self._parts_bytes(op) for op in self.ops if op.is_mean)

    def _table_rows(self, op: Op) -> int:
        """Rows of an op's history table."""
        is_halo = self._ways[op.name] is RowWay.HALO
        rows = self.sizes.table_rows if is_halo else self.sizes.graph_rows
        return rows[op.pushed_type]

    def _table_width(self, op: Op) -> int:
        """Columns of an op's history table."""
        if op.name not in self.by_columns:
            return op.push_width
        return math.ceil(op.push_width * self.sizes.columns_share)

    def _parts_bytes(self, op: Op) -> int:
        """The table of a mean or a sum over all vertices: a part for each chunk, in float64."""
        return op.push_width * self.plan.chunks * _FLOAT64_BYTES

    def activations(self) -> int:
        """Kept tensors and temporaries of training, or evaluation's values and tables if larger."""
        own, pairs = self.sizes.own_rows, 0
        kept = self._kept_by_op()
        if self.settings.recompute and self.settings.recompute_every > 1:
            numbers = self._kept_in_segments(kept) + self._passing(dict.fromkeys(kept, 0))
        else:
            numbers = self._passing(kept)
            numbers += int(self.kept_share * (sum(kept.values()) + self._copies()))
        if self.plan.chunks > 1 and not self.settings.in_flight:
            numbers += self._waiting_gradients()
        for op in self.ops:
            if op.over_pairs:
                # The rows that each chunk reads; scores, and the numbers that ``decode`` keeps.
                pairs += op.push_width * (
                    self.sizes.table_rows[op.pushed_type] + own[op.vertex_type]
                )
                pairs += (1 + op.kept_per_pair) * self.sizes.own_pairs
        training = (numbers + pairs) * self.settings.number_bytes + self._masks_ahead()
        return max(training, self.evaluation())

    def _masks_ahead(self) -> int:
        """Bytes of dropout masks of chunks that have not passed yet; none with recomputation.

        Every vertex type has masks of its own, and so have the loss rows.
        """
        if self.recompute or not self.settings.in_flight:
            return 0
        has_loss_rows = not self.sizes.loss_rows.ops.isdisjoint(op.name for op in self.ops)
        return (len(self.sizes.own_rows) + has_loss_rows) * self.settings.mask_group_bytes

    def evaluation(self) -> int:
        """The most bytes that a step of an evaluation needs beside what training keeps.

        Evaluation runs layer by layer, without gradients. A step needs the whole table that the
        step reads, the whole table that the step pushes into, and the values of all chunks that
        later steps read. If a stage has few layers and training is limited to loss rows, this is
        more than an epoch of training needs.
        """
        chunks, settings = self.plan.chunks, self.settings
        waiting = self._waiting_in_evaluation()
        tables_read, aggregated = [0] * (len(waiting) + 1), [0] * len(waiting)
        leaving = [0] * (len(waiting) + 1)
        parts_read = [0] * (len(waiting) + 1)
        for op in self.pushing:
            tables_read[self.depths[op.name]] += self._table_width(op) * self._table_rows(op)
        for op in self.ops:
            # A sum over all vertices, as of linear attention, is a single row.
            rows = 0 if op.is_one_row else self.sizes.own_rows[op.vertex_type]
            by_columns = op.name in self.by_columns
            # By columns: the product, the rows that arrive, and these rows column beside column.
            aggregated[self.depths[op.name]] += (
                (1 + 2 * by_columns) * op.push_width * rows // chunks
            )
            if by_columns:
                # All chunks send copies of their rows: into shared memory, or freed when the step
                # reads; each is made in the order of its columns first.
                own = self.sizes.own_rows[op.pushed_type]
                leaving[self.depths[op.name]] += op.push_width * (own + own // chunks)
            parts_read[self.depths[op.name]] += self._parts_bytes(op) * op.is_mean
        most = 0
        for step, passing in enumerate(aggregated):
            read, written = tables_read[step], tables_read[step + 1] + leaving[step + 1]
            # Chunk by chunk, values for this step are freed and values for the next step are made.
            waits = max(waiting[step - 1] if step else 0, waiting[step])
            # A single chunk on one shard reads all rows at once, and frees the table.
            tables = max(read, written) if self.is_alone else read + written
            held = tables * settings.row_bytes + (waits + passing) * settings.number_bytes
            held += parts_read[step] + parts_read[step + 1]
            most = max(most, held)
        return most

    def _waiting_in_evaluation(self) -> list[int]:
        """Numbers kept after each step of an evaluation, for a later step or for the output."""
        found = [0] * (max(self.depths.values(), default=0) + 1)

        def keep(width: int, vertex_type: str, made: int, read: int) -> None:
            for step in range(made, read):
                found[step] += width * self.sizes.own_rows[vertex_type]

        # Values made in an unrounded table take no further memory in the step that reads the table.
        in_tables = {op.push_maker for op in self.pushing if op.name not in self.by_columns}
        if self.settings.rounds_rows or self.is_alone:
            in_tables.clear()  # the table holds other rows, or is freed when it is read
        # By value: width, vertex type, and the first step after which the value waits.
        made = {
            name: (width, t.types.get(name, ""), 0)
            for t in self.dag.receives(self.stage)
            for name, width in t.widths.items()
        }
        last_read: dict[str, int] = {}
        for op in self.ops:
            depth = self.depths[op.name]
            for name in op.inputs:
                # An aggregation reads its inputs one step before its result is made.
                last_read[name] = max(last_read.get(name, 0), depth - op.aggregates)
            # A value that is the same for all rows is a single row, which is negligible.
            if not op.is_one_row:
                waits = depth + (op.name in in_tables)
                made |= {name: (width, op.vertex_type, waits) for name, width in op.outputs.items()}
        last_read |= dict.fromkeys(self.dag.passed_on(self.stage), len(found))
        for name, value in made.items():
            keep(*value, last_read.get(name, 0))
        # Values that leave the stage, or the model, are kept to the end.
        sent = {name for t in self.dag.sends(self.stage) for name in t.widths}
        leaving = sent or set(self.ops[-1].outputs)
        for op in self.ops:
            for name, width in op.outputs.items():
                found[-1] += (name in leaving) * width * self.sizes.own_rows[op.vertex_type]
        return found

    def _kept_by_op(self) -> dict[str, int]:
        """Numbers that each op keeps until backward, without those in history tables."""
        in_tables, found = self._kept_in_tables(), {}
        for op in self.ops:
            rows = self.sizes.own_rows[op.vertex_type]
            kept = self.sizes.loss_rows.kept_numbers(op, rows, self.recompute)
            found[op.name] = kept - in_tables[op.name]
        return found

    def _kept_in_segments(self, inputs: dict[str, int]) -> int:
        """Numbers kept until backward if steps are recomputed in segments; changes ``inputs``."""
        whole, lasting = {}, self._copies()
        for op in self.ops:
            rows = self.sizes.own_rows[op.vertex_type]
            whole[op.name] = self.sizes.loss_rows.kept_numbers(op, rows, recompute=False)
            whole[op.name] += op.kept_per_edge * self.entries
            if op.aggregates and not self.is_alone:  # the table holds other rows by then
                rows = self.sizes.loss_rows.rows_of(op.name, rows)
                stays = min(max(inputs[op.name], 0), op.push_width * rows)
                inputs[op.name] -= stays
                whole[op.name] -= op.push_width * rows
                lasting += stays
        segments = Segments(max(self.depths.values()) + 1, self.settings.recompute_every)
        ops = input_numbers(self.model, self.plan.stages[self.stage].ops, inputs, whole)
        forward = kept_by_forward(ops, segments)
        # An exact program runs a step backward for all chunks before the previous step.
        parts = 1 if self.settings.is_exact else self.plan.chunks
        in_backward = most_in_backward(ops, segments) // parts
        return int(self.kept_share * (forward + lasting)) - forward // parts + in_backward

    def _kept_in_tables(self) -> dict[str, int]:
        """Numbers that each op keeps until backward as rows of a history table."""
        sizes = self.sizes
        found = dict.fromkeys((op.name for op in self.ops), 0)
        if not self.num_tables or self.settings.rounds_rows:
            return found
        for op in self.pushing:
            if op.name in self.by_columns:
                continue
            own = sizes.own_rows
            if op.name in self.shared:
                rows = sizes.loss_rows.rows_of(op.name, own[op.vertex_type])
                found[op.name] += op.push_width * rows
            # With --recompute only inputs of a step are kept; for loss rows these are copies.
            is_held = op.holds_pushed and op.name not in sizes.loss_rows.ops
            if op.push_maker in found and (is_held or not self.recompute):
                found[op.push_maker] += op.push_width * own[op.pushed_type]
        return found

    def _copies(self) -> int:
        """Numbers kept per edge, for copied rows and for values of other stages."""
        sizes, recompute, found = self.sizes, self.recompute, 0
        for op in self.ops:
            own = sizes.own_rows[op.vertex_type]
            if not op.over_pairs and not recompute:
                found += op.kept_per_edge * self.entries
            if op.aggregates and not (op.is_linear or op.is_mean or op.over_pairs):
                of_read = op.push_width + op.kept_per_read_row * (not recompute)
                found += int(of_read * sizes.copied_share * own)
        if sizes.loss_rows.ops & {op.name for op in self.ops}:
            found += sizes.loss_rows.copied_widths(self.model) * sizes.loss_rows.rows
        # Received values stay until their gradients have left, and these until the other stage has
        # read them. Sent values are copies if rounded; others leave at the pace of the next stage.
        received = self.dag.receives(self.stage)
        sent = self.dag.sends(self.stage) if self.settings.rounds_rows else ()
        for transfer in (*received, *received, *sent):
            for name, width in transfer.widths.items():
                found += width * sizes.own_rows[transfer.types.get(name, "")]
        if self.settings.is_exact and self.plan.chunks > 1:
            # Gradients of values that are passed on wait for the first step's backward.
            passed_on = self.dag.passed_on(self.stage)
            for transfer in self.dag.receives(self.stage):
                for name in passed_on & transfer.widths.keys():
                    rows = sizes.own_rows[transfer.types.get(name, "")]
                    found += transfer.widths[name] * rows
        return found

    def _passing(self, kept: Mapping[str, int]) -> int:
        """Numbers of the loss, and of temporaries in the backward of one chunk or in a forecast.

        In the backward of an op, the numbers that later ops kept have been freed.
        """
        sizes, chunks = self.sizes, self.plan.chunks
        n = sum(sizes.own_rows[t] for t in self.model.vertex_types)
        of_loss = 0 if self.dag.sends(self.stage) else sizes.loss_numbers
        widest = max((op.passing_per_row for op in self.ops), default=0)
        # A forecast makes the rows of the probe vertices with the old and the new weights.
        most = 2 * widest * sum((sizes.probe_rows or {}).values())
        freed = of_loss // chunks
        for op in reversed(self.ops):
            made = op.passing_per_row * sizes.loss_rows.rows_of(op.name, n)
            # Copies of the rows in the order in which their columns are sent and arrive.
            made += 2 * op.push_width * n * (op.name in self.by_columns)
            # Gradients of the numbers kept per edge; with --recompute also these numbers.
            made += op.kept_per_edge * self.entries * (1 + self.recompute)
            most = max(most, made // chunks - freed)
            freed += kept[op.name] // chunks
        return of_loss + most

    def _waiting_gradients(self) -> int:
        """Gradients of mapped features, kept until the gradients of all chunks are complete."""
        own = self.sizes.own_rows
        return sum(op.flops_per_feature // 2 * own[op.vertex_type] for op in self.ops)

    def weights(self) -> int:
        """Weights, gradients and Adam's two moments, and further copies."""
        count, versions = sum(op.num_parameters for op in self.ops), self.settings.version_copies
        copies = 4 + self.settings.extra_weights + (versions[self.stage] if versions else 0)
        return count * copies * self.settings.number_bytes

    def setup_peak(self, structure: int) -> int:
        """The peak while matrices and blocks are built; ``structure``: bytes of the result.

        Edge weights are computed in float64 for the whole graph. The part of the shard is then
        copied with new indices, rounded and transposed. Features are aggregated with such a part,
        for which dense ones are copied.
        """
        if not (self.is_linear or self.has_blocks or self.by_columns or self.given):
            return 0
        rows = sum(self.sizes.own_rows.values()) * self.shards
        whole = (self.sizes.graph_edges + rows) * (_INDEX_BYTES + _FLOAT64_BYTES)
        if self.shards > 1 or len(self.sizes.own_rows) > 1:
            copied = _INDEX_BYTES + _FLOAT64_BYTES + _LONG_BYTES
        else:
            copied = _INDEX_BYTES + self.settings.row_bytes
        loss_rows, entries = self.sizes.loss_rows, self.entries
        if self.by_columns:
            loss_rows, entries = self.sizes.graph_loss_rows, self.sizes.graph_edges + rows
        limited = loss_rows.edges + loss_rows.rows if loss_rows.ops else 0
        numbers = 0
        for op in self.given:
            read = 0 if self.settings.sparse_features else self.sizes.table_rows[op.vertex_type]
            numbers += (self.sizes.own_rows[op.vertex_type] + read) * sum(op.outputs.values())
            entries = max(entries, self.entries)
        matrices = whole + copied * entries + numbers * self.settings.number_bytes
        return max(matrices, structure + 2 * _LONG_BYTES * limited)
