"""Closed forms of the bytes that an epoch sends (docs/explanation/bytes.md).

Reports show the closed form next to the bytes that were counted; the two must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gnnpipe.plan import ModelGraph, Op, Plan, RowWay, StageDag, column_bounds

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CommVolume:
    """Bytes that are sent in one training epoch, by axis; of one rank or of all."""

    pipeline: int
    graph: int
    gradient: int
    control: int = 0
    """The forecast of stale rows."""

    @property
    def total(self) -> int:
        """The sum over all axes."""
        return sum(astuple(self))

    def with_steps(self, optimizer_steps: int) -> CommVolume:
        """Return the bytes of an epoch with ``optimizer_steps`` sums of gradients, not one."""
        return replace(self, gradient=self.gradient * optimizer_steps)

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by axis and in total, as in result.json."""
        return {**asdict(self), "total": self.total}


def closed_form_volume(
    dag: StageDag,
    model: ModelGraph,
    *,
    num_vertices: Mapping[str, int],
    crossings: Sequence[Mapping[str, int]],
    number_bytes: int,
    row_bytes: int,
    probes: Mapping[str, int],
    label_iterations: int = 0,
) -> CommVolume:
    """Return the bytes that all ranks together send in the forward and backward of an epoch.

    By axis, in numbers:

    - pipeline: 2 N x the total width of all transfers; 2 (S-1) N H if one value of width H crosses
      each boundary;
    - graph: 2 M x the total width of all pushes, 2 L M H for L pushes of width H; for a mean over
      all vertices 2 K sums of its width, in float64;
    - gradient: one sum over the shards of all weight gradients, for one optimizer step;
    - control, with probes: 2 P x the total width of all transfers (once with the old and once with
      the new weights), and a sum of ``fit_numbers`` for every forecast aggregation, in float64;
    - each label iteration: half the bytes of pipeline and graph, because it only goes forward, and
      N C predictions from the last stage to each other one that reads features (pipeline).

    Rows between stages of different shards travel once, too: each row has one owner in each stage.
    Graph, gradient and control are sums over the stages, each with its own M and G. The plan's
    collectives determine the bytes of a sum and of a push (``plan.collectives``). Not counted:
    aggregations whose rows travel in another way than by halo (``row_way_bytes``).

    Args:
        dag: The stages of the plan.
        model: The ops.
        num_vertices: N by vertex type ('' in a graph of one type).
        crossings: M by stage and vertex type, the number of pairs (vertex, other shard of the stage
            that reads it).
        number_bytes: Bytes of a number of a weight.
        row_bytes: Bytes of a number of a row.
        probes: P by vertex type, the number of probe vertices.
        label_iterations: Number of passes that predict label inputs.
    """
    plan, sent = dag.plan, _widths_sent(dag)
    # Training goes forward and backward.
    passes = 2 + label_iterations
    predicted = 0
    if label_iterations:
        readers = len(set(dag.feature_stages) - {plan.num_stages - 1})
        predicted = num_vertices[model.ops[-1].vertex_type] * model.num_classes * readers
    by_stage = [
        _shard_bytes(plan, i, model, m, number_bytes, row_bytes) for i, m in enumerate(crossings)
    ]
    rows_and_means, gradients, fits = (sum(each) for each in zip(*by_stage, strict=True))
    probe_bytes = 2 * sum(probes[t] * width for t, width in sent.items()) * row_bytes
    return CommVolume(
        pipeline=passes * sum(num_vertices[t] * width for t, width in sent.items()) * row_bytes
        + label_iterations * predicted * row_bytes,
        graph=passes * rows_and_means,
        gradient=gradients,
        control=probe_bytes + fits * any(probes.values()),
    )


@dataclass(frozen=True)
class ShardRows:
    """Numbers of rows of the shards of a stage."""

    own: Mapping[str, Sequence[int]]
    """[G] own rows by vertex type."""
    loss: Sequence[int]
    """[G] loss rows."""
    limited: Collection[str]
    """Ops that aggregate into the loss rows only."""


def row_way_bytes(
    dag: StageDag,
    model: ModelGraph,
    rows: Sequence[ShardRows],
    row_bytes: int,
    label_iterations: int = 0,
) -> int:
    """Return the bytes that all shards send for aggregations of another way than by halo.

    Forward and backward of an epoch, and its label iterations. ``COLUMNS``: in each pass the sum
    over the shards of (n + m) (F - f) numbers, for a shard that pushes n rows, aggregates m rows
    and has f of the F columns. With equal shares and N rows of both kinds 2 N F (G-1) / G.
    ``GATHER``: in each pass every row goes to all other shards, N F (G-1).

    Args:
        dag: The stages of the plan.
        model: The ops.
        rows: Rows of the shards, by stage.
        row_bytes: Bytes of a number of a row.
        label_iterations: Number of passes that predict label inputs; these compute all rows.
    """
    plan, total = dag.plan, 0
    for stage, of_stage in zip(plan.stages, rows, strict=True):
        for i in stage.ops:
            if plan.way(i) is RowWay.HALO:
                continue
            op = model.ops[i]
            if plan.way(i) is RowWay.GATHER:
                gathered = (stage.shards - 1) * sum(of_stage.own[op.pushed_type]) * op.push_width
                numbers = (2 + label_iterations) * gathered
                total += plan.collectives.rows.sent_bytes(stage.shards, numbers * row_bytes)
                continue
            all_rows = of_stage.own[op.vertex_type]
            trained = of_stage.loss if op.name in of_stage.limited else all_rows
            pushed, read, limited = (
                ColumnNumbers.of(op.push_width, stage.shares, np.array(rows))
                for rows in (of_stage.own[op.pushed_type], all_rows, trained)
            )
            # Forward moves pushed rows to columns and columns of the product to rows; backward
            # moves the gradients of both the other way, as many numbers.
            numbers = 2 * int(pushed.to_columns.sum() + limited.to_rows.sum())
            numbers += label_iterations * int(pushed.to_columns.sum() + read.to_rows.sum())
            total += plan.collectives.rows.sent_bytes(stage.shards, numbers * row_bytes)
    return total


class ColumnNumbers(NamedTuple):
    """Numbers that each shard sends to move rows [G, ...] to columns, or columns to rows."""

    to_columns: Counts
    to_rows: Counts

    @classmethod
    def of(cls, width: int, shares: Sequence[float], rows: Counts) -> ColumnNumbers:
        """Return the numbers for rows of ``width`` columns.

        Args:
            width: F.
            shares: [G] of the shards in the columns.
            rows: [G, ...] of the shards.
        """
        own = np.diff(column_bounds(width, shares)).reshape(-1, *[1] * (rows.ndim - 1))
        return cls(rows * (width - own), (rows.sum(0) - rows) * own)


def _shard_bytes(
    plan: Plan,
    stage: int,
    model: ModelGraph,
    crossings: Mapping[str, int],
    number_bytes: int,
    row_bytes: int,
) -> tuple[int, int, int]:
    """Return what the shards of a stage send to one another.

    Bytes of one pass for rows and means; of the gradient sums; of the sums that a forecast is
    fitted to.
    """
    ops, shards = model.select(plan.stages[stage].ops), plan.stages[stage].shards
    by_halo = model.select([i for i in plan.stages[stage].ops if plan.way(i) is RowWay.HALO])
    pushing = [op for op in by_halo if op.aggregates and not op.is_mean]
    pushed = sum(crossings[op.pushed_type] * op.push_width for op in pushing)
    means = sum(op.push_width for op in ops if op.is_mean)
    fit = sum(fit_numbers(op) for op in ops if op.is_forecast)
    weights = sum(op.num_parameters for op in ops)
    rows, sums = plan.collectives.rows, plan.collectives.sum
    return (
        rows.sent_bytes(shards, pushed * row_bytes)
        + plan.chunks * sums.sent_bytes(shards, means * 8),
        sums.sent_bytes(shards, weights * number_bytes),
        sums.sent_bytes(shards, fit * 8),
    )


def _widths_sent(dag: StageDag) -> Counter[str]:
    """Return the total width of all transfers by vertex type."""
    sent: Counter[str] = Counter()
    for transfer in dag.transfers:
        for value, width in transfer.widths.items():
            sent[transfer.types.get(value, "")] += width
    return sent


FORECAST_RANK = 16
"""Rank of the slope of a forecast's map (docs/adr/0060-a-forecast-of-low-rank.md)."""


def affine_fit_sizes(width: int) -> list[int]:
    """Return the sizes of the sums that fit an affine map of rows of ``width`` (F) columns.

    In the order of ``runtime.staleness.affine_map.moments``.
    """
    return [width * (width + 1) // 2, width * width, width, width, 1, 1]


def shift_fit_sizes(width: int) -> list[int]:
    """Return the sizes of the sums that fit a shift of ``width`` columns, for a mean."""
    return [width, 1, 1]


def fit_numbers(op: Op) -> int:
    """Return the count of numbers that are summed over the shards to fit one aggregation's map."""
    sizes = shift_fit_sizes if op.is_mean else affine_fit_sizes
    return sum(sizes(op.push_width))
