"""The plan for equal devices: runs of consecutive ops, split so that the slowest is least.

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
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from gnnpipe.errors import InputError
from gnnpipe.plan import ALL_ROWS, LossRows, ModelGraph, Op, Plan
from gnnpipe.plan.model_graph import EDGE_FLOPS, KEPT_FLOPS

__all__ = ["op_costs", "plan_uniform", "split_evenly"]


def op_costs(
    model: ModelGraph,
    num_vertices: Mapping[str, int],
    num_edges: Mapping[str, int],
    feature_entries: Mapping[str, int],
    loss_rows: LossRows = ALL_ROWS,
) -> list[float]:
    """What each op takes, in floating-point operations of a dense product.

    By the type of the vertices, '' if there is but one: how many there are, how many edges lead
    into them (of all relations, a bound where there are several; or how many pairs are scored), and
    the stored features. ``loss_rows``: of the whole graph.
    """
    return [
        _cost(op, num_vertices, num_edges, loss_rows)
        + float(op.flops_per_feature * feature_entries.get(op.vertex_type, 0))
        for op in model.ops
    ]


def _cost(
    op: Op, num_vertices: Mapping[str, int], num_edges: Mapping[str, int], loss_rows: LossRows
) -> float:
    """Without its features."""
    made = loss_rows.rows_of(op.name, num_vertices[op.vertex_type])
    scored = num_edges[op.pushed_type] if op.over_pairs else made
    read = loss_rows.edges if op.name in loss_rows.ops else _read(op, num_vertices, num_edges)
    return float(
        op.flops_per_row * scored
        + EDGE_FLOPS * op.push_width * read
        + KEPT_FLOPS * op.kept_per_row * made
    )


def _read(op: Op, num_vertices: Mapping[str, int], num_edges: Mapping[str, int]) -> int:
    """Rows that an op reads, each as often as it is read."""
    if op.is_mean:
        return num_vertices[op.vertex_type]
    return num_edges[op.pushed_type if op.over_pairs else op.vertex_type]


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


def plan_uniform(
    model: ModelGraph,
    *,
    stages: int,
    shards: int,
    chunks: int,
    exact: bool,
    num_vertices: Mapping[str, int],
    num_edges: Mapping[str, int],
    feature_entries: Mapping[str, int],
    loss_rows: LossRows = ALL_ROWS,
) -> Plan:
    """S x G x K for equal devices; ``exact`` asks for the order that reads nothing stale.

    The counts are those of ``op_costs``. ``InputError`` if the model cannot be cut into so many
    stages.
    """
    cuts = model.cuts
    if stages > len(cuts) + 1:
        raise InputError(
            f"--stages {stages}: {model.name} can be cut in {len(cuts)} places ({_shared(model)}"
            "weights that several calls share must stay on one stage); "
            f"try --stages {len(cuts) + 1} or more --shards"
        )
    costs = op_costs(model, num_vertices, num_edges, feature_entries, loss_rows)
    crossing = model.crossing()
    runs = split_evenly(costs, stages, cuts, [crossing[cut] for cut in cuts])
    return Plan(
        stages=runs,
        steps=tuple(model.num_steps(*run) for run in runs),
        shards=shards,
        chunks=chunks,
        schedule="layer-sync" if exact and chunks > 1 else "fill-drain",
        transfers=model.transfers(runs),
    )
