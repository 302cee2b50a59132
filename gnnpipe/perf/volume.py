"""Closed forms of the bytes that an epoch sends (docs/explanation/bytes.md).

Reports show them next to the bytes that were counted; the two must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gnnpipe.plan import ModelGraph, Op, Plan

__all__ = ["CommVolume", "closed_form_volume", "fit_numbers", "probe_rows_bytes"]


@dataclass(frozen=True)
class CommVolume:
    """Bytes of one training epoch over all ranks, by axis."""

    pipeline: int
    graph: int
    gradient: int
    control: int = 0
    """The forecast of stale rows."""

    @property
    def total(self) -> int:
        """All four."""
        return self.pipeline + self.graph + self.gradient + self.control

    def to_dict(self) -> dict[str, int]:
        """Bytes by axis and in total, as in result.json."""
        return {**asdict(self), "total": self.total}


def closed_form_volume(
    plan: Plan,
    model: ModelGraph,
    *,
    num_vertices: Mapping[str, int],
    crossings: Mapping[str, int],
    number_bytes: int,
    row_bytes: int,
    probes: Mapping[str, int],
) -> CommVolume:
    """Bytes of an epoch's forward and backward over all ranks.

    ``num_vertices`` N, ``crossings`` M = (vertex, other shard that reads it) pairs and ``probes`` P
    by type of vertex ('' if there is only one); a number of a row takes ``row_bytes``, of a weight
    ``number_bytes``. Numbers by axis:

    - pipeline: 2 N x the widths of all transfers; 2 (S-1) N H if one value of width H crosses each
      boundary;
    - graph: 2 M x the widths of all pushes, 2 L M H for L of width H; for a mean over all vertices
      2 K sums of its width, in float64;
    - gradient: a sum of the weights;
    - control, with probes: 2 P x the widths of all transfers (``probe_rows_bytes``: once with the
      old and once with the new weights), and a sum of ``fit_numbers`` of every forecast
      aggregation, in float64.

    A sum of n numbers over G shards takes 2 (G-1) n (``collectives.OrderedSum``).
    """
    sent = _widths_sent(plan)
    pushed = sum(
        crossings[op.pushed_type] * op.push_width for op in model.aggregations if not op.is_mean
    )
    means = sum(op.push_width for op in model.ops if op.is_mean)
    fit = sum(fit_numbers(op) for op in model.aggregations if op.is_forecast)
    rows, sums = plan.collectives.rows, plan.collectives.sum
    return CommVolume(
        pipeline=2 * sum(num_vertices[t] * width for t, width in sent.items()) * row_bytes,
        graph=2 * rows.sent_bytes(plan.shards, pushed * row_bytes)
        + 2 * plan.chunks * sums.sent_bytes(plan.shards, means * 8),
        gradient=sums.sent_bytes(plan.shards, model.num_parameters * number_bytes),
        control=2 * probe_rows_bytes(plan, probes, row_bytes)
        + sums.sent_bytes(plan.shards, fit * 8 * any(probes.values())),
    )


def probe_rows_bytes(plan: Plan, probes: Mapping[str, int], row_bytes: int) -> int:
    """Bytes of P ``probes`` (by type) from stage to stage once: P x the widths of all transfers."""
    return sum(probes[t] * width for t, width in _widths_sent(plan).items()) * row_bytes


def _widths_sent(plan: Plan) -> Counter[str]:
    """Total width of all transfers by type of vertex."""
    sent: Counter[str] = Counter()
    for transfer in plan.transfers:
        for value, width in transfer.widths.items():
            sent[transfer.types.get(value, "")] += width
    return sent


def fit_numbers(op: Op) -> int:
    """Sums over the probe rows that the map of an aggregation is fitted to.

    An affine map on rows of width F takes F (F + 1) / 2 + F F + 2 F + 2, a shift for a mean F + 2.
    """
    width = op.push_width
    if op.is_mean:
        return width + 2
    return width * (width + 1) // 2 + width * width + 2 * width + 2
