"""Which shape fits the devices, where the one that was asked for does not.

By the even shares of the graph's numbers, so that nothing is cut for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gnnpipe.errors import InputError
from gnnpipe.profile.scenario import Scenario, memory_of_shape

__all__ = ["nearest_that_fits"]

Shape = tuple[int, int, int]
"""Stages, shards, chunks."""

MORE_CHUNKS = 64
"""Times as many chunks as asked for, at most."""


def nearest_that_fits(scenario: Scenario, room_bytes: Sequence[int]) -> Shape | None:
    """The shape of fewest ranks, then of fewest chunks, that fits; none if no shape does.

    ``room_bytes``: of every device there is, in the order of the ranks. Stages and chunks are the
    powers of 2 and what was asked for; shards any number. More shards need less memory each, so the
    least number that fits is found by bisection.
    """
    config, model, vertices = scenario.config, scenario.model, scenario.shape.vertices
    devices = len(room_bytes)

    def fits(stages: int, chunks: int, shards: int) -> bool:
        wanted = replace(config, stages=stages, shards=shards, chunks=chunks)
        try:
            takes = memory_of_shape(wanted, scenario.shape, model)
        except InputError:
            return False
        # By stage; the ranks of one take the same, and stand side by side.
        rooms = (room_bytes[s * shards : (s + 1) * shards] for s in range(stages))
        return all(size <= min(room) for size, room in zip(takes, rooms, strict=True))

    found: list[Shape] = []
    for chunks in _powers(config.chunks, min(MORE_CHUNKS * config.chunks, vertices)):
        for stages in _powers(config.stages, min(len(model.cuts) + 1, devices)):
            most = min(devices // stages, vertices // chunks)
            if shards := _least(partial(fits, stages, chunks), most):
                found.append((stages, shards, chunks))
    return min(found, key=lambda s: (s[0] * s[1], s[2], s[1]), default=None)


def _least(fits: Callable[[int], bool], most: int) -> int:
    """The least number from 1 to ``most`` that fits, 0 if that one does not."""
    if most < 1 or not fits(most):
        return 0
    low, high = 0, most  # ``high`` fits
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _powers(asked: int, most: int) -> list[int]:
    """Powers of 2, and what was asked for, up to ``most``."""
    found = {asked} if asked <= most else set()
    power = 1
    while power <= most:
        found.add(power)
        power *= 2
    return sorted(found)
