"""The seam for the weights of a pass: a policy that computes forward with other weights."""

from contextlib import contextmanager

import pytest
import torch
from helpers import quick_config, small_graph

from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epoch


class Doubled:
    """Forward with twice the weights, backward with the weights as they are."""

    def __init__(self, parameters):
        self.parameters, self.seen = list(parameters), []

    def begin(self, gaps):
        self.seen.append(list(gaps))

    @contextmanager
    def for_forward(self, position):
        self.seen.append(f"F{position}")
        own = [p.data for p in self.parameters]
        for p in self.parameters:
            p.data = 2 * p.data
        yield
        for p, data in zip(self.parameters, own, strict=True):
            p.data = data

    @contextmanager
    def for_backward(self, position):
        self.seen.append(f"B{position}")
        yield

    def stepped(self):
        self.seen.append("step")

    def flush(self):
        self.seen.append("flush")


def trained(chunks, doubles_forward=False, doubles_weights=False):
    """Loss of the first epoch, the order of the passes, and whether the weights were put back."""
    torch.manual_seed(0)
    config = quick_config(model="gcn", layers=3, chunks=chunks, schedule="1f1b", dropout=0.0)
    prepared = prepare(config, Mesh.alone(), small_graph())
    if doubles_weights:
        with torch.no_grad():
            for p in prepared.model.module.parameters():
                p.mul_(2)
    rank_runtime = build_rank(prepared, Mesh.alone())
    executor = rank_runtime.executor
    parameters = list(executor.stage.stage_module.parameters())
    before = [p.detach().clone() for p in parameters]
    policy = Doubled(parameters)
    if doubles_forward:
        executor.weight_policy = policy
    executor.optimizer.step = lambda: None  # only the weights of the passes are looked at
    order = prepared.chunk_order(0)
    loss = train_epoch(rank_runtime, Mesh.alone(), prepared.program_of(0), order, 0)
    is_same = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    return loss, policy.seen, is_same


@pytest.mark.parametrize("chunks", [1, 3])
def test_forward_computes_with_the_weights_of_the_policy(chunks):
    loss, seen, is_same = trained(chunks, doubles_forward=True)
    assert is_same
    passes = [f"{way}{p}" for p in range(chunks) for way in "FB"]
    assert seen == [[0] * chunks, *passes, "step", "flush"]
    assert loss == pytest.approx(trained(chunks, doubles_weights=True)[0], rel=1e-12)
    assert loss != pytest.approx(trained(chunks)[0], rel=1e-3)
