"""Replay of work as a CUDA graph: when it is recorded, and its gradients. The GPU is a fake.

tests/test_cuda.py runs on a real GPU.
"""

import itertools

import pytest
import torch
from torch import nn

from gnnpipe.models import MODELS, LayerSpec
from gnnpipe.ops import triton
from gnnpipe.runtime.cuda_graph import Replay


class Graph:
    """Counts how often it is replayed."""

    replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def made(monkeypatch):
    """Recorded graphs, in order; recording runs ``work`` once, as on a GPU."""
    graphs = []

    def captured(work, device):
        assert device.type == "cuda"
        found = work()
        graphs.append(Graph())
        return graphs[-1], found

    monkeypatch.setattr(triton, "captured", captured)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (100, 200))
    clock = itertools.cycle([0.0, 0.9, 1.0])  # the GPU is soon done with what was started
    monkeypatch.setattr("gnnpipe.runtime.cuda_graph.time.perf_counter", lambda: next(clock))
    stats = {"allocated_bytes.all.allocated": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: dict(stats))
    return graphs, stats


class Work:
    """Sets a gradient and allocates memory."""

    def __init__(self, weight, stats, takes=0, fails_at=0):
        self.weight, self.stats, self.takes, self.fails_at = weight, stats, takes, fails_at
        self.times = 0

    def __call__(self):
        self.times += 1
        self.stats["allocated_bytes.all.allocated"] += self.takes
        if self.times == self.fails_at:
            raise RuntimeError("it waited")
        self.weight.grad = torch.full_like(self.weight, self.times)
        return self.times


def epochs(replay, work, count, what="all"):
    """Result and gradient of each epoch."""
    found = []
    for _ in range(count):
        work.weight.grad = None
        found.append((replay.run(what, work), float(work.weight.grad)))
    return found


def begin(stats, **how):
    weight = nn.Parameter(torch.zeros(()))
    return Replay([weight], torch.device("cuda")), Work(weight, stats, **how)


def test_the_fourth_epoch_is_recorded(made):
    graphs, stats = made
    replay, work = begin(stats, takes=49)
    assert epochs(replay, work, 6) == [(1, 1), (2, 2), (3, 3), (4, 4), (4, 4), (4, 4)]
    assert replay.is_recorded
    assert graphs[0].replays == 3  # the recording did nothing yet


def test_other_work_is_recorded_again(made):
    graphs, stats = made
    replay, work = begin(stats)
    epochs(replay, work, 5)
    assert epochs(replay, work, 4, "other") == [(5, 5), (6, 6), (7, 7), (8, 8)]
    assert [graph.replays for graph in graphs] == [2, 1]


def test_no_graph_if_memory_is_short(made):
    graphs, stats = made
    replay, work = begin(stats, takes=51)
    assert epochs(replay, work, 6)[-1] == (6, 6)
    assert not graphs


def test_no_graph_if_launches_are_not_the_bottleneck(made, monkeypatch):
    graphs, stats = made
    clock = iter([0.0, 0.4, 1.0])
    monkeypatch.setattr("gnnpipe.runtime.cuda_graph.time.perf_counter", lambda: next(clock))
    replay, work = begin(stats)
    assert epochs(replay, work, 6)[-1] == (6, 6)
    assert not graphs


def test_work_that_cannot_be_recorded_runs_as_before(made):
    graphs, stats = made
    replay, work = begin(stats, fails_at=4)
    assert epochs(replay, work, 6) == [(1, 1), (2, 2), (3, 3), (5, 5), (6, 6), (7, 7)]
    assert not graphs
    assert not replay.is_recorded


def test_which_layers_can_be_recorded():
    """A subclass that changes a layer must declare it again."""
    spec = LayerSpec(num_features=3, num_classes=2, num_layers=2, hidden=4)
    for name in ("gcn", "sage", "gcnii", "resgcn"):
        kind = MODELS[name]
        assert kind(1, spec).is_cuda_graph_safe

        class Other(kind):
            def dropout_mask(self, rows, width):
                return None if rows.epoch < 50 else super().dropout_mask(rows, width)

        class SaysSo(Other):
            cuda_graph_safe = True

        assert not Other(1, spec).is_cuda_graph_safe
        assert SaysSo(1, spec).is_cuda_graph_safe
    assert not MODELS["gat"](1, spec).is_cuda_graph_safe
