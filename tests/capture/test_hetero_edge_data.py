"""Weights and attributes of relations' edges reach unmodified PyG models, on any shape."""

import warnings

import hetero_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all_within, differences_of_shapes, quick_config, run_ranks
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Graph, Trainer
from gnnpipe.errors import InputError

CITES, WRITES, BACK = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
)
HIDDEN = hetero_models.HIDDEN
PAIR = (HIDDEN, HIDDEN)


def made_data(*fields, relations=(CITES, WRITES)):
    """Weights or attributes, of another width for each of some relations."""
    rng = np.random.default_rng(7)
    data = hetero_models.hetero_data(subjects=False)
    for width, relation in enumerate(relations, start=2):
        count = data[relation].edge_index.shape[1]
        values = {
            "edge_weight": rng.uniform(0.2, 2.0, count),
            "edge_attr": rng.standard_normal((count, width)),
        }
        for field in fields:
            data[relation][field] = torch.from_numpy(values[field]).float()
    return data


class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        widths = hetero_models.WIDTHS
        self.encode = nn.ModuleDict({t: nn.Linear(w, HIDDEN) for t, w in widths.items()})
        self.out = nn.Linear(HIDDEN, hetero_models.OUT)

    def encoded(self, x_dict):
        return {t: self.encode[t](x).relu() for t, x in x_dict.items()}


class Attributes(Encoded):
    """HeteroConv passes attributes on; one relation has none."""

    def __init__(self):
        super().__init__()
        back = pyg.SAGEConv(PAIR, HIDDEN)
        gine = pyg.GINEConv(nn.Linear(HIDDEN, HIDDEN), edge_dim=2)
        gat = pyg.GATConv(PAIR, HIDDEN, add_self_loops=False, edge_dim=3)
        near = pyg.GATv2Conv(HIDDEN, HIDDEN, edge_dim=2, add_self_loops=False)
        transformer = pyg.TransformerConv(PAIR, HIDDEN, edge_dim=3)
        self.convs = nn.ModuleList(
            [
                pyg.HeteroConv({CITES: gine, WRITES: gat, BACK: back}),
                pyg.HeteroConv(
                    {CITES: near, WRITES: transformer, BACK: pyg.SAGEConv(PAIR, HIDDEN)}
                ),
            ]
        )

    def forward(self, x_dict, edge_index_dict, edge_attr_dict):
        h = self.encoded(x_dict)
        for conv in self.convs:
            h = {t: v.relu() for t, v in conv(h, edge_index_dict, edge_attr_dict).items()}
        return self.out(h["paper"])


class Weights(Encoded):
    """Weighted sums, and GCN's norm of weights."""

    def __init__(self):
        super().__init__()
        first = {
            CITES: pyg.GCNConv(HIDDEN, HIDDEN),
            WRITES: pyg.GraphConv(PAIR, HIDDEN),
            BACK: pyg.GraphConv(PAIR, HIDDEN, aggr="mean"),
        }
        second = {r: pyg.GraphConv(PAIR, HIDDEN) for r in (WRITES, BACK)}
        second[CITES] = pyg.TAGConv(HIDDEN, HIDDEN, K=2)
        self.convs = nn.ModuleList([pyg.HeteroConv(first), pyg.HeteroConv(second, aggr="mean")])

    def forward(self, x_dict, edge_index_dict, edge_weight_dict=None):
        h = self.encoded(x_dict)
        for conv in self.convs:
            h = conv(h, edge_index_dict, edge_weight_dict=edge_weight_dict)
        return self.out(h["paper"])


class Called(Encoded):
    """Convolutions called one by one, attributes encoded before, both kinds of data."""

    def __init__(self):
        super().__init__()
        self.encode_edges = nn.Linear(3, HIDDEN)
        self.writes = pyg.GINEConv(nn.Linear(HIDDEN, HIDDEN))
        self.cites = pyg.GraphConv(HIDDEN, HIDDEN)
        self.again = pyg.GraphConv(PAIR, HIDDEN, aggr="max")

    def forward(self, x_dict, edge_index_dict, edge_weight_dict, edge_attr_dict):
        h = self.encoded(x_dict)
        attributes = self.encode_edges(edge_attr_dict[WRITES]).relu()
        ends = h["author"], h["paper"]
        papers = self.writes(ends, edge_index_dict[WRITES], attributes)
        papers = papers + self.cites(h["paper"], edge_index_dict[CITES], edge_weight_dict[CITES])
        ends = h["author"], papers.relu()
        slope = edge_attr_dict[WRITES][:, 0] * edge_weight_dict[WRITES]
        return self.out(papers + self.again(ends, edge_index_dict[WRITES], slope))


class Single(nn.Module):
    """A model of one type, for ``to_hetero``."""

    def __init__(self):
        super().__init__()
        kept = {"add_self_loops": False, "edge_dim": -1}
        self.first = pyg.GATConv((-1, -1), HIDDEN, **kept)
        self.second = pyg.GATConv((-1, -1), hetero_models.OUT, **kept)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


def to_hetero():
    return pyg.to_hetero(Single(), hetero_models.hetero_data(subjects=False).metadata())


MODELS = {
    "attributes": (Attributes, {"edge_attr": (CITES, WRITES)}),
    "weights": (Weights, {"edge_weight": (CITES, WRITES, BACK)}),
    "called": (Called, {"edge_weight": (CITES, WRITES), "edge_attr": (CITES, WRITES)}),
    "to_hetero": (to_hetero, {"edge_attr": (CITES, WRITES, BACK)}),
}


def made(name, seed=0):
    """Model, data, and the arguments with edge data in float64."""
    torch.manual_seed(seed)
    make_model, fields = MODELS[name]
    data = made_data(*fields, relations=next(iter(fields.values())))
    ending = "" if name == "to_hetero" else "_dict"
    given = {
        f"{field}{ending}": {r: data[r][field].double() for r in relations}
        for field, relations in fields.items()
    }
    model = make_model()
    if name == "to_hetero":
        x = {k: {r: v.float() for r, v in one.items()} for k, one in given.items()}
        model(data.x_dict, data.edge_index_dict, **x)
    return model, data, given


def papers_of(model, data, given):
    out = model({t: v.double() for t, v in data.x_dict.items()}, data.edge_index_dict, **given)
    return out["paper"] if isinstance(out, dict) else out


def plain_losses(name, epochs):
    """Losses of training in plain PyG, and the predictions afterwards."""
    model, data, given = made(name)
    model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train, losses = data["paper"].train_mask, []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(papers_of(model, data, given)[train], data["paper"].y[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, papers_of(model.eval(), data, given).detach()


def trained(name, shape, **settings):
    """Losses and predictions of training with gnnpipe."""
    model, data, _ = made(name)
    stages, shards, chunks = shape
    run = quick_config(
        stages=stages,
        shards=shards,
        chunks=chunks,
        lr=0.01,
        staleness="auto" if chunks == 1 else "exact",
        **{"require_capture": True} | settings,
    )
    trainer = Trainer(run, graph=Graph.from_pyg(data), model=model)
    losses = [row.loss for row in trainer.fit().history]
    return losses, trainer.predict()


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_pyg(name, chunks):
    losses, logits = trained(name, (1, 1, chunks))
    truth, plain = plain_losses(name, 3)
    np.testing.assert_allclose(losses, truth, rtol=1e-9)
    torch.testing.assert_close(logits, plain, rtol=1e-8, atol=1e-9)


def losses_on_ranks(shapes):
    return [(name, trained(name, shape)[0]) for name in MODELS for shape in shapes]


@pytest.mark.slow
def test_equals_plain_pyg_on_ranks():
    for name, losses in run_ranks(losses_on_ranks, 2, [(2, 1, 4), (1, 2, 1)])[0]:
        np.testing.assert_allclose(losses, plain_losses(name, 3)[0], rtol=1e-9, err_msg=name)


def parts_of(name, rank, chunks):
    model, data, _ = made(name, seed=rank)
    return Graph.from_pyg(data), model, {}


@pytest.mark.parametrize("name", MODELS)
def test_stale_chunks(name):
    found = differences_of_shapes([(1, 1, 4)], [name], 3, parts_of, staleness="auto")
    assert_all_within(found)


class Unrecorded(Called):
    """Decides by a number of the data, which cannot be recorded."""

    def forward(self, x_dict, edge_index_dict, edge_weight_dict, edge_attr_dict):
        if float(x_dict["paper"].sum()) == 0.5:
            x_dict = {}
        return super().forward(x_dict, edge_index_dict, edge_weight_dict, edge_attr_dict)


def test_a_model_that_runs_as_it_is():
    data = made("called")[1]
    torch.manual_seed(0)
    model, graph = Unrecorded(), Graph.from_pyg(data)
    found = Trainer(quick_config(lr=0.01), graph=graph, model=model).fit()
    with pytest.raises(InputError, match="cannot be traced"):
        Trainer(quick_config(require_capture=True), graph=graph, model=model).fit()
    truth = plain_losses("called", 3)[0]
    np.testing.assert_allclose([row.loss for row in found.history], truth, rtol=1e-9)


def test_data_that_is_read_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained("attributes", (1, 1, 1), epochs=1)


def test_data_that_no_model_reads_is_named():
    data = made_data("edge_attr")
    model = pyg.to_hetero(hetero_models.Sage(), data.metadata())
    message = (
        r"does not use its edge_attr; a PyG model with "
        r"forward\(x_dict, edge_index_dict, edge_attr_dict=None\)"
    )
    with pytest.warns(UserWarning, match=message):
        Trainer(quick_config(epochs=1), graph=Graph.from_pyg(data), model=model).fit()


class Absent(Called):
    def forward(self, x_dict, edge_index_dict, edge_attr_dict):
        return self.out(self.encoded(x_dict)["paper"]) * edge_attr_dict[BACK].mean()


def test_a_relation_without_data_is_named():
    graph = Graph.from_pyg(made_data("edge_attr"))
    message = r"reads \('paper', 'written_by', 'author'\).* its edge_attr of \('author', 'writes'"
    with pytest.raises(InputError, match=message):
        Trainer(quick_config(require_capture=True), graph=graph, model=Absent()).fit()
    with pytest.raises(InputError, match="needs 'edge_weight_dict', which the graph lacks"):
        Trainer(quick_config(), graph=graph, model=Called()).fit()


def test_data_of_another_relation_is_refused():
    class Mistaken(Called):
        def forward(self, x_dict, edge_index_dict, edge_weight_dict):
            h = self.encoded(x_dict)["paper"]
            return self.out(self.cites(h, edge_index_dict[CITES], edge_weight_dict[WRITES]))

    graph = Graph.from_pyg(made_data("edge_weight"))
    with pytest.raises(InputError, match="fails on a sample"):
        Trainer(quick_config(require_capture=True), graph=graph, model=Mistaken()).fit()


def test_weights_become_a_product():
    from gnnpipe.capture.recorded_model import capture

    model, data, _ = made("weights")
    recorded = capture(model, Graph.from_pyg(data))
    found = {a.structure for a in recorded.stage_module(range(recorded.num_ops)).aggregations}
    assert {"gcn-weighted@0", "sum-weighted@1", "mean-weighted@2"} <= found
    fields = {"edge_weight__0", "edge_weight__1", "edge_weight__2", "edge_type"}
    assert recorded.edge_inputs == fields
