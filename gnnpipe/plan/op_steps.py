"""Assigns each op of a stage to one of the stage's steps.

Row-wise ops that share a source run as late as their readers allow, so that fewer values are
carried from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

Op = TypeVar("Op", bound=Hashable)


def op_steps(
    ops: Iterable[Op],
    sources: Callable[[Op], Sequence[Op]],
    readers: Callable[[Op], Iterable[Op]],
    aggregates: Callable[[Op], bool],
    is_row_wise: Callable[[Op], bool],
    width: Callable[[Op], int],
) -> dict[Op, int]:
    """Return the step in which each op of a stage runs.

    The first possible step of an op is the number of aggregations on the longest path to the op
    inside the stage. A row-wise op runs later, with its first reader, if it reads a single value
    that other row-wise ops read too, and that is not wider than its own. If every layer adds
    ``alpha * x_0``, all these products could run in the first step. Then one value for each layer
    would be carried from step to step. If each product runs with its layer, only x_0 is carried.

    Args:
        ops: The stage's ops in topological order.
        sources: Returns the ops whose values an op reads, also those of other stages.
        readers: Returns the ops that read an op's value, also those of other stages.
        aggregates: Whether an op aggregates. The rows that it aggregates are pushed at the end of
            the step before its own.
        is_row_wise: Whether an op computes a row of each vertex from the vertex's own rows; False
            if the op also reads features.
        width: Returns the numbers in a row of an op's values.

    Returns:
        Step by op, in the order of ``ops``.
    """
    found: dict[Op, int] = {}
    for op in ops:
        found[op] = max((found.get(s, 0) for s in sources(op)), default=0) + aggregates(op)
    for op in reversed(found):
        reading = list(readers(op))
        # A value that leaves the stage, or the model, would pass through the later steps anyway.
        if not reading or any(r not in found for r in reading):
            continue
        if not is_row_wise(op) or len(sources(op)) != 1:
            continue
        (source,) = sources(op)
        row_wise = (r for r in readers(source) if not aggregates(r))
        is_shared = len(list(islice(row_wise, 2))) > 1
        if is_shared and width(op) >= width(source):
            found[op] = max(found[op], min(found[r] - aggregates(r) for r in reading))
    return found
