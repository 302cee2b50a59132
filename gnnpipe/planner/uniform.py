"""Plans for equal devices: runs of consecutive ops, so that the slowest stage takes least.

The cost of an op is told in floating-point operations: those of its dense products, of the encoder
by the entries of the features, and what reading a neighbour's number and passing over a row's take
of them, by measurement (docs/benchmarks/op_costs.md). GNNPipe splits layers in the same way by
operations alone: arXiv 2308.10087, released code. Of splits that are as fast, the one that sends
least is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

from gnnpipe.errors import InputError
from gnnpipe.plan import ModelGraph, Op, Plan, StagePlan
from gnnpipe.plan.model_graph import EDGE_FLOPS, KEPT_FLOPS
from gnnpipe.plan.placement import Placement
from gnnpipe.planner.request import PLANNERS, GraphCounts, PlanRequest, Shape
from gnnpipe.schedule import EXACT_SCHEDULE

__all__ = ["UniformPlanner", "op_costs", "split_evenly"]


def op_costs(model: ModelGraph, graph: GraphCounts) -> list[float]:
    """The work of each op, in floating-point operations of a dense product.

    Edges count for the type of the vertices that they lead into, of all relations together (an
    upper bound in a graph of several relations).
    """
    return [
        _cost(op, graph)
        + float(op.flops_per_feature * graph.feature_entries.get(op.vertex_type, 0))
        for op in model.ops
    ]


def _cost(op: Op, graph: GraphCounts) -> float:
    """The work of an op without that of its features."""
    made = graph.loss_rows.rows_of(op.name, graph.num_vertices[op.vertex_type])
    scored = graph.num_edges[op.pushed_type] if op.over_pairs else made
    read = graph.loss_rows.edges if op.name in graph.loss_rows.ops else _read(op, graph)
    return float(
        op.flops_per_row * scored
        + EDGE_FLOPS * op.push_width * read
        + KEPT_FLOPS * op.kept_per_row * made
    )


def _read(op: Op, graph: GraphCounts) -> int:
    """Rows that an op reads, each counted as often as it is read."""
    if op.is_mean:
        return graph.num_vertices[op.vertex_type]
    return graph.num_edges[op.pushed_type if op.over_pairs else op.vertex_type]


def split_evenly(
    costs: Sequence[float], stages: int, cuts: Sequence[int], widths: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Cut the costs into runs, none empty, so that the largest sum is least.

    ``cuts``: ops in front of which a run may begin, ascending, and the ``widths`` that cross there;
    of equally good splits the one with the least sum of widths is taken.

    >>> split_evenly([1.0, 1.0, 1.0, 3.0], 2, [1, 2, 3], [8, 8, 8])
    ((0, 3), (3, 4))
    """
    total = list(accumulate(costs, initial=0.0))
    # Sums of floats in another order must not make two equal splits differ.
    limit = _least_limit(total, stages, cuts) + 1e-9 * total[-1]
    return tuple(pairwise((0, *_narrowest(total, stages, cuts, widths, limit), len(costs))))


def _least_limit(total: Sequence[float], stages: int, cuts: Sequence[int]) -> float:
    """The least largest sum, to a part in 10^12: halving between what cannot be and what can.

    That at most so many runs do is enough: cutting one in two makes no sum larger.
    """
    ends = [*cuts, len(total) - 1]
    at = [total[end] for end in ends]
    low, high = 0.0, total[-1]
    while high - low > 1e-12 * total[-1]:
        limit = (low + high) / 2
        begin, runs = 0.0, 0
        while begin < total[-1] and runs <= stages:
            # The longest run that the limit allows.
            i = bisect_right(at, begin + limit) - 1
            if i < 0 or at[i] <= begin:
                runs = stages + 1
                break
            begin, runs = at[i], runs + 1
        low, high = (limit, high) if runs > stages else (low, limit)
    return high


def _narrowest(
    total: Sequence[float], stages: int, cuts: Sequence[int], widths: Sequence[int], limit: float
) -> tuple[int, ...]:
    """The cuts into exactly ``stages`` runs, none above the limit, whose widths sum to least.

    One pass over the cuts for each stage: those that a run may have begun at slide along.
    """
    ends = [*cuts, len(total) - 1]
    before = [0.0 if total[end] <= limit else math.inf for end in ends]
    chosen: list[list[int]] = []
    for _ in range(stages - 1):
        now, came = [math.inf] * len(ends), [-1] * len(ends)
        # Indices into ``cuts``, least sum first; of equal ones the first.
        window: deque[int] = deque()
        for i, end in enumerate(ends):
            if i:
                added = before[i - 1] + widths[i - 1]
                while window and before[window[-1]] + widths[window[-1]] > added:
                    window.pop()
                window.append(i - 1)
            while window and total[end] - total[cuts[window[0]]] > limit:
                window.popleft()
            if window:
                now[i], came[i] = before[window[0]] + widths[window[0]], window[0]
        chosen.append(came)
        before = now
    place, found = len(ends) - 1, []
    for came in reversed(chosen):
        place = came[place]
        found.append(cuts[place])
    return tuple(reversed(found))


def _shared(model: ModelGraph) -> str:
    """Some weights that several ops use, for a person."""
    uses = Counter(name for op in model.ops for name in set(op.weights))
    names = [name for name, count in uses.items() if count > 1]
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: " if names else ""


class UniformPlanner:
    """Stages of consecutive ops on equal devices, balanced by estimated work."""

    def num_ranks(self, shape: Shape) -> int:
        """S * G."""
        return Placement.grid(shape.stages, shape.shards).num_ranks

    def plan(self, request: PlanRequest) -> Plan:
        """S stages of G ranks each; ``InputError`` if the model cannot be cut into S stages."""
        model, shape = request.model, request.shape
        cuts = model.cuts
        if shape.stages > len(cuts) + 1:
            raise InputError(
                f"--stages {shape.stages}: {model.name} can be cut in {len(cuts)} places "
                f"({_shared(model)}weights that several calls share must stay on one stage); "
                f"try --stages {len(cuts) + 1} or more --shards"
            )
        crossing = model.crossing()
        costs = op_costs(model, request.graph)
        runs = split_evenly(costs, shape.stages, cuts, [crossing[cut] for cut in cuts])
        ops = [tuple(range(*run)) for run in runs]
        ranks = Placement.grid(shape.stages, shape.shards).stages
        return Plan(
            tuple(
                StagePlan.even(own, model.num_steps(own), of)
                for own, of in zip(ops, ranks, strict=True)
            ),
            shape.chunks,
            EXACT_SCHEDULE if shape.is_exact and shape.chunks > 1 else "fill-drain",
            model.transfers(ops),
        )


PLANNERS.add("uniform", UniformPlanner())
