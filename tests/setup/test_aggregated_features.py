"""Features are aggregated once, when the run is set up, and not in every epoch."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric.nn import GCN, GATConv, GCNConv, GraphConv, GraphSAGE, SGConv, SimpleConv

from gnnpipe import Trainer
from gnnpipe.capture.recording import Recording
from gnnpipe.data.links import split_links
from gnnpipe.graph.csr import RowCSR
from gnnpipe.perf.fit import fit_costs
from gnnpipe.perf.parts import Side
from gnnpipe.perf.profile import op_kind
from gnnpipe.profiling.steps import measure_steps
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepare import prepare
from gnnpipe.verification.comparison import compare_epochs

CPU = torch.device("cpu")


class Dropped(nn.Module):
    """What is dropped is another thing in every epoch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(7, 16), GCNConv(16, 3)

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.5, self.training)
        return self.second(F.relu(self.first(x, edge_index)), edge_index)


class InPlace(nn.Module):
    """Writes over aggregated features, which are stored for the next epoch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SimpleConv(aggr="mean"), GCNConv(7, 3)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        x.mul_(2.0)
        return self.second(x.relu_(), edge_index)


OWN = {
    # These add up the narrower rows: the features.
    "own gcn": lambda: GCN(7, 16, 3, 3, dropout=0.5),
    "own sage": lambda: GraphSAGE(7, 16, 3, 3, norm="LayerNorm"),
    "own sgc": lambda: SGConv(7, 3, K=2),
    "own dropped": Dropped,
    "own in place": InPlace,
}
ONCE = {
    "gcn": 1,
    "sage": 1,
    "gcnii": 0,
    "resgcn": 0,
    "gat": 0,
    "own gcn": 1,
    "own sage": 1,
    "own sgc": 1,
    "own dropped": 0,
    "own in place": 1,
}


def module_of(name, dtype=torch.float64):
    torch.manual_seed(0)
    return OWN[name]().to(dtype) if name in OWN else None


def config(name="gcn", **settings):
    # A name of one's own model stands for no built-in one.
    model = {} if name in OWN else {"model": name}
    return quick_config(**model, layers=3, hidden=8, dropout=0.5, **settings)


def given_ops(prepared):
    return [op for op in prepared.model_graph.ops if op.is_given]


def test_means_of_batch_norm_are_no_aggregations():
    module = GCN(7, 16, 2, 3, norm="BatchNorm")
    prepared = prepare(config("own gcn", chunks=2), Mesh.alone(), small_graph(), module)
    once = "(1 of the features, computed once)"
    text = prepared.model.size_text
    assert text.endswith(f"2 aggregations {once}, 2 over all vertices")


@pytest.mark.parametrize("name", ONCE)
def test_aggregations_of_features_of_each_model(name):
    prepared = prepare(config(name), Mesh.alone(), small_graph(), module_of(name))
    assert len(given_ops(prepared)) == ONCE[name]
    times = f" ({ONCE[name]} of the features, computed once)" * bool(ONCE[name])
    numbers = prepared.model.size_text.partition(", ")[2]
    assert numbers.partition(", 4 over all")[0].endswith(f"aggregations{times}")


@pytest.mark.parametrize(
    ("settings", "features", "count"),
    [
        ({}, {}, 1),
        ({"chunks": 4}, {}, 1),
        ({"chunks": 4, "staleness": "paper"}, {}, 1),
        ({"chunks": 4, "schedule": "async"}, {}, 1),
        ({"shards": 2}, {}, 1),
        ({"comm_dtype": "bf16", "dtype": "float32"}, {}, 1),
        ({}, {"sparse": True}, 1),
        ({}, {"features": 8}, 1),
        # Wider than the layer; of sparse ones A (x W) is computed.
        ({}, {"features": 9}, 1),
        ({}, {"features": 9, "sparse": True}, 0),
        # Labels among the features are other ones in every epoch.
        ({"label_inputs": 0.5}, {"features": 9}, 0),
        # Its layers read the features themselves, too.
        ({"name": "sage"}, {"features": 9}, 0),
        ({"label_inputs": 0.5}, {}, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:--schedule async")
def test_conditions(settings, features, count):
    prepared = prepare(config(**settings), Mesh.alone(), small_graph(**features))
    assert len(given_ops(prepared)) == count


def test_given_rows_are_rows_of_the_product():
    """In the order of the chunks; those of the probe vertices, too."""
    graph = small_graph()
    prepared = prepare(config("sage", chunks=4), Mesh.alone(), graph)
    source, target = torch.from_numpy(graph.edge_index)
    x = torch.from_numpy(graph.x).double()
    count = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
    mean = torch.zeros_like(x).index_add_(0, target, x[source]) / count
    executor = build_rank(prepared, Mesh.alone()).executor
    chunks = executor.stage.rows
    made = torch.cat([rows.aggregated["mean"] for rows in chunks])
    order = torch.from_numpy(prepared.chunking.perm)
    torch.testing.assert_close(made, mean[order], rtol=1e-12, atol=1e-12)
    probes = executor.forecaster._probes.rows
    expected = mean[order[torch.from_numpy(prepared.probes)]]
    torch.testing.assert_close(probes.aggregated["mean"], expected, rtol=1e-12, atol=1e-12)
    # What reads only aggregated features holds no others.
    (alone,) = build_rank(prepare(config(), Mesh.alone(), graph), Mesh.alone()).executor.stage.rows
    assert alone.features is None
    assert chunks[0].features is not None


def bytes_of_rows(shards):
    """Bytes of an epoch for rows of other shards, by number of features; those of 9 are sparse."""
    mesh, found, graph = Mesh.join(1, shards), {}, small_graph()
    for features in (7, 9, 10):
        x = np.resize(graph.x, (graph.num_vertices, features))
        given = replace(graph, x=sp.csr_array(x) if features == 9 else x)
        result = Trainer(config(shards=shards, epochs=2, eval_every=0), given, world=mesh).fit()
        assert result.comm_bytes_per_epoch == result.comm_bytes_closed_form
        found[features] = result.comm_bytes_per_epoch["graph"]
    return found


def test_several_shards_send_no_features():
    """Layers push 8, 8 and 3 numbers a row; the first none of dense features."""
    for found in run_ranks(bytes_of_rows, 2, 2):
        assert found[7] * (8 + 8 + 3) == found[9] * (8 + 3) > 0
        assert found[7] == found[10]


def compare(shapes):
    """Differences from one autograd graph, which aggregates anew: (largest, model, shape)."""
    found = []
    for stages, chunks in shapes:
        mesh = Mesh.join(stages, 1)
        for name in ONCE:
            settings = config(name, stages=stages, chunks=chunks, staleness="exact")
            prepared = prepare(settings, mesh, small_graph(), module_of(name))
            assert len(given_ops(prepared)) == ONCE[name]
            found.append(
                (
                    max(c.largest for c in compare_epochs(small_graph(), prepared, mesh, 3)),
                    name,
                    stages,
                    chunks,
                )
            )
    return found


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("shapes", [[(1, 1), (1, 5)], [(2, 1), (2, 5)]])
def test_every_shape_equals_one_autograd_graph(shapes):
    ranks = shapes[0][0]
    for found in run_ranks(compare, ranks, shapes):
        assert max(found)[0] <= 1e-11, max(found)


def products(monkeypatch, name, epochs, **settings):
    """Products with the adjacency, forward and backward, of a whole run."""
    count, real = [], RowCSR.matmul

    def counted(self, x, *args):
        count.append(x.shape)
        return real(self, x, *args)

    with monkeypatch.context() as patched:
        patched.setattr(RowCSR, "matmul", counted)
        given = config(name, epochs=epochs, eval_every=0, predict=False, **settings)
        Trainer(given, graph=small_graph(), model=module_of(name)).fit()
    return len(count)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gcn", "sage", "own gcn", "own sage"])
def test_an_epoch_has_two_products_fewer(name, recompute, monkeypatch):
    """Forward and backward of the first of three layers: 4 are left, and what comes once."""
    counts = [products(monkeypatch, name, e, recompute=recompute) for e in (1, 3)]
    assert counts[1] - counts[0] == 2 * 4


def every_epoch(monkeypatch):
    """Make every epoch aggregate the features, as it aggregates other rows."""
    monkeypatch.setattr(Recording, "aggregates_features", lambda self, call: False)


def trained(name, **settings):
    trainer = Trainer(config(name, **settings), graph=small_graph(), model=module_of(name))
    result = trainer.fit()
    scores = [row.scores for row in result.history]
    return [row.loss for row in result.history], scores, trainer


@pytest.mark.parametrize("name", ["gcn", "sage", "own gcn", "own sage"])
def test_same_results_as_in_every_epoch(name, monkeypatch):
    losses, scores, _ = trained(name, epochs=6, eval_every=1)
    again, _, _ = trained(name, epochs=6, eval_every=1, recompute=True)
    assert again == losses
    every_epoch(monkeypatch)
    plain, plain_scores, _ = trained(name, epochs=6, eval_every=1)
    assert losses == pytest.approx(plain, rel=1e-11)
    assert scores == plain_scores


@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_a_run_resumes_under_another_shape(name, tmp_path):
    out, graph = str(tmp_path / "run"), small_graph()
    whole = Trainer(config(name, epochs=6), graph=graph).fit()
    Trainer(config(name, epochs=2, out=out, checkpoint_every=2), graph=graph).fit()
    for chunks, epochs in ((3, 4), (1, 6)):
        changes = {"chunks": chunks, "staleness": "exact", "epochs": epochs}
        result = Trainer(resumed_config(out, changes), graph=graph, resume=out).fit()
    assert result.loss == pytest.approx(whole.loss, rel=1e-11)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", ["gcn", "sage", "own sage"])
def test_pairs_are_scored_after_aggregated_features(name, chunks):
    graph = split_links(small_graph(), "60/20/20", seed=0)
    # As wide as the features, so that no product would tell A x from A x W.
    given = replace(config(name, chunks=chunks, staleness="exact"), hidden=7)
    module = GraphSAGE(7, 7, 2).double() if name in OWN else None
    prepared = prepare(given, Mesh.alone(), graph, module)
    assert len(given_ops(prepared)) == 1
    assert max(c.largest for c in compare_epochs(graph, prepared, Mesh.alone(), 3)) <= 1e-11


def first_losses(shards):
    mesh = Mesh.join(1, shards)
    found = {}
    for name in ("gcn", "sage"):
        given = config(name, shards=shards, dtype="float32", matmul_dtype="bf16")
        trainer = Trainer(replace(given, dropout=0.0), graph=small_graph(), world=mesh)
        found[name] = trainer.fit().history[0].loss
    return found


@pytest.mark.filterwarnings("ignore:--matmul-dtype bf16. no faster")
def test_products_in_bf16_are_rounded_at_other_places():
    """With several shards the sums over neighbours are in another order."""
    alone, shared = first_losses(1), run_ranks(first_losses, 2, 2)[0]
    for name, loss in alone.items():
        assert shared[name] == pytest.approx(loss, rel=2**-9), name


class Thrice(nn.Module):
    """Three layers side by side, and in a fourth the features as they are or with other weights."""

    def __init__(self, features, fourth=None):
        super().__init__()
        self.convs = nn.ModuleList(GCNConv(features, 8) for _ in range(3))
        self.fourth, self.last = fourth, nn.Linear(8, 3)

    def forward(self, x, edge_index):
        made = sum(conv(x, edge_index) for conv in self.convs)
        if isinstance(self.fourth, nn.Linear):
            made = made + self.fourth(x)
        elif self.fourth is not None:
            made = made + self.fourth(x, edge_index)
        return self.last(made.relu())


@pytest.mark.parametrize(
    ("features", "fourth", "count"),
    [
        (7, None, 3),
        (9, None, 1),
        (9, lambda: GCNConv(9, 8), 1),
        (9, lambda: nn.Linear(9, 8), 0),
        (9, lambda: GraphConv(9, 8, aggr="mean"), 0),
        (9, lambda: GATConv(9, 8), 0),
    ],
)
def test_layers_that_read_the_same_features(features, fourth, count):
    """They share one product, of wide features only if no layer needs these themselves."""
    torch.manual_seed(0)
    module = Thrice(features, fourth and fourth()).double()
    graph = small_graph(features=features)
    prepared = prepare(config(chunks=4, staleness="exact"), Mesh.alone(), graph, module)
    assert len(given_ops(prepared)) == count
    rows = build_rank(prepared, Mesh.alone()).executor.stage.rows
    assert list(rows[0].aggregated) == ["gcn"] * bool(count)
    assert (rows[0].features is None) == bool(count)
    assert max(c.largest for c in compare_epochs(graph, prepared, Mesh.alone(), 3)) <= 1e-11


@pytest.mark.parametrize("chunks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_an_op_with_given_rows_has_no_edges(chunks):
    prepared = prepare(config("sage", chunks=chunks), Mesh.alone(), small_graph(3000, features=8))
    sizes = chunk_sizes(prepared).stages[0]
    (given,) = given_ops(prepared)
    assert not sizes.columns(given, Side.AFTER)[1].any()
    assert sizes.columns(prepared.model_graph.aggregations[0], Side.AFTER)[1].any()
    fitted = fit_costs(measure_steps(prepared, CPU))
    assert (op_kind(given), "forward_after") in fitted.costs
