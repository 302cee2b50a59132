"""Aggregated features are the same in every epoch: where nothing hinders, they are made once.

A linear first layer can be computed as A (x W) or as (A x) W. The first is what chunks and shards
need: rows as wide as the model are pushed, whatever the features (adr 0006). A single shard that
reads nothing stale has no table to push to, and can keep A x.
"""

from __future__ import annotations

from gnnpipe.plan.model_graph import ModelGraph
from gnnpipe.plan.plan import Plan

__all__ = ["made_once"]


def made_once(model: ModelGraph, plan: Plan, rounds_rows: bool) -> frozenset[str]:
    """The ops whose aggregation is made once for all epochs.

    ``rounds_rows``: the tables have fewer bits, which other shapes would show and this one not.
    """
    if plan.shards > 1 or plan.reads_stale or rounds_rows:
        return frozenset()
    return frozenset(op.name for op in model.ops if op.of_features)
