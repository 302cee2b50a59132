"""Chooses how many steps are recomputed together (``--recompute-every``), so that a run fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnpipe.setup.prepared import Prepared


def recomputing(prepared: Prepared, every: int) -> Prepared:
    """Returns the run with ``--recompute --recompute-every`` n."""
    return replace(prepared, config=replace(prepared.config, recompute=True, recompute_every=every))


def fastest_that_fits(
    prepared: Prepared, bytes_of: Callable[[Prepared], int], capacity_bytes: int
) -> int | None:
    """Returns the n with the least recomputation among those that fit; ``None`` if none fits.

    Of several n that cost as many passes, the one that takes least memory.

    Args:
        prepared: The run.
        bytes_of: Returns the memory of a run.
        capacity_bytes: The memory there is.
    """
    graph = prepared.model_graph
    num_steps = max(graph.num_steps(stage.ops) for stage in prepared.plan.stages)
    for level in _levels(num_steps):
        sizes = [(bytes_of(recomputing(prepared, every)), every) for every in level]
        size_bytes, every = min(sizes, default=(capacity_bytes + 1, 0))
        if size_bytes <= capacity_bytes:
            return every
    return None


def _levels(num_steps: int) -> Iterator[list[int]]:
    """Yields numbers of steps that are recomputed together, by the passes that they cost."""
    yield [1]  # does not aggregate again
    powers = [2**i for i in range(1, num_steps.bit_length())]
    root = max(math.ceil(math.sqrt(num_steps)), 2)
    yield [root, *(every for every in powers if every > root)]  # one level of ``Segments``
    yield [every for every in powers if every < root]  # two levels
