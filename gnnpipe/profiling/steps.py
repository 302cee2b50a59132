"""Measures every step of a plan by running its program with made-up values from other stages.

The executor, the stage, its tables and its kernels are those of a run; only messages between
stages are made up, so that no rank waits for another stage. Shards exchange rows as in a run. Both
profiles are fitted to these times: the short one before a run, where every rank plays itself, and
the one of ``gnnpipe profile``, where one process plays all stages of a plan in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from gnnpipe.perf import EpochSpans, PlanSizes
from gnnpipe.perf.fit import Sample, Work
from gnnpipe.perf.parts import Side, step_parts
from gnnpipe.perf.profile import aggregates_again, op_kind
from gnnpipe.plan import StageDag, StagePlan, gradient_buckets
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.p2p import ArrivingMessage, PointToPoint, ValueSize
from gnnpipe.runtime.comm.recorder import Recorder
from gnnpipe.runtime.comm.row_links import Pieces
from gnnpipe.schedule import (
    EXACT_SCHEDULE,
    Action,
    ActionKind,
    CheckedProgram,
    training_program,
    with_forecast,
)
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepared import Prepared

WARM_UP, REPEATS, MAX_REPEATS = 2, 5, 40
"""Epochs; memory pages are first touched in the warm-up."""

MIN_TIME_S = 2.0
"""Epochs beyond ``REPEATS`` are run until then: disturbances of a shared machine last seconds."""

BRIEF = 1, 2, 0.0
"""Warm-up, epochs and seconds of a brief measurement."""

BEGIN, UPDATE = "begin", "update"
"""Start of an epoch (tables cleared, masks drawn), and the optimizer's step. The other parts of a
sample are (kind of op, part)."""

StepKey = tuple[str, int, int, int]
"""(part of the program, stage, chunk, step)."""

_PARTS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.FORECAST: "forecast",
    ActionKind.CARRY: "carry",
    ActionKind.STEP: UPDATE,
}
"""Parts of the program by kind of action."""


def measure_steps(
    prepared: Prepared, device: torch.device, has_cores: bool = True, is_brief: bool = False
) -> list[Sample]:
    """Samples of every step of every chunk for ``fit_costs``; needs S = G = 1.

    The model is measured as one stage, and cut wherever possible: in a single stage, what an op
    does before its push lies in one step with what its predecessor does after its aggregation.
    ``has_cores``: no other rank shares this rank's cores. ``is_brief``: few epochs, for a
    comparison of plans.
    """
    samples = []
    warm_up, repeats, min_time_s = BRIEF if is_brief else (WARM_UP, REPEATS, MIN_TIME_S)
    for cuts in dict.fromkeys([(), prepared.model_graph.cuts]):
        cut = _with_cuts(prepared, cuts)
        stages, sizes = cut.plan.num_stages, chunk_sizes(cut)
        placement = cut.plan.placement
        meshes = [Mesh(stage, stages, device, placement=placement) for stage in range(stages)]
        epochs: list[Mapping[StepKey, float]] = []
        with measured_epochs(cut, meshes, has_cores) as run_epoch:
            start_s = time.perf_counter()
            for repeat in range(warm_up + MAX_REPEATS):
                is_enough = repeat >= warm_up + repeats
                if is_enough and time.perf_counter() - start_s > min_time_s:
                    break
                epochs.append(run_epoch())
        for key, time_s in typical_epoch(epochs[warm_up:]).items():
            # Few large chunks and many small ones count alike. BEGIN takes next to no time without
            # dropout, so its absolute error counts.
            weight = cut.plan.chunks**-0.5 * (time_s if key[0] == BEGIN else 1.0)
            samples.append(Sample(time_s, work_of(key, cut, sizes, 0), weight))
    return samples


def _with_cuts(prepared: Prepared, cuts: Sequence[int]) -> Prepared:
    """The same run with the model cut into stages at these ops."""
    model = prepared.model_graph
    ops = [tuple(range(*run)) for run in pairwise((0, *cuts, model.num_ops))]
    stages = [StagePlan.even(own, (i,)) for i, own in enumerate(ops)]
    plan = replace(prepared.plan, stages=tuple(stages))
    dag = StageDag.of(plan, model)
    buckets = gradient_buckets(model, plan, prepared.dtype.itemsize)
    program = training_program(dag, buckets)
    exact = training_program(dag, buckets, EXACT_SCHEDULE)
    if len(prepared.probes):
        program = with_forecast(dag, program)
    return replace(prepared, dag=dag, program=program, exact_program=exact)


@contextmanager
def measured_epochs(
    prepared: Prepared, meshes: Sequence[Mesh], has_cores: bool
) -> Iterator[Callable[[], dict[StepKey, float]]]:
    """Yields a function that runs one epoch of each rank in ``meshes`` and returns its step times.

    Weights, running means and random numbers are restored afterwards, and all that was allocated
    is freed, so that a run that follows is the same to the bit.
    """
    # A user's model may draw random numbers.
    with torch.random.fork_rng([]):
        ranks = [_MeasuredRank(prepared, mesh, has_cores) for mesh in meshes]
        state = [t for rank in ranks for t in rank.state()]
        before = [t.detach().clone() for t in state]
        try:
            yield lambda: {key: s for rank in ranks for key, s in rank.run_epoch().items()}
        finally:
            with torch.no_grad():
                for now, then in zip(state, before, strict=True):
                    now.copy_(then)


class _MeasuredRank:
    """One rank with an executor of its own, which runs the program one step per action."""

    def __init__(self, prepared: Prepared, mesh: Mesh, has_cores: bool) -> None:
        self._prepared = prepared
        self._mesh = replace(mesh, recorder=Recorder(clock=_clock(mesh.device, has_cores)))
        self._executor = build_rank(prepared, self._mesh).executor
        self._executor.p2p = _MadeUpMessages(self._mesh, prepared.dtype, prepared.row_dtype)
        # The first epoch that is not exact, unless all are.
        self._epoch = prepared.exact_epochs
        self._program = _one_step_per_action(prepared.program_of(self._epoch))

    def state(self) -> list[Tensor]:
        """Weights and buffers of the model, which epochs change."""
        return [t for _, t in self._executor.stage.stage_module.named_state()]

    def run_epoch(self) -> dict[StepKey, float]:
        """Seconds of one epoch by step."""
        order, recorder = _walk_order(self._prepared), self._mesh.recorder
        self._executor.run(self._program, order, epoch=self._epoch, training=True)
        recorder.end_epoch()
        # Masks are drawn anew in every epoch.
        self._epoch += 1
        return _step_times(recorder.epochs[-1], self._mesh.stage, order)


def _clock(device: torch.device, has_cores: bool) -> Callable[[], float]:
    if device.type == "cuda":
        return lambda: _synchronized_s(device)
    # Leaves out what other programs of a busy machine take, and waiting. Where ranks share cores,
    # what they take from each other is part of an epoch.
    return time.thread_time if has_cores and torch.get_num_threads() == 1 else time.perf_counter


def _synchronized_s(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()


class _MadeUpMessages(PointToPoint):
    """Receives random values at once and sends nothing."""

    def post(self, way: str, peer: int, position: int, sizes: Mapping[str, ValueSize]) -> None:
        """Fill the values."""
        values = {
            name: torch.empty(
                size.rows, size.width, dtype=self.row_dtype, device=self.mesh.device
            ).uniform_()
            for name, size in sizes.items()
        }
        self._arriving[way, peer, position] = ArrivingMessage(values, [], 0.0)

    def send(
        self, way: str, position: int, values: Mapping[str, Tensor], pieces: Mapping[str, Pieces]
    ) -> None:
        """Drop the values."""


def _one_step_per_action(program: CheckedProgram) -> CheckedProgram:
    """The program with an F or B action for every step, and without sums of gradients."""
    stages = []
    for actions in program.stages:
        split: list[Action] = []
        for action in actions:
            if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                steps = range(*action.steps)
                ordered = steps if action.kind is ActionKind.FORWARD else reversed(steps)
                split += [replace(action, steps=(step, step + 1)) for step in ordered]
            elif action.kind is not ActionKind.REDUCE_GRADIENTS:
                split.append(action)
        stages.append(tuple(split))
    return replace(program, stages=tuple(stages))


def _step_times(epoch: EpochSpans, stage: int, order: Sequence[int]) -> dict[StepKey, float]:
    """Seconds by step, without waits for other ranks."""
    collectives = [*epoch.collectives, *filter(None, [epoch.step_sync])]
    waits = iter(sorted(collectives, key=lambda c: c.wait_end_s))
    wait = next(waits, None)
    found: dict[StepKey, float] = {}
    for action, start_s, end_s in epoch.actions:
        time_s = end_s - start_s
        while wait is not None and wait.wait_end_s <= end_s:
            time_s -= wait.wait_end_s - max(wait.wait_start_s, start_s)
            wait = next(waits, None)
        if action.kind in _PARTS:
            chunk = order[action.position] if action.position >= 0 else 0
            found[_PARTS[action.kind], stage, chunk, action.steps[0]] = time_s
    before_s = epoch.actions[0][1] - epoch.start_s
    found[BEGIN, stage, 0, 0] = before_s + epoch.end_s - epoch.actions_end_s
    return found


def typical_epoch(epochs: Sequence[Mapping[StepKey, float]]) -> dict[StepKey, float]:
    """Mean by step over the epochs whose total time is in the middle half.

    Whole epochs are left out, not single steps: every epoch has some steps that were disturbed,
    different ones each time, and an epoch of typical steps would be faster than any real one.

    >>> p, q = ("forward", 0, 0, 0), ("forward", 0, 1, 0)
    >>> typical_epoch([{p: 1, q: 9}, {p: 9, q: 3}, {p: 90, q: 2}, {p: 1, q: 2}])[p]
    5.0
    """
    cut = len(epochs) // 4
    middle = sorted(epochs, key=lambda epoch: sum(epoch.values()))[cut : len(epochs) - cut]
    return {key: sum(epoch[key] for epoch in middle) / len(middle) for key in middle[0]}


def work_of(
    key: StepKey, prepared: Prepared, sizes: PlanSizes, shard: int
) -> Mapping[Hashable, Work]:
    """Work of a shard in a measured step, by part: (kind of op, part), BEGIN or UPDATE."""
    what, stage, chunk, step = key
    model, indices = prepared.model_graph, prepared.plan.stages[stage].ops
    ops, of_stage = model.select(indices), sizes.stages[stage]
    if what == UPDATE:
        return {UPDATE: Work(sum(op.num_parameters for op in ops), times=len(ops))}
    if what == BEGIN:
        return {BEGIN: of_stage.begin_work(ops, shard)}
    if what == "forecast":
        found = [(op, what, Work(int(of_stage.probes[op.vertex_type][shard]))) for op in ops]
    elif what == "carry":
        found = [
            (op, what, Work(int(of_stage.stale[op.pushed_type][shard])))
            for op in ops
            if op.aggregates and op.is_forecast
        ]
    else:
        parts = [
            (model.ops[p.op], p.side, of_stage.work(model.ops[p.op], p.side, shard, chunk))
            for p in step_parts(model, indices)[step]
        ]
        found = [(op, f"{what}_{side}", work) for op, side, work in parts]
        # With --recompute, all stages recompute, and this is part of the time of backward.
        adds_forward = prepared.plan.stages[stage].recompute and not prepared.config.recompute
        if what == "backward" and adds_forward:
            for op, side, work in parts:
                has_edges = aggregates_again(op.is_linear, side is Side.AFTER)
                again = work if has_edges else replace(work, edges=0.0)
                found.append((op, f"forward_{side}", again))
        # The last chunk backward also completes the gradients of all chunks' features.
        if (what, chunk, step) == ("backward", _walk_order(prepared)[0], 0):
            reading = [op for op in ops if op.reads_features]
            found += [(op, "finish", of_stage.feature_work(op, shard)) for op in reading]
    total: dict[Hashable, Work] = {}
    for op, part, work in found:
        name = op_kind(op), part
        total[name] = total[name] + work if name in total else work
    return total


def _walk_order(prepared: Prepared) -> Sequence[int]:
    """The order of the chunks in every measured epoch."""
    return prepared.chunk_order(prepared.exact_epochs)


def boundary_time_per_number_s(device: torch.device) -> float:
    """Seconds to read a number of a table row for another shard, or to add one to a table.

    The mean of both, for rows of a common width in the order of an exchange.
    """
    table = torch.zeros(1 << 15, 64, device=device)
    rows = torch.arange(0, len(table), 4, device=device)
    clock, times = _clock(device, False), []
    for _ in range(WARM_UP + REPEATS):
        start_s = clock()
        table.index_add_(0, rows, table[rows])
        times.append(clock() - start_s)
    return statistics.median(times[WARM_UP:]) / (2 * len(rows) * table.shape[1])
