"""Replay of work as a CUDA graph: when it is recorded, and its gradients. The GPU is a fake.

tests/test_cuda.py runs on a real GPU.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import quick_config, small_graph
from torch import nn
from torch_geometric.nn import GCN, GCNConv

from gnnpipe.ops import triton
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.cuda_graph import Replay
from gnnpipe.setup.build import _RankBuilder
from gnnpipe.setup.prepare import prepare


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


class Scaled(nn.Module):
    """Makes a call that is not known to launch the same kernels."""

    def __init__(self):
        super().__init__()
        self.conv = GCNConv(7, 3)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return torch.where(x > 0, x, x * 0.5)


@pytest.mark.parametrize(
    ("name", "is_safe"),
    [("gcn", True), ("sage", True), ("gcnii", True), ("resgcn", True), ("gat", False)],
)
def test_which_models_can_be_replayed(name, is_safe):
    config = quick_config(model=name, layers=3, hidden=8)
    model = prepare(config, Mesh.alone(), small_graph()).model
    assert model.stage_module(range(model.num_ops)).is_cuda_graph_safe == is_safe


@pytest.mark.parametrize("model", [Scaled, lambda: GCN(7, 8, 2, 3, norm="BatchNorm")])
def test_unknown_calls_are_not_replayed(model):
    model = prepare(quick_config(), Mesh.alone(), small_graph(), model()).model
    assert not model.stage_module(range(model.num_ops)).is_cuda_graph_safe


def test_a_module_with_a_hook_is_not_replayed():
    module = GCN(7, 8, 2, 3)
    module.convs[0].lin.register_forward_hook(lambda module, given, out: out * 2)
    model = prepare(quick_config(), Mesh.alone(), small_graph(), module).model
    assert not model.stage_module(range(model.num_ops)).is_cuda_graph_safe


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_that_draws_masks_in_backward_is_not_replayed(recompute):
    """A recorded graph would hold the masks of one epoch."""
    config = quick_config(dropout=0.0, recompute=recompute)
    prepared = prepare(config, Mesh.alone(), small_graph(), GCN(7, 8, 2, 3, dropout=0.5))
    mesh = SimpleNamespace(
        device=torch.device("cuda"), world_size=1, stage=0, recorder=SimpleNamespace(is_on=False)
    )
    stage_module = prepared.model.stage_module(range(prepared.model.num_ops))
    builder = SimpleNamespace(_prepared=prepared, _mesh=mesh, _stage_module=stage_module)
    assert _RankBuilder._can_use_cuda_graph(builder) != recompute
