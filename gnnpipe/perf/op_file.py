"""Models of row-wise ops and their times from a JSON file, for networks that are not GNNs.

A row is a sample. A chunk is a part of the samples of one optimizer step, and an epoch is one step.
No op aggregates, so any schedule is exact. The file:

{"name": "two towers",
 "link": {"latency_s": 15e-6, "bandwidth_bytes_per_s": 11e9},
 "update_s_per_parameter": 4e-11,
 "ops": [{"name": "fc1", "inputs": [], "outputs": {"fc1.y": 4096}, "num_parameters": 16777216,
          "kept_per_row": 8192, "forward": {"base_s": 12e-6, "per_row_s": 3e-6},
          "backward": {"base_s": 12e-6, "per_row_s": 6e-6}}, ...]}

``inputs`` are outputs of earlier ops; an op without inputs reads the samples. Widths and kept
numbers are float32 numbers per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from gnnpipe.collectives import DEFAULT_COLLECTIVES
from gnnpipe.documents import document_text, parse_json, read_dataclass
from gnnpipe.errors import InputError
from gnnpipe.perf.parts import ChunkSizes, Counts, PlanSizes
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes, Profile
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.perf.simulate import Timeline, simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.plan import ModelGraph, Op, Plan, StageDag
from gnnpipe.schedule import training_program

NUMBER_BYTES = 4


@dataclass(frozen=True)
class RowTime:
    """Time of an op for the rows of one call."""

    base_s: float
    per_row_s: float

    @property
    def affine(self) -> Affine:
        """The time as an entry of a profile."""
        return Affine(self.base_s, self.per_row_s)


@dataclass(frozen=True)
class OpEntry:
    """An op of the file."""

    name: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, int]
    num_parameters: int
    kept_per_row: int
    forward: RowTime
    backward: RowTime


@dataclass(frozen=True)
class LinkEntry:
    """The link between any two devices."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class OpFile:
    """The content of a file."""

    name: str
    link: LinkEntry
    update_s_per_parameter: float
    ops: tuple[OpEntry, ...]

    @classmethod
    def read(cls, path: str) -> OpFile:
        """Read a file; ``InputError`` if this fails."""
        return cls.from_json(document_text(path, repr(path), "give a JSON file"), path)

    @classmethod
    def from_json(cls, text: str, source: str = "ops") -> OpFile:
        """Read the text of a file; ``InputError`` names what is wrong."""
        data = parse_json(text, None, source, "see gnnpipe.perf.op_file")
        found = read_dataclass(cls, data, source)
        _check(found, source)
        return found

    def model(self) -> ModelGraph:
        """Return the ops."""
        ops = tuple(
            Op(
                entry.name,
                entry.inputs,
                entry.outputs,
                entry.num_parameters,
                flops_per_row=0,
                kept_per_row=entry.kept_per_row,
                reads_features=not entry.inputs,
                weights=(f"{entry.name}.weight",) if entry.num_parameters else (),
                kind=entry.name,
            )
            for entry in self.ops
        )
        return ModelGraph(self.name, 0, sum(ops[-1].outputs.values()), ops)

    def profile(self) -> Profile:
        """Return the times of the ops and of the link."""
        none = Affine()
        times = {
            e.name: OpTimes(
                none, e.forward.affine, none, e.backward.affine, none, none, none, relative_error=0
            )
            for e in self.ops
        }
        update = Affine(0.0, self.update_s_per_parameter)
        link = LinkTimes(self.link.latency_s, self.link.bandwidth_bytes_per_s, 0.0)
        return Profile(
            machine=self.name,
            source="by hand",
            note="from a file of ops",
            device="cpu",
            dtype="float32",
            comm_dtype="same",
            matmul_dtype="same",
            kernel="auto",
            recompute=False,
            threads=1,
            compute=(ComputeTimes(1, times, none, update, 0.0),),
            message=link,
            exchange=link,
            shard_sum=link,
        )


def _check(file: OpFile, source: str) -> None:
    """Raise ``InputError`` if the ops do not form a DAG in the order of the file."""
    if not file.ops:
        raise InputError(f"{source}: ops: the list is empty; give at least one op")
    if file.link.bandwidth_bytes_per_s < 0.1:
        raise InputError(f"{source}: link: bandwidth_bytes_per_s: must be at least 0.1")
    names: set[str] = set()
    made: set[str] = set()
    for i, entry in enumerate(file.ops):
        where = f"{source}: ops[{i}] ({entry.name})"
        if entry.name in names:
            raise InputError(f"{where}: another op has this name; give each op its own")
        if not entry.outputs:
            raise InputError(f"{where}: has no outputs; give at least one")
        for value in entry.inputs:
            if value not in made:
                raise InputError(
                    f"{where}: reads {value!r}, which no earlier op computes; list every op after "
                    "those that it reads from"
                )
        for value, width in entry.outputs.items():
            if value in made or width < 1:
                what = "another op computes this value" if value in made else "has no width"
                raise InputError(f"{where}: outputs: {value!r}: {what}; give it a name and a width")
        names.add(entry.name)
        made |= entry.outputs.keys()


@dataclass(frozen=True)
class RowCosts:
    """Planning costs of a file's ops for K chunks (``planner.costs.PlanningCosts``)."""

    model: ModelGraph
    profile: Profile
    rows: int
    """Samples of an optimizer step."""
    chunks: int
    numbers_per_parameter: int = 4
    """A weight, its gradient and Adam's two moments; 2 for plain SGD."""

    def _rows(self, shards: int) -> int:
        """Return the most rows of a chunk on one device."""
        return math.ceil(self.rows / self.chunks / shards)

    def stage_s(self, ops: Sequence[int], shards: int) -> float:
        """Return the time of forward and backward of one chunk."""
        rows, times = self._rows(shards), self._times
        return sum(times[op].base_s + times[op].per_row_s * rows for op in ops)

    @cached_property
    def _times(self) -> list[Affine]:
        """Time of each op, forward and backward."""
        known = self.profile.compute[0].ops
        each = (known[op.kind] for op in self.model.ops)
        return [times.forward_after + times.backward_after for times in each]

    def epoch_s(self, ops: Sequence[int], shards: int) -> float:
        """Return the time of the gradient sum, after the last chunk, and the optimizer's step."""
        weights = sum(op.num_parameters for op in self.model.select(ops))
        update_s = self.profile.compute[0].update.time_s(weights, times=len(ops))
        link = self.profile.shard_sum
        if shards == 1 or link is None:
            return update_s
        use = DEFAULT_COLLECTIVES.sum.link_use(shards, weights * NUMBER_BYTES)
        return update_s + link.time_s(use.sent_bytes, use.messages)

    def message_s(self, width: int, shards: int) -> float:
        """Return the time of ``width`` numbers of every row of a chunk, one way."""
        link = self.profile.message
        return link.time_s(width * NUMBER_BYTES * self._rows(shards)) if link else 0.0

    def memory_bytes(self, ops: Sequence[int], shards: int, in_flight: int) -> int:
        """Return the bytes of weights with gradients and moments, and of kept numbers."""
        held = self.model.select(ops)
        numbers = self.numbers_per_parameter * sum(op.num_parameters for op in held)
        kept = sum(op.kept_per_row for op in held)
        return (numbers + in_flight * self._rows(shards) * kept) * NUMBER_BYTES


def row_timeline(dag: StageDag, model: ModelGraph, profile: Profile, rows: int) -> Timeline:
    """Return the simulated optimizer step of a plan; chunks get equal numbers of samples."""
    costs = ProfiledCosts(
        profile,
        dag,
        model,
        _row_sizes(dag.plan, rows),
        number_bytes=NUMBER_BYTES,
        row_bytes=NUMBER_BYTES,
        ranks_at_once=1,
    )
    return simulate(program_tasks(training_program(dag), costs))


def _row_sizes(plan: Plan, rows: int) -> PlanSizes:
    """Return the samples of every chunk, shard and stage."""
    chunk_ends = np.arange(plan.chunks + 1) * rows // plan.chunks
    part_ends = np.array([0.0, *accumulate(plan.split.shares)])[:, None]
    ends = np.round(part_ends * np.diff(chunk_ends)).astype(np.int64)
    parts: Counts = ends[1:] - ends[:-1]
    stages = []
    for bounds in plan.split.bounds:
        cells = np.add.reduceat(parts, bounds[:-1], axis=0)
        none, column = {"": np.zeros_like(cells)}, {"": np.zeros(len(cells), dtype=np.int64)}
        stages.append(ChunkSizes({"": cells}, none, none, none, none, column, column))
    probes = {"": np.zeros(len(parts), dtype=np.int64)}
    return PlanSizes(tuple(stages), plan.split, {"": parts}, probes)
