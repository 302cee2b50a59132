"""Steps of a stage in which ops run: as late as their readers allow, if no more is carried."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Op = TypeVar("Op", bound=Hashable)


def late_steps(
    earliest: dict[Op, int],
    readers: Callable[[Op], Iterable[Op]],
    aggregates: Callable[[Op], bool],
    may_wait: Callable[[Op], bool],
) -> dict[Op, int]:
    """Return the step in which each op of a stage runs.

    If every layer adds ``alpha * x_0``, all these products could run in the first step. Then one
    value for each layer would be carried from step to step. If each product runs with its layer,
    only x_0 is carried.

    Args:
        earliest: First possible step by op, in topological order: the number of aggregations on the
            longest path to the op inside the stage.
        readers: Returns the ops that read an op's value, also those of other stages.
        aggregates: Whether an op aggregates. The rows that it aggregates are pushed at the end of
            the step before its own.
        may_wait: Whether an op may run later than ``earliest``: it is row-wise and reads a single
            value, which is not wider than its own, and which other row-wise ops read, too.

    Returns:
        Step by op, in the order of ``earliest``.
    """
    found = dict(earliest)
    for op in reversed(earliest):
        uses = [found[r] - aggregates(r) if r in found else -1 for r in readers(op)]
        # A value that leaves the stage, or the model, would pass through the later steps anyway.
        if uses and may_wait(op):
            found[op] = max(found[op], min(uses))
    return found
