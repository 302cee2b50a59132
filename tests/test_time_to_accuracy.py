"""scripts/time_to_accuracy.py: models of the peers, stops, order and resumption, and the page."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.nn import GCNConv, SAGEConv

from gnnpipe.data.load import load_graph
from gnnpipe.runtime.comm.world import World

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import loader_training as peers
import time_to_accuracy as script
import time_to_accuracy_page as page

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'"),
]
SMALL = "synthetic:planted:n=320,degree=6,classes=3,features=12"


@pytest.fixture(scope="module", params=["gcn", "sage"])
def problem(request):
    return peers.Problem.of(load_graph(SMALL), request.param, 3)


def whole_logits(problem, net):
    whole = problem.whole()
    return net.eval()(whole.x, whole.blocks)


def test_the_full_batch_is_what_pygs_layers_compute(problem):
    net = peers.Net(problem)
    for bias in net.biases:
        torch.nn.init.normal_(bias)
    edges = torch.from_numpy(np.stack(problem.adjacency.tocoo().coords[::-1]).astype(np.int64))
    h = torch.from_numpy(problem.x)
    for i, lin in enumerate(net.lins):
        if problem.model == "gcn":
            conv = GCNConv(lin.in_features, lin.out_features)
            weights = {"lin.weight": lin.weight, "bias": net.biases[i]}
        else:
            conv = SAGEConv(lin.in_features, lin.out_features)
            weights = {"lin_l.weight": lin.weight, "lin_l.bias": net.biases[i]}
            weights["lin_r.weight"] = net.own[i].weight
        conv.load_state_dict(weights)
        h = conv(h, edges)
        if i < len(net.lins) - 1:
            h = torch.relu(net.norms[i](h))
    torch.testing.assert_close(whole_logits(problem, net), h, rtol=1e-4, atol=1e-5)


def sample_of_all(problem, seeds):
    """Every neighbour of every hop, laid out as torch_sparse does: by reader, new ones last."""
    place, vertices = {v: i for i, v in enumerate(seeds)}, list(seeds)
    sources, readers, begin = [], [], 0
    a = problem.adjacency
    for _ in range(problem.layers):
        end = len(vertices)
        for i in range(begin, end):
            v = vertices[i]
            for u in a.indices[a.indptr[v] : a.indptr[v + 1]].tolist():
                if u not in place:
                    place[u] = len(vertices)
                    vertices.append(u)
                sources.append(place[u])
                readers.append(i)
        begin = end
    edges = torch.tensor([sources, readers])
    return SimpleNamespace(n_id=torch.tensor(vertices), edge_index=edges, batch_size=len(seeds))


def test_a_sample_of_all_neighbours_gives_the_logits_of_the_whole_graph(problem):
    torch.manual_seed(1)
    net, seeds = peers.Net(problem), [5, 90, 17]
    batch = problem.sampled(sample_of_all(problem, seeds))
    rows = [block.num_rows for block in batch.blocks]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] == len(seeds)
    want = whole_logits(problem, net)[seeds]
    torch.testing.assert_close(net(batch.x, batch.blocks), want, rtol=1e-4, atol=1e-5)
    assert batch.labels.tolist() == problem.y[seeds].tolist()


def test_a_product_goes_back_with_the_transposed_matrix():
    matrix = sp.random_array((3, 5), density=0.6, rng=np.random.default_rng(0))
    block = peers.block_of(matrix, np.arange(3.0))
    h = torch.randn(5, 2, requires_grad=True)
    weight = torch.arange(6.0).view(3, 2)
    (block(h) * weight).sum().backward()
    dense = torch.from_numpy(matrix.toarray() + np.diag(np.arange(3.0), 0) @ np.eye(3, 5)).float()
    torch.testing.assert_close(h.grad, dense.t() @ weight)
    torch.testing.assert_close(block(h), dense @ h)


def test_a_sampled_neighbour_counts_for_those_that_were_not_sampled():
    problem = peers.Problem.of(load_graph(SMALL), "gcn", 1)
    v = int(problem.degrees.argmax())
    neighbours = problem.adjacency.indices[
        problem.adjacency.indptr[v] : problem.adjacency.indptr[v + 1]
    ]
    h = torch.randn(len(problem.y), 2)
    found = []
    for u in neighbours.tolist():
        data = SimpleNamespace(
            n_id=torch.tensor([v, u]), edge_index=torch.tensor([[1], [0]]), batch_size=1
        )
        found.append(problem.sampled(data).blocks[0](h[[v, u]]))
    want = problem.whole().blocks[0](h)[[v]]
    torch.testing.assert_close(torch.stack(found).mean(0), want, rtol=1e-4, atol=1e-5)


def test_clusters_cover_the_graph_and_all_of_them_are_the_whole(problem):
    setting = {"parts": 4, "per_batch": 1}
    batches = peers.cluster_batches(problem, setting, World.alone())
    assert len(batches) == 4
    assert sum(len(batch.loss_rows) for batch in batches) == len(problem.masks["train"])
    both = peers.cluster_batches(problem, {"parts": 4, "per_batch": 4}, World.alone())
    (batch,) = both
    net = peers.Net(problem).eval()
    torch.manual_seed(0)
    found, rows = net(batch.x, batch.blocks)[batch.loss_rows], problem.masks["train"]
    want = whole_logits(problem, net)[rows]
    order = lambda t: t.sum(1).argsort()  # noqa: E731 - the clusters come in another order
    torch.testing.assert_close(found[order(found)], want[order(want)], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_the_loader_itself_where_its_sampler_is_installed(model):
    pytest.importorskip("torch_sparse")
    problem = peers.Problem.of(load_graph(SMALL), model, 3)
    setting = {"fan_out": [-1] * 3, "batch": 16, "workers": 0}
    batch = next(iter(peers.neighbor_batches(problem, setting, World.alone())))
    net = peers.Net(problem)
    found, every = net.eval()(batch.x, batch.blocks), whole_logits(problem, net)
    assert len(found) == 16
    distance, which = torch.cdist(found, every).min(1)
    assert distance.max() < 1e-3
    assert torch.equal(problem.y[which], batch.labels)


def test_a_curve_ends_at_the_target_at_the_limit_and_without_progress():
    there = peers.Curve(0.8)
    assert not there.add(1.0, 1, 0.7, 0.7)
    assert there.add(2.0, 2, 0.8, 0.8)
    assert there.reached == 1
    slow = peers.Curve(0.8, limit_s=3.0)
    assert not slow.add(2.9, 1, 0.1, 0.1)
    assert slow.add(3.0, 2, 0.1, 0.1)
    assert slow.reached is None
    stale = peers.Curve(None, patience=2)
    assert [stale.add(e, e, v, v) for e, v in ((1, 0.5), (2, 0.4), (3, 0.5))] == [
        False,
        False,
        True,
    ]


def test_evaluations_are_due_after_twice_their_time():
    clock = peers._Clock()
    clock.seconds = 1.0
    assert not clock.is_due  # before the first one, which ends the first epoch
    clock.evaluated(0.5)
    clock.seconds = 1.9
    assert not clock.is_due
    clock.seconds = 2.0
    assert clock.is_due


def row(contender="async", seconds=(1.0, 2.0), val=(0.5, 0.9), reached=1, **more):
    there = None
    if reached is not None:
        there = {"seconds": seconds[reached], "epochs": 2.0, "bytes": 3_000_000}
    made = {"graph": "pubmed", "model": "gcn", "ranks": 1, "mbit": 0, "seed": 0}
    made |= {"contender": contender, "setting": {"kind": "x"}, "limit_s": None, "failed": ""}
    made |= {"seconds": list(seconds), "epochs": [1.0, 2.0], "val": list(val), "test": list(val)}
    made |= {"set_up_s": 0.5, "bytes_per_epoch": 10, "reached": there}
    return made | {"commit": "abc", "date": "2026-01-01 00:00"} | more


CELL = script.Cell("pubmed", "gcn", 1, 0)


def test_the_most_telling_cells_come_first():
    found = script.cells([], script.STAGES, 2)
    assert [c.graph for c in found[:5]] == list(script.GRAPHS)
    assert {(c.model, c.ranks) for c in found[:5]} == {("gcn", 1)}
    assert {(c.model, c.ranks) for c in found[5:10]} == {("sage", 1)}
    assert [(c.ranks, c.mbit) for c in found[10:30:10]] == [(2, 0), (2, 100)]
    assert all(c.seed == 0 for c in found[:30])
    first = script.contenders(CELL, [])[0]
    assert first[0] == "full batch, tuned"


def test_the_tuned_rate_is_the_first_at_the_best_accuracy_of_its_grid():
    def tried(lr, val, **more):
        made = {"graph": "pubmed", "model": "gcn", "kind": "full", "seed": 0, "error": ""}
        made |= {"lr": lr, "schedule": "cosine", "epoch": [10, 20, 30], "val": val}
        return made | more

    rows = [tried(0.01, [0.5, 0.894, 0.9]), tried(0.003, [0.7, 0.896, 0.896])]
    rows += [tried(0.03, [0.894, 0.894, 0.894]), tried(1.0, [1.0], epoch=[10], kind="predict")]
    rows += [tried(2.0, [], epoch=[], error="loss is nan"), tried(3.0, [1.0], epoch=[1], seed=1)]
    assert script.tuned_rate(rows, "pubmed", "gcn") == {"lr": 0.003, "schedule": "cosine"}
    assert script.tuned_rate(rows[:1], "pubmed", "gcn")["lr"] == 0.01
    assert script.tuned_rate(rows, "squirrel", "gcn") == script.TUNED_LR


def test_what_ran_is_not_run_again_unless_it_failed():
    every = script.contenders(CELL, [])
    made = [row(name, setting=setting) for name, setting in every[:3]]
    assert script.missing(CELL, made, 0) == every[3:]
    made[1]["failed"] = "no sampler"
    assert script.missing(CELL, made, 0) == [every[1], *every[3:]]
    other = script.Cell("pubmed", "sage", 1, 0)
    assert len(script.missing(other, made, 0)) == len(every)
    assert {s["epochs"] for _, s in script.missing(CELL, [], 3)} == {3}


def test_a_run_may_take_a_multiple_of_the_tuned_full_batch_or_as_long_as_a_faster_setting():
    assert script.limit_of([], CELL, "async") == math.inf
    tuned = row("full batch, tuned", seconds=(10.0, 20.0), val=(0.896, 0.9))
    assert script.target_of([tuned], CELL) == pytest.approx(0.895)
    assert script.limit_of([tuned], CELL, "async") == 2 * 10.0  # .896 is at the target
    assert script.limit_of([tuned], CELL, "full batch, default") == 4 * 10.0
    assert script.limit_of([tuned, row(seconds=(1.0, 7.0))], CELL, "async") == 7.0
    assert script.limit_of([tuned, row(reached=None)], CELL, "async") == 20.0
    tuned["seconds"] = [0.1, 0.2]
    assert script.limit_of([tuned], CELL, "async") == script.LEAST_S


def test_on_ranks_a_sampler_has_its_fastest_setting_of_one_process():
    fast = row("NeighborLoader", setting={"kind": "neighbor", "batch": 7, "workers": 1})
    slow = row("NeighborLoader", setting={"kind": "neighbor", "batch": 8}, seconds=(1.0, 9.0))
    ranks = script.Cell("pubmed", "gcn", 2, 100)
    given = dict(script.contenders(ranks, [slow, fast]))
    assert given["NeighborLoader"] == {"kind": "neighbor", "batch": 7, "workers": 0}


def test_gains_are_against_the_fastest_and_bounds_where_it_did_not_get_there():
    case = page.Case([row(), row("full batch, tuned", seconds=(1.0, 6.0))], [])
    assert case.gain(*page.FULL) == (3.0, False)
    case = page.Case([*case.rows, row("gnnpipe full batch, tuned", seconds=(1.0, 4.0))], [])
    assert case.gain(*page.FULL) == (2.0, False)
    case = page.Case([row(), row("NeighborLoader", seconds=(1.0, 8.0), reached=None)], [])
    assert case.gain("NeighborLoader") == (4.0, True)
    assert page.gain_text(case.gain("NeighborLoader")) == "> 4.0"
    assert case.gain("ClusterLoader") is None
    assert page.Case([row(reached=None)], []).gain("async") is None
    ended = row("async", seconds=(1.0, 1.5), reached=None, val=(0.1, 0.95))
    assert page.Case([ended, row()], []).best("async") == row()


@pytest.mark.slow
def test_a_trial_run_is_written_and_becomes_a_page(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    monkeypatch.setattr(script, "CHUNKS", 4)
    monkeypatch.setattr(script, "SAMPLERS", {"ClusterLoader": script.SAMPLERS["ClusterLoader"][:1]})
    cell = script.Cell(SMALL, "gcn", 1, 0)
    todo = script.missing(cell, [], 2)
    script.measure(cell, todo, data)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert [r["contender"] for r in rows] == [name for name, _ in todo]
    assert script.missing(cell, rows, 2) == []
    for one in rows:
        assert one["seconds"] == sorted(one["seconds"])
        assert one["seconds"][0] > 0
        assert all(0 <= v <= 1 for v in one["val"])
    page.write_page(rows)
    text = (tmp_path / "time_to_accuracy.md").read_text()
    assert "| ClusterLoader |" in text
    assert (tmp_path / "time_to_accuracy_gcn.svg").is_file()
