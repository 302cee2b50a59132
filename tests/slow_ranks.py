"""Runs in which a rank sleeps in every action."""

import time

from helpers import quick_config, small_graph

NAP_S = 0.25

EVERY = -2


def slow_rank(shape, slow, staleness="none"):
    """Time shares and epoch times of a run in which one rank naps in every forward action, or every
    rank in every action."""
    from gnnpipe import Trainer
    from gnnpipe.runtime import stage
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.runtime.stage import Stage

    stages, shards, chunks = shape
    mesh = Mesh.join(stages, shards)
    forward = Stage.forward

    def napping(self, chunk, steps):
        if slow in (mesh.rank, EVERY) and self._training:
            time.sleep(NAP_S)
        return forward(self, chunk, steps)

    def napping_back(entries, grads):
        if slow == EVERY:
            time.sleep(NAP_S)
        backward(entries, grads)

    Stage.forward = napping
    backward, stage._backward = stage._backward, napping_back
    config = quick_config(
        stages=stages, shards=shards, chunks=chunks, layers=4, staleness=staleness, eval_every=0
    )
    try:
        result = Trainer(config, graph=small_graph(), world=mesh).fit()
    finally:
        Stage.forward, stage._backward = forward, backward
    return result.time_shares, [row.epoch_time_s for row in result.history]
