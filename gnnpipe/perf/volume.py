"""Closed forms for the bytes that an epoch sends (docs/concepts.md).

They are printed next to what the program counted; the two must be equal to the byte.
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
        """As it stands in result.json."""
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
    """Forward and backward of N vertices, M ``crossings``: (vertex, other reading shard) pairs.

    N, M and P by the type of the vertices, '' if there is but one; rows take ``row_bytes`` for a
    number, weights ``number_bytes``:

    pipeline: 2 N x the widths of every transfer, which is 2 (S-1) N H numbers when one value of
    width H crosses each boundary; graph: 2 M x the width of every push, 2 L M H in all,
    and for a mean over all vertices 4 K (G-1) x its width in float64;
    gradient: 2 (G-1) P for P weights; control, where P ``probes`` forecast stale rows: 2 P x the
    widths of every transfer (``probe_rows_bytes``: once with old weights, once with new ones), and
    for every aggregation whose rows move 2 (G-1) times the float64 numbers of a fit,
    F (F + 1) / 2 + F F + 2 F + 2 (of a mean F + 2).
    """
    sent = _widths_sent(plan)
    pushed = sum(
        crossings[op.pushed_type] * op.push_width for op in model.aggregations if not op.is_mean
    )
    means = sum(op.push_width for op in model.ops if op.is_mean)
    fit = sum(fit_numbers(op) for op in model.aggregations if op.is_forecast)
    return CommVolume(
        pipeline=2 * sum(num_vertices[t] * width for t, width in sent.items()) * row_bytes,
        graph=2 * pushed * row_bytes + 2 * plan.chunks * 2 * (plan.shards - 1) * means * 8,
        gradient=2 * (plan.shards - 1) * model.num_parameters * number_bytes,
        control=2 * probe_rows_bytes(plan, probes, row_bytes)
        + 2 * (plan.shards - 1) * fit * 8 * any(probes.values()),
    )


def probe_rows_bytes(plan: Plan, probes: Mapping[str, int], row_bytes: int) -> int:
    """The pilot rows, P by type, once from stage to stage: P x the widths of every transfer."""
    return sum(probes[t] * width for t, width in _widths_sent(plan).items()) * row_bytes


def _widths_sent(plan: Plan) -> Counter[str]:
    """Of all transfers together, by the type of the vertices."""
    sent: Counter[str] = Counter()
    for transfer in plan.transfers:
        for value, width in transfer.widths.items():
            sent[transfer.types.get(value, "")] += width
    return sent


def fit_numbers(op: Op) -> int:
    """Sums over the pilot rows that the map of an aggregation is fitted from, a shift for a mean.

    An affine map on rows of width F takes F (F + 1) / 2 + F F + 2 F + 2.
    """
    width = op.push_width
    if op.is_mean:
        return width + 2
    return width * (width + 1) // 2 + width * width + 2 * width + 2
