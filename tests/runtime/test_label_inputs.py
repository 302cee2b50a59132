"""Labels as inputs: the numbers of a loop of plain PyG, on every shape."""

import copy
from dataclasses import replace

import hetero_models
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from models.test_plain_pyg import HIDDEN, LAYERS, PlainGCN
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import dropout_edge

import gnnpipe
from gnnpipe import Graph, InputError, Trainer
from gnnpipe.capture.edge_work.program import random_numbers_of
from gnnpipe.data.links import split_links
from gnnpipe.ops.hashed_dropout import drawn_labels, row_keys
from gnnpipe.profiling.scenario import GraphShape
from gnnpipe.run.resume import resumed_config
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.memory_estimate import memory_of_rank
from gnnpipe.setup.prepare import prepare

SHARE, EPOCHS, FEATURES, CLASSES = 0.4, 5, 7, 3
EXACT = {"staleness": "exact"}
ITERATIONS = [0, 2]


def drawn(count, epoch, seed=0, share=SHARE):
    return drawn_labels(row_keys(torch.arange(count)), share, seed, epoch)


def test_a_share_is_drawn_by_epoch_and_vertex_alone():
    for share in (0.03, 0.25, 0.625):
        found = torch.stack([drawn(20_000, epoch, 0, share) for epoch in range(4)]).double()
        deviation = (share * (1 - share) / 20_000) ** 0.5
        assert ((found.mean(1) - share).abs() < 4 * deviation).all()
        both = (found[0] * found[1]).mean()
        assert abs(float(both) - share**2) < 4 * deviation
    keys = row_keys(torch.arange(100))
    some = torch.tensor([5, 40, 99])
    assert (drawn_labels(keys[some], SHARE, 0, 3) == drawn(100, 3)[some]).all()
    assert (drawn(100, 3) != drawn(100, 3, seed=1)).any()


def multi_label_graph():
    graph = small_graph()
    y = np.random.default_rng(1).integers(-1, 2, (graph.num_vertices, CLASSES)).astype(np.int8)
    return replace(graph, y=y)


def labels_of(graph):
    """The labels [N, C] as numbers, 0 where unknown."""
    y = torch.from_numpy(graph.y)
    if graph.is_multi_label:
        return (y == 1).double()
    return F.one_hot(y.clamp(min=0), CLASSES).double() * (y >= 0)[:, None]


def plain(model, graph, iterations, lr=0.01, epochs=EPOCHS):
    """Losses and final logits of label reuse in plain PyG (arXiv 2103.13355)."""
    dense = graph.x.toarray() if sp.issparse(graph.x) else graph.x
    x, edges = torch.from_numpy(dense).double(), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    labels = labels_of(graph)

    def forward(columns, number):
        with random_numbers_of(0, number):  # of random edges
            return model(torch.cat([x, columns], 1), edges)

    def logits_with(given, epoch=0):
        columns = labels * given[:, None]
        with torch.no_grad():
            for number in range(iterations):
                found = forward(columns, -2 - epoch * iterations - number)
                found = found.sigmoid() if graph.is_multi_label else found.softmax(-1)
                columns = torch.where(given[:, None], columns, found)
        return forward(columns, epoch)

    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for epoch in range(epochs):
        model.train()
        given = train & drawn(len(train), epoch)
        rest = train & ~given
        optimizer.zero_grad()
        logits = logits_with(given, epoch)[rest]
        if graph.is_multi_label:
            known = y[rest] >= 0
            truth = y[rest][known].double()
            loss = F.binary_cross_entropy_with_logits(logits[known], truth)
        else:
            loss = F.cross_entropy(logits, y[rest])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, logits_with(train) if not model.eval().training else None


class Net(nn.Module):
    """SAGE with BatchNorm, whose running statistics count every pass in training mode."""

    def __init__(self, dropout=0.0):
        super().__init__()
        # No bias before a norm: Adam would step by the sign of a gradient of rounding errors.
        self.first = pyg.SAGEConv(FEATURES + CLASSES, 8, bias=False)
        self.last = pyg.SAGEConv(8, CLASSES)
        self.norm, self.dropout = nn.BatchNorm1d(8), dropout

    def forward(self, x, edge_index):
        x = F.dropout(x, self.dropout, self.training)
        x = self.norm(self.first(x, edge_index)).relu()
        return self.last(F.dropout(x, self.dropout, self.training), edge_index)


class Linear(Net):
    """Its first layer is a linear map of the features, sparse if they are."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES + CLASSES, 8)
        self.first = pyg.GCNConv(8, 8, bias=False)

    def forward(self, x, edge_index):
        x = self.norm(self.first(self.encode(x), edge_index)).relu()
        return self.last(x, edge_index)


class RandomEdges(Net):
    def forward(self, x, edge_index):
        edge_index, _ = dropout_edge(edge_index, 0.3, training=self.training)
        return super().forward(x, edge_index)


class Whole(Net):
    """Attends over all vertices, which cannot be recorded."""

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        x = (x @ x.t()).softmax(dim=1) @ x
        return self.last(self.norm(x), edge_index)


def made(kind, **settings):
    torch.manual_seed(0)
    return kind(**settings).double()


def trained(graph, model, iterations, **settings):
    given = {"label_inputs": SHARE, "label_iterations": iterations, "epochs": EPOCHS}
    trainer = Trainer(quick_config(**given | settings), graph=graph, model=model)
    return [row.loss for row in trainer.fit().history], trainer


def assert_is_plain(found, trainer, truth):
    losses, logits = truth
    assert found == pytest.approx(losses, rel=1e-9)
    assert torch.allclose(trainer.predict(), logits, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [Net, Linear, RandomEdges])
def test_a_recorded_model_equals_plain_pyg(kind, sparse, chunks, iterations):
    graph, model = small_graph(sparse=sparse), made(kind)
    truth = plain(copy.deepcopy(model), graph, iterations)
    found = trained(graph, model, iterations, chunks=chunks, require_capture=True, **EXACT)
    assert_is_plain(*found, truth)


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_model_that_runs_as_it_is_equals_plain_pyg(sparse, iterations):
    graph, model = small_graph(sparse=sparse), made(Whole)
    truth = plain(copy.deepcopy(model), graph, iterations)
    assert_is_plain(*trained(graph, model, iterations), truth)


@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_built_in_model_equals_plain_pyg(chunks, iterations):
    graph = small_graph()
    wide = replace(graph, x=np.zeros((graph.num_vertices, FEATURES + CLASSES), np.float32))
    settings = {"layers": LAYERS, "hidden": HIDDEN, "dropout": 0.0}
    same = Trainer(quick_config(**settings), graph=wide)
    model = PlainGCN(wide).double()
    model.load_state_dict(same.model.state_dict())
    truth = plain(model, graph, iterations)
    found = trained(graph, None, iterations, chunks=chunks, **settings, **EXACT)
    assert_is_plain(*found, truth)


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.parametrize("iterations", ITERATIONS)
@pytest.mark.parametrize("chunks", [1, 4])
def test_several_labels_at_once_equal_plain_pyg(chunks, iterations):
    graph, model = multi_label_graph(), made(Net)
    truth = plain(copy.deepcopy(model), graph, iterations)
    assert_is_plain(*trained(graph, model, iterations, chunks=chunks, **EXACT), truth)


ANEW = EXACT | {"recompute": True}
# (S, G, K), settings: what must agree; the first of each on one rank.
ALIKE = {
    "exact": [((1, 1, 4), EXACT), ((2, 1, 4), EXACT), ((1, 2, 1), {}), ((1, 2, 3), ANEW)],
    "auto": [((1, 1, 4), {}), ((2, 1, 4), {}), ((1, 2, 4), {})],
    "paper": [((1, 1, 4), {"staleness": "paper"}), ((2, 1, 4), {"staleness": "paper"})],
}


def on_shapes(shapes, kinds):
    """Losses, logits, counted bytes and their closed form, by shape."""
    found = []
    for (stages, shards, chunks), more in shapes:
        mesh = Mesh.join(stages, shards)
        shape = {"stages": stages, "shards": shards, "chunks": chunks} | more
        for kind in kinds:
            own = {"layers": 3, "hidden": 8, "dropout": 0.5} if kind is None else {}
            model = None if kind is None else made(kind, dropout=0.3)
            given = {"label_inputs": SHARE, "label_iterations": 2, "epochs": EPOCHS}
            run = quick_config(**given | own | shape)
            trainer = Trainer(run, graph=small_graph(), model=model, world=mesh)
            result = trainer.fit()
            bytes_sent = result.comm_bytes_per_epoch, result.comm_bytes_closed_form
            losses = [row.loss for row in result.history]
            found.append((losses, trainer.predict().numpy(), *bytes_sent))
    return found


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.filterwarnings("ignore:--label-inputs .*. stale rows")
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(shapes, id=name, marks=[] if name == "exact" else [pytest.mark.slow])
        for name, shapes in ALIKE.items()
    ],
)
def test_shapes_agree_with_dropout_and_count_every_byte(shapes):
    # Other chunks read the statistics of a BatchNorm stale.
    kinds = [None, Net, RandomEdges] if shapes[0][1] == EXACT else [None]
    alone, shared = shapes[:1], shapes[1:]
    truth = on_shapes(alone, kinds)
    for rank in run_ranks(on_shapes, 2, shared, kinds):
        for number, (losses, logits, counted, formula) in enumerate(rank):
            wanted = truth[number % len(kinds)]
            assert losses == pytest.approx(wanted[0], rel=1e-9)
            assert np.allclose(logits, wanted[1], rtol=1e-8, atol=1e-10)
            assert counted == formula
            assert counted["total"] > 0


def test_predictions_count_as_bytes_of_the_pipeline():
    """One float64 for each vertex and class, an iteration; and a forward pass."""
    (with_labels,) = run_ranks(on_shapes, 2, [((2, 1, 4), EXACT)], [None])[0]
    n, width = small_graph().num_vertices, 8
    assert with_labels[2]["pipeline"] == (2 + 2) * n * width * 8 + 2 * n * CLASSES * 8


def test_an_epoch_time_is_predicted_without_label_iterations_alone():
    for iterations, is_predicted in ((0, True), (1, False)):
        given = {"label_inputs": SHARE, "label_iterations": iterations, "epochs": 10}
        result = Trainer(quick_config(**given, hidden=8), graph=small_graph()).fit()
        assert (result.predicted_epoch_time_s is not None) == is_predicted


def test_stale_rows_carry_labels_of_the_last_epoch():
    with pytest.warns(UserWarning, match="also those that are trained on now"):
        trained(small_graph(), None, 0, chunks=4, epochs=8)


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.filterwarnings("ignore:--label-inputs .*. stale rows")
@pytest.mark.parametrize("kind", [None, Net, Whole])
def test_a_resumed_run_is_the_same_to_the_bit(kind, tmp_path):
    graph, out = small_graph(), str(tmp_path / "run")
    chunks = 1 if kind is Whole else 4
    settings = {"chunks": chunks, "hidden": 8, "epochs": 6, "checkpoint_every": 3}

    def fit(name, epochs, **more):
        torch.manual_seed(7)
        model = None if kind is None else made(kind, dropout=0.3)
        given = settings | {"out": str(tmp_path / name), "epochs": epochs}
        return trained(graph, model, 1, **given | more)

    whole, trainer = fit("whole", 6)
    fit("run", 3)
    model = None if kind is None else made(kind, dropout=0.3)
    config = resumed_config(out, {"epochs": 6})
    again = Trainer(config, graph=graph, model=model, resume=out)
    assert [row.loss for row in again.fit().history] == whole
    assert torch.equal(again.predict(), trainer.predict())
    with pytest.raises(InputError, match="--label-iterations 2: the run in"):
        resumed_config(out, {"label_iterations": 2})


def test_a_loss_of_ones_own_gets_the_vertices_that_are_trained_on():
    graph, seen = small_graph(), []

    def loss(logits, y, vertices, epoch):
        seen.append((epoch, vertices.tolist()))
        assert (y == torch.from_numpy(graph.y)[vertices]).all()
        return F.cross_entropy(logits, y, reduction="sum")

    model = made(Net)
    given = {"label_inputs": SHARE, "epochs": EPOCHS}
    trainer = Trainer(quick_config(**given), graph=graph, model=copy.deepcopy(model), loss_fn=loss)
    losses = [row.loss for row in trainer.fit().history]
    assert losses == pytest.approx(plain(model, graph, 0)[0], rel=1e-9)
    for epoch, vertices in seen[-EPOCHS:]:
        left = graph.train_mask & ~drawn(graph.num_vertices, epoch).numpy()
        assert vertices == np.flatnonzero(left).tolist()


def test_another_graph_is_predicted_for_without_labels(tmp_path):
    out = str(tmp_path / "run")
    _, trainer = trained(small_graph(), made(Net), 1, out=out)
    other = small_graph(n=80, seed=5)
    none = np.zeros(80, dtype=bool)
    bare = replace(
        other, y=np.full(80, -1), num_classes=0, train_mask=none, val_mask=none, test_mask=none
    )
    model = copy.deepcopy(trainer.model).eval()
    x, edges = torch.from_numpy(other.x).double(), torch.from_numpy(other.edge_index)
    with torch.no_grad():
        first = model(torch.cat([x, torch.zeros(80, CLASSES)], 1), edges)
        truth = model(torch.cat([x, first.softmax(-1)], 1), edges)
    loaded = Trainer.load(out, graph=bare, model=made(Net), chunks=3)
    assert torch.allclose(loaded.predict(), truth, rtol=1e-9)
    with pytest.raises(InputError, match="label iterations, which need the logits"):
        Trainer.load(out, graph=bare, model=made(Net), layer="norm")


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
def test_an_unlabelled_graph_of_several_labels_gets_their_probabilities(tmp_path):
    graph, out = multi_label_graph(), tmp_path / "run"
    trained(graph, made(Net), 1, out=str(out))
    n, none = graph.num_vertices, np.zeros(graph.num_vertices, dtype=bool)
    bare = replace(graph, y=np.full(n, -1), num_classes=0, train_mask=none)
    truth = Trainer.load(out, graph=replace(graph, train_mask=none), model=made(Net)).predict()
    found = Trainer.load(out, graph=bare, model=made(Net)).predict()
    assert torch.equal(found, truth)
    (out / "result.json").unlink()
    with pytest.raises(InputError, match="do not know the kind of labels"):
        Trainer.load(out, graph=bare, model=made(Net))


def test_several_vertex_types_widen_the_features_of_the_labelled_type():
    graph = Graph.from_pyg(hetero_models.hetero_data(subjects=False))
    is_paper = np.flatnonzero(graph.row_types["paper"])
    y = torch.from_numpy(graph.y[is_paper])
    train = torch.from_numpy(graph.train_mask[is_paper])
    labels = F.one_hot(y, CLASSES).double()
    model = made(hetero_models.to_hetero)
    with torch.no_grad():  # lazy weights
        x = {t: torch.zeros(1, w).double() for t, w in hetero_models.WIDTHS.items()}
        x["paper"] = torch.zeros(1, 7 + CLASSES).double()
        model(x, {r: torch.zeros(2, 1).long() for r in graph.relations})
    own, losses = copy.deepcopy(model), []
    data = hetero_models.hetero_data(subjects=False)
    x = {name: data[name].x.double() for name in hetero_models.WIDTHS}
    keys = row_keys(torch.from_numpy(is_paper))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        given = train & drawn_labels(keys, SHARE, 0, epoch)
        columns = labels * given[:, None]
        for number in range(2):
            wide = x | {"paper": torch.cat([x["paper"], columns], 1)}
            logits = model(wide, data.edge_index_dict)["paper"]
            if not number:
                columns = torch.where(given[:, None], columns, logits.softmax(-1)).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(logits[train & ~given], y[train & ~given])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for chunks in (1, 3):
        found, _ = trained(graph, copy.deepcopy(own), 1, chunks=chunks, **EXACT)
        assert found == pytest.approx(losses, rel=1e-9)


def test_a_graph_without_features_has_the_labels_alone():
    graph = small_graph()
    bare = replace(graph, x=np.zeros((graph.num_vertices, 0), np.float32))
    prepared = prepare(quick_config(label_inputs=SHARE, hidden=8), Mesh.alone(), bare)
    assert prepared.model_graph.num_features == CLASSES


@pytest.mark.parametrize("sparse", [False, True])
def test_the_estimate_counts_the_label_columns(sparse):
    graph, mesh = small_graph(sparse=sparse), Mesh.alone()
    run = quick_config(label_inputs=0.125, hidden=8)
    prepared = prepare(run, mesh, graph)
    found = memory_of_rank(prepared, 0, 0).features
    n, labels = graph.num_vertices, int((graph.train_mask & (graph.y >= 0)).sum())
    if sparse:
        assert found == (graph.x.nnz + labels) * 2 * (4 + 8) + n * CLASSES * (8 + 1)
    else:
        assert found == n * (FEATURES + CLASSES) * 8 + n * CLASSES
    words = "labels as inputs: the last 3 features, in each epoch of 0.125 of the training vertices"
    assert any(line.startswith(words) for line in head_lines(prepared))
    assert not any(op.is_given for op in prepared.model_graph.ops)


@pytest.mark.parametrize(
    ("settings", "graph", "message"),
    [
        ({"label_iterations": 1}, None, "has no effect without --label-inputs"),
        ({"label_inputs": 0.5, "task": "links"}, None, "links have no labels of vertices"),
        ({"label_inputs": 1.0}, None, "must be less than 1"),
        (
            {"label_inputs": 0.5, "label_iterations": 1, "profile": "p.json"},
            None,
            "a predicted epoch has no such passes",
        ),
        (
            {"label_inputs": 0.5},
            lambda: split_links(small_graph(), "60/20/20", seed=0),
            "needs classes or labels of 0 and 1, but small has .* pairs of vertices",
        ),
        (
            {"label_inputs": 0.5},
            lambda: replace(small_graph(), y=np.ones((60, 1), np.float32), num_classes=1),
            "needs classes or labels of 0 and 1, but small has 1 target",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, graph, message):
    def attempt():
        prepare(quick_config(**settings), Mesh.alone(), graph and graph())

    with pytest.raises(InputError, match=message):
        attempt()


def test_the_commands_that_do_not_follow_labels_say_so():
    graph, given = small_graph(), quick_config(label_inputs=0.5, label_iterations=1)
    with pytest.raises(InputError, match="not followed by the reference"):
        gnnpipe.verify(given, graph=graph)
    with pytest.raises(InputError, match="a predicted epoch has no such passes"):
        gnnpipe.simulate(given, graph=graph, hardware="h100:100gbe")
    with pytest.raises(InputError, match="a predicted epoch has no such passes"):
        gnnpipe.profile(given, graph=graph)
    shape = GraphShape(vertices=1000, edges=5000, features=16, classes=4)
    with pytest.raises(InputError, match="give features=20"):
        gnnpipe.simulate(quick_config(label_inputs=0.5), shape=shape, hardware="h100:100gbe")


def test_hidden_rows_have_the_training_labels_as_inputs(tmp_path):
    graph, out = small_graph(), str(tmp_path / "run")
    _, trainer = trained(graph, made(Net), 0, out=out)
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    given = labels_of(graph) * torch.from_numpy(graph.train_mask)[:, None]
    with torch.no_grad():
        truth = trainer.model.eval().first(torch.cat([x, given], 1), edges)
    loaded = Trainer.load(out, graph=graph, model=made(Net), layer="first")
    assert torch.allclose(loaded.predict(), truth, rtol=1e-9)
