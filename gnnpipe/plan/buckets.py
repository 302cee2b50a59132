"""Buckets of the gradient sum over the shards: which gradients are summed together, and when.

Backward completes the gradients of a stage step by step, the last step first. A bucket is summed
while the remaining steps compute (wait-free backpropagation: Poseidon, arXiv 1706.03292; the S-SGD
model of Shi et al., arXiv 1805.03812). A small bucket can start early, but every bucket has a fixed
cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnnpipe.collectives import LARGE_BYTES
from gnnpipe.plan.model_graph import ModelGraph
from gnnpipe.plan.plan import Plan

BUCKET_BYTES = LARGE_BYTES
"""Least bytes that a shard sends for a bucket (the bucket of step 0 may be smaller): from this size
on, an all-to-all is split into two that run at once (docs/adr/0021)."""


def gradient_steps(model: ModelGraph, ops: Sequence[int]) -> dict[str, int]:
    """Return the step after whose backward each weight's gradient is complete in a stage.

    Backward runs the steps in reverse, so a shared weight is complete after the first step that
    uses it.
    """
    found: dict[str, int] = {}
    for op, depth in zip(model.select(ops), model.depths(ops), strict=True):
        # The op may also use its weights before its push, in the step before.
        step = depth - op.aggregates
        for name in op.weights:
            found[name] = min(step, found.get(name, step))
    return found


def gradient_buckets(model: ModelGraph, plan: Plan, number_bytes: int) -> list[tuple[int, ...]]:
    """Return for each stage the first steps of its buckets, ascending from 0; (0,) if G = 1."""
    return [
        _stage_buckets(model, stage.ops, number_bytes, stage.shards) if stage.shards > 1 else (0,)
        for stage in plan.stages
    ]


def op_gradient_steps(model: ModelGraph, ops: Sequence[int]) -> list[int]:
    """Return the step after whose backward the gradients of each op's weights are complete."""
    steps = gradient_steps(model, ops)
    return [min((steps[name] for name in op.weights), default=0) for op in model.select(ops)]


def _stage_buckets(
    model: ModelGraph, ops: Sequence[int], number_bytes: int, shards: int
) -> tuple[int, ...]:
    sizes = [0] * model.num_steps(ops)
    for op, step in zip(model.select(ops), op_gradient_steps(model, ops), strict=True):
        sizes[step] += op.num_parameters * number_bytes
    begins, size = [], 0
    for step in reversed(range(1, len(sizes))):
        size += sizes[step]
        if size // shards * (shards - 1) >= BUCKET_BYTES:
            begins.append(step)
            size = 0
    if begins and size + sizes[0] == 0:
        begins.pop()  # no weights are left for the bucket of step 0
    return (0, *reversed(begins))
