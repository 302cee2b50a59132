"""Rows computed from features alone do not move with the weights and need no forecast."""

import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SAGEConv, SimpleConv

from gnnpipe import Trainer
from gnnpipe.capture.recording import Recording
from gnnpipe.perf.fit import fit_costs
from gnnpipe.perf.profile import op_kind
from gnnpipe.profiling.steps import measure_steps
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare
from gnnpipe.verification.comparison import compare_epochs

CPU = torch.device("cpu")

FEATURES, HIDDEN = 30, 4

pytestmark = pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")


class Stack(nn.Module):
    """Dropout, perhaps a norm over all vertices, and two convolutions."""

    def __init__(self, first, norm=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False) if norm else nn.Identity()
        self.first, self.second = first, GCNConv(HIDDEN, 3)

    def forward(self, x, edge_index):
        x = F.dropout(self.norm(x), 0.5, self.training)
        return self.second(F.relu(self.first(x, edge_index)), edge_index)


class Twice(nn.Module):
    """Two convolutions without weights."""

    def __init__(self):
        super().__init__()
        self.most, self.first = SimpleConv(aggr="max"), attention(GATv2Conv)
        self.second = GCNConv(HIDDEN, 3)

    def forward(self, x, edge_index):
        x = self.first(torch.tanh(self.most(x, edge_index)), edge_index)
        return self.second(F.relu(x), edge_index)


def attention(kind=GATConv):
    """A convolution whose map widens rows, so that the features are pushed as they are."""
    return kind(FEATURES, HIDDEN, heads=8, concat=False)


MODELS = {
    "gat": (lambda: Stack(attention()), 1),
    "gat that maps first": (lambda: Stack(GATConv(FEATURES, HIDDEN)), 0),
    "gatv2": (lambda: Stack(attention(GATv2Conv)), 1),
    "gatv2 that maps first": (lambda: Stack(GATv2Conv(FEATURES, HIDDEN)), 0),
    "sage max": (lambda: Stack(SAGEConv(FEATURES, HIDDEN, aggr="max")), 1),
    # Two means of a norm, and what it gives.
    "a norm": (lambda: Stack(attention(), norm=True), 3),
    "two in a row": (Twice, 2),
    "a map first": (lambda: Stack(GCNConv(FEATURES, HIDDEN)), 0),
}


def graph():
    return small_graph(n=200, features=FEATURES)


def config(**settings):
    return quick_config(chunks=6, dropout=0.5, epochs=6, **settings)


def module_of(name, dtype=torch.float64):
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_do_not_move_are_found(name):
    prepared = prepare(config(), Mesh.alone(), graph(), module_of(name))
    fixed = [op.name for op in prepared.model_graph.aggregations if not op.moves]
    assert len(fixed) == MODELS[name][1]
    assert len(prepared.probes) == graph().num_vertices  # 512 of 200


def losses(name, **settings):
    trainer = Trainer(config(**settings), graph=graph(), model=module_of(name))
    return [row.loss for row in trainer.fit().history]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_forecast_of_fixed_rows_changes_nothing(name, monkeypatch):
    """With all vertices as probes, so that both runs have the same ones."""
    every = {"probes": 200}
    found = losses(name, **every)
    monkeypatch.setattr(Recording, "is_fixed", lambda *_: False)
    assert losses(name, **every) == found


def compare(shapes):
    found = []
    for stages, shards in shapes:
        mesh = Mesh.join(stages, shards)
        for name in MODELS:
            settings = config(stages=stages, shards=shards)
            prepared = prepare(settings, mesh, graph(), module_of(name))
            found.append(
                (
                    max(c.largest for c in compare_epochs(graph(), prepared, mesh, 4)),
                    name,
                    stages,
                    shards,
                )
            )
            trainer = Trainer(settings, graph=graph(), model=module_of(name), world=mesh)
            result = trainer.fit()
            assert result.comm_bytes_per_epoch == result.comm_bytes_closed_form, name
    return found


@pytest.mark.parametrize(("ranks", "shapes"), [(1, [(1, 1)]), (2, [(2, 1), (1, 2)])])
def test_every_shape_equals_one_autograd_graph(ranks, shapes):
    for found in run_ranks(compare, ranks, shapes):
        assert max(found)[0] <= 1e-11, max(found)


class MapBehind(nn.Module):
    """One aggregation of features, then a map of rows."""

    def __init__(self):
        super().__init__()
        self.most, self.out = SimpleConv(aggr="max"), nn.Linear(FEATURES, 3)

    def forward(self, x, edge_index):
        return self.out(self.most(x, edge_index))


def test_model_without_moving_rows_has_no_probes():
    trainer = Trainer(config(), graph=graph(), model=MapBehind())
    assert len(trainer.fit().history) == 6
    prepared = trainer._setup()[1]
    assert [op.moves for op in prepared.model_graph.aggregations] == [False]
    assert len(prepared.probes) == 0


def test_stage_without_moving_rows_is_measured_and_predicted():
    prepared = prepare(config(), Mesh.alone(), graph(), module_of("gatv2"))
    fitted = fit_costs(measure_steps(prepared, CPU))
    for op in prepared.model_graph.aggregations:
        assert (op_kind(op), "forecast") in fitted.costs
        assert ((op_kind(op), "carry") in fitted.costs) == op.moves
