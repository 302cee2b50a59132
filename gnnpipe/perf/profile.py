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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace

from gnnpipe.collectives import DEFAULT_COLLECTIVES, Collectives
from gnnpipe.documents import document_text, named, parse_json, read_dataclass
from gnnpipe.errors import InputError
from gnnpipe.output import warn
from gnnpipe.plan import Op

VERSION = 7
SOURCES = ("measured", "by hand")

MOST_FIT_ERROR, MOST_WAITING = 0.25, 0.1
"""Largest error of a fit, and share of time waited for a core, without a warning."""

SHOWN_KINDS = 4
"""Kinds of ops that an error lists at most."""

_HINT = "make one with `gnnpipe profile --save`"
_AGAIN = "measure again on an idle machine, or with a larger graph"


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


def aggregates_again(is_linear: bool, is_after: bool) -> bool:
    """Return whether backward repeats the work per edge of a part of an op that recomputes.

    ``is_linear``: the aggregation is a product with a matrix, whose result is an input that is
    kept; other convolutions aggregate again. ``is_after``: the part after the aggregation.
    """
    return not (is_linear and is_after)


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

        ``is_linear``: as for ``aggregates_again``.
        """
        again = self.forward_after
        if not aggregates_again(is_linear, is_after=True):
            again = replace(again, per_edge_s=0.0)
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

    def times_of(self, op: Op, kind: str) -> OpTimes:
        """Return the times of an op of this kind; ``InputError`` if the profile has no such op."""
        if kind in self.ops:
            return self.ops[kind]
        raise InputError(
            f"profile: has no op like {op.name} ({kind}), {_nearest(kind, self.ops)}; take one "
            "with the dataset and the model flags of the run (--model, --hidden, --model-args) and "
            "with --layers 3 at least, or leave --profile out of gnnpipe train, which then takes "
            "a short one"
        )

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


LINK_NAMES = ("message", "exchange", "shard_sum", "pair_exchange", "pair_sum")
"""Fields of ``Profile`` that are ``LinkTimes``."""

_PAIRS = {"exchange": "pair_exchange", "shard_sum": "pair_sum"}
"""Where the link of two shards lies."""


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
    pair_exchange: LinkTimes | None = None
    """``exchange`` between two shards, if that was measured among more. It has no ``busy``."""
    pair_sum: LinkTimes | None = None
    """``shard_sum``, likewise."""
    collectives: Collectives = DEFAULT_COLLECTIVES
    """The row exchange and the sum that were measured."""
    recompute_every: int = 1
    """With ``recompute``, steps that were recomputed together."""
    waiting_share: float = 0.0
    """Share of the measured time in which a rank's main thread could run and had no core, of the
    rank that waited most; 0 on a GPU, of ranks that share cores, by hand, and where the system does
    not count this time."""

    def __post_init__(self) -> None:
        counts = [times.ranks for times in self.compute]
        if self.source not in SOURCES:
            raise InputError(f"profile: source {self.source!r}: must be {' or '.join(SOURCES)}")
        if not counts or min(counts) < 1 or counts != sorted(set(counts)):
            raise InputError(f"profile: compute: ranks {counts}: must ascend from at least 1")
        for name in LINK_NAMES:
            link: LinkTimes | None = getattr(self, name)
            # So that times stay finite.
            if link is not None and link.bandwidth_bytes_per_s < 0.1:
                raise InputError(
                    f"profile: {name}: bandwidth_bytes_per_s {link.bandwidth_bytes_per_s:g}: must "
                    "be at least 0.1; give null if there is no such link"
                )

    def compute_of(self, ranks: int) -> ComputeTimes:
        """Return the times that were measured with the nearest number of ranks."""
        return min(self.compute, key=lambda times: (abs(times.ranks - ranks), times.ranks))

    def link(self, name: str, shards: int | None = None) -> LinkTimes:
        """Return 'message', 'exchange' or 'shard_sum'; ``InputError`` if it was not measured.

        ``shards``: how many take part in an exchange or a sum. Two have the link of pairs, if that
        was measured; any other number, and None, have the one that was measured among all ranks.
        """
        found: LinkTimes | None = getattr(self, name)
        if shards == 2 and name in _PAIRS:
            found = getattr(self, _PAIRS[name]) or found
        if found is None:
            raise InputError(
                f"profile: {name}: was not measured; take the profile with torchrun "
                "--nproc-per-node 2 -m gnnpipe profile and the same settings"
            )
        return found

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
        for name in LINK_NAMES:
            link: LinkTimes | None = getattr(self, name)
            if link is not None:
                yield (
                    f"{name.replace('_', ' ')}: {link.latency_s * 1e6:.0f} us and "
                    f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s (fit off by "
                    f"{link.relative_error:.0%})"
                )
        if self.message is None:
            yield "links: not measured with a single rank; use torchrun --nproc-per-node 2"
        if doubts := self.doubts():
            yield f"warning: {doubts}; {_AGAIN}"

    def doubts(self) -> str:
        """Return why the times may be wrong; '' if they seem right.

        The worst fit of ops and links, and the time in which a rank waited for a core.
        """
        errors = [(op.relative_error, kind) for t in self.compute for kind, op in t.ops.items()]
        links = {name.replace("_", " "): getattr(self, name) for name in LINK_NAMES}
        errors += [(link.relative_error, name) for name, link in links.items() if link is not None]
        error, worst = max(errors, default=(0.0, ""))
        found = []
        if error > MOST_FIT_ERROR:
            found.append(f"the fit of {worst} is off by {error:.0%}")
        if self.waiting_share > MOST_WAITING:
            found.append(
                f"the machine was busy: a rank waited for a core for {self.waiting_share:.0%} of "
                "the time"
            )
        return " and ".join(found)

    @classmethod
    def read(cls, path: str) -> Profile:
        """Read a file, written by ``gnnpipe profile`` or by hand; ``InputError`` if this fails."""
        source = f"--profile {path!r}"
        return cls.from_json(document_text(path, source, _HINT), source)

    @classmethod
    def read_to_use(cls, path: str) -> Profile:
        """Read a file, as ``read``, to compute with its times; warns if these may be wrong."""
        found = cls.read(path)
        if doubts := found.doubts():
            warn(f"--profile {path!r}: {doubts}; {_AGAIN}")
        return found

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Read a profile from the text of ``to_json``; ``InputError`` names the wrong field.

        ``source``: the file, with its flag.
        """
        data = parse_json(text, VERSION, source, _HINT)
        with named("profile", source):
            return read_dataclass(cls, data, source)


def _nearest(kind: str, known: Collection[str]) -> str:
    """Return the differences of ``kind`` to the most similar known kind of op, as text."""
    wanted = kind.split(", ")

    def differences(other: str) -> int:
        return len(set(wanted).symmetric_difference(other.split(", ")))

    found = min(known, key=differences, default="")
    if found.split(", ")[0] != wanted[0]:
        return f"only {'; '.join([*known][:SHOWN_KINDS]) or 'none'}"
    different = [part for part in found.split(", ") if part not in wanted]
    return f"but one with {', '.join(different) or 'less'}"


def op_kind(op: Op) -> str:
    """Return the kind of an op; ops of one kind take the same time for the same rows and edges.

    >>> op_kind(Op("gcn3", ("gcn2.x",), {"gcn3.x": 16}, 272, 512, push_width=16))
    'gcn, push 16, out 16, flops 512 a row'
    >>> op_kind(Op("model_convs_2_lin", ("drop_1",), {"model_convs_2_lin": 16}, 256, 512))
    'model_convs_lin, out 16, flops 512 a row'
    """
    if op.kind:
        return op.kind
    stem = re.sub(r"_*\d+", "", op.name)  # 'part_1_of_convs_2': without the numbers of layers
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
