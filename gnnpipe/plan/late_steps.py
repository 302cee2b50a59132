"""Steps of a stage in which ops run: as late as their readers allow, if that carries no more."""

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

    GCNII's ``alpha * x_0`` of each layer could run in the first step. Then a value for every layer
    would pass from step to step; run with its layer, only x_0 does.

    Args:
        earliest: By op in topological order, the longest chain of aggregations up to the op.
        readers: The ops, in other stages too, that read an op's value.
        aggregates: Whether an op aggregates; its rows are pushed one step before.
        may_wait: Whether an op is row-wise, and reads one value that has no more numbers than its
            own and that other row-wise ops read as well.
    """
    found = dict(earliest)
    for op in reversed(earliest):
        uses = [found[r] - aggregates(r) if r in found else -1 for r in readers(op)]
        # A value that leaves the stage, or the model, would pass through the later steps anyway.
        if uses and may_wait(op):
            found[op] = max(found[op], min(uses))
    return found
