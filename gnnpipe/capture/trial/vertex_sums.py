"""Finds sums over all vertices in a recording and lets the runtime add them up over the chunks.

A call such as ``x.mean(0)`` or ``k.t() @ v`` has no row for each vertex. On the sample, it is a sum
over the vertices if its value on all rows is the sum of its values on two parts of the rows; a mean
and a Euclidean norm are recognised likewise. Each chunk then computes the call on its own rows, the
runtime adds the chunks' values, and every later call reads the total.

The number of all vertices, ``x.size(0)``, is replaced where a call gives other rows with the number
of a chunk's rows.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

from gnnpipe.capture.markers import aggregate, num_vertices, of_all
from gnnpipe.graph.operators import SUM


class SumKind(Enum):
    """How the values of parts of the rows make up the value of all rows."""

    CONSTANT = auto()
    """The value does not depend on the rows."""
    SUM = auto()
    MEAN = auto()
    """A mean over the rows."""
    NORM = auto()
    """The root of a sum of squares."""


def sum_kind(value: Any, halves: Sequence[Any], counts: Sequence[int]) -> SumKind | None:
    """The kind of a value without rows; None if it is no sum over the vertices.

    ``halves``: values of two parts of the rows; ``counts``: numbers of rows of the parts.
    """
    every = [value, *halves]
    if not all(isinstance(v, Tensor) and v.shape == value.shape for v in every):
        return None
    if all(torch.equal(value, half) for half in halves):
        return SumKind.CONSTANT
    if not value.is_floating_point():
        return None

    def is_close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, 1e-9, 1e-12)

    one, two = halves
    if is_close(value, one + two):
        return SumKind.SUM
    if is_close(value * sum(counts), one * counts[0] + two * counts[1]):
        return SumKind.MEAN
    if is_close(value.square(), one.square() + two.square()) and bool((value >= 0).all()):
        return SumKind.NORM
    return None


def add_over_chunks(call: fx.Node, kind: SumKind, rows: fx.Node, count: fx.Node) -> list[fx.Node]:
    """Insert the calls that add a call's values over the chunks; later calls read their result.

    Args:
        call: Computed on the rows of each chunk.
        kind: SUM, MEAN or NORM.
        rows: A value with one row for each vertex that ``call`` reads.
        count: The number of all vertices.

    Returns:
        The new calls that are also computed on the rows of each chunk, in order.
    """
    graph, made = call.graph, list[fx.Node]()
    readers = list(call.users)

    def add(function: Any, *args: Any, method: bool = False, **kwargs: Any) -> fx.Node:
        with graph.inserting_after(made[-1] if made else call):
            create = graph.call_method if method else graph.call_function
            new = create(function, args, kwargs)
        new.stack_trace = call.stack_trace
        made.append(new)
        return new

    part = call
    if kind is SumKind.MEAN:
        part = add(operator.mul, call, add("size", rows, 0, method=True))
    elif kind is SumKind.NORM:
        part = add(torch.square, call)
    of_chunks = list(made)
    total = add(of_all, add(aggregate, part, structure=SUM, observed_by=""))
    if kind is SumKind.MEAN:
        total = add(operator.truediv, total, count)
    elif kind is SumKind.NORM:
        total = add(torch.sqrt, total)
    for reader in readers:
        reader.replace_input_with(call, total)
    return of_chunks


def count_node(call: fx.Node, vertex_type: str, count: int) -> fx.Node:
    """Insert, before a call, the number ``count`` of all vertices of a type."""
    with call.graph.inserting_before(call):
        return call.graph.call_function(
            num_vertices, (), {"vertex_type": vertex_type, "count": count}
        )


def for_all_vertices(
    number: fx.Node, values: Mapping[fx.Node, Any], bases: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    """Insert a copy of a number's calls that counts all vertices; the last one is the number.

    ``values``: values on all rows; ``bases``: the new number of vertices, by the calls that count
    the rows.
    """
    made: list[fx.Node] = []
    new = dict(bases)

    def copied(call: fx.Node) -> fx.Node:
        if call not in new:
            numbers = [s for s in call.all_input_nodes if isinstance(values[s], int | float)]
            sources = {source: copied(source) for source in numbers}
            with call.graph.inserting_after(made[-1] if made else number):
                new[call] = call.graph.node_copy(call, lambda s: sources.get(s, s))
            made.append(new[call])
        return new[call]

    copied(number)
    return made
