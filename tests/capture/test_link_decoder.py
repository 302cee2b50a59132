"""Link prediction: law 1 for pairs, on any shape, and which pairs are asked for."""

import copy

import link_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all_within, differences_of_shapes, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAE
from torch_geometric.transforms import RandomLinkSplit

from gnnpipe import Graph, TrainConfig, Trainer
from gnnpipe.data.links import split_links
from gnnpipe.errors import InputError
from gnnpipe.tasks.scoring import ranking_score

EPOCHS = 3


def data_of(graph):
    return Data(x=torch.from_numpy(graph.x), edge_index=torch.from_numpy(graph.edge_index))


def linked(seed=0, **settings):
    return split_links(small_graph(seed=seed, **settings), "60/20/20", seed=0)


def scores_of(model, z, ends):
    if hasattr(model, "decode"):
        return model.decode(z, ends).reshape(-1)
    return (z[ends[0]] * z[ends[1]]).sum(1)


@pytest.mark.parametrize("chunks", [1, 6])
@pytest.mark.parametrize("name", link_models.MODELS)
def test_equals_plain_pyg_step_by_step(name, chunks, monkeypatch):
    graph = linked(directed=name == "gae")
    model = link_models.made(name)
    plain = copy.deepcopy(model).double()
    run = quick_config(epochs=4, chunks=chunks, staleness="auto" if chunks == 1 else "exact")
    trainer = Trainer(run, graph=graph, model=model)
    result = trainer.fit()
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    ends = torch.from_numpy(graph.pairs.ends)
    label = torch.from_numpy(graph.pairs.label).double()
    part = torch.from_numpy(graph.pairs.part)
    optimizer = torch.optim.Adam(plain.parameters(), lr=run.lr)
    encode = plain.encode if hasattr(plain, "encode") else plain
    truth = []
    for _ in range(4):
        optimizer.zero_grad()
        scores = scores_of(plain, encode(x, edges), ends)
        loss = F.binary_cross_entropy_with_logits(scores[part == 0], label[part == 0])
        loss.backward()
        optimizer.step()
        truth.append(loss.item())
    np.testing.assert_allclose([row.loss for row in result.history], truth, rtol=1e-8)
    plain.eval()
    with torch.no_grad():
        z = encode(x, edges)
        scores = scores_of(plain, z, ends)
    torch.testing.assert_close(trainer.predict(), z, rtol=1e-6, atol=1e-8)
    for number, found in enumerate((result.train_metric, result.val_metric, result.test_metric)):
        mine = part == number
        truth = label[mine, None].numpy().astype(np.int8)
        area = ranking_score(scores[mine, None].numpy(), truth, "rocauc")
        assert found == pytest.approx(area)
    right = ((scores > 0) == (label == 1))[part == 2].double().mean()
    assert result.test_acc == pytest.approx(float(right))
    assert result.metric == "rocauc"
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-8)


def drops(dropout=0.4):
    torch.manual_seed(0)
    return link_models.Predictor(dropout)


def test_dropout_does_not_depend_on_the_chunks():
    losses = []
    for chunks in (1, 2, 6):
        run = quick_config(chunks=chunks, staleness="auto" if chunks == 1 else "exact")
        found = Trainer(run, graph=linked(), model=drops()).fit()
        losses.append([row.loss for row in found.history])
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-9)
    run = quick_config()
    without = Trainer(run, graph=linked(), model=drops(0.0)).fit()
    assert abs(without.history[0].loss - losses[0][0]) > 1e-3


def parts_of(name, rank, chunks):
    if name == "drops":
        return linked(), drops(), {}
    if name in link_models.MODELS:
        return linked(), link_models.made(name, seed=rank), {}
    return linked(), None, {"model": name, "hidden": 8}


def largest_difference(shapes, names, **settings):
    return differences_of_shapes(shapes, names, EPOCHS, parts_of, **settings)


NAMES = ("predictor", "drops", "attends", "sage")


@pytest.mark.parametrize("staleness", ["auto", "paper", "exact"])
@pytest.mark.parametrize("name", [*NAMES, "gcnii"])
def test_chunks_on_one_process(name, staleness):
    assert_all_within(largest_difference([(1, 1, 4)], [name], staleness=staleness))


@pytest.mark.slow
def test_two_ranks():
    shapes = [(2, 1, 1), (1, 2, 1), (2, 1, 6)]
    assert_all_within(run_ranks(largest_difference, 2, shapes, NAMES)[0])


@pytest.mark.slow
def test_four_ranks():
    assert_all_within(run_ranks(largest_difference, 4, [(2, 2, 6)], NAMES)[0])


def bytes_sent(shapes):
    """For each shape, the axis to look at, bytes counted and predicted, and the metric."""
    found = []
    for stages, shards in shapes:
        run = quick_config(stages=stages, shards=shards, chunks=4, epochs=2)
        trainer = Trainer(run, graph=linked(), model=link_models.made("predictor"))
        result = trainer.fit()
        trainer.close()
        axis, counted = "pipeline" if stages > 1 else "graph", result.comm_bytes_per_epoch
        found.append((axis, counted, result.comm_bytes_closed_form, result.test_metric))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[(2, 1), (1, 2)], [(2, 2)]])
def test_bytes_are_the_closed_form(shapes):
    ranks = run_ranks(bytes_sent, shapes[0][0] * shapes[0][1], shapes)
    for found in ranks:
        for (axis, counted, formula, metric), first in zip(found, ranks[0], strict=True):
            assert counted == formula
            assert counted[axis] > 0
            assert metric == first[3]


def test_a_chunk_may_have_no_pair():
    """Every vertex a chunk, and of few edges."""
    sparse = small_graph(n=30, degree=1)
    graph = split_links(sparse, "60/20/20", seed=0)
    assert (graph.pairs.degrees == 0).any()
    losses = []
    for chunks in (1, 30):
        run = quick_config(chunks=chunks, staleness="auto" if chunks == 1 else "exact")
        losses.append(Trainer(run, graph=graph, model=drops()).fit().loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_user_loss_gets_scores_and_labels():
    def hinge(scores, labels):
        assert scores.shape == labels.shape == (len(labels),)
        return F.relu(1 - scores * (2 * labels - 1)).sum()

    runs = []
    for chunks in (1, 6):
        run = quick_config(chunks=chunks, staleness="auto" if chunks == 1 else "exact")
        model = link_models.made("net")
        runs.append(Trainer(run, graph=linked(), model=model, loss_fn=hinge).fit())
    np.testing.assert_allclose(
        [r.loss for r in runs[0].history], [r.loss for r in runs[1].history], rtol=1e-9
    )


@pytest.mark.parametrize("directed", [False, True])
def test_which_pairs_are_asked_for(directed):
    whole = small_graph(directed=directed)
    graph = split_links(whole, "60/20/20", seed=3)
    n, pairs = whole.num_vertices, graph.pairs
    both = {tuple(e) for e in whole.edge_index.T.tolist()}
    kept = {tuple(e) for e in graph.edge_index.T.tolist()}
    links = len(both) if directed else len(both) // 2
    ends = [tuple(e) for e in pairs.ends.T.tolist()]
    assert len(ends) == 2 * links
    unordered = ends if directed else [tuple(sorted(e)) for e in ends]
    assert len(set(unordered)) == len(ends)
    assert sum(pairs.counts) == 2 * links
    units = len({tuple(sorted(e)) for e in both})
    assert directed or pairs.counts[1] == 2 * (round(0.8 * units) - round(0.6 * units))
    for pair, label, part in zip(ends, pairs.label, pairs.part, strict=True):
        assert (pair in both) == bool(label)
        assert pair[0] != pair[1]
        assert min(pair) >= 0
        assert max(pair) < n
        if label:
            assert (pair in kept) == (part == 0)
            # What joins two vertices is held out in both directions.
            assert (pair[::-1] in kept) == (part == 0 and pair[::-1] in both)
    again = split_links(whole, "60/20/20", seed=3)
    assert np.array_equal(again.pairs.ends, pairs.ends)
    assert not np.array_equal(split_links(whole, "60/20/20", seed=4).pairs.label, pairs.label)


def test_pairs_of_random_link_split():
    data = data_of(small_graph())
    for negatives in (True, False):
        parts = RandomLinkSplit(0.2, 0.2, is_undirected=True, add_negative_train_samples=negatives)(
            data
        )
        graph = Graph.from_pyg(parts, task="links")
        pairs = graph.pairs
        for number, part in enumerate(parts):
            mine = pairs.part == number
            given = {
                (*e, v)
                for *e, v in zip(
                    *part.edge_label_index.tolist(), part.edge_label.int().tolist(), strict=True
                )
            }
            found = {
                (*e, v)
                for *e, v in zip(
                    *pairs.ends[:, mine].tolist(), pairs.label[mine].tolist(), strict=True
                )
            }
            if number == 0 and not negatives:
                assert {f for f in found if f[2]} == given
                joined = {tuple(e) for e in data.edge_index.T.tolist()}
                assert not joined & {f[:2] for f in found if not f[2]}
                assert len(found) == 2 * len(given)
            else:
                assert found == given
        assert graph.num_edges == parts[0].edge_index.shape[1]


def test_one_data_is_split_here():
    graph = Graph.from_pyg(data_of(small_graph()), task="links", split="60/20/20", seed=0)
    assert np.array_equal(graph.pairs.ends, linked().pairs.ends)


def test_no_direction_of_a_held_out_link_is_left():
    """Also where one of the edges is there twice, and so no mirror image of its reverse."""
    whole = small_graph()
    e = torch.from_numpy(whole.edge_index)
    data = Data(
        x=torch.from_numpy(whole.x),
        edge_index=torch.cat([e, e[:, :1]], 1),
        edge_weight=torch.ones(e.shape[1] + 1),
    )
    graph = Graph.from_pyg(data, task="links", split="60/20/20")
    kept = {tuple(pair) for pair in graph.edge_index.T.tolist()}
    held = graph.pairs.ends[:, (graph.pairs.label == 1) & (graph.pairs.part > 0)].T.tolist()
    assert held
    assert not kept & ({(a, b) for a, b in held} | {(b, a) for a, b in held})


def test_no_pair_is_drawn_that_another_part_asks_for():
    torch.manual_seed(0)
    parts = RandomLinkSplit(0.2, 0.2, is_undirected=True, add_negative_train_samples=False)(
        data_of(small_graph())
    )
    pairs = Graph.from_pyg(parts, task="links").pairs
    loss_rows = [set(map(frozenset, pairs.ends[:, pairs.part == i].T.tolist())) for i in range(3)]
    assert not loss_rows[0] & (loss_rows[1] | loss_rows[2])


def plain_scores(model, graph):
    model = copy.deepcopy(model).double().eval()
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    with torch.no_grad():
        return model.decode(model.encode(x, edges), torch.from_numpy(graph.pairs.ends)).reshape(-1)


class Scaled(link_models.Predictor):
    """A buffer, and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0]))
        self.lins[0].weight.requires_grad_(False)

    def decode(self, z, edge_label_index):
        return super().decode(z, edge_label_index) * self.scale


def test_buffers_and_frozen_weights_of_decode():
    torch.manual_seed(0)
    model = Scaled()
    before = model.lins[0].weight.clone()
    trainer = Trainer(quick_config(chunks=4), graph=linked(), model=model)
    result = trainer.fit()
    assert torch.equal(model.lins[0].weight, before.double())
    names = dict(trainer._ready()[2].executor.stage.stage_module.named_state())
    assert {"scale", "lins.0.weight", "lins.1.bias", "conv1.bias"} <= names.keys()
    graph = linked()
    label, part = torch.from_numpy(graph.pairs.label), graph.pairs.part
    right = ((plain_scores(model, graph) > 0) == (label == 1))[part == 2].double().mean()
    assert result.test_acc == pytest.approx(float(right))


def test_no_layer_is_taken_for_a_method():
    class Named(link_models.Attends):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(7, 7), nn.Identity()

        def forward(self, x, edge_index):
            return super().forward(self.encode(x), edge_index)

    assert Trainer(quick_config(), graph=linked(), model=Named()).fit().loss > 0


def other_graphs():
    from gnnpipe.runtime.comm.mesh import Mesh

    seed = Mesh.join(2, 1).rank
    with pytest.raises(InputError, match=r"differs between ranks.*seed_everything"):
        Trainer(quick_config(stages=2), graph=linked(seed=seed), model=link_models.Net()).fit()


@pytest.mark.slow
def test_other_graphs_on_other_ranks_are_told():
    run_ranks(other_graphs, 2)


def test_frozen_weights_make_every_table_exact():
    """Law 8, the pairs' table included."""
    run = quick_config(chunks=6, epochs=6, lr=1e-30, dropout=0.0, staleness="none")
    stale = Trainer(run, graph=linked(), model=link_models.made("net")).fit()
    exact = Trainer(
        quick_config(epochs=1, lr=1e-30), graph=linked(), model=link_models.made("net")
    ).fit()
    assert stale.history[0].loss != pytest.approx(exact.loss, rel=1e-6)
    assert stale.loss == pytest.approx(exact.loss, rel=1e-10)


class Normed(link_models.Predictor):
    def decode(self, z, edge_label_index):
        h = z[edge_label_index[0]] * z[edge_label_index[1]]
        return F.batch_norm(h, None, None, training=True).sum(1)


class Squared(link_models.Net):
    def decode(self, z, edge_label_index):
        return z @ z.T


class Needs(link_models.Net):
    def decode(self, z, edge_label_index, more):
        return super().decode(z, edge_label_index)


class Centred(link_models.Net):
    def decode(self, z, edge_label_index):
        return super().decode(z - z.mean(0), edge_label_index)


class Counts(link_models.Net):
    def decode(self, z, edge_label_index):
        return super().decode(z, edge_label_index) * 10 / z.size(0)


class Popular(link_models.Net):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(100))

    def decode(self, z, edge_label_index):
        return super().decode(z, edge_label_index) + self.bias[edge_label_index[0]]


class Turns(link_models.Net):
    def decode(self, z, edge_label_index):
        scores = super().decode(z, edge_label_index)
        return scores if self.training else -scores


class Detached(link_models.Net):
    def decode(self, z, edge_label_index):
        return super().decode(z.detach(), edge_label_index)


class Chances(link_models.Net):
    def decode(self, z, edge_label_index):
        return super().decode(z, edge_label_index).sigmoid()


class DropsRows(link_models.Net):
    def decode(self, z, edge_label_index):
        return super().decode(F.dropout(z, 0.5, self.training), edge_label_index)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Normed, "by its two ends alone"),
        (Squared, r"should give a score for each pair, \[P\], not \[22, 22\]"),
        (Needs, r"should take \(z, edge_label_index\)"),
        (DropsRows, "drops rows of vertices"),
        (Centred, "by its two ends alone"),
        (Counts, "by its two ends alone"),
        (Popular, "by its two ends alone"),
        (Turns, "other scores in training"),
        (Detached, "do not depend on z"),
        (Chances, "from 0 to 1"),
        (lambda: GAE(link_models.Inner()), "pass a decoder of your own"),
    ],
)
def test_what_cannot_be_scored_is_told(model, words):
    with pytest.raises(InputError, match=words):
        Trainer(quick_config(), graph=linked(), model=model()).fit()


def test_bad_pairs_are_told():
    data = data_of(small_graph())
    parts = RandomLinkSplit(0.2, 0.2, is_undirected=True, split_labels=False)(data)
    with pytest.raises(InputError, match="2 parts"):
        Graph.from_pyg(parts[:2], task="links")
    with pytest.raises(InputError, match="split and symmetrize have no meaning"):
        Graph.from_pyg(parts, task="links", split="60/20/20")
    with pytest.raises(InputError, match="give one, or task='links'"):
        Graph.from_pyg(parts)
    wrong = [p.clone() for p in parts]
    wrong[1].edge_label_index = wrong[1].edge_label_index + 1000
    with pytest.raises(InputError, match=r"val.edge_label_index\[:, 0\]"):
        Graph.from_pyg(wrong, task="links")
    wrong = [p.clone() for p in parts]
    wrong[2].edge_label = wrong[2].edge_label + 1
    with pytest.raises(InputError, match=r"test.edge_label\[0\] = 2"):
        Graph.from_pyg(wrong, task="links")
    del wrong[2].edge_label
    with pytest.raises(InputError, match=r"no test\.edge_label"):
        Graph.from_pyg(wrong, task="links")
    full = Data(x=torch.ones(6, 2), edge_index=torch.ones(6, 6).nonzero().T)
    with pytest.raises(InputError, match="too few pairs"):
        Graph.from_pyg(full, task="links")
    for bad, words in (
        ((), "no graphs"),
        ((parts[0], None, parts[2]), "a NoneType"),
        ({}, "neither edge_index nor adj_t"),
        ("cora", "a str"),
    ):
        with pytest.raises(InputError, match=words):
            Graph.from_pyg(bad, task="links")
    with pytest.raises(InputError, match="task 'link'"):
        Graph.from_pyg(data, task="link")
    with pytest.raises(InputError, match="target 'paper'"):
        Graph.from_pyg(data, task="links", target="paper")
    with pytest.raises(InputError, match="no features x"):
        Graph.from_pyg(Data(edge_index=data.edge_index), task="links")
    with pytest.raises(InputError, match="--metric r2"):
        Trainer(quick_config(metric="r2"), graph=linked(), model=link_models.made("net")).fit()


def test_by_name():
    """As the command line has it."""
    config = TrainConfig(
        dataset="karate",
        task="links",
        epochs=60,
        out="off",
        quiet=True,
        model="sage",
        hidden=16,
        dropout=0.0,
        eval_every=0,
    )
    result = Trainer(config).fit()
    assert result.train_metric > 0.8
    with pytest.raises(InputError, match="--task"):
        Trainer(config, graph=linked()).fit()


def test_a_file_needs_no_labels(tmp_path):
    graph = small_graph()
    np.savez(tmp_path / "bare.npz", x=graph.x, edge_index=graph.edge_index)
    config = quick_config(dataset=str(tmp_path / "bare.npz"), task="links", model="sage", hidden=8)
    assert Trainer(config).fit().loss > 0
    wrong = ({"edge_index": graph.edge_index}, "no features"), ({"x": graph.x}, "edge_index")
    for bad, words in wrong:
        np.savez(tmp_path / "bad.npz", **bad)
        with pytest.raises(InputError, match=words):
            Trainer(quick_config(dataset=str(tmp_path / "bad.npz"), task="links")).fit()


def test_memory_is_estimated_with_its_pairs():
    """What ``decode`` keeps of a pair counts."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.memory_estimate import memory_by_rank
    from gnnpipe.setup.prepare import prepare

    sizes, kept = [], []
    for name in ("attends", "net", "predictor"):
        prepared = prepare(quick_config(), Mesh.join(1, 1), linked(), link_models.made(name))
        sizes.append(memory_by_rank(prepared)[0].activations)
        kept.append(prepared.model_graph.ops[-1].kept_per_pair)
    pairs = linked().pairs.num_pairs
    # Nothing; both ends' rows of 8 columns and their product; the hidden row and what relu keeps.
    assert kept[0] == 0
    assert kept[1] >= 2 * 8
    # These two have the same encoder, so that only pairs make the difference.
    assert sizes[2] - sizes[1] == (kept[2] - kept[1]) * pairs * 8 >= 12 * pairs * 8


@pytest.mark.slow
def test_learns_the_links_of_a_planted_partition():
    """Links are mostly within classes, and features tell the class."""
    config = TrainConfig(
        dataset="synthetic:planted:n=600,degree=12,classes=4,features=16,homophily=0.9,noise=1",
        task="links",
        epochs=80,
        out="off",
        quiet=True,
        model="gcn",
        hidden=16,
        dropout=0.0,
        chunks=4,
        eval_every=0,
    )
    result = Trainer(config).fit()
    assert result.test_metric > 0.75
