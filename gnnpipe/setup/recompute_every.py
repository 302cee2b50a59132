"""Chooses how many steps are recomputed together (``--recompute-every``), so that a run fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnpipe.config import TrainConfig
from gnnpipe.output import human_bytes, warn
from gnnpipe.plan import ModelGraph, Plan

GROWTH = 1.4
"""The most that the memory of a process grew by, over its estimate (docs/how-to)."""


def recomputing(config: TrainConfig, every: int) -> TrainConfig:
    """Returns the settings with ``--recompute --recompute-every`` n."""
    return replace(config, recompute=True, recompute_every=every)


def fastest_that_fits(
    model: ModelGraph, plan: Plan, bytes_of: Callable[[int], int], capacity_bytes: int
) -> tuple[int, int]:
    """Returns the n with the least recomputation among those that fit, and its memory.

    Of several n that cost as many passes, the one that takes least memory; if none fits, the n
    that takes least memory of all.

    Args:
        model: The ops.
        plan: The plan.
        bytes_of: Returns the memory of a rank, the largest, by n.
        capacity_bytes: The memory there is.
    """
    best: list[tuple[int, int]] = []
    for level in _levels(max(model.num_steps(stage.ops) for stage in plan.stages)):
        if level:
            best.append(min((bytes_of(every), every) for every in level))
            if best[-1][0] <= capacity_bytes:
                break
    else:
        best.sort(reverse=True)
    size_bytes, every = best[-1]
    return every, size_bytes


def settle_recompute_every(
    config: TrainConfig,
    model: ModelGraph,
    plan: Plan,
    bytes_of: Callable[[TrainConfig], int],
    memory_bytes: int,
    *,
    warns: bool = True,
) -> TrainConfig:
    """Returns the settings with the n that ``--recompute-every 0`` leaves open.

    Warns if no n fits by estimate; the n is then the one that takes least memory.

    Args:
        config: The settings.
        model: The ops.
        plan: The plan.
        bytes_of: Returns the estimate of the largest rank for settings with an n.
        memory_bytes: The memory of the smallest device; an estimate may grow by ``GROWTH``.
        warns: Whether this rank warns.
    """
    if config.recompute_every:
        return config
    capacity_bytes = int(memory_bytes / GROWTH)
    every, size_bytes = fastest_that_fits(
        model, plan, lambda n: bytes_of(recomputing(config, n)), capacity_bytes
    )
    if warns and size_bytes > capacity_bytes:
        warn(
            f"--recompute-every 0: no number fits into memory by estimate; {every} takes least, "
            f"{human_bytes(size_bytes)} for a rank, which may grow to "
            f"{human_bytes(GROWTH * size_bytes)}, of {human_bytes(memory_bytes)}; it is used; try "
            "a smaller --hidden, or more --stages or --shards on more machines"
        )
    return recomputing(config, every)


def _levels(num_steps: int) -> Iterator[list[int]]:
    """Yields numbers of steps that are recomputed together, by the passes that they cost."""
    yield [1]  # does not aggregate again
    powers = [2**i for i in range(1, num_steps.bit_length())]
    root = max(math.ceil(math.sqrt(num_steps)), 2)
    yield [root, *(every for every in powers if every > root)]  # one level of ``Segments``
    yield [every for every in powers if every < root]  # two levels
