"""The placement: which rank holds which shard of which stage.

Only this module maps ranks to (stage, shard) and back; the mesh of a run, simulated timelines and
reports all use ``Placement``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The ranks of a run, by stage and shard."""

    stages: tuple[tuple[int, ...], ...]
    """The ranks of every stage, by shard."""

    @classmethod
    def grid(cls, stages: int, shards: int) -> Placement:
        """Return S stages of G shards each, with ranks numbered stage by stage.

        >>> Placement.grid(2, 3).place(4)
        (1, 1)
        """
        return cls(tuple(tuple(range(s * shards, (s + 1) * shards)) for s in range(stages)))

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stages)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return len(self._places)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (stage, shard)
            for stage, ranks in enumerate(self.stages)
            for shard, rank in enumerate(ranks)
        }

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, shard) of a rank."""
        return self._places[rank]

    def stage(self, rank: int) -> int:
        """The stage of a rank."""
        return self._places[rank][0]

    def shard(self, rank: int) -> int:
        """The shard of a rank."""
        return self._places[rank][1]

    def rank(self, stage: int, shard: int) -> int:
        """The rank that holds a shard of a stage."""
        return self.stages[stage][shard]

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's stage, by shard."""
        return self.stages[self.stage(rank)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(stage, shard) of every rank, in the order of the ranks."""
        return (self._places[rank] for rank in range(self.num_ranks))
