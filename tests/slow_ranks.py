"""Runs in which a rank sleeps in every action."""

import os
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

from helpers import quick_config, small_graph

NAP_S = 0.25

EVERY = -2


@contextmanager
def napping(mesh, slow):
    """Context in which rank ``slow`` naps in every forward action of training, or every rank in
    every action."""
    from gnnpipe.runtime import stage
    from gnnpipe.runtime.stage import Stage

    forward, backward = Stage.forward, stage._backward

    def slow_forward(self, chunk, steps):
        if slow in (mesh.rank, EVERY) and self._training:
            time.sleep(NAP_S)
        return forward(self, chunk, steps)

    def slow_backward(entries, grads):
        if slow == EVERY:
            time.sleep(NAP_S)
        backward(entries, grads)

    Stage.forward, stage._backward = slow_forward, slow_backward
    try:
        yield
    finally:
        Stage.forward, stage._backward = forward, backward


def slow_rank(shape, slow, staleness="none"):
    """Time shares and epoch times of a run with a slow rank (see ``napping``)."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.mesh import Mesh

    stages, shards, chunks = shape
    mesh = Mesh.join(stages, shards)
    config = quick_config(
        stages=stages, shards=shards, chunks=chunks, layers=4, staleness=staleness, eval_every=0
    )
    with napping(mesh, slow):
        result = Trainer(config, graph=small_graph(), world=mesh).fit()
    return result.time_shares, [row.epoch_time_s for row in result.history]


ACTION_S = 0.004
"""Time that every action of ``slow_devices`` takes besides its own."""


@contextmanager
def slow_devices(half_speed):
    """Context in which every compute action takes 4 ms more, and on one rank twice as long.

    Made so long, what an action takes hardly depends on other programs of the machine.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
    from throttle import SLOWED, throttled

    from gnnpipe.runtime import executor

    methods, before = executor._METHODS, dict(executor._METHODS)

    def longer(inner):
        def run(self, action):
            inner(self, action)
            time.sleep(ACTION_S)

        return run

    for kind in SLOWED:
        methods[kind] = longer(before[kind])
    is_slow = int(os.environ["RANK"]) == half_speed
    try:
        with throttled() if is_slow else nullcontext():
            yield
    finally:
        methods.update(before)
