"""What a plan's steps and messages cost by a profile: ``Costs`` for the simulator.

Bytes are counted, not estimated: over all ranks they are those of ``closed_form_volume``, to the
byte. Times are the profile's, of as many ranks at once as the plan has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from gnnpipe.errors import InputError
from gnnpipe.perf.parts import ChunkSizes, Part, step_parts
from gnnpipe.perf.profile import Affine, LinkTimes, OpTimes, Profile, op_kind
from gnnpipe.perf.volume import fit_numbers
from gnnpipe.plan import ModelGraph, Op, Plan, Transfer, op_gradient_steps
from gnnpipe.schedule import PROBE_POSITIONS

__all__ = ["ProfiledCosts", "sync_time_s"]

WAYS = {"F": "forward", "B": "backward"}
SUM_BYTES = 8
"""Of a number in the sums of a forecast, and of a mean over all vertices: float64."""


class ProfiledCosts:
    """``Costs`` of a plan from a profile and the sizes of its chunks."""

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        model: ModelGraph,
        sizes: ChunkSizes,
        *,
        number_bytes: int,
        row_bytes: int,
        ranks_at_once: int,
    ) -> None:
        """``row_bytes`` for a number of a row on the wire, ``number_bytes`` of a weight;
        ``ranks_at_once``: ranks of one machine. ``InputError`` if the profile lacks an op or a link
        that the plan needs.
        """
        self.plan, self.model, self.sizes = plan, model, sizes
        self._number_bytes, self._row_bytes = number_bytes, row_bytes
        self._profile, self._compute = profile, profile.compute_of(ranks_at_once)
        self._ops = [self._times_of(op) for op in model.ops]
        self._parts = [step_parts(model, *run, sizes.precomputed) for run in plan.stages]
        self._steps: dict[tuple[str, int, int], npt.NDArray[np.float64]] = {}
        self._messages: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._transfers: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        """By source and target."""
        for transfer in plan.transfers:
            self._transfers[transfer.source, transfer.target].append(transfer)
        self._beside: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By stage the ends of the transfers that it has a part in."""
        for ends in self._transfers:
            for stage in ends:
                self._beside[stage].append(ends)
        if plan.num_stages > 1:
            self._link("message")
        if plan.shards > 1:
            self._link("exchange")
            self._link("gradient_sum")

    def _times_of(self, op: Op) -> OpTimes:
        kind, known = op_kind(op), self._compute.ops
        if kind not in known:
            advice = (
                "take one with the dataset of the run and what it says of the model (--model, "
                "--hidden, --heads), and with --layers 3 at least"
            )
            if self.model.unit == "op":
                advice = "leave it out: a run of your own model takes a short one by itself"
            raise InputError(
                f"--profile: has no {self.model.unit} like {op.name} ({kind}), "
                f"{_nearest(kind, known)}; {advice}"
            )
        return known[kind]

    def _link(self, name: str) -> LinkTimes:
        found: LinkTimes | None = getattr(self._profile, name)
        if found is None:
            raise InputError(
                f"--profile: {name}: was not measured; take the profile with torchrun "
                "--nproc-per-node 2 -m gnnpipe profile and the same settings"
            )
        return found

    def begin_s(self, stage: int, shard: int) -> float:
        """Clearing and keeping tables; masks."""
        begin, work = self._compute.begin, self.sizes.begun(self._stage_ops(stage), shard)
        per_row, per_edge = begin.per_row_s * work.rows, begin.per_edge_s * work.edges
        return begin.base_s * work.times + per_row + per_edge

    def step_s(self, way: str, stage: int, shard: int, chunk: int, step: int) -> float:
        """One step of one chunk; rows taken out for other shards, or added, are part of it."""
        key = way, stage, step
        if key not in self._steps:
            self._steps[key] = self._step_times(*key)
        return float(self._steps[key][shard, chunk])

    def _step_times(self, way: str, stage: int, step: int) -> npt.NDArray[np.float64]:
        """[G, K]."""
        total = np.zeros((self.plan.shards, self.plan.chunks))
        for part in self._parts[stage][step]:
            op, costs = self.model.ops[part.op], self._part_times(way, part)
            rows, edges, entries = self.sizes.columns(op, part.side)
            total += costs.base_s + costs.per_row_s * rows
            total += costs.per_edge_s * edges + costs.per_entry_s * entries
            if part.side == "before" and not op.is_mean:
                numbers = self.sizes.boundary[op.pushed_type] * op.push_width
                total += self._compute.boundary_per_number_s * numbers
        return total + self._busy_times(way, stage, step)

    def _busy_times(self, way: str, stage: int, step: int) -> npt.NDArray[np.float64]:
        """[G, K], what the processors do for messages and exchanges beside the step."""
        plan, total = self.plan, np.zeros((self.plan.shards, self.plan.chunks))
        last = len(self._parts[stage]) - 1
        enters, leaves = (0, last) if way == "F" else (last, 0)
        for ends in self._beside[stage]:
            source, target = ends if way == "F" else ends[::-1]
            if (target == stage and step == enters) or (source == stage and step == leaves):
                busy = self._link("message").busy
                total += busy.base_s + busy.per_row_s * self._sizes_between(*ends)
        if plan.shards > 1 and step < last and self.has_exchange(stage, step):
            busy = self._link("exchange").busy
            total += [
                [
                    busy.base_s * (plan.shards - 1)
                    + busy.per_row_s * self.exchange_bytes(way, stage, shard, chunk, step)
                    for chunk in range(plan.chunks)
                ]
                for shard in range(plan.shards)
            ]
        return total

    def _part_times(self, way: str, part: Part) -> Affine:
        found: Affine = getattr(self._ops[part.op], f"{WAYS[way]}_{part.side}")
        return found

    def finish_s(self, stage: int, shard: int) -> float:
        """Of the ops that read features."""
        total = 0.0
        first, last = self.plan.stages[stage]
        for op, times in zip(self.model.ops[first:last], self._ops[first:last], strict=True):
            if op.reads_features:
                work = self.sizes.whole(op, shard)
                total += times.finish.time_s(work.rows, entries=work.entries)
        return total

    def pull_s(self, stage: int, shard: int, chunk: int, step: int) -> float:
        """The edges' share of the step: of halo rows, too, which are few."""
        return sum(
            self._part_times("B", part).per_edge_s
            * float(self.sizes.columns(self.model.ops[part.op], part.side)[1][shard, chunk])
            for part in self._parts[stage][step]
            if part.side == "before"
        )

    def pilot_s(self, kind: str, stage: int, shard: int) -> float:
        """FORECAST, CARRY or RECALL."""
        first, last = self.plan.stages[stage]
        total = 0.0
        for op, times in zip(self.model.ops[first:last], self._ops[first:last], strict=True):
            probes = float(self.sizes.probes[op.vertex_type][shard])
            if kind == "RECALL":
                total += times.recall.time_s(probes)
            elif kind == "FORECAST":
                total += times.forecast.time_s(probes)
            elif op.is_forecast:
                total += times.carry.time_s(float(self.sizes.stale[op.pushed_type][shard]))
        return total

    def fit_bytes(self, stage: int) -> Sequence[int]:
        """Of each aggregation that is forecast."""
        return [fit_numbers(op) * SUM_BYTES for op in self._stage_ops(stage) if op.is_forecast]

    def update_s(self, stage: int, shard: int) -> float:
        """The optimizer's step."""
        ops, update = self._stage_ops(stage), self._compute.update
        return update.base_s * len(ops) + update.per_row_s * sum(op.num_parameters for op in ops)

    def message_bytes(self, way: str, source: int, target: int, shard: int, chunk: int) -> int:
        """Rows of a chunk times the widths of what the stages hand on."""
        ends = (source, target) if way == "F" else (target, source)
        if chunk not in PROBE_POSITIONS:
            return int(self._sizes_between(*ends)[shard, chunk])
        return sum(
            int(self.sizes.probes[t.types.get(value, "")][shard]) * width * self._row_bytes
            for t in self._transfers.get(ends, ())
            for value, width in t.widths.items()
        )

    def _sizes_between(self, source: int, target: int) -> npt.NDArray[np.int64]:
        """[G, K], bytes of each chunk's message; as many go back."""
        ends = source, target
        if ends not in self._messages:
            total = np.zeros((self.plan.shards, self.plan.chunks), dtype=np.int64)
            for transfer in self._transfers.get(ends, ()):
                for value, width in transfer.widths.items():
                    rows = self.sizes.rows[transfer.types.get(value, "")]
                    total += rows * (width * self._row_bytes)
            self._messages[ends] = total
        return self._messages[ends]

    def has_exchange(self, stage: int, step: int) -> bool:
        """Rows are pushed, not for means alone."""
        return any(not op.is_mean for op in self._pushing(stage, step))

    def exchange_bytes(self, way: str, stage: int, shard: int, chunk: int, step: int) -> int:
        """Boundary rows forward, gradients of halo rows back."""
        total = 0
        for op in self._pushing(stage, step):
            if op.is_mean:
                continue
            rows = self.sizes.boundary if way == "F" else self.sizes.halo
            total += int(rows[op.pushed_type][shard, chunk]) * op.push_width * self._row_bytes
        return total

    def mean_bytes(self, stage: int, step: int) -> Sequence[int]:
        """Of each mean that the step pushes for."""
        return [op.push_width * SUM_BYTES for op in self._pushing(stage, step) if op.is_mean]

    def _pushing(self, stage: int, step: int) -> list[Op]:
        """Ops that push at the end of the step, in order."""
        parts = self._parts[stage][step]
        return [self.model.ops[part.op] for part in parts if part.side == "before"]

    def gradient_bytes(self, stage: int, steps: tuple[int, int]) -> int:
        """Weights of the stage that are whole behind these steps."""
        whole = op_gradient_steps(self.model, *self.plan.stages[stage])
        ops = zip(self._stage_ops(stage), whole, strict=True)
        numbers = sum(op.num_parameters for op, step in ops if step in range(*steps))
        return numbers * self._number_bytes

    def link_s(self, source: int, target: int, size_bytes: int) -> float:
        """A message."""
        return self._link("message").time_s(size_bytes)

    def exchange_s(self, stage: int, sizes_bytes: Sequence[int]) -> float:
        """As slow as the shard that sends most."""
        return self._link("exchange").time_s(max(sizes_bytes), self.plan.shards - 1)

    def reduce_s(self, stage: int, size_bytes: int) -> float:
        """Two exchanges: each shard adds up its part, then hands it out."""
        return self._link("gradient_sum").time_s(size_bytes, 2 * (self.plan.shards - 1))

    def sync_s(self) -> float:
        """By the latency of a message, or of an exchange where there are no messages."""
        link = self._profile.message or self._link("exchange")
        return sync_time_s(self.plan.world_size, link.latency_s)

    def link(self, source: int, target: int) -> str:
        """Every pair of ranks has its own, each way."""
        return f"link {source} to {target}"

    def group(self, stage: int) -> str:
        """Every stage has its own."""
        return f"shards of stage {stage}"

    def _stage_ops(self, stage: int) -> tuple[Op, ...]:
        first, last = self.plan.stages[stage]
        return self.model.ops[first:last]


def sync_time_s(ranks: int, latency_s: float) -> float:
    """Of a sum of a few numbers over all ranks: by pairs, then by pairs of pairs, and back again.

    >>> sync_time_s(4, 0.5)
    2.0
    """
    return 2 * math.ceil(math.log2(ranks)) * latency_s


def _nearest(kind: str, known: Collection[str]) -> str:
    """What of ``known`` has most in common with a kind of op, and what not."""
    wanted = kind.split(", ")

    def differs(other: str) -> int:
        return len(set(wanted).symmetric_difference(other.split(", ")))

    found = min(known, key=differs, default="")
    if found.split(", ")[0] != wanted[0]:
        return f"only {'; '.join(known)}"
    there = [part for part in found.split(", ") if part not in wanted]
    return f"but one with {', '.join(there) or 'less'}"
