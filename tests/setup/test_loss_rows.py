"""In training the last aggregation computes only the loss rows; results do not change."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all_within, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv

from gnnpipe.capture.stage.stage_module import Cut, _may_choose
from gnnpipe.data.links import split_links
from gnnpipe.graph.chunking import make_chunking
from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.layout import shard_layout
from gnnpipe.graph.operators import weighted_rows
from gnnpipe.perf.parts import Side, step_parts
from gnnpipe.plan import ALL_ROWS, LossRows, choose_loss_rows
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup import loss_rows as loss_rows_module
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.tasks.loss import Loss
from gnnpipe.train.evaluate import evaluate, train_epoch
from gnnpipe.verification.comparison import compare_epochs

LAYERS = ("gcn", "sage", "gcnii", "resgcn")


class Jumping(nn.Module):
    """The last map reads rows of every depth, and there is dropout behind the last aggregation."""

    def __init__(self, reads_features=False):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(7, 16), SAGEConv(16, 16)])
        self.reads_features = reads_features
        self.last = nn.Linear(32 + 7 * reads_features, 3)

    def forward(self, x, edge_index):
        rows = [self.convs[0](x, edge_index).relu()]
        rows.append(self.convs[1](rows[0], edge_index).relu())
        rows += [x] if self.reads_features else []
        return self.last(F.dropout(torch.cat(rows, -1), 0.3, self.training))


class Viewing(nn.Module):
    """Behind the last aggregation it asks rows for their size, and drops what is one long."""

    def __init__(self):
        super().__init__()
        self.convs, self.last = nn.ModuleList([GCNConv(7, 16), GCNConv(16, 16)]), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.last(x.view(x.size(0), 2, -1).sum(1, keepdim=True).squeeze())


def sparse_graph(share=0.1, **settings):
    """Few of its vertices are in training."""
    graph = small_graph(n=120, degree=3, **settings)
    few = np.random.default_rng(1).random(120) < share * 3
    return replace(graph, train_mask=graph.train_mask & few, val_mask=graph.val_mask | ~few)


def own(name):
    torch.manual_seed(0)
    own = {"jumping": Jumping, "viewing": Viewing}
    return own[name]().double() if name in own else None


def settings_of(name):
    return (
        {}
        if name in ("jumping", "viewing")
        else {"model": name, "layers": 3, "hidden": 16, "dropout": 0.3}
    )


def trained(name, graph, epochs=3, **settings):
    """Losses, weights and scores of the parts behind some epochs, and what ran."""
    config = quick_config(epochs=epochs, **settings_of(name), **settings)
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, graph, own(name))
    rank_runtime = build_rank(prepared, mesh)
    losses = [
        train_epoch(rank_runtime, mesh, prepared.program_of(e), prepared.chunk_order(e), e)
        for e in range(epochs)
    ]
    weights = torch.cat([p.detach().flatten() for p in prepared.model.module.parameters()])
    return losses, weights, evaluate(rank_runtime, mesh), prepared, rank_runtime


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": True},
        {"chunks": 3},
        {"chunks": 3, "staleness": "exact"},
        {"chunks": 3, "recompute": True, "staleness": "paper"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [*LAYERS, "jumping", "viewing"])
def test_same_results_as_with_all_rows(name, settings, monkeypatch):
    graph = sparse_graph()
    few = trained(name, graph, epochs=2, **settings)
    monkeypatch.setattr(loss_rows_module, "choose_loss_rows", lambda *_, **__: ALL_ROWS)
    every = trained(name, graph, epochs=2, **settings)
    assert few[3].loss_rows.ops
    assert not every[3].loss_rows.ops
    assert few[0] == pytest.approx(every[0], rel=1e-12)
    torch.testing.assert_close(few[1], every[1], rtol=1e-9, atol=1e-12)
    assert few[2] == every[2]


def unevenly(graph, chunks, shards):
    """The graph with all it trains on in the last chunk of the first shard."""
    config = quick_config(chunks=chunks, shards=shards)
    chunking = make_chunking(
        graph,
        chunks=chunks,
        shards=shards,
        seed=config.seed,
        partitioner="metis",
        order=config.order,
        cache_dir="off",
    )
    start, stop = chunking.rows(chunks - 1, 0)
    there = np.zeros(graph.num_vertices, dtype=bool)
    there[chunking.perm[start:stop]] = True
    known = np.flatnonzero(there & (graph.y >= 0))
    mask = np.zeros(graph.num_vertices, dtype=bool)
    mask[known[: max(1, len(known) // 6)]] = True
    return replace(graph, train_mask=mask, val_mask=~mask & graph.val_mask)


def uneven_shapes(shapes, names, settings):
    """(largest difference, of what) by shape and name; runs on every rank."""
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for name in names:
            run = quick_config(
                stages=stages, shards=shards, chunks=chunks, **settings_of(name), **settings
            )
            graph = unevenly(sparse_graph(), chunks, shards)
            prepared = prepare(run, mesh, graph, own(name))
            cut = prepared.chunking
            trained = [
                prepared.graph.train_mask[slice(*cut.rows(c, s))].sum()
                for c in range(chunks)
                for s in range(shards)
            ]
            assert np.count_nonzero(trained) == 1
            assert prepared.loss_rows.ops, name
            worst = max(compare_epochs(graph, prepared, mesh, 3), key=lambda c: c.largest)
            found.append((worst.largest, f"{name} ({stages},{shards},{chunks}) {worst}"))
    return found


@pytest.mark.parametrize(
    ("shapes", "settings"),
    [
        ([(2, 1, 4)], {}),
        ([(1, 2, 1), (1, 2, 4)], {}),
        ([(2, 2, 3)], {}),
        ([(1, 2, 4)], {"staleness": "paper", "recompute": True}),
    ],
    ids=str,
)
def test_chunks_and_shards_without_a_training_vertex(shapes, settings):
    names, ranks = [*LAYERS, "jumping", "viewing"], shapes[0][0] * shapes[0][1]
    found = run_ranks(uneven_shapes, ranks, shapes, names, settings)
    assert_all_within([one for rank in found for one in rank])


@pytest.mark.parametrize("kind", ["several labels", "numbers", "loss of one's own"])
def test_other_kinds_of_labels(kind):
    graph, loss = unevenly(sparse_graph(), 4, 1), None
    rng = np.random.default_rng(0)
    if kind == "several labels":
        graph = replace(graph, y=rng.integers(0, 2, (120, 3)).astype(np.int8))
    elif kind == "numbers":
        graph = replace(graph, y=rng.standard_normal((120, 3)).astype(np.float32))
    else:
        loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]).double(), reduction="sum")
    config = quick_config(chunks=4, **settings_of("gcnii"))
    prepared = prepare(config, Mesh.alone(), graph, loss_fn=loss)
    assert prepared.loss_rows.ops
    assert max(one.largest for one in compare_epochs(graph, prepared, Mesh.alone(), 3)) < 1e-10


def test_rounded_rows():
    found = []
    for shape in ({}, {"chunks": 4, "staleness": "exact"}):
        settings = {"dtype": "float32", "comm_dtype": "bf16", **shape}
        losses, _, _, prepared, _ = trained("gcnii", sparse_graph(), **settings)
        assert prepared.loss_rows.ops
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-2)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ["gcn", "sage", "jumping"])
def test_only_loss_rows_are_computed(name, chunks, monkeypatch):
    graph, rows = unevenly(sparse_graph(), chunks, 1), []
    matmul, settings = RowCSR.matmul, {"chunks": chunks, "staleness": "none"}
    *_, prepared, rank_runtime = trained(name, graph, epochs=1, **settings)
    stage = rank_runtime.executor.stage
    last = prepared.model.stage_module(range(prepared.plan.num_ops)).rounds[-1][0].name
    operator = stage.histories[last].operator

    def watched(self, dense, start=0, stop=None):
        if self is operator.forward:
            rows.append((self.num_rows if stop is None else stop) - start)
        return matmul(self, dense, start, stop)

    made = []
    loss_of = Loss.__call__
    monkeypatch.setattr(
        Loss, "__call__", lambda self, x, *rest: (made.append(len(x)), loss_of(self, x, *rest))[1]
    )
    monkeypatch.setattr(RowCSR, "matmul", watched)
    train_epoch(rank_runtime, Mesh.alone(), prepared.program, range(chunks), 1)
    mask, chunk = prepared.loss_row_mask, prepared.chunking.chunk_of_row()
    assert rows == made == np.bincount(chunk[mask]).tolist()
    # Those in training, and where a chunk has fewer than two, others.
    assert mask[prepared.graph.train_mask].all()
    trained_on = np.bincount(chunk[prepared.graph.train_mask], minlength=chunks)
    assert made == np.maximum(trained_on, 2).tolist()
    # Evaluation reads the whole matrix.
    rows.clear()
    assert evaluate(rank_runtime, Mesh.alone())
    assert not rows


def last_aggregation(model):
    """The index of the last op that aggregates."""
    return max(i for i, op in enumerate(model.ops) if op.aggregates)


def from_last_aggregation(model):
    """The names of the last aggregation and of the ops behind it, in a model of one chain."""
    return {op.name for op in model.ops[last_aggregation(model) :]}


def loss_rows(graph, name="gcn", model=None, **settings):
    config = quick_config(**({} if model else settings_of(name)), **settings)
    return prepare(config, Mesh.alone(), graph, model).loss_rows


def test_conditions_of_loss_rows():
    graph = sparse_graph()
    gcn = prepare(quick_config(**settings_of("gcn")), Mesh.alone(), graph).model_graph
    # The product is before the aggregation, because it makes the rows narrower; the bias is behind.
    assert gcn.ops[last_aggregation(gcn) - 1].flops_per_row
    assert loss_rows(graph).ops == from_last_aggregation(gcn)
    assert len(loss_rows(graph).ops) == 2
    assert (loss_rows(graph).rows, loss_rows(graph).edges) == (
        graph.train_mask.sum(),
        graph.degrees[graph.train_mask].sum(),
    )
    assert loss_rows(graph, "sage").ops
    # Else it would have other bits.
    assert loss_rows(graph, recompute=True) == loss_rows(graph)
    # At most three quarters of the vertices have a training label.
    most = replace(graph, train_mask=np.arange(120) < 90)
    assert loss_rows(most).ops
    assert loss_rows(replace(graph, train_mask=np.arange(120) < 91)) == ALL_ROWS
    # Attention is no product, and aggregated features are given for all rows.
    assert loss_rows(graph, "gat") == ALL_ROWS
    few_features = sparse_graph(features=3)
    assert loss_rows(few_features).ops
    alone = prepare(quick_config(layers=1, hidden=16), Mesh.alone(), few_features)
    assert any(op.is_given for op in alone.model_graph.ops)
    assert alone.loss_rows == ALL_ROWS
    links = split_links(small_graph(n=120, degree=3), "60/20/20", seed=0)
    assert loss_rows(links) == ALL_ROWS


def test_a_last_step_that_reads_features_makes_all_rows():
    graph = sparse_graph()
    assert loss_rows(graph, model=Jumping().double()).ops
    assert loss_rows(graph, model=Jumping(reads_features=True).double()) == ALL_ROWS


class Normed(nn.Module):
    """A norm over all vertices in front of the last aggregation, or behind it."""

    def __init__(self, is_last):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(7, 16), GCNConv(16, 16)])
        self.norm, self.last, self.is_last = nn.BatchNorm1d(16), nn.Linear(16, 3), is_last

    def forward(self, x, edge_index):
        x = self.convs[0](x, edge_index).relu()
        if not self.is_last:
            x = self.norm(x)
        x = x + self.convs[1](x, edge_index)
        return self.last(self.norm(x) if self.is_last else x)


NETS = {
    "jumping": Jumping,
    "viewing": Viewing,
    "reading": lambda: Jumping(reads_features=True),
    "normed": lambda: Normed(False),
    "normed last": lambda: Normed(True),
}


@pytest.mark.parametrize("name", NETS)
def test_a_chunk_has_at_least_two_loss_rows(name):
    """Where fewer rows may be made is said of plain ops, and of the recorded ones they come from:
    a step of which few rows are asked chooses them, and cannot choose of one that stands for all.
    """
    prepared = prepare(quick_config(), Mesh.alone(), sparse_graph(), NETS[name]().double())
    cut = Cut(prepared.model.recording, prepared.plan.stages[-1].ops)
    chooses = _may_choose(cut, cut.num_steps - 1)
    assert not any(_may_choose(cut, step) for step in range(cut.num_steps - 1))
    assert chooses or not prepared.loss_rows.ops
    assert bool(prepared.loss_rows.ops) == (name in ("jumping", "viewing", "normed"))
    assert chooses == (name != "normed last")


def test_ops_of_the_last_stage_alone():
    prepared = prepare(quick_config(**settings_of("gcnii")), Mesh.alone(), sparse_graph())
    model, n = prepared.model_graph, 120
    counts = LossRows(30, 90)
    last, end = last_aggregation(model), model.num_ops
    for first in range(last + 1):
        found = choose_loss_rows(model, range(first, end), counts, n)
        assert found.ops == from_last_aggregation(model)
    # Without an aggregation a stage makes all rows: those it reads are given for all.
    for first in range(last + 1, end):
        assert choose_loss_rows(model, range(first, end), counts, n) == ALL_ROWS
    assert choose_loss_rows(model, range(end), LossRows(91, 90), n) == ALL_ROWS


def test_transpose_of_some_rows():
    graph = sparse_graph(directed=True)
    rows = weighted_rows(graph, "gcn")
    whole = RowCSR.from_scipy(rows, torch.float64, torch.device("cpu"))
    chosen = torch.tensor([3, 5, 40, 119])
    some = whole.select(chosen)
    assert np.array_equal(some.dense().numpy(), rows[chosen.numpy()].toarray())
    turned = some.transpose()
    assert np.array_equal(turned.dense().numpy(), rows[chosen.numpy()].toarray().T)
    assert turned.indices.dtype == whole.indices.dtype
    nobody = whole.select(chosen[:0]).transpose()
    assert nobody.dense().shape == (120, 0)


@pytest.mark.parametrize("shards", [1, 2])
def test_memory_and_predictions_count_loss_rows(shards, monkeypatch):
    settings = {**settings_of("gcnii"), "dtype": "float32", "chunks": 4, "shards": shards}
    prepared = prepare(quick_config(**settings), Mesh.alone(), sparse_graph())
    sizes = chunk_sizes(prepared).stages[0]
    model = prepared.model_graph
    first, last = model.aggregations[0], model.aggregations[-1]
    graph, train = prepared.graph, prepared.loss_row_mask
    rows, edges, _ = sizes.columns(last, Side.AFTER)
    assert (rows.sum(), edges.sum()) == (train.sum(), graph.degrees[train].sum())
    rows, edges, _ = sizes.columns(last, Side.BEFORE)
    assert (rows.sum(), edges.sum()) == (graph.num_vertices, graph.degrees[train].sum())
    # Brought back to a chunk is what its rows are read for, whoever reads them.
    read = graph.indices[np.repeat(train, graph.degrees)]
    assert edges.sum(0).tolist() == np.bincount(prepared.chunking.chunk_of_row()[read]).tolist()
    rows, edges, _ = sizes.columns(first, Side.AFTER)
    assert (rows.sum(), edges.sum()) == (graph.num_vertices, graph.num_edges)
    limited = [op for op in model.ops if op.name in from_last_aggregation(model)]
    for op in limited[1:]:
        rows, edges, _ = sizes.columns(op, Side.AFTER)
        assert (rows.sum(), edges.sum()) == (train.sum(), 0)
    few = memory_by_rank(prepared)
    monkeypatch.setattr(loss_rows_module, "choose_loss_rows", lambda *_, **__: ALL_ROWS)
    every = memory_by_rank(prepare(quick_config(**settings), Mesh.alone(), sparse_graph()))
    spared = graph.num_vertices - train.sum()
    # Among all layers the aggregated row has a table with its gradient, by itself it has not.
    in_table = last.push_width * graph.num_vertices
    # The rows of the encoder that the last layer mixes in are copied: 16 numbers.
    kept = sum(op.kept_per_row for op in limited)
    saved = 4 * (kept * spared - in_table - 16 * train.sum())
    assert sum(e.activations - f.activations for e, f in zip(every, few, strict=True)) == saved
    extra = 8 * 2 * (graph.degrees[train].sum() + train.sum())
    layouts = [shard_layout(graph, prepared.chunking, shard) for shard in range(shards)]
    more = sum(f.structure - e.structure for e, f in zip(every, few, strict=True))
    halo = sum(len(of.halo) for of in layouts)
    pointers = 2 * 4 * (train.sum() + graph.num_vertices + halo)  # whole, and by chunk
    # And of every row its key, its number and its place.
    assert more == extra + pointers + 20 * train.sum()


def test_depths_are_steps():
    model = prepare(quick_config(**settings_of("gcnii")), Mesh.alone(), sparse_graph()).model_graph
    aggregates = [op.aggregates for op in model.ops]
    assert sum(aggregates) == 3
    second = [i for i, found in enumerate(aggregates) if found][1]
    assert model.depths(range(model.num_ops)) == list(accumulate(aggregates))
    assert model.depths(range(second, model.num_ops)) == list(accumulate(aggregates[second:]))
    parts = step_parts(model, range(second, model.num_ops))
    sides = [[part.side for part in one if aggregates[part.op]] for one in parts]
    assert sides == [["before"], ["after", "before"], ["after"]]
    # Row-wise ops have the part behind alone, in the step of the aggregation before them.
    row_wise = [part for one in parts for part in one if not aggregates[part.op]]
    assert {part.side for part in row_wise} == {"after"}
    assert [part.op for part in row_wise] == [
        i for i in range(second, model.num_ops) if not aggregates[i]
    ]


def test_a_shard_of_all_rows_has_the_loss_rows_of_the_graph():
    config = quick_config(model="resgcn", layers=3, chunks=3, recompute=True, staleness="none")
    prepared = prepare(config, Mesh.alone(), small_graph())
    whole, graph = prepared.loss_rows, prepared.graph
    assert whole.ops
    assert whole.copied
    rows = np.arange(graph.num_vertices)
    found = loss_rows_module.loss_rows_of_shard(graph, prepared.loss_row_mask, whole, rows)
    assert found == whole
