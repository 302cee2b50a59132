"""Buckets of the gradient sum: which weights are added up together, and how early they can be.

Backward ends a stage's weights step by step, the last ones first; their sum over the shards can
travel under the steps that are left (wait-free backpropagation: Poseidon, arXiv 1706.03292; the
S-SGD model of Shi et al., arXiv 1805.03812). Small buckets leave early, and each costs a start.
"""

from __future__ import annotations

from gnnpipe.plan.model_graph import ModelGraph
from gnnpipe.plan.plan import Plan

__all__ = ["BUCKET_BYTES", "gradient_buckets", "gradient_steps", "op_gradient_steps"]

BUCKET_BYTES = 1 << 18
"""What a shard sends at once of gradients that are worth a sum of their own: enough for exchanges
that go up and down (docs/adr/0021)."""


def gradient_steps(model: ModelGraph, first: int, last: int) -> dict[str, int]:
    """Of a stage of ops first..last-1, by weight: the step behind whose backward it is whole.

    Backward walks the steps from the last to the first; a weight that several calls share is whole
    behind the first step that uses it.
    """
    found: dict[str, int] = {}
    for op, depth in zip(model.ops[first:last], model.depths(first, last), strict=True):
        # In front of its push it may have weights, too.
        step = depth - op.aggregates
        for name in op.weights:
            found[name] = min(step, found.get(name, step))
    return found


def gradient_buckets(model: ModelGraph, plan: Plan, number_bytes: int) -> list[tuple[int, ...]]:
    """By stage, the steps that its buckets begin with, ascending from 0; one where G is 1."""
    if plan.shards == 1:
        return [(0,)] * plan.num_stages
    return [_of_stage(model, run, number_bytes, plan.shards) for run in plan.stages]


def op_gradient_steps(model: ModelGraph, first: int, last: int) -> list[int]:
    """By op of the stage: the step behind whose backward its weights are whole."""
    steps = gradient_steps(model, first, last)
    return [min((steps[name] for name in op.weights), default=0) for op in model.ops[first:last]]


def _of_stage(
    model: ModelGraph, run: tuple[int, int], number_bytes: int, shards: int
) -> tuple[int, ...]:
    sizes = [0] * model.num_steps(*run)
    for op, step in zip(model.ops[slice(*run)], op_gradient_steps(model, *run), strict=True):
        sizes[step] += op.num_parameters * number_bytes
    begins, size = [], 0
    for step in reversed(range(1, len(sizes))):
        size += sizes[step]
        if size // shards * (shards - 1) >= BUCKET_BYTES:
            begins.append(step)
            size = 0
    return (0, *reversed(begins))
