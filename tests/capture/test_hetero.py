"""Law 1 for several types of vertices and edges: unmodified PyG models, on any shape."""

import copy

import hetero_models
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from helpers import (
    SHARED,
    NoDropout,
    assert_all_within,
    differences_of_shapes,
    quick_config,
    run_ranks,
)
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import HeteroData

from gnnpipe import Graph, Trainer
from gnnpipe.errors import InputError

EPOCHS = 3


def made(name, seed=0):
    """Model and data."""
    torch.manual_seed(seed)
    data = hetero_models.hetero_data(subjects=name not in hetero_models.NO_SUBJECTS)
    return hetero_models.MODELS[name](), data


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", hetero_models.MODELS)
def test_equals_plain_pyg_step_by_step(name, chunks, monkeypatch):
    from gnnpipe.models.rows import Rows

    monkeypatch.setattr(Rows, "mask", lambda self, width, probability, site: None)
    model, data = made(name)
    x = {t: v.double() for t, v in data.x_dict.items()}
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        model(data.x_dict, data.edge_index_dict)
    plain = copy.deepcopy(model).double()
    run = quick_config(epochs=4, chunks=chunks, staleness="auto" if chunks == 1 else "exact")
    trainer = Trainer(run, graph=Graph.from_pyg(data), model=model)
    losses = [row.loss for row in trainer.fit().history]
    y, train = data["paper"].y, data["paper"].train_mask
    optimizer = torch.optim.Adam(plain.parameters(), lr=trainer.config.lr)
    truth = []

    def papers():
        out = plain(x, data.edge_index_dict)
        return out["paper"] if isinstance(out, dict) else out

    with NoDropout():
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(papers()[train], y[train])
            loss.backward()
            optimizer.step()
            truth.append(loss.item())
    np.testing.assert_allclose(losses, truth, rtol=1e-8)
    plain.eval()
    torch.testing.assert_close(trainer.predict(), papers().detach(), rtol=1e-6, atol=1e-8)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("name", ["hetero conv", "dropping", "han"])
def test_dropout_does_not_depend_on_the_chunks(name):
    losses = []
    for chunks in (1, 4):
        model, data = made(name)
        run = quick_config(epochs=2, chunks=chunks, staleness="auto" if chunks == 1 else "exact")
        found = Trainer(run, graph=Graph.from_pyg(data), model=model).fit()
        losses.append([row.loss for row in found.history])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


def parts_of(name, rank, chunks):
    model, data = made(name, seed=rank)
    return Graph.from_pyg(data), model, {}


def largest_difference(shapes, names, **settings):
    return differences_of_shapes(shapes, names, EPOCHS, parts_of, **settings)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize("name", hetero_models.MODELS)
def test_chunks_on_one_process(name):
    """Stale; the exact walk is held against plain PyG above."""
    assert_all_within(largest_difference([(1, 1, 4)], [name], staleness="auto"))


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.slow
@pytest.mark.parametrize("name", hetero_models.MODELS)
def test_recomputed(name):
    assert_all_within(largest_difference([(1, 1, 1), (1, 1, 6)], [name], recompute=True))


@pytest.mark.slow
def test_two_ranks():
    shapes = [(2, 1, 1), (1, 2, 1), (2, 1, 6)]
    assert_all_within(run_ranks(largest_difference, 2, shapes, tuple(hetero_models.MODELS))[0])


@pytest.mark.slow
def test_four_ranks():
    assert_all_within(run_ranks(largest_difference, 4, [(2, 2, 6)], tuple(hetero_models.MODELS))[0])


def bytes_sent(shapes):
    """For each shape, the axis to look at, and bytes counted and predicted."""
    found = []
    for stages, shards in shapes:
        model, data = made("hetero conv")
        run = quick_config(stages=stages, shards=shards, chunks=4, epochs=2)
        trainer = Trainer(run, graph=Graph.from_pyg(data), model=model)
        result = trainer.fit()
        trainer.close()
        axis = "pipeline" if stages > 1 else "graph"
        found.append((axis, result.comm_bytes_per_epoch, result.comm_bytes_closed_form))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[(2, 1), (1, 2)], [(2, 2)]])
def test_bytes_are_the_closed_form(shapes):
    for found in run_ranks(bytes_sent, shapes[0][0] * shapes[0][1], shapes):
        for axis, counted, formula in found:
            assert counted == formula
            assert counted[axis] > 0


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hetero conv", "hgt"])
def test_a_chunk_may_have_no_vertex_of_a_type(name):
    """20 chunks, 9 subjects."""
    assert_all_within(largest_difference([(1, 1, 20)], [name], partitioner="range"))


def empty_on_ranks(name):
    return largest_difference([(2, 1, 20), (1, 2, 12)], [name], partitioner="random")


@pytest.mark.slow
def test_a_rank_may_have_no_row_of_a_type():
    assert_all_within(run_ranks(empty_on_ranks, 2, "hetero conv")[0])


@pytest.mark.slow
def test_a_deep_recording_is_copied_for_the_forecast():
    """The calls of a recording are linked; walked one by one they would exhaust the stack."""
    data = hetero_models.hetero_data(subjects=False)
    model = hetero_models.Hgt(layers=5)
    result = Trainer(quick_config(chunks=4), graph=Graph.from_pyg(data), model=model).fit()
    assert result.missed


class Backwards(hetero_models.Hetero):
    def forward(self, x_dict, edge_index_dict):
        h = {t: self.encode[t](x) for t, x in x_dict.items()}
        conv = self.convs[0].convs["author", "writes", "paper"]
        return self.out(
            conv((h["author"], h["paper"]), edge_index_dict["paper", "written_by", "author"])
        )


class Misspelt(hetero_models.Hetero):
    def forward(self, x_dict, edge_index_dict):
        return self.out(self.encode["paper"](x_dict["papers"]))


class Mixing(hetero_models.Hetero):
    def forward(self, x_dict, edge_index_dict):
        papers = self.encode["paper"](x_dict["paper"])
        return self.out(papers + self.encode["author"](x_dict["author"]).amax(0))


class Adding(hetero_models.Hetero):
    """Adds a mean over the rows of another type."""

    def forward(self, x_dict, edge_index_dict):
        papers = self.encode["paper"](x_dict["paper"])
        authors = self.encode["author"](x_dict["author"])
        return self.out(papers + authors.mean(0) + authors.size(0))


@pytest.mark.parametrize("chunks", [1, 4])
def test_sums_over_another_type(chunks):
    torch.manual_seed(0)
    data, model = hetero_models.hetero_data(), Adding()
    plain = copy.deepcopy(model).double()
    run = quick_config(chunks=chunks, staleness="exact", require_capture=True, epochs=1)
    found = Trainer(run, graph=Graph.from_pyg(data), model=model).fit().loss
    out = plain({t: x.double() for t, x in data.x_dict.items()}, data.edge_index_dict)
    train = data["paper"].train_mask
    truth = F.cross_entropy(out[train], data["paper"].y[train])
    assert found == pytest.approx(truth.item(), rel=1e-9)


class Joining(hetero_models.Hetero):
    def forward(self, x_dict, edge_index_dict):
        parts = [self.encode[t](x) for t, x in x_dict.items()]
        return self.out(torch.cat(parts)[:50])


class Elsewhere(hetero_models.Hetero):
    def forward(self, x_dict, edge_index_dict):
        return {"author": self.out(self.encode["author"](x_dict["author"]))}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(7, 3)

    def forward(self, x, edge_index):
        return self.lin(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Mixing, "amax does not keep one row for each vertex"),
        (Joining, r"cat mixes rows of author and paper.*torch\.cat\(parts\)"),
        (Elsewhere, "gives results for author, but 'paper' has the labels"),
        (Backwards, "given rows of author, but the edges lead from paper to author"),
        (Misspelt, r"reads 'papers' .*types with features are paper, author, its relations"),
        (Plain, "lin mixes rows of author and paper"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind, message):
    graph = Graph.from_pyg(hetero_models.hetero_data())
    with pytest.raises(InputError, match=message):
        Trainer(quick_config(require_capture=True), graph=graph, model=kind()).fit()


def test_a_built_in_model_knows_one_type():
    graph = Graph.from_pyg(hetero_models.hetero_data())
    with pytest.raises(InputError, match="--model gcn: pyg has several types of vertices"):
        Trainer(quick_config(), graph=graph).fit()


class Centred(pyg.MessagePassing):
    """Reads a mean over the rows that it is shown."""

    def __init__(self):
        super().__init__(aggr="mean")

    def forward(self, x, edge_index):
        read, own = x if isinstance(x, tuple) else (x, x)
        size = (len(read), len(own))
        return own + self.propagate(edge_index, x=(read - read.mean(0), own), size=size)

    def message(self, x_j):
        return x_j


class WithCentred(hetero_models.Hetero):
    def __init__(self):
        super().__init__()
        self.convs[1].convs["author", "writes", "paper"] = Centred()


def test_what_a_convolution_is_shown_must_not_matter():
    graph = Graph.from_pyg(hetero_models.hetero_data())
    with pytest.raises(InputError, match=r"\(Centred\) does not give the same rows"):
        Trainer(quick_config(require_capture=True), graph=graph, model=WithCentred()).fit()


class TwoTables(nn.Module):
    """Two types of as many vertices; the names tell whose table it is."""

    def __init__(self, names=("a", "b")):
        super().__init__()
        self.tables = nn.ModuleDict({n: nn.Embedding(20, 4) for n in names})
        self.names = names
        self.conv = pyg.SAGEConv((4, 4), 3)

    def forward(self, x_dict, edge_index_dict):
        read, own = (self.tables[n].weight for n in self.names)
        return self.conv((read, own), edge_index_dict["a", "to", "b"])


def test_types_of_equal_size():
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = 20
    ends = np.random.default_rng(0).integers(0, 20, (2, 90))
    data["a", "to", "b"].edge_index = torch.from_numpy(np.unique(ends, axis=1))
    data["b"].y = torch.arange(20) % 3
    for i, field in enumerate(("train_mask", "val_mask", "test_mask")):
        data["b"][field] = torch.arange(20) % 3 == i
    graph = Graph.from_pyg(data)
    assert Trainer(quick_config(chunks=3), graph=graph, model=TwoTables()).fit().loss > 0
    with pytest.raises(InputError, match="has 20 rows, and a and b have as many vertices"):
        Trainer(
            quick_config(require_capture=True), graph=graph, model=TwoTables(("first", "second"))
        ).fit()


class PaperAuthorSubject(nn.Module):
    """Only papers have features; authors and subjects are learned."""

    def __init__(self, counts, width):
        super().__init__()
        self.encode = nn.Linear(width, 16)
        self.tables = nn.ModuleDict({t: nn.Embedding(n, 16) for t, n in counts.items()})
        ends = [("a", "p"), ("p", "a"), ("s", "p"), ("p", "s")]
        self.convs = nn.ModuleList(
            pyg.HeteroConv({(a, a + b, b): pyg.SAGEConv((16, 16), 16) for a, b in ends})
            for _ in range(2)
        )
        self.out = nn.Linear(16, 3)

    def forward(self, x_dict, edge_index_dict):
        h = {"p": self.encode(x_dict["p"]), **{t: e.weight for t, e in self.tables.items()}}
        for conv in self.convs:
            h = {t: v.relu() for t, v in conv(h, edge_index_dict).items()}
        return self.out(h["p"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the graphs of ../shared/data")
@pytest.mark.parametrize("chunks", [1, 8])
def test_acm(chunks):
    """Papers, authors and subjects of ACM: the losses of plain PyG."""
    with np.load(SHARED / "hetero_acm.npz") as found:
        arrays = {k: found[k] for k in ("x_data", "x_indices", "x_indptr", "x_shape", "y")}
        ends = {t: torch.from_numpy(found[f"rel_p{t}"].astype(np.int64)) for t in "as"}
        train = torch.from_numpy(found["train_mask"])
    parts = (arrays["x_data"], arrays["x_indices"], arrays["x_indptr"])
    x = torch.from_numpy(sp.csr_array(parts, shape=tuple(arrays["x_shape"])).toarray())
    data = HeteroData()
    data["p"].x, data["p"].y = x, torch.from_numpy(arrays["y"])
    for field in ("train_mask", "val_mask", "test_mask"):
        data["p"][field] = train if field == "train_mask" else ~train
    counts = {t: int(e[1].max()) + 1 for t, e in ends.items()}
    for t, pairs in ends.items():
        data[t].num_nodes = counts[t]
        data["p", f"p{t}", t].edge_index = pairs
        data[t, f"{t}p", "p"].edge_index = pairs.flip(0)
    torch.manual_seed(0)
    model = PaperAuthorSubject(counts, x.shape[1])
    plain = copy.deepcopy(model).double()
    with pytest.warns(UserWarning, match="both val_mask and test_mask"):
        graph = Graph.from_pyg(data)
    run = quick_config(chunks=chunks, staleness="exact" if chunks > 1 else "auto")
    losses = [row.loss for row in Trainer(run, graph=graph, model=model).fit().history]
    optimizer = torch.optim.Adam(plain.parameters(), lr=run.lr)
    truth = []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = plain({"p": x.double()}, data.edge_index_dict)
        loss = F.cross_entropy(out[train], data["p"].y[train])
        loss.backward()
        optimizer.step()
        truth.append(loss.item())
    np.testing.assert_allclose(losses, truth, rtol=1e-9)
