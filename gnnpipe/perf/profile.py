"""What a machine takes for the parts of a model and for its links: a file, measured or by hand.

The model's ops are told apart by their kind: op of like names and numbers take like times, so a
profile of a few layers serves any depth, any cut and any other graph with as many classes. Each op
has two parts, as it lies in two steps of its stage: what it does before its rows are pushed, and
what it makes of the rows that it aggregated; an op that works row by row has the second alone.
Times are affine in rows, edges and stored features: c rows of a chunk, e edges into them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gnnpipe.errors import InputError
from gnnpipe.perf.read_json import read_dataclass
from gnnpipe.plan import Op

__all__ = ["Affine", "ComputeTimes", "LinkTimes", "OpTimes", "Profile", "op_kind"]

VERSION = 5
SOURCES = ("measured", "by hand")


@dataclass(frozen=True)
class Affine:
    """Seconds: a base, and so many for each row, edge and stored number of the features."""

    base_s: float = 0.0
    per_row_s: float = 0.0
    per_edge_s: float = 0.0
    per_entry_s: float = 0.0

    def time_s(self, rows: float, edges: float = 0.0, entries: float = 0.0) -> float:
        """Of so much work.

        >>> Affine(1.0, 0.5).time_s(4)
        3.0
        """
        return (
            self.base_s
            + self.per_row_s * rows
            + self.per_edge_s * edges
            + self.per_entry_s * entries
        )


@dataclass(frozen=True)
class OpTimes:
    """Times of the ops of one kind."""

    forward_before: Affine
    """Up to the push of its rows; rows are those that are pushed."""
    forward_after: Affine
    """Reading what was aggregated, the sparse product included, and what is made of it."""
    backward_before: Affine
    """Bringing gradients back over the edges (the edges' share of this part), and undoing what
    came before the push."""
    backward_after: Affine
    finish: Affine
    """The gradient of the features' weight, once an epoch; rows and entries of the whole shard."""
    forecast: Affine
    """Of so many pilot rows with the weights of this epoch, the fit of the map included."""
    recall: Affine
    """Of so many pilot rows with the weights of the last epoch."""
    carry: Affine
    """Of so many stale rows."""
    relative_error: float
    """Of the fit: mean |fitted - measured| over mean measured, of the steps that it is part of;
    0 by hand."""


@dataclass(frozen=True)
class ComputeTimes:
    """Times while ``ranks`` ranks of a machine compute at once: they share its memory."""

    ranks: int
    ops: Mapping[str, OpTimes]
    """By kind, see ``op_kind``."""
    begin: Affine
    """What a rank does once an epoch outside of all steps, for each of its histories; rows are
    numbers of its tables that are cleared, edges numbers that masks are made for."""
    update: Affine
    """The optimizer's step, for each op; rows are weights."""
    boundary_per_number_s: float
    """Taking a number out of a table for another shard, or adding one that came from there."""


@dataclass(frozen=True)
class LinkTimes:
    """A message of so many bytes: a latency, and a bandwidth."""

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float
    """Of the fit, 0 by hand."""
    busy: Affine = Affine()
    """What processors that compute do for one at each of its ends, meanwhile; rows are bytes."""

    def time_s(self, size_bytes: float, messages: int = 1) -> float:
        """Of one message, or several one after another that have these bytes together."""
        return self.latency_s * messages + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Profile:
    """What one machine, or several of the same kind and their links, take."""

    machine: str
    source: str
    """'measured' or 'by hand'."""
    note: str
    """When and how it was measured, or where the figures of a hand-made one are from."""
    device: str
    dtype: str
    """Number type of weights and rows; the next five are settings of a run, too."""
    comm_dtype: str
    matmul_dtype: str
    kernel: str
    recompute: bool
    threads: int
    """Of each rank."""
    compute: tuple[ComputeTimes, ...]
    """By ranks at once, ascending."""
    message: LinkTimes | None
    """From rank to rank; none where one rank was alone."""
    exchange: LinkTimes | None
    """All-to-all among shards: a latency for each other shard, bytes that one shard sends."""
    gradient_sum: LinkTimes | None
    """The same of the sum of gradients; bytes of one copy."""

    def __post_init__(self) -> None:
        counts = [times.ranks for times in self.compute]
        if self.source not in SOURCES:
            raise InputError(f"profile: source {self.source!r}; one of {', '.join(SOURCES)}")
        if not counts or min(counts) < 1 or counts != sorted(set(counts)):
            raise InputError(f"profile: compute.ranks {counts}; must ascend from at least 1")
        for name in ("message", "exchange", "gradient_sum"):
            link: LinkTimes | None = getattr(self, name)
            # A sum's is up to half of what the least link of a cluster has.
            if link is not None and link.bandwidth_bytes_per_s < 0.1:
                raise InputError(f"profile: {name}.bandwidth_bytes_per_s: must be at least 0.1")

    def compute_of(self, ranks: int) -> ComputeTimes:
        """Times while so many ranks compute at once: of the nearest number that is known."""
        return min(self.compute, key=lambda times: (abs(times.ranks - ranks), times.ranks))

    def to_json(self) -> str:
        """The profile as text, with a version."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """A profile from ``to_json``'s text; ``InputError`` names the field that is wrong."""
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
    """Ops of one kind take the same time for the same rows and edges.

    >>> op_kind(Op("gcn3", ("gcn2.x",), {"gcn3.x": 16}, 272, 512, push_width=16))
    'gcn, push 16, out 16, flops 512 a row'
    """
    stem = re.sub(r"[_\d]+$", "", op.name)
    parts = [stem]
    if op.push_width:
        parts.append(f"push {op.push_width}" if op.moves else f"push {op.push_width} of features")
    parts.append(f"out {sum(op.outputs.values())}")
    if op.kept_per_edge:
        # Heads of attention, or the width of a message.
        parts.append(f"kept {op.kept_per_edge} an edge")
    parts.append(f"flops {op.flops_per_row} a row")
    if op.reads_features:
        parts.append(f"{op.flops_per_feature} a feature")
    return ", ".join(parts)
