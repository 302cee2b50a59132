"""Numbers that a stage keeps until backward if its steps are recomputed in segments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gnnpipe.plan import ModelGraph, Segments


@dataclass(frozen=True)
class InputNumbers:
    """Numbers of one op in one chunk, as input of steps and while its step runs again."""

    first: int
    """First step that reads the op's rows as an input: its aggregated rows, or its value."""
    last: int
    """Last step that reads them."""
    step: int
    """Step in which the op ends."""
    inputs: int
    """Numbers that are kept if one of the steps from ``first`` to ``last`` keeps its inputs."""
    whole: int
    """Numbers that autograd keeps from the time the op runs again until its backward."""


def input_numbers(
    model: ModelGraph, ops: Sequence[int], inputs: Mapping[str, int], whole: Mapping[str, int]
) -> list[InputNumbers]:
    """Return the numbers of a stage's ``ops``; ``inputs`` and ``whole`` by name of the op."""
    step = dict(zip(ops, model.depths(ops), strict=True))
    last = max(step.values(), default=0)
    found = []
    for i in ops:
        op, uses = model.ops[i], [step[i]]
        for reader in model.readers[i]:
            # A value that leaves the stage passes through all its steps.
            uses.append(step[reader] - model.ops[reader].aggregates if reader in step else last)
        first = step[i] + (not op.aggregates)
        found.append(InputNumbers(first, max(uses), step[i], inputs[op.name], whole[op.name]))
    return found


def kept_by_forward(ops: Iterable[InputNumbers], segments: Segments) -> int:
    """Return the numbers of one chunk that are kept between its forward and its backward."""
    return _inputs_of(ops, [*segments.kept])


def most_in_backward(ops: Sequence[InputNumbers], segments: Segments) -> int:
    """Return the most numbers of one chunk at once in its backward: inputs and one segment.

    Before a segment runs again, backward has the inputs of the segments that forward kept, up to
    this one, and those of the segments between the last kept one and this one.
    """
    whole = [0] * segments.num_steps
    for op in ops:
        whole[op.step] += op.whole
    most = 0
    for first in range(0, segments.num_steps, segments.every):
        outer = first - first % segments.outer
        held = [*range(0, outer, segments.outer), *range(outer, first + 1, segments.every)]
        most = max(most, _inputs_of(ops, held) + sum(whole[first : first + segments.every]))
    return most


def _inputs_of(ops: Iterable[InputNumbers], steps: Sequence[int]) -> int:
    """Return the numbers that the inputs of these ascending steps have; shared ones count once."""
    found = 0
    for op in ops:
        place = bisect_left(steps, op.first)
        found += op.inputs * (place < len(steps) and steps[place] <= op.last)
    return found
