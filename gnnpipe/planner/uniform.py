"""Planner for equal devices: stages of consecutive ops, with the slowest stage as fast as possible.

The cost of an op is measured in floating-point operations of a dense product: its own dense
products (that of sparse features by their stored entries), plus the time to read neighbours' rows
and the time of row-wise work, converted by measured factors (docs/benchmarks/op_costs.md). GNNPipe
splits layers by floating-point operations alone (arXiv 2308.10087, released code). Of splits that
are balanced almost equally well, the planner takes one that sends few values between stages: a cut
inside a layer often sends twice as many as a cut between two layers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

from gnnpipe.errors import InputError
from gnnpipe.plan import ModelGraph, Op, Placement, Plan, RowWay, StagePlan
from gnnpipe.plan.model_graph import EDGE_FLOPS, KEPT_FLOPS
from gnnpipe.planner.planner import PLANNERS, GraphCounts, PlanRequest, Shape
from gnnpipe.schedule import EXACT_SCHEDULE

_SLACK, _SAVING = 0.05, 0.75
"""A slowest stage that is slower by this share counts as equally fast if at most so much is sent as
before; costs are no more exact (docs/benchmarks/op_costs.md)."""


def op_costs(model: ModelGraph, graph: GraphCounts) -> list[float]:
    """Return the cost of each op, in floating-point operations of a dense product.

    The edges of an op are all edges into the vertices of its type. With several relations this is
    an upper bound.
    """
    return [_cost(op, graph) for op in model.ops]


def _cost(op: Op, graph: GraphCounts) -> float:
    vertices = graph.num_vertices[op.vertex_type]
    rows = graph.loss_rows.rows_of(op.name, vertices)
    edges = graph.num_edges[op.pushed_type if op.over_pairs else op.vertex_type]
    # A row that is read twice counts twice.
    read_rows = vertices if op.is_mean else edges
    if op.name in graph.loss_rows.ops:
        read_rows = graph.loss_rows.edges
    return float(
        op.flops_per_row * (edges if op.over_pairs else rows)
        + EDGE_FLOPS * op.push_width * read_rows
        + KEPT_FLOPS * op.kept_per_row * rows
        + op.flops_per_feature * graph.feature_entries.get(op.vertex_type, 0)
    )


def split_evenly(
    costs: Sequence[float], stages: int, cuts: Sequence[int], widths: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Split the ops into non-empty consecutive runs that minimise the largest sum of costs.

    Args:
        costs: Cost of each op.
        stages: Number of runs.
        cuts: Ops at which a run may begin, ascending.
        widths: Total width of the values that cross each cut. Of equally balanced splits the one
            with the smallest sum of widths is returned; or that of the narrowest cuts alone, if the
            largest sum of costs grows by ``_SLACK`` at most and the widths shrink to ``_SAVING``.

    Returns:
        First op and one past the last op of each run.

    >>> split_evenly([1.0, 1.0, 1.0, 3.0], 2, [1, 2, 3], [8, 8, 8])
    ((0, 3), (3, 4))
    """
    prefix = list(accumulate(costs, initial=0.0))
    width_of = dict(zip(cuts, widths, strict=True))
    found = _balanced(prefix, stages, cuts, widths)
    most = (1 + _SLACK) * _smallest_limit(prefix, stages, cuts)
    for width in sorted(set(widths)):
        chosen = [cut for cut in cuts if width_of[cut] <= width]
        if len(chosen) >= stages - 1 and _smallest_limit(prefix, stages, chosen) <= most:
            narrow = _balanced(prefix, stages, chosen, [width_of[cut] for cut in chosen])
            sums = [sum(width_of[cut] for cut in split) for split in (narrow, found)]
            found = narrow if sums[0] <= _SAVING * sums[1] else found
            break
    return tuple(pairwise((0, *found, len(costs))))


def _balanced(
    prefix: Sequence[float], stages: int, cuts: Sequence[int], widths: Sequence[int]
) -> tuple[int, ...]:
    """Return the cuts of the split with the smallest largest sum, and of such with least widths."""
    # Splits whose largest sums differ by rounding errors only count as equally balanced.
    limit = _smallest_limit(prefix, stages, cuts) + 1e-9 * prefix[-1]
    return _narrowest_cuts(prefix, stages, cuts, widths, limit)


def _smallest_limit(prefix: Sequence[float], stages: int, cuts: Sequence[int]) -> float:
    """Return the smallest possible largest sum, by bisection to a relative error of 1e-12.

    ``prefix``: prefix sums of the costs. A limit is feasible if at most ``stages`` runs suffice,
    because splitting a run further makes no sum larger.
    """
    ends = [*cuts, len(prefix) - 1]
    end_sums = [prefix[end] for end in ends]
    low, high = 0.0, prefix[-1]
    while high - low > 1e-12 * prefix[-1]:
        limit = (low + high) / 2
        begin, runs = 0.0, 0
        while begin < prefix[-1] and runs <= stages:
            # The longest run that the limit allows.
            i = bisect_right(end_sums, begin + limit) - 1
            if i < 0 or end_sums[i] <= begin:
                runs = stages + 1
                break
            begin, runs = end_sums[i], runs + 1
        low, high = (limit, high) if runs > stages else (low, limit)
    return high


def _narrowest_cuts(
    prefix: Sequence[float], stages: int, cuts: Sequence[int], widths: Sequence[int], limit: float
) -> tuple[int, ...]:
    """Return the ``stages - 1`` cuts with the smallest sum of widths and no run above ``limit``.

    Dynamic programming with one pass over the cuts per stage. The minimum over the allowed begins
    of a run is a sliding-window minimum.
    """
    ends = [*cuts, len(prefix) - 1]
    # Smallest sum of widths of splits that end at each of ``ends``, for a growing number of runs.
    best = [0.0 if prefix[end] <= limit else math.inf for end in ends]
    previous_cuts: list[list[int]] = []
    for _ in range(stages - 1):
        next_best, previous_cut = [math.inf] * len(ends), [-1] * len(ends)
        # Indices into ``cuts``, smallest sum first; of equal sums the first cut.
        window: deque[int] = deque()
        for i, end in enumerate(ends):
            if i:
                added = best[i - 1] + widths[i - 1]
                while window and best[window[-1]] + widths[window[-1]] > added:
                    window.pop()
                window.append(i - 1)
            while window and prefix[end] - prefix[cuts[window[0]]] > limit:
                window.popleft()
            if window:
                next_best[i] = best[window[0]] + widths[window[0]]
                previous_cut[i] = window[0]
        previous_cuts.append(previous_cut)
        best = next_best
    index, found = len(ends) - 1, []
    for previous_cut in reversed(previous_cuts):
        index = previous_cut[index]
        found.append(cuts[index])
    return tuple(reversed(found))


def _tied_weights(model: ModelGraph) -> str:
    """Return why up to three weights that several ops use leave fewer cuts; '' without any."""
    uses = Counter(name for op in model.ops for name in set(op.weights))
    names = [name for name, count in uses.items() if count > 1]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f" ({shown}: weights that several calls share must stay on one stage)" if names else ""


class UniformPlanner:
    """Stages of consecutive ops on equal devices, balanced by estimated work."""

    def num_ranks(self, shape: Shape) -> int:
        """Return S x G."""
        return Placement.grid(shape.stages, shape.shards).num_ranks

    def plan(self, request: PlanRequest) -> Plan:
        """Return S stages of G ranks each; ``InputError`` if the model has too few cuts."""
        model, shape = request.model, request.shape
        cuts = model.cuts
        if shape.stages > len(cuts) + 1:
            raise InputError(
                f"--stages {shape.stages}: {model.name} can be cut in {len(cuts)} places"
                f"{_tied_weights(model)}; try --stages {len(cuts) + 1} or more --shards"
            )
        crossing = model.crossing()
        costs = op_costs(model, request.graph)
        runs = split_evenly(costs, shape.stages, cuts, [crossing[cut] for cut in cuts])
        ranks = Placement.grid(shape.stages, shape.shards).stages
        stages = (StagePlan.even(tuple(range(*run)), r) for run, r in zip(runs, ranks, strict=True))
        return Plan(
            tuple(stages),
            shape.chunks,
            EXACT_SCHEDULE if shape.is_exact and shape.chunks > 1 else shape.schedule,
            ways=_ways(model, shape),
        )


def _ways(model: ModelGraph, shape: Shape) -> dict[int, RowWay]:
    """Return the way of the shape for each op that can use it; ``InputError`` if no op can."""
    way = shape.row_way
    if way is RowWay.HALO or shape.shards == 1:
        return {}
    reasons = {i: op.reason_against(way) for i, op in enumerate(model.ops) if op.aggregates}
    found: dict[int, RowWay] = {i: way for i, reason in reasons.items() if not reason}
    if found:
        return found
    fault = "has no aggregation"
    if reasons:
        op, reason = next(iter(reasons.items()))
        fault = f"op {op} ({model.ops[op].name}) {reason}"
    raise InputError(f"--row-way {way}: {model.name}: {fault}; try --row-way halo")


PLANNERS.add("uniform", UniformPlanner())
