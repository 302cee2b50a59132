"""Times of a model's steps by size of the chunks, measured on the stages that a run has.

One process plays all stages of a chain, one chunk after another, forward and then backward, with
the same pieces, tables, dropout and kernels as a run. It does so with the model as one stage, as
most steps of a run are, and cut wherever it can be, which tells what lies before a push from what
lies behind it. Not in here: what ranks take from each other (see ``take_profile``), and halo rows.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gnnpipe.models import Values
from gnnpipe.perf import ChunkSizes
from gnnpipe.perf.fit import Sample, Work
from gnnpipe.perf.parts import step_parts
from gnnpipe.perf.profile import op_kind
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.stage import Stage
from gnnpipe.runtime.staleness.forecast import Forecaster
from gnnpipe.setup.build import RankRuntime, build_rank
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepare import Prepared, chunk_order

__all__ = [
    "BEGIN",
    "UPDATE",
    "StepPlace",
    "boundary_time_per_number_s",
    "measure_steps",
    "typical_walk",
    "walk_order",
    "work_at",
]

WARM_UP, REPEATS, MOST_REPEATS = 2, 5, 40
"""Epochs; the first ones fault every page in."""

SPREAD_S = 2.0
"""More than ``REPEATS`` epochs are walked until then: what a machine does beside, or its neighbours
do on the same host, comes and goes within seconds."""

BEGIN, UPDATE = "begin", "update"
"""Parts of a sample beside those of the ops, which are (kind, part)."""

StepPlace = tuple[str, int, int, int]
"""(what was timed, stage, chunk, step)."""


def measure_steps(prepared: Prepared, mesh: Mesh, has_cores: bool = True) -> list[Sample]:
    """Samples of every step of every chunk, for ``fit_costs``; S = G = 1.

    ``mesh``: of this rank alone, on its device; ``has_cores``: no other rank takes its turns.
    """
    model, chunks = prepared.model_graph, prepared.plan.chunks
    found = []
    for cuts in dict.fromkeys([(), model.cuts]):
        runs = tuple(pairwise((0, *cuts, model.num_ops)))
        plan = replace(
            prepared.plan,
            stages=runs,
            steps=tuple(model.num_steps(*run) for run in runs),
            schedule="fill-drain",
            transfers=model.transfers(runs),
        )
        cut = replace(prepared, plan=plan)
        sizes, chain = chunk_sizes(cut), _Chain(cut, mesh, has_cores)
        walks: list[Mapping[StepPlace, float]] = []
        start_s = time.perf_counter()
        for epoch in range(WARM_UP + MOST_REPEATS):
            is_enough = epoch >= WARM_UP + REPEATS
            if is_enough and time.perf_counter() - start_s > SPREAD_S:
                break
            walks.append(chain.epoch(epoch))
        for place, time_s in typical_walk(walks[WARM_UP:]).items():
            parts = work_at(place, cut, sizes, 0)
            # Few large chunks and many small ones count alike. Ops without dropout begin in next to
            # no time, so there it is the sum that is to be right.
            weight = chunks**-0.5 * (time_s if place[0] == BEGIN else 1.0)
            found.append(Sample(time_s, parts, weight))
    return found


def typical_walk(walks: Sequence[Mapping[StepPlace, float]]) -> Mapping[StepPlace, float]:
    """By place the mean of the walks that as a whole are in the middle half.

    Whole walks are left out, not single steps: every epoch has some steps that something came
    between, other ones each time, and an epoch of the typical steps alone would be quicker than
    any.

    >>> p, q = ("forward", 0, 0, 0), ("forward", 0, 1, 0)
    >>> typical_walk([{p: 1, q: 9}, {p: 9, q: 3}, {p: 90, q: 2}, {p: 1, q: 2}])[p]
    5.0
    """
    cut = len(walks) // 4
    middle = sorted(walks, key=lambda walk: sum(walk.values()))[cut : len(walks) - cut]
    return {place: sum(walk[place] for walk in middle) / len(middle) for place in middle[0]}


def work_at(
    place: StepPlace, prepared: Prepared, sizes: ChunkSizes, shard: int
) -> Mapping[Hashable, Work]:
    """What a shard does at a place, by part: of an op (its kind, the part), BEGIN or UPDATE.

    The chunks were walked in ``walk_order``.
    """
    what, stage, chunk, step = place
    model, (first, last) = prepared.model_graph, prepared.plan.stages[stage]
    ops = model.ops[first:last]
    if what == UPDATE:
        weights = sum(op.num_parameters for op in ops)
        return {UPDATE: Work(weights, times=len(ops))}
    pushing = [op for op in ops if op.aggregates]
    if what == BEGIN:
        return {BEGIN: sizes.begun(ops, shard)}
    summed: dict[Hashable, Work] = {}
    if what in ("forecast", "recall"):
        found = [(op, what, Work(int(sizes.probes[op.vertex_type][shard]))) for op in ops]
    elif what == "carry":
        found = [
            (op, what, Work(int(sizes.stale[op.pushed_type][shard])))
            for op in pushing
            if op.is_forecast
        ]
    else:
        found = [
            (model.ops[p.op], f"{what}_{p.side}", sizes.work(model.ops[p.op], p.side, shard, chunk))
            for p in step_parts(model, first, last, sizes.precomputed)[step]
        ]
        if (what, chunk, step) == ("backward", walk_order(prepared)[0], 0):
            reading = [op for op in ops if op.reads_features]
            found += [(op, "finish", sizes.whole(op, shard)) for op in reading]
    for op, name, work in found:
        summed[op_kind(op), name] = summed.get((op_kind(op), name), Work(0, times=0)) + work
    return summed


def walk_order(prepared: Prepared) -> Sequence[int]:
    """Of the chunks, always the same: the last one back pays for what all have left."""
    return chunk_order(prepared.config, prepared.exact_epochs)


@dataclass(frozen=True)
class _Played(Mesh):
    """The place of a stage that this process plays beside all others: nobody else is there."""

    said: list[Any] = field(default_factory=list, compare=False)
    """What the first stage told all others."""

    def gather(self, thing: Any) -> list[Any]:
        """Every stage finds the same."""
        return [thing] * self.world_size

    def share(self, thing: Any) -> Any:
        """The first stage comes first."""
        if self.rank == 0:
            self.said.append(thing)
        return self.said[-1]


class _Chain:
    """All stages of a plan in one process."""

    def __init__(self, prepared: Prepared, mesh: Mesh, has_cores: bool) -> None:
        self._prepared, self._device = prepared, mesh.device
        self._clocks_processor = has_cores and torch.get_num_threads() == 1
        self._times: dict[StepPlace, float] = defaultdict(float)
        count, said = prepared.plan.num_stages, list[Any]()
        self._ranks: list[RankRuntime] = [
            build_rank(prepared, _Played(count, 1, stage, mesh.device, None, None, said=said))
            for stage in range(count)
        ]
        self._stages: list[Stage] = [rank.executor.stage for rank in self._ranks]

    def epoch(self, epoch: int) -> Mapping[StepPlace, float]:
        """Seconds by place."""
        self._times = defaultdict(float)
        order = walk_order(self._prepared)
        for i, stage in enumerate(self._stages):
            with self._timed(BEGIN, i):
                stage.begin(epoch, True)
        if epoch:  # The first one is exact in a run.
            self._forecast(order)
        for chunk in order:
            self._forward(chunk)
        for chunk in reversed(order):
            self._backward(chunk)
        self._recall()
        for i, stage in enumerate(self._stages):
            with self._timed(BEGIN, i):
                stage.end()
            with self._timed(UPDATE, i):
                self._update(i)
        return self._times

    @contextmanager
    def _timed(self, what: str, stage: int, chunk: int = 0, step: int = 0) -> Iterator[None]:
        start_s = self._clock()
        yield
        self._times[what, stage, chunk, step] += self._clock() - start_s

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._clocks_processor:
            # What other programs of a busy machine take is no part of it.
            return time.thread_time()
        return time.perf_counter()

    def _forecast(self, order: Sequence[int]) -> None:
        made: Values = {}
        for i, forecaster in self._forecasters():
            with self._timed("forecast", i):
                made |= forecaster.run({name: made[name] for name in self._read(i)})
            with self._timed("carry", i):
                forecaster.carry(order)

    def _recall(self) -> None:
        made: Values = {}
        for i, forecaster in self._forecasters():
            values = {name: made[name] for name in self._read(i)}
            with self._timed("recall", i):
                forecaster.remember()
                made |= forecaster.recall(values)

    def _forecasters(self) -> Iterator[tuple[int, Forecaster]]:
        """Of every stage, where there are any."""
        for i, rank in enumerate(self._ranks):
            if rank.executor.forecaster is not None:
                yield i, rank.executor.forecaster

    def _read(self, stage: int) -> set[str]:
        """Names of the values that a stage gets from earlier ones."""
        return {name for t in self._prepared.plan.receives(stage) for name in t.widths}

    def _forward(self, chunk: int) -> None:
        made: Values = {}
        for i, stage in enumerate(self._stages):
            stage.enter(chunk, {name: made[name] for name in self._read(i)})
            values: Values = {}
            for step in range(stage.num_steps):
                with self._timed("forward", i, chunk, step):
                    values = stage.forward(chunk, range(step, step + 1))
            made |= {name: value.detach() for name, value in values.items()}

    def _backward(self, chunk: int) -> None:
        grads: dict[str, list[Tensor]] = defaultdict(list)
        for i, stage in reversed(list(enumerate(self._stages))):
            sent = {name for t in self._prepared.plan.sends(i) for name in t.widths}
            if sent:
                stage.seed(chunk, {name: sum(grads[name][1:], grads[name][0]) for name in sent})
            else:
                stage.seed_loss(chunk)
            found: Values = {}
            for step in reversed(range(stage.num_steps)):
                with self._timed("backward", i, chunk, step):
                    found = stage.backward(chunk, range(step, step + 1))
            for name, grad in found.items():
                grads[name].append(grad)

    def _update(self, stage: int) -> None:
        executor = self._ranks[stage].executor
        assert executor.optimizer is not None
        executor.optimizer.step()
        executor.optimizer.zero_grad(set_to_none=True)


def boundary_time_per_number_s(device: torch.device) -> float:
    """Of a number that is taken out of a table's row for another shard, or added to one.

    The mean of both, for rows of a common width in the order of an exchange.
    """
    table = torch.zeros(1 << 15, 64, device=device)
    rows = torch.arange(0, len(table), 4, device=device)
    times = []
    for _ in range(WARM_UP + REPEATS):
        start_s = time.perf_counter()
        table.index_add_(0, rows, table[rows])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[WARM_UP:]) / (2 * len(rows) * table.shape[1])
