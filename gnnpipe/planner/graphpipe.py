"""GraphPipe's planner: dynamic programming over the series-parallel pieces of a model.

For a target time, the shortest longest path from the source of a piece is computed from those of
its parts (arXiv 2406.17145, section 5): a piece is one stage; or a series is cut and its downstream
side is solved first; or branches run side by side, and the longer path counts. The length of a path
in stages is the number of chunks in flight at its source, the value of the paper; where a schedule
holds all chunks anyway, the length is a time (``InFlight``). Where the paper enumerates how devices
are divided, a piece keeps, for each length, the fewest devices that reach the length; joining two
such lists enumerates the same divisions.

Beyond the paper, a stage may hold ends of branches and what follows their join, or what precedes a
fork and beginnings of branches. Without this case a light join takes a device of its own.

Equal pieces share one entry: two pieces are equal if their units cost the same and pass the same
values, whatever the units' names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from gnnpipe.plan import Op
from gnnpipe.planner.series_parallel import Decomposition, Piece, PieceKind, compose, decompose
from gnnpipe.planner.stage_search import InFlight, Stage, StageCosts, Stages
from gnnpipe.planner.unit_dag import members


class PieceSide(Enum):
    """The two sides of a branch."""

    BEGIN = "begin"
    END = "end"


class _Cut(NamedTuple):
    """A series or parallel piece, cut before part ``at``."""

    at: int
    front: Choice
    back: Choice


class _Join(NamedTuple):
    """A last stage of all parts behind parallel part ``at`` and of the ends of its branches."""

    at: int
    share: int
    """Which branches: a place in ``_shares``."""
    shards: int
    front: Choice


class _Fork(NamedTuple):
    """A stage of parts ``at`` to the last but one, and beginnings of the last part's branches."""

    at: int
    share: int
    shards: int
    front: Choice | None
    """None: no part precedes the stage."""
    back: Choice


Choice = int | _Cut | _Join | _Fork
"""How a piece becomes stages: a single stage on so many devices, or composed of smaller pieces."""


class _Share(NamedTuple):
    """A part of the branches of a parallel piece, for a stage that also holds the join or fork."""

    mask: int
    rest: tuple[Piece, ...]
    """The branches, or pieces of them, that are left."""


class _Point(NamedTuple):
    """A way to run a piece."""

    devices: int
    length: float
    """The longest path from the source of the piece, with the stages behind the piece."""
    choice: Choice


class GraphPipe:
    """Planner for one number of chunks; a ``TargetSearch``."""

    is_chain = False

    def __init__(self, costs: StageCosts) -> None:
        """Decompose the model."""
        self.costs, self.dag = costs, costs.dag
        self.decomposition: Decomposition = decompose(costs.dag, costs.unit_times_s)
        self._fixed_memory = costs.limits.in_flight is InFlight.ALL
        self._ids: dict[Any, int] = {}
        """Number of each kind of piece, by its signature."""
        self._id_of: dict[Piece, int] = {}
        self._made: dict[tuple[Any, ...], Piece] = {}
        self._shares_of: dict[tuple[Piece, PieceSide], list[_Share]] = {}
        self._root = self._sorted(self.decomposition.root)
        self._target_s = 0.0
        self._memo: dict[tuple[int, float], list[_Point]] = {}

    @property
    def num_solved(self) -> int:
        """Pieces that the last target needed; equal ones count once."""
        return len(self._memo)

    def find(self, target_s: float) -> Stages | None:
        """Return stages of at most ``target_s`` each, with the shortest longest path."""
        self._target_s = target_s
        self._memo.clear()
        points = self._solve(self._root, 0)
        if not points:
            return None
        return tuple(self._stages(self._root, points[-1].choice))

    def _solve(self, piece: Piece, behind: float) -> list[_Point]:
        """Return the ways to run a piece, ``behind`` before the end of the longest path.

        Devices ascend and lengths descend.
        """
        # Where memory does not depend on the length behind, neither does the choice.
        shift = behind if self._fixed_memory else 0.0
        key = self._id(piece), behind - shift
        if key not in self._memo:
            ways = sorted(self._ways(piece, behind - shift), key=lambda way: way[:2])
            kept: list[_Point] = []
            for way in ways:
                if way.devices > self.costs.limits.devices:
                    break
                if not kept or way.length < kept[-1].length:
                    kept.append(way)
            self._memo[key] = kept
        found = self._memo[key]
        return [p._replace(length=p.length + shift) for p in found] if shift else found

    def _ways(self, piece: Piece, behind: float) -> Iterator[_Point]:
        yield from self._one_stage(piece.mask, behind)
        is_series = piece.kind is PieceKind.SERIES
        for at in reversed(range(1, len(piece.parts))):
            end = self._run(piece, at, len(piece.parts))
            is_last = at == len(piece.parts) - 1
            if not is_last and self.costs.is_too_slow(end.mask, self._target_s):
                break
            # The last stage of a series is a run of parts, or lies in the last part.
            for back in self._solve(end, behind) if is_last else self._one_stage(end.mask, behind):
                after = back.length if is_series else behind
                for front in self._solve(self._run(piece, 0, at), after):
                    length = front.length if is_series else max(front.length, back.length)
                    choice = _Cut(at, front.choice, back.choice)
                    yield _Point(front.devices + back.devices, length, choice)
        if is_series:
            yield from self._joins(piece, behind)
            yield from self._forks(piece, behind)

    def _one_stage(self, mask: int, behind: float) -> list[_Point]:
        shards = self.costs.fewest_shards(mask, behind, self._target_s)
        if not shards:
            return []
        return [_Point(shards, behind + self.costs.length(mask, shards), shards)]

    def _joins(self, piece: Piece, behind: float) -> Iterator[_Point]:
        """Yield ways whose last stage holds ends of branches and all parts after the join."""
        for at, part in enumerate(piece.parts[:-1]):
            if part.kind is not PieceKind.PARALLEL:
                continue
            tail = self._run(piece, at + 1, len(piece.parts)).mask
            for number, share in enumerate(self._shares(part, PieceSide.END)):
                for stage in self._one_stage(tail | share.mask, behind):
                    for front in self._solve(self._before_join(piece, at, number), stage.length):
                        choice = _Join(at, number, stage.devices, front.choice)
                        yield _Point(front.devices + stage.devices, front.length, choice)

    def _forks(self, piece: Piece, behind: float) -> Iterator[_Point]:
        """Yield ways in which a stage holds parts before a fork and beginnings of branches."""
        *earlier, last = piece.parts
        if last.kind is not PieceKind.PARALLEL:
            return
        for number, share in enumerate(self._shares(last, PieceSide.BEGIN)):
            if self.costs.is_too_slow(share.mask | earlier[-1].mask, self._target_s):
                continue
            for back in self._solve(self._after_fork(piece, number), behind):
                mask = share.mask
                for at in reversed(range(len(earlier))):
                    mask |= earlier[at].mask
                    for stage in self._one_stage(mask, back.length):
                        yield from self._before_fork(piece, at, number, (stage, back))

    def _before_fork(
        self, piece: Piece, at: int, share: int, behind: tuple[_Point, _Point]
    ) -> Iterator[_Point]:
        """Yield the ways of ``_forks`` for a stage and the pieces behind."""
        stage, back = behind
        devices = stage.devices + back.devices
        if not at:
            choice = _Fork(at, share, stage.devices, None, back.choice)
            yield _Point(devices, stage.length, choice)
            return
        for front in self._solve(self._run(piece, 0, at), stage.length):
            choice = _Fork(at, share, stage.devices, front.choice, back.choice)
            yield _Point(devices + front.devices, front.length, choice)

    def _shares(self, parallel: Piece, side: PieceSide) -> list[_Share]:
        """Return the parts of branches that may share a stage with the join or the fork.

        Some branches from the first on, or up to the last, are whole; of another one there may be a
        part on the side of the join or fork. Equal branches count once.
        """
        key = parallel, side
        if key not in self._shares_of:
            count, found = len(parallel.parts), list[_Share]()
            runs = [(count, count), *((n, count) for n in range(1, count))]
            for first, end in [*runs, *((0, n) for n in range(1, count))]:
                mask = sum(branch.mask for branch in parallel.parts[first:end])
                left = (*parallel.parts[:first], *parallel.parts[end:])
                if mask:
                    found.append(_Share(mask, left))
                for number in self._different(left):
                    others = (*left[:number], *left[number + 1 :])
                    chain = left[number].chain
                    for length in range(1, len(chain)):
                        at = length if side is PieceSide.BEGIN else len(chain) - length
                        own, other = chain[:at], chain[at:]
                        if side is PieceSide.END:
                            own, other = other, own
                        kept = self._composed(PieceKind.SERIES, other)
                        taken = mask | sum(part.mask for part in own)
                        found.append(_Share(taken, (*others, kept)))
            self._shares_of[key] = found
        return self._shares_of[key]

    def _different(self, branches: Sequence[Piece]) -> list[int]:
        """Return the first branch of each kind."""
        first: dict[int, int] = {}
        for number, branch in enumerate(branches):
            first.setdefault(self._id(branch), number)
        return list(first.values())

    def _before_join(self, piece: Piece, at: int, share: int) -> Piece:
        """Return a series up to parallel part ``at``, without a share of its branches."""
        key = "before join", piece, at, share
        if key not in self._made:
            rest = self._shares(piece.parts[at], PieceSide.END)[share].rest
            parallel = self._composed(PieceKind.PARALLEL, rest)
            self._made[key] = self._composed(PieceKind.SERIES, (*piece.parts[:at], parallel))
        return self._made[key]

    def _after_fork(self, piece: Piece, share: int) -> Piece:
        """Return the last part of a series without a share of its branches."""
        key = "after fork", piece, share
        if key not in self._made:
            rest = self._shares(piece.parts[-1], PieceSide.BEGIN)[share].rest
            self._made[key] = self._composed(PieceKind.PARALLEL, rest)
        return self._made[key]

    def _stages(self, piece: Piece, choice: Choice) -> Iterator[Stage]:
        """Yield the stages of a choice; a stage comes after those that it reads from."""
        parts = piece.parts
        if isinstance(choice, int):
            yield Stage(piece.mask, choice)
        elif isinstance(choice, _Cut):
            yield from self._stages(self._run(piece, 0, choice.at), choice.front)
            yield from self._stages(self._run(piece, choice.at, len(parts)), choice.back)
        elif isinstance(choice, _Join):
            yield from self._stages(self._before_join(piece, choice.at, choice.share), choice.front)
            mask = self._shares(parts[choice.at], PieceSide.END)[choice.share].mask
            tail = self._run(piece, choice.at + 1, len(parts)).mask
            yield Stage(mask | tail, choice.shards)
        else:
            if choice.front is not None:
                yield from self._stages(self._run(piece, 0, choice.at), choice.front)
            mask = self._shares(parts[-1], PieceSide.BEGIN)[choice.share].mask
            head = self._run(piece, choice.at, len(parts) - 1).mask
            yield Stage(mask | head, choice.shards)
            yield from self._stages(self._after_fork(piece, choice.share), choice.back)

    def _run(self, piece: Piece, begin: int, end: int) -> Piece:
        """Return the piece of consecutive parts."""
        key = "run", piece, begin, end
        if key not in self._made:
            self._made[key] = self._composed(piece.kind, piece.parts[begin:end])
        return self._made[key]

    def _sorted(self, piece: Piece) -> Piece:
        """Return the piece with equal branches side by side."""
        if piece.kind is PieceKind.UNIT:
            return piece
        return self._composed(piece.kind, [self._sorted(part) for part in piece.parts])

    def _composed(self, kind: PieceKind, parts: Sequence[Piece]) -> Piece:
        # Equal pieces must list equal parts in the same order, because they share their choices.
        is_parallel = kind is PieceKind.PARALLEL
        ordered = tuple(sorted(parts, key=self._id) if is_parallel else parts)
        if (kind, ordered) not in self._made:
            self._made[kind, ordered] = compose(kind, ordered)
        return self._made[kind, ordered]

    def _id(self, piece: Piece) -> int:
        """Return the number of the piece's kind; equal pieces have the same."""
        if piece not in self._id_of:
            signature = self._signature(piece)
            self._id_of[piece] = self._ids.setdefault(signature, len(self._ids))
        return self._id_of[piece]

    def _signature(self, piece: Piece) -> tuple[Any, ...]:
        """Return all that the costs of a piece's stages depend on."""
        if piece.kind is PieceKind.UNIT:
            return self._unit_signature(piece.unit)
        parts = tuple(self._id(part) for part in piece.parts)
        if piece.kind is PieceKind.PARALLEL:
            return PieceKind.PARALLEL, parts
        place = {unit: i for i, unit in enumerate(piece.units)}
        passed = []
        for unit in piece.units:
            for value in self.dag.values[unit]:
                inside = sorted(place[u] for u in members(value.readers & piece.mask))
                passed.append((*inside, bool(value.readers & ~piece.mask)))
        return PieceKind.SERIES, parts, tuple(passed)

    def _unit_signature(self, unit: int) -> tuple[Any, ...]:
        costs, ops = self.costs.costs, self.dag.units[unit]
        counts = self.costs.limits.shard_counts[:2]
        figures = tuple(
            (
                costs.stage_s(ops, shards),
                costs.epoch_s(ops, shards),
                costs.memory_bytes(ops, shards, 1),
                costs.memory_bytes(ops, shards, 2),
            )
            for shards in counts
        )
        values = tuple((value.width, bool(value.readers)) for value in self.dag.values[unit])
        return PieceKind.UNIT, figures, values, tuple(map(_shape, self.dag.model.select(ops)))


def _shape(op: Op) -> tuple[Any, ...]:
    """Return the fields of an op that decide how the op shares a stage with others."""
    return op.push_width, op.structure, op.is_linear, op.is_mean, op.reads_features, op.vertex_type
