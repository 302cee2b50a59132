"""Parts of a chunk, so that every shard of every stage is a run of parts.

Stages may have different numbers of shards, and different shares of the rows. All stages number
the rows alike: a chunk is cut into parts where a shard of any stage ends, and a shard of a stage
owns consecutive parts. Two stages of equal shares own the same rows by shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_SAME = 0.01
"""Ends of shards that differ by less than this part of the smallest share are one end."""


@dataclass(frozen=True)
class ShardSplit:
    """P parts of every chunk, and the shards that consist of them."""

    shares: tuple[float, ...]
    """[P], the part of the work of a chunk; the shares sum to 1."""
    bounds: tuple[tuple[int, ...], ...]
    """By stage [G + 1], the first part of each shard, and P."""

    @classmethod
    def of(cls, stage_shares: Sequence[Sequence[float]]) -> ShardSplit:
        """Return the fewest parts for the shares [G] of every stage.

        >>> ShardSplit.of([(0.5, 0.5), (0.25, 0.25, 0.5)]).bounds
        ((0, 2, 3), (0, 1, 2, 3))
        """
        ends_by_stage = [[*accumulate(shares)][:-1] for shares in stage_shares]
        ends: list[float] = []
        least = _SAME * min(min(shares) for shares in stage_shares)
        for end in sorted(end for stage in ends_by_stage for end in stage):
            if not ends or end - ends[-1] > least:
                ends.append(end)
        if all(tuple(shares) == tuple(stage_shares[0]) for shares in stage_shares):
            parts = tuple(stage_shares[0])
        else:
            parts = tuple(b - a for a, b in pairwise((0.0, *ends, 1.0)))
        bounds = tuple(
            (0, *(1 + _nearest(ends, end) for end in stage), len(parts)) for stage in ends_by_stage
        )
        return cls(parts, bounds)

    def can_cut(self, num_vertices: Mapping[str, int], chunks: int) -> bool:
        """Return whether there is a vertex for every part of every chunk.

        ``num_vertices``: by type; the vertices of all types are cut together.
        """
        return sum(num_vertices.values()) >= chunks * self.num_parts

    @property
    def num_parts(self) -> int:
        """P."""
        return len(self.shares)

    @property
    def has_equal_stages(self) -> bool:
        """Every stage has the same shards."""
        return len(set(self.bounds)) == 1

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The bounds by which a chunk is cut one after another, the fewest shards first."""
        finest, uncut = tuple(range(self.num_parts + 1)), (0, self.num_parts)
        return (*sorted(set(self.bounds) - {finest, uncut}, key=lambda b: (len(b), b)), finest)

    def overlaps(self, stage: int, other: int) -> tuple[tuple[int, int], ...]:
        """Return the pairs (shard of ``stage``, shard of ``other``) that own rows in common."""
        mine, theirs = self.bounds[stage], self.bounds[other]
        found, i, j = [], 0, 0
        while i < len(mine) - 1 and j < len(theirs) - 1:
            found.append((i, j))
            end = min(mine[i + 1], theirs[j + 1])
            i, j = i + (mine[i + 1] == end), j + (theirs[j + 1] == end)
        return tuple(found)


def _nearest(ends: Sequence[float], end: float) -> int:
    """Return the place of the nearest of ascending ``ends``, the first one of two as near."""
    place = bisect_left(ends, end)
    is_last = place == len(ends)
    return place - (place > 0 and (is_last or end - ends[place - 1] <= ends[place] - end))
