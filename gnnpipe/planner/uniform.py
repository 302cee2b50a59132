"""The plan for equal devices: runs of consecutive ops, split so that the slowest is least.

The cost of an op is its multiply-adds: dense products per vertex, one multiply-add per edge and
column, the encoder by the entries of the features. GNNPipe splits layers the same way:
arXiv 2308.10087, released code. Of splits that are as fast, the one that sends least is taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from gnnpipe.errors import InputError
from gnnpipe.plan import ModelGraph, Op, Plan

__all__ = ["op_costs", "plan_uniform", "split_evenly"]


def op_costs(
    model: ModelGraph,
    num_vertices: Mapping[str, int],
    num_edges: Mapping[str, int],
    feature_entries: Mapping[str, int],
) -> list[float]:
    """Floating-point operations of each op, forward.

    By the type of the vertices, '' if there is but one: how many there are, how many edges lead
    into them (of all relations, a bound where there are several; or how many pairs are scored), and
    the stored features.
    """
    return [
        float(
            op.flops_per_row
            * (num_edges[op.pushed_type] if op.over_pairs else num_vertices[op.vertex_type])
            + op.flops_per_feature * feature_entries.get(op.vertex_type, 0)
            + 2 * op.push_width * _read(op, num_vertices, num_edges)
        )
        for op in model.ops
    ]


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
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    width = dict(zip(cuts, widths, strict=True))
    # Sums of floats in another order must not make two equal splits differ.
    slack = 1e-9 * total[-1]

    @cache
    def least(last: int, parts: int) -> float:
        """Least largest sum over ops 0..last-1 in ``parts`` runs."""
        if parts == 1:
            return total[last]
        return min(
            (max(least(cut, parts - 1), total[last] - total[cut]) for cut in cuts if cut < last),
            default=math.inf,
        )

    limit = least(len(costs), stages) + slack

    @cache
    def narrowest(last: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Least sum of widths with no run above the limit, and its cuts."""
        if parts == 1:
            return (0.0 if total[last] <= limit else math.inf), ()
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        for cut in cuts:
            if cut < last and total[last] - total[cut] <= limit:
                crossing, chosen = narrowest(cut, parts - 1)
                if crossing + width[cut] < best[0]:
                    best = crossing + width[cut], (*chosen, cut)
        return best

    return tuple(pairwise((0, *narrowest(len(costs), stages)[1], len(costs))))


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
    costs = op_costs(model, num_vertices, num_edges, feature_entries)
    runs = split_evenly(costs, stages, cuts, [model.crossing(cut) for cut in cuts])
    return Plan(
        stages=runs,
        steps=tuple(model.num_steps(*run) for run in runs),
        shards=shards,
        chunks=chunks,
        schedule="layer-sync" if exact and chunks > 1 else "fill-drain",
        transfers=model.transfers(runs),
    )
