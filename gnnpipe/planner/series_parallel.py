"""Series-parallel decomposition of a DAG of units, and the branch-major order of the units.

A piece is a single unit; or a series, in which every unit of a part depends on every unit of the
parts before; or a parallel piece, whose parts do not depend on each other. GraphPipe (arXiv
2406.17145) searches over these pieces. A set of units that is neither is converted: its units are
split in two, and everything in the second half is made to wait for the first. These added
dependencies restrict the search only; a plan is simulated and executed with true dependencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from gnnpipe.planner.unit_dag import UnitDag, members


class PieceKind(Enum):
    """Kind of a piece."""

    UNIT = "unit"
    SERIES = "series"
    PARALLEL = "parallel"


@dataclass(frozen=True, eq=False)
class Piece:
    """A set of units, composed of smaller pieces."""

    kind: PieceKind
    parts: tuple[Piece, ...] = ()
    unit: int = -1
    """The unit, of a piece of kind UNIT."""

    @cached_property
    def units(self) -> tuple[int, ...]:
        """All units, part by part: of a model, the branch-major order."""
        if self.kind is PieceKind.UNIT:
            return (self.unit,)
        return tuple(unit for part in self.parts for unit in part.units)

    @cached_property
    def mirrored(self) -> tuple[int, ...]:
        """All units, with the parts of every parallel piece in reverse."""
        if self.kind is PieceKind.UNIT:
            return (self.unit,)
        parts = self.parts if self.kind is PieceKind.SERIES else reversed(self.parts)
        return tuple(unit for part in parts for unit in part.mirrored)

    @cached_property
    def mask(self) -> int:
        """The units as a mask."""
        return sum(1 << unit for unit in self.units)

    @property
    def chain(self) -> tuple[Piece, ...]:
        """The parts of a series; of another piece, the piece alone."""
        return self.parts if self.kind is PieceKind.SERIES else (self,)


def compose(kind: PieceKind, parts: Sequence[Piece]) -> Piece:
    """Return the series or parallel piece of ``parts``; a part of the same kind is dissolved."""
    flat = [q for p in parts for q in (p.parts if p.kind is kind else (p,))]
    return flat[0] if len(flat) == 1 else Piece(kind, tuple(flat))


def has_branches(dag: UnitDag) -> bool:
    """Whether some units do not depend on each other, so that stages may run side by side."""
    everything = dag.everything
    return any(everything & ~(dag.after[u] | dag.before[u] | 1 << u) for u in range(len(dag.units)))


@dataclass(frozen=True)
class Decomposition:
    """The pieces of a DAG, and the cost of its conversion."""

    root: Piece
    added: tuple[tuple[int, int], ...]
    """Dependencies (unit, later unit) that the conversion added; empty if the DAG is
    series-parallel."""
    longest_path_s: float
    """Longest path of dependent units, by their times."""
    converted_path_s: float
    """The same with the added dependencies; never shorter."""


def decompose(dag: UnitDag, times_s: Sequence[float]) -> Decomposition:
    """Return the pieces of ``dag``, the lightest part of a parallel piece first.

    ``times_s``: time of each unit. Of the ways to convert, the one with the shortest longest path
    is taken, and of these the one that orders the fewest pairs of units.
    """
    builder = _Builder(dag, times_s)
    root = builder.piece(dag.everything)
    path_s = dag.longest_path(times_s, dag.everything)
    return Decomposition(root, tuple(builder.added), path_s, builder.path_s(root))


class _Builder:
    def __init__(self, dag: UnitDag, times_s: Sequence[float]) -> None:
        self.dag, self.times_s = dag, times_s
        self.added: list[tuple[int, int]] = []

    def piece(self, mask: int) -> Piece:
        if not mask & (mask - 1):
            return Piece(PieceKind.UNIT, unit=mask.bit_length() - 1)
        branches = list(self._branches(mask))
        if len(branches) > 1:
            branches.sort(key=lambda m: (sum(self.times_s[u] for u in members(m)), m))
            return compose(PieceKind.PARALLEL, [self.piece(m) for m in branches])
        links = list(self._links(mask))
        if len(links) == 1:
            links = self._converted(mask)
        return compose(PieceKind.SERIES, [self.piece(m) for m in links])

    def _branches(self, mask: int) -> Iterator[int]:
        """Yield the largest sets of ``mask`` that do not depend on each other."""
        while mask:
            found, front = 0, mask & -mask
            while front:
                found |= front
                around = 0
                for u in members(front):
                    around |= self.dag.before[u] | self.dag.after[u]
                front = around & mask & ~found
            yield found
            mask &= ~found

    def _links(self, mask: int) -> Iterator[int]:
        """Yield the smallest sets of ``mask`` of which each depends on all of the one before."""
        open_mask, after_all = 0, mask
        for u in members(mask):
            open_mask |= 1 << u
            after_all &= self.dag.after[u]
            mask &= ~(1 << u)
            if mask & ~after_all == 0:
                yield open_mask
                open_mask = 0

    def _converted(self, mask: int) -> list[int]:
        """Split a set that is neither series nor parallel in two, and add the dependencies."""
        halves = set()
        for u in members(mask):
            halves.add((self.dag.before[u] | 1 << u) & mask)
            halves.add(mask & ~(self.dag.after[u] | 1 << u))
        first = min((h for h in halves if 0 < h < mask), key=lambda h: self._price(h, mask & ~h))
        rest = mask & ~first
        ends = [u for u in members(first) if not self.dag.after[u] & first]
        begins = [u for u in members(rest) if not self.dag.before[u] & rest]
        self.added += [(u, v) for u in ends for v in begins if not self.dag.after[u] >> v & 1]
        return [first, rest]

    def _price(self, first: int, rest: int) -> tuple[float, int, int]:
        paths = (self.dag.longest_path(self.times_s, half) for half in (first, rest))
        ordered = sum((rest & ~self.dag.after[u]).bit_count() for u in members(first))
        return sum(paths), ordered, first

    def path_s(self, piece: Piece) -> float:
        """Return the longest path of a piece, with the added dependencies."""
        if piece.kind is PieceKind.UNIT:
            return self.times_s[piece.unit]
        paths = [self.path_s(part) for part in piece.parts]
        return sum(paths) if piece.kind is PieceKind.SERIES else max(paths)
