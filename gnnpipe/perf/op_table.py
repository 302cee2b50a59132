"""Costs of a workload's ops as arrays over the ops, each computed once for all plans.

Ops of one kind on the same types of vertices cost the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gnnpipe.perf.profile import OpTimes
from gnnpipe.perf.volume import fit_numbers
from gnnpipe.perf.workload import Workload
from gnnpipe.plan import Op, RowWay

Floats = npt.NDArray[np.float64]


class StepCosts(NamedTuple):
    """Times of the ops' steps for the whole graph in one chunk on one device, [ops] each."""

    forward_base_s: Floats
    """Time that does not depend on the size of a chunk."""
    backward_base_s: Floats
    forward_s: Floats
    """Time that is in proportion to the size of a chunk."""
    backward_s: Floats
    pull_s: Floats
    """The part of ``backward_s`` during which the gradients of halo rows arrive, that of edges."""
    forward_edges_s: Floats
    """The part of ``forward_s`` that is in proportion to the edges."""


class _OneOp(NamedTuple):
    """The times of one op, as the fields of ``StepCosts``, in the same order."""

    forward_base_s: float
    backward_base_s: float
    forward_s: float
    backward_s: float
    pull_s: float
    forward_edges_s: float


class BeginCosts(NamedTuple):
    """Times before the first action and after the last one, on one device, [ops] each."""

    base_s: Floats
    """In proportion to the slowness of the device alone."""
    work_s: Floats
    """In proportion to the share of the rows, too."""
    finish_s: Floats
    """On every device the same."""


class ProbeCosts(NamedTuple):
    """Times of a forecast on one device, [ops] each."""

    forecast_base_s: Floats
    forecast_s: Floats
    """For all probe vertices."""
    carry_base_s: Floats
    carry_s: Floats
    """For all rows."""
    fits: npt.NDArray[np.int64]
    """Numbers that are summed over the shards to fit the op's map; 0: not forecast."""


class OpTable:
    """The costs of a workload's ops for devices of speed 1."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.ops = workload, workload.model.ops
        self.compute = workload.profile.compute_of(workload.ranks_at_once)
        self._steps: dict[bool, StepCosts] = {}
        self._begins: dict[bool, BeginCosts] = {}

    @cached_property
    def pushed_rows(self) -> Floats:
        """Rows of the table that an op pushes into; 0 for a row-wise op."""
        rows = self.workload.table_rows
        return _array(rows[op.pushed_type] if op.aggregates else 0 for op in self.ops)

    @cached_property
    def widths(self) -> Floats:
        """Width of the rows that an op pushes."""
        return _array(op.push_width for op in self.ops)

    @cached_property
    def pushed(self) -> Floats:
        """Numbers that an op pushes in an epoch, without those of means."""
        return self.pushed_rows * self.widths * ~self.is_mean

    @cached_property
    def aggregated(self) -> Floats:
        """Numbers of the rows that an op aggregates in an epoch."""
        rows = self.workload.table_rows
        return _array(rows[op.vertex_type] for op in self.ops) * self.widths

    @cached_property
    def is_mean(self) -> npt.NDArray[np.bool_]:
        """Whether an op aggregates a mean over all vertices."""
        return np.array([op.is_mean for op in self.ops])

    @cached_property
    def movable(self) -> Sequence[int]:
        """The ops whose rows may travel by columns."""
        return [i for i, op in enumerate(self.ops) if not op.reason_against(RowWay.COLUMNS)]

    @cached_property
    def parameters(self) -> Floats:
        """Prefix sums of the numbers of parameters, [ops + 1]."""
        return prefix_sums(_array(op.num_parameters for op in self.ops))

    @cached_property
    def classes(self) -> list[int]:
        """The first op that differs from an op by the names of ops, values and weights alone."""
        limited = self.workload.loss_rows.ops
        first: dict[tuple[object, ...], int] = {}
        return [
            first.setdefault((op.name in limited, *_without_names(op)), i)
            for i, op in enumerate(self.ops)
        ]

    @cached_property
    def makers(self) -> dict[str, tuple[int, int]]:
        """The op that computes each value, and the place of the value in the outputs of the op."""
        outputs = (enumerate(op.outputs) for op in self.ops)
        return {name: (i, place) for i, of in enumerate(outputs) for place, name in of}

    @cached_property
    def reads(self) -> list[list[tuple[int, int]]]:
        """The values that an op reads, as in ``makers``."""
        return [[self.makers[value] for value in op.inputs] for op in self.ops]

    @cached_property
    def writers(self) -> list[int]:
        """The op that writes an op's pushed rows into the table; -1: none (``Op.push_maker``)."""
        number = {op.name: i for i, op in enumerate(self.ops)}
        return [number.get(op.push_maker, -1) for op in self.ops]

    def steps(self, recompute: bool) -> StepCosts:
        """Return the times of the ops' steps.

        Args:
            recompute: The ops keep only their inputs until backward.

        Raises:
            InputError: The profile lacks a kind of ops.
        """
        if recompute not in self._steps:
            self._steps[recompute] = self._step_costs(recompute)
        return self._steps[recompute]

    def _step_costs(self, recompute: bool) -> StepCosts:
        work, loss = self.workload, self.workload.loss_rows
        found: dict[tuple[object, ...], _OneOp] = {}
        columns = []
        for op, kind in zip(self.ops, work.kinds, strict=True):
            key = kind, op.vertex_type, op.pushed_type, op.name in loss.ops
            if key not in found:
                times = self.compute.times_of(op, kind)
                times = times.recomputing(op.is_linear) if recompute else times
                found[key] = self._kind_costs(op, times)
            columns.append(found[key])
        return StepCosts(*np.array(columns).T)

    def _kind_costs(self, op: Op, times: OpTimes) -> _OneOp:
        """Return the times of the ops of a kind, for the whole graph in one chunk."""
        work, loss = self.workload, self.workload.loss_rows
        rows, edges_of = work.table_rows[op.vertex_type], 0
        if op.aggregates and not op.is_mean:
            edges_of = work.num_edges[op.pushed_type if op.over_pairs else op.vertex_type]
        if op.name in loss.ops and op.aggregates:
            edges_of = loss.edges
        after_rows = loss.rows if op.name in loss.ops else edges_of if op.over_pairs else rows
        entries = work.feature_entries.get(op.vertex_type, 0) * op.reads_features
        before_entries, after_entries = entries * op.aggregates, entries * (not op.aggregates)
        base_s, size_s = [], []
        for before, after in (
            (times.forward_before, times.forward_after),
            (times.backward_before, times.backward_after),
        ):
            base_s.append(after.base_s + before.base_s * op.aggregates)
            one_s = after.time_s(after_rows, edges_of, after_entries, 0)
            if op.aggregates:
                before_rows = work.table_rows[op.pushed_type]
                one_s += before.time_s(before_rows, edges_of, before_entries, 0)
            size_s.append(one_s)
        return _OneOp(
            forward_base_s=base_s[0],
            backward_base_s=base_s[1],
            forward_s=size_s[0],
            backward_s=size_s[1],
            pull_s=times.backward_before.per_edge_s * edges_of * op.aggregates,
            forward_edges_s=times.forward_after.per_edge_s * edges_of,
        )

    def begin(self, has_chunks: bool) -> BeginCosts:
        """Return the times before the first action and after the last one; ``has_chunks``: K > 1.

        Gradient tables are cleared if there are several chunks.
        """
        if has_chunks not in self._begins:
            self._begins[has_chunks] = self._begin_costs(has_chunks)
        return self._begins[has_chunks]

    def _begin_costs(self, has_chunks: bool) -> BeginCosts:
        begin, work = self.compute.begin, self.workload
        numbers = self.pushed_rows * self.widths
        cleared = _array(op.clears for op in self.ops) * has_chunks
        work_s = numbers * (begin.per_row_s * cleared + begin.per_edge_s)
        finish_s = np.zeros(len(self.ops))
        for i, op in enumerate(self.ops):
            if op.reads_features:
                finish = self.compute.ops[work.kinds[i]].finish
                entries = work.feature_entries.get(op.vertex_type, 0)
                work_s[i] += finish.time_s(work.table_rows[op.vertex_type], 0, entries, 0)
                finish_s[i] = finish.base_s
        base_s = _array(begin.base_s * op.aggregates for op in self.ops)
        return BeginCosts(base_s, work_s, finish_s)

    @cached_property
    def probes(self) -> ProbeCosts:
        """The times of a forecast."""
        times = [self.compute.ops[kind] for kind in self.workload.kinds]
        is_forecast = _array(op.is_forecast for op in self.ops)
        fits = [fit_numbers(op) if op.is_forecast else 0 for op in self.ops]
        return ProbeCosts(
            _array(t.forecast.base_s for t in times),
            _array(t.forecast.per_row_s for t in times) * self.workload.probes,
            _array(t.carry.base_s for t in times) * is_forecast,
            _array(t.carry.per_row_s for t in times) * is_forecast * self.pushed_rows,
            np.array(fits, dtype=np.int64),
        )


def _without_names(op: Op) -> Iterator[object]:
    """Yield the fields of an op without the names of ops, values and weights."""
    for field in fields(Op):
        value = getattr(op, field.name)
        if isinstance(value, Mapping):
            yield tuple(value.values())
        elif field.name not in ("name", "inputs", "weights", "push_maker"):
            yield value


def _array(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


def prefix_sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, ... values along the last axis, [..., n + 1]."""
    found = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=found[..., 1:])
    return found


def sum_of(prefix: Floats, ops: Sequence[int]) -> Floats:
    """Return the sum over ascending ``ops`` of values with these prefix sums [..., ops + 1]."""
    first, end = ops[0], ops[-1] + 1
    if len(ops) == end - first:
        return prefix[..., end] - prefix[..., first]
    chosen = np.array(ops)
    found: Floats = (prefix[..., chosen + 1] - prefix[..., chosen]).sum(-1)
    return found
