"""Where rows may be stale, maps come behind the aggregations, so that no row is stale in W."""

from dataclasses import replace

import hetero_models
import pyg_models
import pytest
import torch
import torch.nn.functional as F
from helpers import carrying, plain_pyg_losses, pyg_data, quick_config, small_graph
from recorded import parts_of
from torch import nn
from torch_geometric.nn import GCNConv, GINConv, GraphConv, RGCNConv, SAGEConv, SimpleConv

from gnnpipe import Graph, Trainer
from gnnpipe.plan import Plan, RowWay, StagePlan
from gnnpipe.planner import GivenPlan, Shape, UniformPlanner
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

FEATURES, HIDDEN, CLASSES = 7, 8, 3


def make_gin(width_in, width_out):
    return GINConv(nn.Linear(width_in, width_out), train_eps=True)


class Net(nn.Module):
    """Two convolutions; the second one gives narrower rows."""

    def __init__(self, conv=GCNConv):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = conv(FEATURES, HIDDEN), conv(HIDDEN, CLASSES)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Concatenated(Net):
    """Reads the features beside hidden rows."""

    def __init__(self):
        super().__init__()
        self.second = GCNConv(FEATURES + HIDDEN, CLASSES)

    def forward(self, x, edge_index):
        h = self.first(x, edge_index).relu()
        return self.second(torch.cat([x, h], dim=1), edge_index)


class Normalised(Net):
    """The first convolution reads normalised features, with random zeros."""

    def __init__(self):
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(FEATURES), GCNConv(FEATURES, 5)
        self.second = GCNConv(5, CLASSES)

    def forward(self, x, edge_index):
        return super().forward(F.dropout(self.norm(x), 0.5, self.training), edge_index)


class Residual(Net):
    """The second convolution reads a sum of mapped features and hidden rows."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(FEATURES, HIDDEN)

    def forward(self, x, edge_index):
        h = self.into(x) + self.first(x, edge_index).relu()
        return self.second(h, edge_index)


class Skipped(Net):
    """A linear map of the same rows is added to each convolution, and a norm comes behind it."""

    def __init__(self, conv=GCNConv):
        super().__init__(conv)
        self.skip, self.norm = nn.Linear(HIDDEN, CLASSES), nn.LayerNorm(CLASSES)

    def forward(self, x, edge_index):
        h = self.first(x, edge_index).relu()
        return self.norm(self.second(h, edge_index) + self.skip(h)).relu()


class ByHand(Net):
    """Maps by ``F.linear``, with arguments by position or by name."""

    def __init__(self, is_named=False):
        super().__init__()
        self.is_named, self.conv = is_named, SimpleConv(aggr="sum")
        self.weight = nn.Parameter(torch.randn(CLASSES, HIDDEN))

    def forward(self, x, edge_index):
        h = self.first(x, edge_index).relu()
        if self.is_named:
            return self.conv(F.linear(input=h, weight=self.weight), edge_index)
        return self.conv(F.linear(h, self.weight), edge_index)


class Embedded(Net):
    """Reads the features beside an embedding of each vertex."""

    def __init__(self):
        super().__init__()
        self.rows, self.first = nn.Embedding(60, 2), GCNConv(FEATURES + 2, 5)
        self.second = GCNConv(5, CLASSES)

    def forward(self, x, edge_index):
        return super().forward(torch.cat([x, self.rows.weight], dim=1), edge_index)


class Scaled(Net):
    """Multiplies the features by a weight each."""

    def __init__(self):
        super().__init__()
        self.scale, self.first = nn.Parameter(torch.ones(1, FEATURES)), GCNConv(FEATURES, 5)
        self.second = GCNConv(5, CLASSES)

    def forward(self, x, edge_index):
        return super().forward(x * self.scale, edge_index)


class Relations(nn.Module):
    """Three relations of one vertex type: three narrow products, each read by one relation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.conv = nn.Linear(FEATURES, HIDDEN), RGCNConv(HIDDEN, CLASSES, 3)

    def forward(self, x, edge_index, edge_type):
        return self.conv(self.into(x), edge_index, edge_type)


MODELS = {
    "GCN": Net,
    "SAGE": lambda: Net(SAGEConv),
    "GraphConv": lambda: Net(GraphConv),
    "residual": Residual,
    "skip and norm": Skipped,
    "SAGE, skip and norm": lambda: Skipped(SAGEConv),
    "by hand": ByHand,
}
AS_THEY_ARE = {
    "GIN": lambda: Net(make_gin),
    "GIN, skip and norm": lambda: Skipped(make_gin),
    "by name": lambda: ByHand(is_named=True),
}
"""Something else reads x W, or it is not taken for a map."""


def graph_of(sparse=False):
    return small_graph(features=FEATURES, sparse=sparse)


def prepared_run(model, sparse=False, planner=None, **settings):
    return prepare(quick_config(**settings), Mesh.alone(), graph_of(sparse), model, planner)


def pushed(*arguments, **settings):
    """Widths of the rows that are aggregated in every epoch."""
    ops = prepared_run(*arguments, **settings).model_graph.ops
    return [op.push_width for op in ops if op.aggregates and not op.is_mean]


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({}, CLASSES),
        ({"chunks": 4}, HIDDEN),
        ({"chunks": 4, "staleness": "paper"}, HIDDEN),
        ({"chunks": 4, "staleness": "none"}, HIDDEN),
        ({"chunks": 4, "staleness": "exact"}, CLASSES),
        ({"chunks": 4, "exact_epochs": 3}, CLASSES),
        ({"chunks": 4, "schedule": "1f1b"}, HIDDEN),
    ],
    ids=str,
)
def test_maps_come_behind_aggregations_that_may_read_stale_rows(settings, width):
    assert pushed(Net(), **settings) == [width]


@pytest.mark.parametrize("name", list(MODELS))
def test_of_each_convolution_the_hidden_rows_are_aggregated(name):
    assert pushed(MODELS[name]()) == [CLASSES]
    assert pushed(MODELS[name](), chunks=4) == [HIDDEN]


@pytest.mark.parametrize("name", list(AS_THEY_ARE))
def test_some_models_have_one_order(name):
    assert pushed(AS_THEY_ARE[name]()) == pushed(AS_THEY_ARE[name](), chunks=4) == [CLASSES]


@pytest.mark.parametrize(
    ("model", "widths"),
    [(Concatenated(), [CLASSES]), (Normalised(), [5, 5]), (Embedded(), [5, 5]), (Scaled(), [5, 5])],
    ids=["beside hidden rows", "normalised", "beside embeddings", "scaled"],
)
def test_columns_of_the_features_are_mapped_first(model, widths):
    """Features may be wide: A (x W) stays as it is where x has columns that no map has made."""
    assert pushed(model, chunks=4) == widths


def test_relations_of_one_vertex_type_keep_their_narrow_rows():
    graph = carrying(graph_of(), "edge_type")
    for chunks in (1, 4):
        found = prepare(quick_config(chunks=chunks), Mesh.alone(), graph, Relations())
        widths = [op.push_width for op in found.model_graph.ops if op.aggregates]
        assert widths == [CLASSES] * 3


@pytest.mark.parametrize("name", [*MODELS, *AS_THEY_ARE])
def test_losses_of_exact_epochs_are_those_of_plain_pyg(name):
    """The maps are behind, because the third epoch may read stale rows."""
    graph = graph_of()
    data = pyg_data(graph).apply(lambda t: t.double() if t.is_floating_point() else t)
    make = (MODELS | AS_THEY_ARE)[name]
    truth = plain_pyg_losses(make().double(), data, (data.x, data.edge_index), 3)
    config = quick_config(chunks=4, exact_epochs=2, lr=0.01, weight_decay=0.0)
    trainer = Trainer(config, graph=graph, model=make().double())
    losses = [row.loss for row in trainer.fit().history]
    assert losses[:2] == pytest.approx(truth[:2], rel=1e-9)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
def test_a_run_goes_on_in_another_number_of_chunks(before, after, tmp_path):
    """The checksum of the operations is that of one model, whatever the order."""
    out, graph = tmp_path / "run", graph_of()
    Trainer(
        quick_config(chunks=before, out=str(out), checkpoint_every=1), graph=graph, model=Net()
    ).fit()
    longer = resumed_config(out, {"chunks": after, "epochs": 5})
    rows = Trainer(longer, graph=graph, model=Net(), resume=out).fit().history
    assert [row.epoch for row in rows] == [1, 2, 3, 4, 5]


def test_an_exact_run_goes_on_with_stale_rows(tmp_path):
    """Its history tables, if any, have narrower rows."""
    out, graph = tmp_path / "run", graph_of()
    config = quick_config(chunks=4, out=str(out), exact_epochs=3, checkpoint_every=1)
    Trainer(config, graph=graph, model=Net()).fit()
    longer = resumed_config(out, {"epochs": 5})
    assert Trainer(longer, graph=graph, model=Net(), resume=out).fit().epochs == 5


def test_a_search_that_finds_one_chunk_records_the_narrow_rows():
    config = quick_config(plan="auto")
    trainer = Trainer(config, graph=graph_of(), model=Net())
    trainer.fit()
    assert trainer.plan.chunks == 1
    assert pushed(Net(), planner=GivenPlan(trainer.plan)) == [CLASSES]


class Fixed:
    """A search that finds this many stages and chunks."""

    def __init__(self, stages, chunks):
        self.stages, self.chunks = stages, chunks

    def num_ranks(self, shape):
        return self.stages

    def plan(self, request):
        shape = Shape(self.stages, 1, self.chunks)
        return UniformPlanner().plan(replace(request, shape=shape))


@pytest.mark.parametrize("name", [*MODELS, *AS_THEY_ARE])
def test_a_plan_serves_both_orders(name):
    """Plans number ops; a search does not know the order before it has found the chunks."""
    make = (MODELS | AS_THEY_ARE)[name]
    exact, stale, given = (
        prepared_run(make(), planner=planner, require_capture=True)
        for planner in (Fixed(2, 1), Fixed(2, 4), Fixed(1, 1))
    )
    assert exact.plan.stages == stale.plan.stages
    plan = replace(exact.plan, chunks=4)
    assert prepared_run(make(), planner=GivenPlan(plan)).plan == plan
    names = [op.name for op in given.model_graph.ops]
    assert names == [op.name for op in prepared_run(make()).model_graph.ops]


class ByColumns(Fixed):
    """Finds one chunk on two shards, whose last aggregation exchanges columns."""

    def __init__(self):
        super().__init__(1, 1)

    def num_ranks(self, shape):
        return 2

    def plan(self, request):
        *_, last = (i for i, op in enumerate(request.model.ops) if op.aggregates)
        stage = StagePlan.even(tuple(range(request.model.num_ops)), (0, 1))
        return Plan((stage,), 1, "fill-drain", ways={last: RowWay.COLUMNS})


def test_the_way_of_rows_stays_with_its_aggregation():
    """It has another number where the map comes first."""
    prepared = prepared_run(Net(), planner=ByColumns())
    ((op, way),) = prepared.plan.ways.items()
    assert way is RowWay.COLUMNS
    assert prepared.model_graph.ops[op] == prepared.model_graph.aggregations[-1]
    assert prepared.model_graph.ops[op].push_width == CLASSES


@pytest.mark.parametrize(("chunks", "width"), [(1, CLASSES), (4, HIDDEN)])
def test_a_given_plan_tells_the_order(chunks, width):
    config = quick_config(chunks=chunks)
    plan = prepare(config, Mesh.alone(), graph_of(), Net()).plan
    assert pushed(Net(), planner=GivenPlan(plan)) == [width]


def models_of_tests():
    """Graph and model of each kind that the tests of recordings have."""
    for name in pyg_models.MODELS:
        yield name, lambda name=name: parts_of(name, 0, 2)[:2]
    for name in hetero_models.MODELS:
        subjects = name not in hetero_models.NO_SUBJECTS

        def make(name=name, subjects=subjects):
            data = hetero_models.hetero_data(subjects=subjects)
            return Graph.from_pyg(data), hetero_models.MODELS[name]()

        yield f"types: {name}", make


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "make"), list(models_of_tests()))
def test_both_orders_have_as_many_ops(name, make):
    found = []
    for chunks in (1, 4):
        graph, model = make()
        config = quick_config(chunks=chunks, require_capture=True)
        found.append(prepare(config, Mesh.alone(), graph, model).model_graph)
    exact, stale = found
    assert exact.num_ops == stale.num_ops
    assert {op.name for op in exact.aggregations} == {op.name for op in stale.aggregations}
