"""Profile of a machine: times of a model's ops and of links, measured or written by hand.

Ops of one kind (``op_kind``) take the same time, so a profile of a few layers serves for any depth,
any cut into stages, and any other graph with as many classes. An op has two parts, in two steps of
its stage: before its rows are pushed, and after the rows were aggregated. A row-wise op has only
the second part. Times are affine in the rows of a chunk, the edges into these rows and their stored
features.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from gnnpipe.collectives import DEFAULT_COLLECTIVES, Collectives
from gnnpipe.errors import InputError
from gnnpipe.plan import Op

T = TypeVar("T")

VERSION = 7
SOURCES = ("measured", "by hand")
MAX_NUMBER = 1e30
"""Largest number in a profile; sums and products with counts of rows stay finite."""


@dataclass(frozen=True)
class Affine:
    """Seconds of a call, and per row, edge and stored feature."""

    base_s: float = 0.0
    per_row_s: float = 0.0
    per_edge_s: float = 0.0
    per_entry_s: float = 0.0

    def time_s(
        self, rows: float, edges: float = 0.0, entries: float = 0.0, times: float = 1.0
    ) -> float:
        """Seconds of the given work in so many calls.

        >>> Affine(1.0, 0.5).time_s(4)
        3.0
        """
        per_call, per_row = self.base_s * times, self.per_row_s * rows
        return per_call + per_row + self.per_edge_s * edges + self.per_entry_s * entries

    def scaled(self, factor: float) -> Affine:
        """Return ``factor`` times this time."""
        return Affine(*(factor * number for number in astuple(self)))

    def __add__(self, other: Affine) -> Affine:
        """Return the time of one call of each."""
        return Affine(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class OpTimes:
    """Times of the ops of one kind."""

    forward_before: Affine
    """The part before the push; per pushed row."""
    forward_after: Affine
    """The sparse product and the rest of the op."""
    backward_before: Affine
    """Transposed aggregation (all of the time per edge), and the backward of ``forward_before``."""
    backward_after: Affine
    finish: Affine
    """Gradient of the weight that multiplies the features, once per epoch; per row and entry of the
    shard."""
    forecast: Affine
    """Per probe row, with the weights of the last and of this epoch; includes the fit."""
    carry: Affine
    """Per stale row."""
    relative_error: float
    """Mean |fitted - measured| over mean measured, of the steps that contain the op; 0 by hand."""

    def recomputing(self, is_linear: bool) -> OpTimes:
        """Return the times of an op that keeps only its inputs and runs again in backward.

        ``is_linear``: the aggregation is a product with a matrix, whose result is an input that is
        kept; other convolutions aggregate again.
        """
        again = replace(self.forward_after, per_edge_s=0.0) if is_linear else self.forward_after
        return replace(
            self,
            backward_before=self.backward_before + self.forward_before,
            backward_after=self.backward_after + again,
        )


@dataclass(frozen=True)
class ComputeTimes:
    """Times while ``ranks`` ranks of a machine compute at once and share its memory."""

    ranks: int
    ops: Mapping[str, OpTimes]
    """Times by ``op_kind``."""
    begin: Affine
    """Work before the first action of an epoch, for each history table; ``rows`` counts cleared
    numbers, ``edges`` numbers of dropout masks."""
    update: Affine
    """The optimizer's step for each op; ``rows`` counts weights."""
    boundary_per_number_s: float
    """Reading a number of a boundary row for another shard, or adding a number that arrived."""

    def scaled(self, factor: float, ranks: int) -> ComputeTimes:
        """Return ``factor`` times these times, for another number of ranks."""
        names = [f.name for f in fields(OpTimes) if f.name != "relative_error"]
        ops = {
            kind: replace(op, **{name: getattr(op, name).scaled(factor) for name in names})
            for kind, op in self.ops.items()
        }
        once = self.begin.scaled(factor), self.update.scaled(factor)
        return ComputeTimes(ranks, ops, *once, self.boundary_per_number_s * factor)


@dataclass(frozen=True)
class LinkTimes:
    """Latency and bandwidth of a link."""

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float
    """Error of the fit; 0 by hand."""
    busy: Affine = Affine()
    """Processor time of a message at each end, during which the rank does not compute; ``rows``
    counts bytes."""

    def time_s(self, size_bytes: float, messages: int = 1) -> float:
        """Return the seconds of consecutive messages with ``size_bytes`` in total."""
        return self.latency_s * messages + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Profile:
    """Times of one machine, or of several equal ones and their links."""

    machine: str
    source: str
    """'measured' or 'by hand'."""
    note: str
    """When and how it was measured, or the source of figures written by hand."""
    device: str
    dtype: str
    """Number type of weights and rows; this and the next four fields are settings of a run."""
    comm_dtype: str
    matmul_dtype: str
    kernel: str
    recompute: bool
    threads: int
    """Threads of each rank."""
    compute: tuple[ComputeTimes, ...]
    """Ascending by ``ranks``."""
    message: LinkTimes | None
    """From rank to rank; None if measured with a single rank."""
    exchange: LinkTimes | None
    """Row exchange among shards: latency of a message, bytes that one shard sends."""
    shard_sum: LinkTimes | None
    """Sum over shards, likewise."""
    collectives: Collectives = DEFAULT_COLLECTIVES
    """The row exchange and the sum that were measured."""

    def __post_init__(self) -> None:
        counts = [times.ranks for times in self.compute]
        if self.source not in SOURCES:
            raise InputError(f"profile: source {self.source!r}; one of {', '.join(SOURCES)}")
        if not counts or min(counts) < 1 or counts != sorted(set(counts)):
            raise InputError(f"profile: compute.ranks {counts}; must ascend from at least 1")
        for name in ("message", "exchange", "shard_sum"):
            link: LinkTimes | None = getattr(self, name)
            # So that times stay finite.
            if link is not None and link.bandwidth_bytes_per_s < 0.1:
                raise InputError(f"profile: {name}.bandwidth_bytes_per_s: must be at least 0.1")

    def compute_of(self, ranks: int) -> ComputeTimes:
        """Return the times that were measured with the nearest number of ranks."""
        return min(self.compute, key=lambda times: (abs(times.ranks - ranks), times.ranks))

    def to_json(self) -> str:
        """Return the profile as JSON with a format version."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Return a table of milliseconds per step, 1,000 rows and 1,000 edges, as text lines."""
        yield f"profile of {self.machine} ({self.source}: {self.note})"
        for times in self.compute:
            ranks = "1 rank" if times.ranks == 1 else f"{times.ranks} ranks at once"
            yield (
                f"{ranks}, {self.threads} thread{'s' * (self.threads > 1)} each; ms a step, a "
                "1,000 rows, a 1,000 edges:"
            )
            for kind, op in times.ops.items():
                yield f"  {kind} (fit off by {op.relative_error:.0%})"
                for way in ("forward", "backward"):
                    both = getattr(op, f"{way}_before") + getattr(op, f"{way}_after")
                    yield (
                        f"    {way:8}  {both.base_s * 1e3:8.3f}  {both.per_row_s * 1e6:8.4f}  "
                        f"{both.per_edge_s * 1e6:8.4f}"
                    )
        for name in ("message", "exchange", "shard_sum"):
            link: LinkTimes | None = getattr(self, name)
            if link is not None:
                yield (
                    f"{name.replace('_', ' ')}: {link.latency_s * 1e6:.0f} us and "
                    f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s (fit off by "
                    f"{link.relative_error:.0%})"
                )
        if self.message is None:
            yield "links: not measured with a single rank; use torchrun --nproc-per-node 2"

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Read a profile from the text of ``to_json``; ``InputError`` names the wrong field."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{source}: not JSON ({error}); make one with `gnnpipe profile --save`"
            ) from None
        if not isinstance(data, dict) or "version" not in data:
            raise InputError(f"{source}: not a profile; make one with `gnnpipe profile --save`")
        if data.pop("version") != VERSION:
            raise InputError(
                f"{source}: version: written by another gnnpipe, expected {VERSION}; make one with "
                "`gnnpipe profile --save`"
            )
        return read_dataclass(cls, data, source)


def op_kind(op: Op) -> str:
    """Return the kind of an op; ops of one kind take the same time for the same rows and edges.

    >>> op_kind(Op("gcn3", ("gcn2.x",), {"gcn3.x": 16}, 272, 512, push_width=16))
    'gcn, push 16, out 16, flops 512 a row'
    """
    if op.kind:
        return op.kind
    stem = re.sub(r"[_\d]+$", "", op.name)
    parts = [stem]
    if op.push_width:
        parts.append(f"push {op.push_width}" if op.moves else f"push {op.push_width} of features")
    parts.append(f"out {sum(op.outputs.values())}")
    if op.kept_per_edge:
        # Attention heads, or the width of a message.
        parts.append(f"kept {op.kept_per_edge} an edge")
    parts.append(f"flops {op.flops_per_row} a row")
    if op.reads_features:
        parts.append(f"{op.flops_per_feature} a feature")
    return ", ".join(parts)


def read_dataclass(kind: type[T], data: Any, where: str) -> T:
    """Return JSON ``data`` as a dataclass; ``InputError`` names the field that is missing or wrong.

    Types of fields: str, bool; int and float from 0 to ``MAX_NUMBER``; dataclasses; tuples and
    mappings (with str keys) of these types; and any of these types or None.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where}: must be an object, not {_short(data)}")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    missing = [name for name in names if name not in data]
    unknown = [name for name in data if name not in names]
    if missing or unknown:
        what, name = ("is missing", missing[0]) if missing else ("is no field", unknown[0])
        raise InputError(f"{where}: {name!r} {what}; the fields are {', '.join(names)}")
    return kind(**{name: _read(hints[name], data[name], f"{where}: {name}") for name in names})


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        hint = next(a for a in arguments if a is not types.NoneType)
        return _read(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where}: must be a list, not {_short(value)}")
        return tuple(_read(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise InputError(f"{where}: must be an object, not {_short(value)}")
        return {k: _read(arguments[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    if is_dataclass(hint):
        return read_dataclass(typing.cast(type, hint), value, where)
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN compares as false.
        if not is_number or not 0 <= value <= MAX_NUMBER:
            raise InputError(
                f"{where}: must be a number from 0 to {MAX_NUMBER:g}, not {_short(value)}"
            )
        return float(value)
    if type(value) is not hint or (hint is int and value < 0):
        names = {int: "a whole number of at least 0", str: "text", bool: "true or false"}
        raise InputError(f"{where}: must be {names[hint]}, not {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
