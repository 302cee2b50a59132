"""Walks in blocks of rows: of one chunk, and of small ones together. The same run as without."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import carrying, small_graph
from torch import nn
from torch_geometric.nn import GATv2Conv, GINConv, NNConv

from gnnpipe import TrainConfig, Trainer
from gnnpipe.graph.chunking import make_chunking
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup import row_blocks
from gnnpipe.setup.prepare import prepare


def config(**settings):
    given = {"layers": 3, "hidden": 16, "dropout": 0.5, "epochs": 3, "out": "off", "quiet": True}
    return TrainConfig(cache_dir="off", **(given | settings))


def cut(monkeypatch):
    """Six blocks: of 200 rows of 16 numbers, or of the messages of all edges."""
    monkeypatch.setattr(row_blocks, "KEPT_BYTES", 0)
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 34 * 16 * 8)
    monkeypatch.setattr(row_blocks, "MESSAGE_BYTES", graph().num_edges * 16 * 8 // 6 + 128)


def graph():
    return small_graph(n=200, features=20)


class WithMessages(nn.Module):
    """Attention that makes them: its scores are of both ends at once."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(20, 16)
        self.first = GATv2Conv(16, 8, heads=2)
        self.second = GATv2Conv(16, 3, heads=1)

    def forward(self, x, edge_index):
        return self.second(self.first(self.encode(x), edge_index).relu(), edge_index)


@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn", "gat", "with messages"])
def test_blocks_give_the_same(model, monkeypatch):
    # Without messages an edge has a number for each of four heads.
    count = 2 if model == "gat" else 6
    is_ours = model != "with messages"
    settings = config(dtype="float64", **({"model": model} if is_ours else {}))
    torch.manual_seed(0)
    mine = None if is_ours else WithMessages().double()

    def trainer_of(**given):
        return Trainer(settings, graph=graph(), model=copy.deepcopy(mine), **given)

    whole = trainer_of().fit()
    cut(monkeypatch)
    trainer = trainer_of()
    blocks = trainer.fit()
    assert trainer.plan.chunks == count
    assert blocks.exact
    assert blocks.chunks == 1
    for a, b in zip(whole.history, blocks.history, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-11)
    assert blocks.test_acc == whole.test_acc
    # The plan of such a run is one for such a run.
    again = trainer_of(plan=trainer.plan).fit()
    assert [row.loss for row in again.history] == [row.loss for row in blocks.history]


def test_stale_walks_are_left_as_they_are(monkeypatch):
    cut(monkeypatch)
    trainer = Trainer(config(model="gcn", chunks=2), graph=graph())
    trainer.fit()
    assert trainer.plan.chunks == 2


def join(monkeypatch, prepared, together=2):
    """So many of 8 chunks of 200 rows in a run, by what the largest op makes."""
    ops = prepared.model_graph.ops
    of_rows = [200 * max(op.push_width, op.written_per_row) for op in ops]
    of_edges = [graph().num_edges * op.kept_per_edge for op in ops]
    monkeypatch.setattr(row_blocks, "JOINED_BYTES", max(of_rows + of_edges) * together)


@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "gat", "with messages"])
@pytest.mark.parametrize("recompute", [False, True])
def test_exact_chunks_walked_together_give_the_same(model, recompute, monkeypatch):
    is_ours = model != "with messages"
    named = {"model": model} if is_ours else {}
    settings = config(dtype="float64", chunks=8, staleness="exact", recompute=recompute, **named)
    torch.manual_seed(0)
    mine = None if is_ours else WithMessages().double()

    def trainer_of(**given):
        return Trainer(settings, graph=graph(), model=copy.deepcopy(mine), **given)

    apart = trainer_of()
    one_by_one = apart.fit()
    assert apart.plan.chunks == 8
    join(monkeypatch, prepare(settings, Mesh.alone(), graph(), copy.deepcopy(mine)))
    trainer = trainer_of()
    together = trainer.fit()
    assert trainer.plan.chunks == 4
    assert together.exact
    assert together.chunks == 8
    for a, b in zip(one_by_one.history, together.history, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-11)
    assert together.test_acc == one_by_one.test_acc
    # The plan of either run is one for such a run.
    for plan, run in ((apart.plan, one_by_one), (trainer.plan, together)):
        again = trainer_of(plan=plan).fit()
        assert [row.loss for row in again.history] == [row.loss for row in run.history]


def test_only_one_rank_walks_exact_chunks_together(monkeypatch):
    def prepared_of(**settings):
        return prepare(config(dtype="float64", chunks=8, **settings), Mesh.alone(), graph())

    join(monkeypatch, prepared_of(), together=8)
    assert prepared_of(staleness="exact").plan.chunks == 1
    # A run of exact epochs alone is one.
    assert prepared_of(exact_epochs=3).plan.chunks == 1
    stale = prepared_of(staleness="auto")
    assert stale.plan.chunks == 8
    exact = replace(stale.config, staleness="exact")
    of_graph = stale.model_graph, (stale.graph.num_vertices, stale.graph.num_edges)

    def cut_of(device="cpu", **shape):
        found = replace(exact, **shape)
        return row_blocks.walked(found, *of_graph, stale.chunking, None, device, True)[0].chunks

    assert cut_of() == 1
    assert cut_of(stages=2) == cut_of(shards=2) == cut_of("cuda") == 8
    shown = head_lines(prepared_of(staleness="exact"))
    assert any("x 8 chunks (in 1 block of rows) on 1 rank" in line for line in shown)


def test_no_run_is_larger_than_it_may_be(monkeypatch):
    """But for a single chunk; a run of two in place of one would be twice as large."""
    settings = config(model="gcn", chunks=17, staleness="exact")
    stale = prepare(config(model="gcn", chunks=17), Mesh.alone(), graph())
    sizes = graph().num_vertices, graph().num_edges
    largest = 200 * 4 * max(max(op.push_width, op.written_per_row) for op in stale.model_graph.ops)
    for share in (0.01, 0.05, 0.06, 0.1, 0.12, 0.3, 0.5, 0.51, 0.99, 1.0, 2.0):
        monkeypatch.setattr(row_blocks, "JOINED_BYTES", int(largest * share) + 1)
        of = settings, stale.model_graph, sizes, stale.chunking, None, "cpu", True
        runs = row_blocks.walked(*of)[0].chunks
        longest = -(-17 // runs)
        assert longest <= max(1, 17 * share + 0.1)
        assert runs == 1 or -(-17 // (runs - 1)) > 17 * share, "as few as that allows"


def test_runs_of_chunks_end_where_chunks_do():
    chunking = make_chunking(
        graph(), chunks=7, shards=1, partitioner="metis", seed=0, cache_dir="off"
    )
    for runs in range(1, 8):
        joined = chunking.joined(runs)
        assert joined.chunks == runs
        assert joined.perm is chunking.perm
        assert set(joined.ptr.ravel()) <= set(chunking.ptr.ravel())
    for wrong in (0, 8):
        with pytest.raises(ValueError, match="do not make"):
            chunking.joined(wrong)


class Wide(nn.Module):
    """What it pushes is narrow, and what it makes of it is not."""

    def __init__(self):
        super().__init__()
        self.conv = GINConv(nn.Sequential(nn.Linear(20, 4096), nn.ReLU(), nn.Linear(4096, 3)))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class OfEdges(nn.Module):
    """A matrix for every edge."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 3)
        self.conv = NNConv(16, 16, nn.Linear(4, 256))

    def forward(self, x, edge_index, edge_attr=None):
        return self.last(self.conv(self.first(x), edge_index, edge_attr))


@pytest.mark.parametrize(("made", "numbers"), [(Wide, 200 * 4096), (OfEdges, 1000 * 256)])
@pytest.mark.parametrize("recompute", [False, True])
def test_runs_are_as_small_as_what_is_made_on_the_way_asks(made, numbers, recompute, monkeypatch):
    """Not as what is pushed allows: many chunks were asked for to spare memory."""
    given = carrying(graph(), "edge_attr") if made is OfEdges else graph()
    assert made is Wide or given.num_edges > 1000
    monkeypatch.setattr(row_blocks, "JOINED_BYTES", numbers * 4 // 6)
    settings = config(chunks=32, staleness="exact", recompute=recompute)
    assert prepare(settings, Mesh.alone(), given, made()).plan.chunks >= 6
    monkeypatch.setattr(row_blocks, "JOINED_BYTES", 40 * numbers)
    assert prepare(settings, Mesh.alone(), given, made()).plan.chunks == 1
