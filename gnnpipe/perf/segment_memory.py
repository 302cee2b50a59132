"""Counts the tensor entries that a stage keeps until backward if it recomputes in segments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gnnpipe.plan import ModelGraph, Segments


@dataclass(frozen=True)
class InputNumbers:
    """Tensor entries of one op: as an input of later steps, and while its step is recomputed.

    The caller decides whose rows are counted: those of one chunk, or of several.
    """

    first: int
    """First step whose inputs contain the op's rows: its own step for aggregated rows, else the
    next one."""
    last: int
    """Last step whose inputs contain them."""
    step: int
    """Step in which the op ends."""
    inputs: int
    """Entries that are kept once if any step from ``first`` to ``last`` keeps its inputs."""
    whole: int
    """Entries that autograd saves from the recomputation of the op until its backward."""


def input_numbers(
    model: ModelGraph, ops: Sequence[int], inputs: Mapping[str, int], whole: Mapping[str, int]
) -> list[InputNumbers]:
    """Return one ``InputNumbers`` for each of a stage's ``ops``.

    Args:
        model: The model.
        ops: Positions of the stage's ops in the model, ascending.
        inputs: Field ``inputs`` by name of the op.
        whole: Field ``whole`` by name of the op.
    """
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
    """Return the entries that are kept between forward and backward of the counted rows."""
    return _inputs_of(ops, [*segments.kept])


def most_in_backward(ops: Sequence[InputNumbers], segments: Segments) -> int:
    """Return the most entries held at once in backward: inputs, and one recomputed segment.

    While a segment is recomputed, backward holds two kinds of inputs: those that forward kept for
    the segments up to this one, and those of the segments from the last of these to this one, which
    the outer recomputation made.
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
    """Return the entries of the inputs of these ascending ``steps``; a shared input counts once."""
    found = 0
    for op in ops:
        place = bisect_left(steps, op.first)
        found += op.inputs * (place < len(steps) and steps[place] <= op.last)
    return found
