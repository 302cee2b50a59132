"""Which aggregations keep what they aggregated in the table where its gradients will be.

A row in as few as three of a layer's is saved by it. But while some gradients are not there yet,
the others have to be brought back over edges that are cut out of the whole matrix for that, anew
for each order of the chunks: of use to several layers of a stage, it is made up for by what they do
not read; of use to one, it is not (docs/adr/0028).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from gnnpipe.plan.model_graph import ModelGraph
from gnnpipe.plan.plan import Plan

__all__ = ["shared_tables"]


def shared_tables(
    model: ModelGraph, plan: Plan, once: Collection[str], asked: Collection[str], rounds_rows: bool
) -> frozenset[str]:
    """Names of their ops.

    ``once``: aggregations that are made once (``made_once``); ``asked``: ops that make the rows
    that the loss asks for, with a matrix of their own (``Asked.ops``); ``rounds_rows``: the tables
    have fewer bits, and hold nothing that is aggregated.
    """
    if plan.chunks == 1 or rounds_rows:
        return frozenset()
    found: set[str] = set()
    for first, last in plan.stages:
        alike = defaultdict(list)
        for op in model.ops[first:last]:
            if op.aggregates and op.is_linear and not op.is_mean and op.name not in once:
                alike[op.structure, op.name in asked].append(op.name)
        for names in alike.values():
            # Where nothing is stale, nothing is cut out.
            if len(names) > 1 or not plan.reads_stale:
                found.update(names)
    return frozenset(found)
