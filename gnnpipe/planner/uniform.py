"""The plan for equal devices: runs of consecutive ops, split so that the slowest is least.

The cost of an op is its multiply-adds: dense products per vertex, one multiply-add per edge and
column, the encoder by the entries of the features. GNNPipe splits layers the same way:
arXiv 2308.10087, released code.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from gnnpipe.plan import ModelGraph, Plan

__all__ = ["op_costs", "plan_uniform", "split_evenly"]


def op_costs(
    model: ModelGraph, num_vertices: int, num_edges: int, feature_entries: int
) -> list[float]:
    """Floating-point operations of each op, forward; ``feature_entries`` are the stored ones."""
    return [
        float(
            op.flops_per_row * num_vertices
            + op.flops_per_feature * feature_entries
            + 2 * op.push_width * num_edges
        )
        for op in model.ops
    ]


def split_evenly(costs: list[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Cut the costs into runs, none empty, so that the largest sum is least.

    >>> split_evenly([1.0, 1.0, 1.0, 3.0], 2)
    ((0, 3), (3, 4))
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    @cache
    def best(last: int, parts: int) -> tuple[float, int]:
        """Least largest sum over ops 0..last-1 in ``parts`` runs, and where the last begins."""
        if parts == 1:
            return total[last], 0
        return min(
            (max(best(cut, parts - 1)[0], total[last] - total[cut]), cut)
            for cut in range(parts - 1, last)
        )

    cuts = [len(costs)]
    for parts in range(stages, 0, -1):
        cuts.append(best(cuts[-1], parts)[1])
    cuts.reverse()
    return tuple(pairwise(cuts))


def plan_uniform(
    model: ModelGraph,
    *,
    stages: int,
    shards: int,
    chunks: int,
    exact: bool,
    num_vertices: int,
    num_edges: int,
    feature_entries: int,
) -> Plan:
    """S x G x K for equal devices; ``exact`` asks for the order that reads nothing stale."""
    costs = op_costs(model, num_vertices, num_edges, feature_entries)
    runs = split_evenly(costs, stages)
    return Plan(
        stages=runs,
        steps=tuple(model.num_steps(*run) for run in runs),
        shards=shards,
        chunks=chunks,
        schedule="layer-sync" if exact and chunks > 1 else "fill-drain",
        transfers=model.transfers(runs),
    )
