"""Attention without messages gives what PyG's GATConv gives, forward and backward."""

import copy
from dataclasses import replace

import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from helpers import small_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import GAT, GATConv, GATv2Conv, Linear, TransformerConv

from gnnpipe import TrainConfig, Trainer
from gnnpipe.capture import capture
from gnnpipe.graph.blocks import Block
from gnnpipe.models.gat_attention import attend, is_additive
from gnnpipe.setup.model_graph import describe


def block(edges, size):
    nothing = torch.empty(0, dtype=torch.int64)
    return Block(edges, nothing, nothing.bool()[:, None], size, is_fused=True)


def draw_edges(read, reading, count, seed, loops):
    draw = torch.Generator().manual_seed(seed)
    source = torch.randint(read, (count,), generator=draw)
    target = torch.randint(reading, (count,), generator=draw)
    edges = torch.unique(torch.stack([source, target]), dim=1)
    return edges if loops else edges[:, edges[0] != edges[1]]


def both(conv, x, own, edges, count):
    """Rows and gradients of rows and weights, one way and the other."""
    found = []
    for is_fused in (False, True):
        conv.zero_grad()
        a = x.clone().requires_grad_()
        b = None if own is None else own.clone().requires_grad_()
        size = (len(x), count)
        if is_fused:
            out = attend(conv, a, b, block(edges, size))
        else:
            out = conv((a, a[:count] if b is None else b), edges, size=size)
        (out * torch.sin(torch.arange(out.numel())).view(out.shape)).sum().backward()
        grads = [a.grad, None if b is None else b.grad, *(p.grad for p in conv.parameters())]
        found.append([out.detach(), *(g for g in grads if g is not None)])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(
    read=st.integers(1, 30),
    heads=st.sampled_from([1, 3]),
    width=st.sampled_from([1, 4]),
    concat=st.booleans(),
    loops=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_rows_and_gradients_are_those_of_gatconv(read, heads, width, concat, loops, seed, data):
    reading = data.draw(st.integers(1, read))
    count = data.draw(st.integers(0, 4 * read))
    slope = data.draw(st.sampled_from([0.2, 0.01]))
    torch.manual_seed(seed)
    edges = draw_edges(read, reading, count, seed, loops)
    conv = GATConv(
        5,
        width,
        heads=heads,
        concat=concat,
        add_self_loops=loops,
        negative_slope=slope,
        bias=seed % 2 == 0,
        residual=seed % 3 == 0,
    ).double()
    x = torch.randn(read, 5, dtype=torch.float64)
    both(conv, x, None, edges, reading)
    both(conv, x, torch.randn(reading, 5, dtype=torch.float64), edges, reading)


def test_source_and_target_with_separate_linear_maps():
    torch.manual_seed(0)
    conv = GATConv((5, 3), 4, heads=2, add_self_loops=False).double()
    edges = draw_edges(20, 9, 50, 0, loops=True)
    x, own = torch.randn(20, 5).double(), torch.randn(9, 3).double()
    both(conv, x, own, edges, 9)


@pytest.mark.parametrize("what", ["attention", "rows"])
def test_scores_of_zero_have_the_slope_that_torch_gives_them(what):
    torch.manual_seed(0)
    conv = GATConv(5, 4, heads=2).double()
    x = torch.randn(20, 5).double()
    with torch.no_grad():
        if what == "attention":
            conv.att_src.zero_()
            conv.att_dst.zero_()
        else:
            x[::2] = 0
    both(conv, x, None, draw_edges(20, 9, 50, 0, loops=False), 9)


def test_large_scores_neither_overflow_nor_vanish():
    torch.manual_seed(0)
    conv = GATConv(5, 4, heads=2, add_self_loops=False).double()
    edges = draw_edges(20, 9, 50, 0, loops=True)
    x = 1e3 * torch.randn(20, 5).double()
    out = attend(conv, x, None, block(edges, (20, 9)))
    torch.testing.assert_close(out, conv((x, x[:9]), edges, size=(20, 9)))
    assert out.isfinite().all()


def test_dropout_takes_edges_off_the_sum_and_not_off_the_softmax(monkeypatch):
    torch.manual_seed(0)
    conv = GATConv(5, 4, heads=2, dropout=0.5).double()
    edges = draw_edges(20, 9, 50, 0, loops=False)
    # Ascending by target, with the loops behind: so that both see the same order of edges.
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    kept = 2.0 * (torch.rand(edges.shape[1] + 9, 2) < 0.5).double()
    monkeypatch.setattr(F, "dropout", lambda x, p, training: x * kept)
    both(conv, torch.randn(20, 5).double(), None, edges, 9)


def test_only_unchanged_gatconv_runs_without_messages():
    assert is_additive(GATConv(4, 4))
    assert not is_additive(GATConv(4, 4, edge_dim=2))
    assert not is_additive(GATConv(4, 4, flow="target_to_source"))
    assert not is_additive(GATConv(4, 4, aggr="max"))
    assert not is_additive(GATv2Conv(4, 4))
    assert not is_additive(type("Mine", (GATConv,), {})(4, 4))
    assert not is_additive(GATConv(4, 4, negative_slope=-0.2))
    replaced = GATConv(4, 4)
    replaced.message = lambda x_j, alpha: x_j
    assert not is_additive(replaced)
    watched, changed = GATConv(4, 4), GATConv(4, 4)
    watched.register_message_forward_hook(lambda *given: None)
    changed.register_forward_hook(lambda *given: None)
    assert not is_additive(watched)
    assert not is_additive(changed)


class Attentive(nn.Module):
    """As a user writes it: dropout of attention, loops added by the convolution."""

    def __init__(self):
        super().__init__()
        self.first = GATConv(8, 8, heads=2, dropout=0.5)
        self.second = GATConv(16, 3, heads=1, concat=False, dropout=0.5)

    def forward(self, x, edge_index):
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


def test_a_users_model_trains_as_with_messages(monkeypatch):
    losses = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr("gnnpipe.capture.stage.block_conv.is_additive", lambda conv: False)
        torch.manual_seed(0)
        config = TrainConfig(epochs=4, chunks=3, dtype="float64", out="off", quiet=True)
        trainer = Trainer(config, graph=small_graph(n=60, features=8), model=Attentive())
        losses.append([row.loss for row in trainer.fit().history])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("loops", [False, True])
def test_structure_takes_what_the_estimate_says(loops):
    """Beyond both ends of the edges: 8 bytes an edge, with loops of its own 24; rows aside."""
    edges = draw_edges(300, 300, 20_000, 0, loops=False)
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    held = block(edges, (300, 300))
    found = held.incidence_with_loops if loops else held.incidence
    tensors = [v for v in vars(found).values() if v is not None]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    sizes.pop(edges.untyped_storage().data_ptr(), None)
    each = sum(sizes.values()) / edges.shape[1]
    assert each == pytest.approx(24 if loops else 8, rel=0.03)


class Spelled(nn.Module):
    """As PyG's own models call it: edge features by name, which there are none of."""

    def __init__(self):
        super().__init__()
        self.conv = GATConv(16, 3, heads=2, concat=False)

    def forward(self, x, edge_index, edge_attr=None):
        return self.conv(x, edge_index, edge_attr=edge_attr)


def test_edge_features_that_are_none_make_no_messages():
    graph = small_graph(n=40, features=16, degree=3)
    models = [Spelled(), GAT(16, 8, 2, 3, heads=2)]
    kept = [
        op.kept_per_edge
        for model in models
        for op in describe(capture(model, graph), graph).ops
        if op.aggregates
    ]
    assert kept == [2, 2, 2]  # a number for each head, and no message


class Narrowing(nn.Module):
    def __init__(self, first, width):
        super().__init__()
        self.first, self.second = first, GATConv(width, 3, heads=4, concat=False)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


NARROWED = {
    "gat": lambda **kind: GATConv(16, 4, heads=2, dropout=0.3, **kind),
    "gatv2": lambda **kind: GATv2Conv(16, 4, heads=2, dropout=0.3, **kind),
    "transformer": lambda **kind: TransformerConv(16, 2, heads=2, dropout=0.3, **kind),
}
EVERY, OF_GATS = [{}, {"concat": False}, {"bias": False}], [{"residual": True}]
KINDS = [
    *[(name, kind) for name in NARROWED for kind in EVERY],
    *[(name, kind) for name in ("gat", "gatv2") for kind in OF_GATS],
    ("gatv2", {"share_weights": True}),
    ("gatv2", {"add_self_loops": False}),
    ("gatv2", {"edge_dim": 3}),
    ("transformer", {"beta": True}),
    ("transformer", {"beta": True, "concat": False}),
    ("transformer", {"root_weight": False}),
]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_wide_rows_are_mapped_before_they_are_pushed(name, kind):
    """Once for a vertex, whoever reads it; sparse features are so never made dense rows."""
    graph = small_graph(n=60, features=16, degree=3)
    width = (4 if name == "transformer" else 8) // (1 if kind.get("concat", True) else 2)
    losses = []
    for x in (graph.x, sp.csr_array(graph.x)):
        torch.manual_seed(0)
        model, given = Narrowing(NARROWED[name](**kind), width), replace(graph, x=x)
        config = TrainConfig(epochs=2, chunks=3, dtype="float64", out="off", quiet=True)
        trainer = Trainer(config, graph=given, model=model)
        ops = [op for op in trainer._setup()[1].model_graph.ops if op.aggregates]
        # The second would make them wider, and is left as it is.
        assert [op.push_width for op in ops] == [8, width]
        assert [op.kept_per_read_row for op in ops][1] == 12
        assert not any(op.is_given for op in trainer._setup()[1].model_graph.ops)
        losses.append([r.loss for r in trainer.fit().history])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_mapping_first_equals_pyg(name, kind):
    """Losses of plain PyG over the whole graph, to the last digits; without dropout."""
    graph = small_graph(n=60, features=16, degree=3)
    width = (4 if name == "transformer" else 8) // (1 if kind.get("concat", True) else 2)
    torch.manual_seed(0)
    model = Narrowing(NARROWED[name](**kind), width).double()
    model.first.dropout = 0.0
    plain = copy.deepcopy(model)
    config = TrainConfig(
        epochs=3, chunks=3, staleness="exact", dtype="float64", out="off", quiet=True, lr=0.01
    )
    ours = [r.loss for r in Trainer(config, graph=graph, model=model).fit().history]
    x, y = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.y)
    edges, mask = torch.from_numpy(graph.edge_index).long(), torch.from_numpy(graph.train_mask)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    theirs = []
    for _ in range(3):
        loss = F.cross_entropy(plain(x, edges)[mask], y[mask])
        theirs.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_attention_that_is_not_pygs_own_maps_nothing_first():
    watched = GATv2Conv(16, 4, heads=2)
    watched.register_message_forward_hook(lambda *given: None)
    mine = GATv2Conv(16, 4, heads=2)
    mine.lin_l = nn.Linear(16, 8)
    wide = GATv2Conv(16, 8, heads=2)  # as wide as the features, which are never stale
    graph = small_graph(n=60, features=16, degree=3)
    for conv, width in ((watched, 8), (mine, 8), (wide, 16), (TransformerConv(16, 8), 8)):
        ops = describe(capture(Narrowing(conv, width), graph), graph).ops
        first = next(op for op in ops if op.aggregates)
        assert first.push_width == 16


def test_shared_weights_are_taken_by_the_flag_as_pyg_does():
    conv = GATv2Conv(16, 4, heads=2, share_weights=True)
    conv.lin_r = Linear(16, 8)
    graph = small_graph(n=60, features=16, degree=3)
    found = describe(capture(Narrowing(conv, 8), graph), graph).ops
    assert [op.push_width for op in found if op.aggregates] == [8, 8]
