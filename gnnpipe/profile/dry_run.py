"""A rank's own part of the program walked before the run, with made-up values from other stages.

It is what a short profile is taken from: the executor, the stage, its tables and its shard's rows
are those of the run, and the ranks walk at once, for they share a machine. Only messages between
stages are left out, so that no rank waits for another one; shards exchange rows as in the run. All
that is allocated here is dropped again, and the weights are put back, so that the run that follows
is the same to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpipe.perf import EpochSpans
from gnnpipe.profile.steps import BEGIN, UPDATE, StepPlace, walk_order
from gnnpipe.runtime.comm.cpu_affinity import crowding
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.p2p import PointToPoint
from gnnpipe.runtime.comm.recorder import Recorder
from gnnpipe.runtime.comm.start_thread import Transfer
from gnnpipe.schedule import Action, ActionKind, Program
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import Prepared

__all__ = ["DryRun", "rehearsal"]

WHAT = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.FORECAST: "forecast",
    ActionKind.CARRY: "carry",
    ActionKind.RECALL: "recall",
    ActionKind.STEP: UPDATE,
}


class DryRun:
    """Walks on one rank, as often as asked; every rank must ask alike."""

    def __init__(self, prepared: Prepared, mesh: Mesh) -> None:
        threads = torch.get_num_threads()
        has_cores = crowding(threads, mesh.gather) <= 1
        recorder = Recorder(clock=time.thread_time) if threads == 1 and has_cores else Recorder()
        self._mesh = _Aside(
            mesh.stages,
            mesh.shards,
            mesh.rank,
            mesh.device,
            mesh.graph_group,
            mesh.control_group,
            recorder=recorder,
            start_thread=mesh.start_thread,
            down_group=mesh.down_group,
        )
        self._prepared = prepared
        self._rank_runtime = build_rank(prepared, self._mesh)
        executor = self._rank_runtime.executor
        executor.p2p = _MadeUp(self._mesh, prepared.dtype, prepared.row_dtype)
        self._walked = 0
        self.state = [t for _, t in executor.stage.stage_module.named_state()]
        """Weights, and what else the walks change of the model."""

    def walk(self) -> Mapping[StepPlace, float]:
        """Seconds by place, of one epoch."""
        prepared, notes = self._prepared, self._mesh.recorder
        # Past the exact epochs, where there are others.
        first = prepared.exact_epochs
        order = walk_order(prepared)
        program = _step_by_step(prepared.program_of(first))
        # Each is an epoch of its own: what is made once an epoch, as masks are, is made anew.
        epoch, self._walked = first + self._walked, self._walked + 1
        self._rank_runtime.executor.run(program, order, epoch=epoch, training=True)
        notes.end_epoch()
        return _times(notes.epochs[-1], self._mesh.stage, order)


@contextmanager
def rehearsal(prepared: Prepared, mesh: Mesh) -> Iterator[DryRun]:
    """Nothing is left of it behind the block, neither memory nor a changed weight."""
    # A model of the user's own may draw random numbers.
    with torch.random.fork_rng([]):
        made = DryRun(prepared, mesh)
        kept = [t.detach().clone() for t in made.state]
        try:
            yield made
        finally:
            with torch.no_grad():
                for now, before in zip(made.state, kept, strict=True):
                    now.copy_(before)


@dataclass(frozen=True)
class _Aside(Mesh):
    """The place of a rank that meets others only within its stage."""

    def sum(self, values: list[float]) -> list[float]:
        """The other stages are not asked."""
        return values


class _MadeUp(PointToPoint):
    """Has something for everyone who asks, and sends nothing."""

    def post(
        self, way: str, peer: int, position: int, sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        """Fill the values at once."""
        room = {
            name: torch.empty(size, dtype=self.row_dtype, device=self.mesh.device).uniform_()
            for name, size in sizes.items()
        }
        nothing = Transfer(list)
        nothing.begin()
        self._arriving[way, peer, position] = (room, nothing, 0.0)

    def send(self, way: str, peer: int, position: int, values: Mapping[str, Tensor]) -> None:
        """Nothing."""


def _step_by_step(program: Program) -> Program:
    """The same with an action for every step, without the sum over shards, a matter of links."""
    stages = []
    for actions in program.stages:
        mine: list[Action] = []
        for a in actions:
            if a.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                steps = (
                    range(*a.steps) if a.kind is ActionKind.FORWARD else reversed(range(*a.steps))
                )
                mine += [replace(a, steps=(step, step + 1)) for step in steps]
            elif a.kind is not ActionKind.REDUCE_GRADIENTS:
                mine.append(a)
        stages.append(tuple(mine))
    return replace(program, stages=tuple(stages))


def _times(notes: EpochSpans, stage: int, order: Sequence[int]) -> dict[StepPlace, float]:
    """Seconds by place, without waiting for other shards."""
    found: dict[StepPlace, float] = {}
    waits = iter(notes.collectives)
    wait = next(waits, None)
    for action, start_s, end_s in notes.actions:
        time_s = end_s - start_s
        while wait is not None and wait.wait_end_s <= end_s:
            time_s -= wait.wait_end_s - max(wait.wait_start_s, start_s)
            wait = next(waits, None)
        if action.kind in WHAT:
            chunk = order[action.position] if action.position >= 0 else 0
            found[WHAT[action.kind], stage, chunk, action.steps[0]] = time_s
    begun_s = notes.actions[0][1] - notes.start_s
    found[BEGIN, stage, 0, 0] = begun_s + notes.end_s - notes.actions_end_s
    return found
