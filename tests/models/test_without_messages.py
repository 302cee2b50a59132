"""Convolutions without messages give what PyG's own give, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gat_attention import block, draw_edges
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.models.neighbour_rows import NeedsMessagesError
from gnnpipe.models.without_messages import can_avoid_messages, without_messages

DEGREES = torch.tensor([1, 4, 6, 3, 2])
ALL = ["mean", "min", "max", "std", "var"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]

CONVS = {
    "gen": lambda: pyg.GENConv(6, 6, aggr="softmax", learn_t=True, norm="layer"),
    "gen, t by column": lambda: pyg.GENConv(
        6, 6, aggr=pyg.aggr.SoftmaxAggregation(0.3, learn=True, channels=6), norm="layer"
    ),
    "gen, t fixed, message norm": lambda: pyg.GENConv(
        6, 4, aggr="softmax", t=2.0, msg_norm=True, norm="layer"
    ),
    "gen, semi": lambda: pyg.GENConv(
        6, 6, aggr=pyg.aggr.SoftmaxAggregation(semi_grad=True), norm="layer"
    ),
    "gen, sum": lambda: pyg.GENConv(6, 6, aggr="add", norm="layer"),
    "gen, mean": lambda: pyg.GENConv(6, 6, aggr="mean", norm="layer"),
    "gen, max": lambda: pyg.GENConv(6, 6, aggr="max", norm="layer"),
    "gen with edge features": lambda: pyg.GENConv(6, 6, learn_t=True, norm="layer", edge_dim=5),
    "gen, t by column, with edge features": lambda: pyg.GENConv(
        6,
        6,
        aggr=pyg.aggr.SoftmaxAggregation(0.3, learn=True, channels=6),
        norm="layer",
        edge_dim=5,
        bias=True,
    ),
    "gen, semi, with edge features": lambda: pyg.GENConv(
        6, 6, aggr=pyg.aggr.SoftmaxAggregation(semi_grad=True), norm="layer", edge_dim=5
    ),
    "gen, mean, with edge features": lambda: pyg.GENConv(
        6, 6, aggr="mean", norm="layer", edge_dim=5
    ),
    "gen with edge features, not mapped": lambda: pyg.GENConv(5, 5, norm="layer"),
    "gine with edge features": lambda: pyg.GINEConv(nn.Linear(6, 4), train_eps=True, edge_dim=5),
    "gine, mean, with edge features": lambda: pyg.GINEConv(nn.Linear(5, 4), eps=0.5, aggr="mean"),
    "gat with edge features": lambda: pyg.GATConv(6, 4, 3, edge_dim=5),
    "gatv2": lambda: pyg.GATv2Conv(6, 4, 3),
    "gatv2 with edge features": lambda: pyg.GATv2Conv(6, 4, 3, edge_dim=5, residual=True),
    "gatv2, no loops, mean of heads": lambda: pyg.GATv2Conv(
        6, 4, 3, edge_dim=5, add_self_loops=False, concat=False
    ),
    "gatv2, shared": lambda: pyg.GATv2Conv(6, 4, share_weights=True, negative_slope=0.0),
    "transformer": lambda: pyg.TransformerConv(6, 4, 3, beta=True),
    "transformer with edge features": lambda: pyg.TransformerConv(6, 4, 3, edge_dim=5),
    "pna": lambda: pyg.PNAConv(6, 6, ALL, SCALERS, DEGREES),
    "pna, towers": lambda: pyg.PNAConv(
        6, 6, ["max", "std"], ["identity"], DEGREES, towers=3, divide_input=True
    ),
    "pna, towers of all columns": lambda: pyg.PNAConv(6, 6, ALL, SCALERS, DEGREES, towers=2),
    "sage, max": lambda: pyg.SAGEConv(6, 4, aggr="max"),
}

NOT_MAPPED = ("gen with edge features, not mapped", "gine, mean, with edge features")
"""Edge features are as wide as the rows."""


def run(conv, name, given, edges, is_fused):
    """The rows, and the gradients of rows, edge features and weights."""
    conv.zero_grad()
    x, own, of_edges = (None if t is None else t.clone().requires_grad_() for t in given)
    count = len(x) if own is None else len(own)
    more = (of_edges,) if "edge features" in name or "no loops" in name else ()
    called = conv
    if is_fused:
        called = without_messages(conv, block(edges, (len(x), count)))
    out = called(x if own is None else (x, own), edges, *more)
    (out * torch.sin(torch.arange(out.numel())).view(out.shape)).sum().backward()
    leaves = (x, own, *more, *conv.parameters())
    return [out.detach(), *(t.grad for t in leaves if t is not None and t.grad is not None)]


def check(name, conv, given, edges):
    for plain, fused in zip(
        *(run(conv, name, given, edges, is_fused) for is_fused in (False, True)), strict=True
    ):
        torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", list(CONVS))
@settings(max_examples=12, deadline=None)
@given(
    read=st.integers(1, 30),
    loops=st.booleans(),
    is_sorted=st.booleans(),
    is_pair=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_rows_and_gradients_are_those_of_pyg(name, read, loops, is_sorted, is_pair, seed, data):
    torch.manual_seed(seed)
    is_pair &= "pna" not in name
    reading = data.draw(st.integers(1, read)) if is_pair else read
    edges = draw_edges(read, reading, data.draw(st.integers(0, 4 * read)), seed, loops)
    # Parallel edges: equal maxima share the gradient.
    edges = torch.cat([edges, edges[:, : seed % 3]], dim=1)
    order = torch.argsort(edges[1], stable=True) if is_sorted else torch.randperm(edges.shape[1])
    edges = edges[:, order]
    conv = CONVS[name]().double()
    width = 5 if name in NOT_MAPPED else 6
    x, of_edges = torch.randn(read, width).double(), torch.randn(edges.shape[1], 5).double()
    own = torch.randn(reading, width).double() if is_pair else None
    check(name, conv, (x, own, of_edges), edges)


@pytest.mark.parametrize("name", ["gen", "pna", "sage, max", "gen, max"])
def test_equal_rows_share_the_gradient_of_a_maximum(name):
    torch.manual_seed(0)
    x = torch.randn(20, 6).double()
    x[::2] = x[0]
    own = None if name == "pna" else torch.randn(20, 6).double()
    check(name, CONVS[name]().double(), (x, own, None), draw_edges(20, 20, 90, 0, loops=True))


@pytest.mark.parametrize("name", ["sage, max", "gen, max", "pna"])
def test_a_maximum_of_zero_shares_the_gradient_with_the_zero_that_torch_begins_with(name):
    torch.manual_seed(0)
    x = torch.randn(20, 6).double().clamp(max=0)
    own = None if name == "pna" else torch.randn(20, 6).double()
    check(name, CONVS[name]().double(), (x, own, None), draw_edges(20, 20, 90, 0, loops=True))


@pytest.mark.parametrize("name", ["gat with edge features", "gatv2 with edge features"])
def test_edge_features_of_one_dimension(name):
    torch.manual_seed(0)
    kind = pyg.GATConv if name.startswith("gat ") else pyg.GATv2Conv
    edges = draw_edges(20, 9, 50, 0, loops=False)
    given = torch.randn(20, 6).double(), torch.randn(9, 6).double()
    check(
        name,
        kind(6, 4, 3, edge_dim=1).double(),
        (*given, torch.rand(edges.shape[1]).double()),
        edges,
    )


def test_edge_features_that_gat_does_not_map_do_not_count():
    torch.manual_seed(0)
    edges = draw_edges(20, 9, 50, 0, loops=False)
    given = torch.randn(20, 6).double(), torch.randn(9, 6).double()
    features = torch.randn(edges.shape[1], 5).double()
    check("gat with edge features", pyg.GATConv(6, 4, 3).double(), (*given, features), edges)


@pytest.mark.parametrize("name", ["gatv2 with edge features", "gen", "sage, max", "transformer"])
def test_all_rows_of_the_block_as_targets(name):
    """As a block is called whose convolution takes no pair: results of own rows are kept."""
    torch.manual_seed(0)
    conv, edges = CONVS[name]().double(), draw_edges(20, 9, 50, 0, loops=True)
    x, more = torch.randn(20, 6).double(), ()
    if "edge" in name:
        more = (torch.randn(edges.shape[1], 5).double(),)
    called = without_messages(conv, block(edges, (20, 9)))
    found, truth = called(x, edges, *more), conv(x, edges, *more)
    torch.testing.assert_close(found[:9], truth[:9], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in CONVS if "edge" not in name])
def test_in_float32_rows_are_as_near_as_two_orders_of_the_edges(name):
    torch.manual_seed(0)
    conv, edges = CONVS[name](), draw_edges(30, 30, 300, 0, loops=True)
    x = torch.randn(30, 6)
    given = (x,) if "pna" in name else ((x, x),)
    more = (torch.randn(edges.shape[1], 5),) if "no loops" in name else ()
    found = without_messages(conv, block(edges, (30, 30)))(*given, edges, *more)
    torch.testing.assert_close(found, conv(*given, edges, *more), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gen", "sage, max"])
def test_rows_that_are_not_finite_are_left_to_pyg(name):
    conv, edges = CONVS[name](), draw_edges(20, 20, 90, 0, loops=True)
    x = torch.randn(20, 6)
    x[3, 2] = torch.nan
    with pytest.raises(NeedsMessagesError):
        without_messages(conv, block(edges, (20, 20)))((x, x), edges)


@pytest.mark.parametrize("name", ["gatv2 with edge features", "transformer"])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_dropout_is_that_of_the_edges_as_given(name, is_sorted, monkeypatch):
    torch.manual_seed(0)
    conv = CONVS[name]().double()
    conv.dropout = 0.5
    edges = draw_edges(20, 9, 50, 0, loops=False)
    if is_sorted:
        edges = edges[:, torch.argsort(edges[1], stable=True)]
    kept = 2.0 * (torch.rand(edges.shape[1] + 9, 3) < 0.5).double()
    monkeypatch.setattr(F, "dropout", lambda x, p, training: x * kept[: len(x)])
    given = torch.randn(20, 6).double(), torch.randn(9, 6).double(), torch.randn(50, 5).double()
    check(name, conv, (*given[:2], given[2][: edges.shape[1]]), edges)


def test_rows_far_apart_are_left_to_pyg():
    """Vertex 0 reads rows whose exponentials vanish beside those that vertex 1 reads."""
    conv = pyg.GENConv(2, 2, aggr="softmax", t=1.0)
    x, edges = torch.tensor([[1.0, 1.0], [200.0, 200.0]]), torch.tensor([[0, 1], [0, 1]])
    fused = without_messages(conv, block(edges, (2, 2)))
    with pytest.raises(NeedsMessagesError):
        fused((x, x), edges)
    near = without_messages(conv, block(edges, (2, 2)))((x.clamp(max=20.0), x), edges)
    assert near.isfinite().all()


def test_attention_takes_scores_far_apart():
    torch.manual_seed(0)
    conv = pyg.TransformerConv(6, 4, 3).double()
    edges = draw_edges(20, 20, 90, 0, loops=True)
    check("transformer", conv, (1e3 * torch.randn(20, 6).double(), None, None), edges)


def test_other_settings_run_unchanged():
    assert can_avoid_messages(pyg.GENConv(4, 4))
    assert not can_avoid_messages(pyg.GENConv(4, 4, aggr="powermean"))
    assert not can_avoid_messages(pyg.GENConv(4, 4, flow="target_to_source"))
    assert not can_avoid_messages(pyg.PNAConv(4, 4, ["mean"], ["identity"], DEGREES, pre_layers=2))
    assert not can_avoid_messages(pyg.PNAConv(4, 4, ["mean"], ["identity"], DEGREES, edge_dim=2))
    assert not can_avoid_messages(pyg.PNAConv(4, 4, ["median"], ["identity"], DEGREES))
    assert not can_avoid_messages(pyg.SAGEConv(4, 4))
    assert not can_avoid_messages(pyg.GENConv(4, 4, aggr="max"), reads_edges=True)
    assert not can_avoid_messages(pyg.TransformerConv(4, 4, edge_dim=4), reads_edges=True)
    assert not can_avoid_messages(pyg.TransformerConv(4, 4), reads_edges=True)
    assert not can_avoid_messages(pyg.TransformerConv(4, 4, decomposed_layers=2))
    biased, inside = pyg.GATv2Conv(4, 4, edge_dim=2), pyg.GENConv(4, 4)
    biased.lin_edge = nn.Linear(2, 4)
    inside.aggr_module.register_forward_hook(lambda *given: None)
    assert not can_avoid_messages(biased, reads_edges=True)
    assert not can_avoid_messages(inside)
    assert not can_avoid_messages(type("Mine", (pyg.GATv2Conv,), {})(4, 4))
    replaced, watched, changed = (pyg.GATv2Conv(4, 4) for _ in range(3))
    replaced.message = lambda x_j, alpha: x_j
    watched.register_propagate_forward_hook(lambda *given: None)
    changed.register_forward_hook(lambda *given: None)
    assert not can_avoid_messages(replaced)
    assert not can_avoid_messages(watched)
    assert not can_avoid_messages(changed)


def test_a_message_is_never_made():
    """Backward of 100,000 edges needs no tensor with a number for each edge and column."""
    torch.manual_seed(0)
    x, edges = torch.randn(500, 64, requires_grad=True), torch.randint(500, (2, 100_000))
    for conv in (pyg.GENConv(64, 64), pyg.GATv2Conv(64, 16, 4), pyg.SAGEConv(64, 64, aggr="max")):
        saved = []
        called = without_messages(conv, block(edges, (500, 500)))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            called((x, x), edges).sum().backward()
        assert max(saved) <= 4 * math.prod(edges.shape)
