"""Runs in which a rank sleeps in every action."""

import os
import time
from contextlib import contextmanager

from helpers import quick_config, small_graph

from gnnpipe.schedule import ActionKind

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
    graph = small_graph(features=config.hidden + 1, sparse=True)  # every layer pushes rows
    with napping(mesh, slow):
        result = Trainer(config, graph=graph, world=mesh).fit()
    return result.time_shares, [row.epoch_time_s for row in result.history]


@contextmanager
def slow_devices(half_speed, action_s=0.004):
    """Context in which every compute action takes some ms more, and on one rank twice as long.

    Made so long, what an action takes hardly depends on other programs of the machine.
    """
    from gnnpipe.runtime import executor
    from gnnpipe.runtime.stage import Stage

    methods, before, begin = executor._METHODS, dict(executor._METHODS), Stage.begin
    is_slow = int(os.environ["RANK"]) == half_speed

    def longer(inner, more_s):
        def run(self, *arguments):
            start_s = time.thread_time()  # waiting for other ranks is no compute time
            inner(self, *arguments)
            computed_s = time.thread_time() - start_s
            time.sleep(2 * more_s + computed_s if is_slow else more_s)

        return run

    kinds = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.FORECAST, ActionKind.CARRY
    for kind in (*kinds, ActionKind.STEP):
        methods[kind] = longer(before[kind], action_s)
    Stage.begin = longer(begin, 0.0)
    try:
        yield
    finally:
        methods.update(before)
        Stage.begin = begin
