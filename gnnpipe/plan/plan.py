"""The plan: which ops form which stage, on which ranks, in how many chunks and in which order.

A planner writes a plan and the runtime reads it; nothing else passes between them. A plan is plain
data and survives JSON, so a run can be repeated from the ``plan.json`` in its folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from gnnpipe.collectives import DEFAULT_COLLECTIVES, Collectives
from gnnpipe.documents import named, parse_json, read_dataclass, shown
from gnnpipe.errors import InputError
from gnnpipe.plan.row_ways import RowWay
from gnnpipe.plan.shard_split import ShardSplit

VERSION = 6

_HINT = "take the plan.json of a run, or see docs/how-to/write-a-plan.md"


@dataclass(frozen=True)
class Placement:
    """Which rank holds which shard of which stage.

    Only this class maps ranks to (stage, shard) and back; the mesh of a run, simulated timelines
    and reports all use it.
    """

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

    def counterparts(self, rank: int, stage: int) -> list[int]:
        """The ranks of a stage that own rows of ``rank``, if all shares are equal.

        >>> Placement(((0,), (1, 2))).counterparts(0, 1)
        [1, 2]
        """
        shard, mine, theirs = self.shard(rank), len(self.group(rank)), self.stages[stage]
        return [
            other
            for i, other in enumerate(theirs)
            if i * mine < (shard + 1) * len(theirs) and shard * len(theirs) < (i + 1) * mine
        ]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(stage, shard) of every rank, in the order of the ranks."""
        return (self._places[rank] for rank in range(self.num_ranks))


@dataclass(frozen=True)
class StagePlan:
    """One stage: its ops, and the ranks that share its rows."""

    ops: tuple[int, ...]
    """Indices of its ops in ``ModelGraph.ops``, ascending."""
    ranks: tuple[int, ...]
    """Its ranks, ascending, by shard."""
    shares: tuple[float, ...]
    """The part of the work of every chunk that each shard gets; the shares sum to 1.

    The work of a vertex is 50 + its degree (``graph.partition.vertex_work``): a shard of vertices
    of high degree gets fewer rows.
    """
    recompute: bool = False
    """The stage keeps only the inputs of its steps until backward, and computes the rest again.

    As ``--recompute``, but in this stage alone: less memory, more time, identical results.
    """

    @classmethod
    def even(cls, ops: tuple[int, ...], ranks: tuple[int, ...]) -> StagePlan:
        """A stage whose ranks have equal shares."""
        return cls(ops, ranks, (1 / len(ranks),) * len(ranks))

    @property
    def shards(self) -> int:
        """G, its number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Plan:
    """S stages, each on its own ranks, and K chunks of a model."""

    stages: tuple[StagePlan, ...]
    """In an order in which every value is computed before a stage reads it."""
    chunks: int
    schedule: str
    """Name of the schedule (see ``schedule.schedules``)."""
    collectives: Collectives = DEFAULT_COLLECTIVES
    """Collectives among the shards of every stage."""
    comm_dtype: str = ""
    """The ``--comm-dtype`` with which the plan was found, same or bf16; '': none in particular."""
    ways: Mapping[int, RowWay] = field(default_factory=dict, hash=False)
    """By op, how the rows of its aggregation travel among the shards; ``HALO`` for all others."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise InputError("plan: stages []: is empty; give at least one stage")
        _check_each_once("op", [stage.ops for stage in self.stages])
        _check_each_once("rank", [stage.ranks for stage in self.stages])
        for i, stage in enumerate(self.stages):
            if fault := _fault_of_shares(stage):
                raise InputError(f"plan: stages[{i}]: shares {shown([*stage.shares])}: {fault}")
        if self.chunks < 1:
            raise InputError(f"plan: chunks {self.chunks}: must be at least 1")
        if self.comm_dtype not in ("", "same", "bf16"):
            raise InputError(f"plan: comm_dtype {self.comm_dtype!r}: must be same or bf16")
        for op in self.ways:
            if not 0 <= op < self.num_ops:
                raise InputError(f"plan: ways: {op}: must be an op from 0 to {self.num_ops - 1}")

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stages)

    @cached_property
    def num_ops(self) -> int:
        """Ops of the model."""
        return sum(len(stage.ops) for stage in self.stages)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(len(stage.ranks) for stage in self.stages)

    @cached_property
    def placement(self) -> Placement:
        """Which rank holds which shard of which stage."""
        return Placement(tuple(stage.ranks for stage in self.stages))

    @cached_property
    def most_shards(self) -> int:
        """The largest number of ranks of a stage."""
        return max(stage.shards for stage in self.stages)

    @property
    def recomputes(self) -> bool:
        """Some stage computes again in backward what it does not keep."""
        return any(stage.recompute for stage in self.stages)

    @property
    def shards_text(self) -> str:
        """The number of shards of the stages."""
        return shards_text([stage.shards for stage in self.stages])

    def way(self, op: int) -> RowWay:
        """How the rows of an op's aggregation travel among the shards."""
        return self.ways.get(op, RowWay.HALO)

    @cached_property
    def split(self) -> ShardSplit:
        """The parts of a chunk from which the shards of every stage are made."""
        return ShardSplit.of([stage.shares for stage in self.stages])

    def to_json(self) -> str:
        """Return the plan as JSON text, with a format version."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Read a plan from the text of ``to_json``; ``InputError`` names ``source`` and the field.

        ``source``: the file, with its flag.
        """
        data = parse_json(text, VERSION, source, _HINT)
        with named("plan", source):
            return read_dataclass(cls, data, source)


def shards_text(by_stage: Sequence[int]) -> str:
    """Return the numbers of shards as text.

    >>> shards_text([2, 2]), shards_text([1, 2, 1])
    ('2', '1, 2 and 1')
    """
    counts = [str(count) for count in by_stage]
    if len(set(counts)) == 1:
        return counts[0]
    return f"{', '.join(counts[:-1])} and {counts[-1]}"


def _check_each_once(name: str, lists: Sequence[Sequence[int]]) -> None:
    """Check that the lists of the stages ascend and together hold 0, 1, 2, ... once each.

    ``name``: of the numbers, "op" or "rank". Process groups number their ranks in ascending order.
    """
    together = sorted(number for numbers in lists for number in numbers)
    ascend = all(numbers and [*numbers] == sorted(numbers) for numbers in lists)
    if ascend and together == [*range(len(together))]:
        return
    stage_of: dict[int, int] = {}
    for i, numbers in enumerate(lists):
        where = f"plan: stages[{i}]: {name}s {shown([*numbers])}"
        if not numbers:
            raise InputError(f"{where}: is empty; give at least one {name}, or leave the stage out")
        for number in numbers:
            if number < 0:
                raise InputError(f"{where}: {name} {number}: must be at least 0")
            if number in stage_of:
                other = stage_of[number]
                place = f"in stages[{other}], too" if other != i else "there twice"
                raise InputError(f"{where}: {name} {number} is {place}; give each {name} once")
            stage_of[number] = i
        if [*numbers] != sorted(numbers):
            shares = ", with their shares in the same order" if name == "rank" else ""
            raise InputError(f"{where}: must ascend; try {shown(sorted(numbers))}{shares}")
    missing = next(n for n, found in enumerate(together) if n != found)
    raise InputError(
        f"plan: stages: {name} {missing} is in no stage, and {name} {together[-1]} is in "
        f"stages[{stage_of[together[-1]]}]; number the {name}s from 0 without a gap"
    )


def _fault_of_shares(stage: StagePlan) -> str:
    """Return what is wrong with the shares of a stage, and what to try; '' if they are right."""
    shares, total = stage.shares, sum(stage.shares)
    if len(shares) != len(stage.ranks):
        return f"{len(shares)} for {len(stage.ranks)} ranks; give one share for each rank"
    if not all(share > 0 for share in shares):
        return "each must be above 0; leave out ranks that get no work"
    if not math.isclose(total, 1):
        return f"sum to {total:g} and must sum to 1; divide each by {total!r}"
    return ""
