"""The ways in which the rows of an aggregation travel among the shards of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate


class RowWay(StrEnum):
    """How the shards of a stage get what an aggregation reads; chosen op by op (``Plan.ways``)."""

    HALO = "halo"
    """Each shard gets exactly the rows that its own rows read."""
    GATHER = "gather"
    """Each shard sends all of its rows to all others. Never fewer bytes than by halo, but it does
    not depend on the edges, which may differ in every epoch."""
    COLUMNS = "columns"
    """All-to-all from rows to columns: each shard gets its columns of all rows, multiplies them
    with the matrix of the whole graph, and an all-to-all brings the rows back (NeutronTP). For
    products with a fixed matrix, in exact programs."""


def column_bounds(width: int, shares: Sequence[float]) -> list[int]:
    """Return the first column of each shard, and ``width``, [G + 1].

    A shard gets its share of the columns, because work and bytes grow with them. It may get none.

    >>> column_bounds(8, [0.5, 0.5]), column_bounds(7, [1 / 3, 2 / 3])
    ([0, 4, 8], [0, 2, 7])
    """
    ends = [round(width * total) for total in accumulate(shares)]
    return [0, *ends[:-1], width]
