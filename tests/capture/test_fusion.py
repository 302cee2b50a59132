"""Row-wise calls that are computed as one give the numbers of the single calls."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.capture.recorded_model import capture
from gnnpipe.capture.stage.row_work import (
    batch_norm_relu,
    gcnii_norm_relu,
    layer_norm_relu,
    mixed_map,
    summed,
)
from gnnpipe.capture.stage.step_calls import normalise
from gnnpipe.capture.trial import facts
from gnnpipe.ops.output_buffer import OutputBuffer

H, LAYERS = 8, 3


class Net(nn.Module):
    """Convolutions, each with LayerNorm, ReLU and dropout, and a decoder."""

    def __init__(self, kind, norm=nn.LayerNorm, dropout=0.5):
        super().__init__()
        made = {
            "gcn": lambda i: pyg.GCNConv(H, H),
            "sage": lambda i: pyg.SAGEConv(H, H),
            "graph": lambda i: pyg.GraphConv(H, H),
            "gcnii": lambda i: pyg.GCN2Conv(H, 0.1, 0.5, i + 1),
        }[kind]
        self.kind, self.encode, self.decode = kind, nn.Linear(7, H), nn.Linear(H, 3)
        self.convs = nn.ModuleList(made(i) for i in range(LAYERS))
        self.norms = nn.ModuleList(norm(H) for _ in range(LAYERS))
        self.dropout = nn.Dropout(dropout)

    def conv(self, conv, x, first, edges):
        return conv(x, first, edges) if self.kind == "gcnii" else conv(x, edges)

    def forward(self, x, edge_index):
        x = first = self.encode(x).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.dropout(F.relu(norm(self.conv(conv, x, first, edge_index))))
        return self.decode(x)


class Residual(Net):
    """Norm, ReLU and dropout before the convolution, whose result is added to the rows."""

    def forward(self, x, edge_index):
        x = first = self.encode(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + self.conv(conv, self.dropout(norm(x).relu()), first, edge_index)
        return self.decode(x)


class Skipping(Net):
    """Residual layers with a linear map of their own: two products and two biases."""

    def __init__(self, kind):
        super().__init__(kind)
        self.lins = nn.ModuleList(nn.Linear(H, H) for _ in range(LAYERS))

    def forward(self, x, edge_index):
        x = first = self.encode(x)
        for conv, norm, lin in zip(self.convs, self.norms, self.lins, strict=True):
            x = self.dropout(norm(lin(x) + self.conv(conv, x, first, edge_index)).relu())
        return self.decode(x) + self.decode(x)


class OfFeatures(nn.Module):
    """GCN2Conv of the features, whose aggregated rows are computed once for all epochs."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = pyg.GCN2Conv(7, 0.1, 0.5, 1), nn.LayerNorm(7)
        self.decode = pyg.GCNConv(7, 3)

    def forward(self, x, edge_index):
        x = self.norm(self.conv(x, x, edge_index)).relu()
        return self.decode(x, edge_index)


class Frozen(Net):
    """BatchNorm with its running statistics."""

    def __init__(self):
        super().__init__("gcn", nn.BatchNorm1d)
        self.norms.eval()

    def train(self, mode=True):
        super().train(mode)
        self.norms.eval()
        return self


NETS = {
    **{kind: lambda kind=kind: Net(kind) for kind in ("gcn", "sage", "graph", "gcnii")},
    "residual gcn": lambda: Residual("gcn"),
    "residual sage": lambda: Residual("sage"),
    "skipping": lambda: Skipping("gcn"),
    "of features": OfFeatures,
    "frozen batch norm": Frozen,
    "batch norm": lambda: Net("sage", nn.BatchNorm1d),
    "batch norm without weights": lambda: Net("gcn", lambda n: nn.BatchNorm1d(n, affine=False)),
    "without dropout": lambda: Net("gcn", dropout=0.0),
}


def made(name):
    torch.manual_seed(0)
    return NETS[name]()


def targets(model):
    recording = capture(model, small_graph()).recording
    return [call.target for call in recording.graph_module.graph.nodes]


def trained(model, **settings):
    graph = small_graph(directed=True, sparse=True)
    trainer = Trainer(quick_config(epochs=4, **settings), graph=graph, model=model)
    losses = [row.loss for row in trainer.fit().history]
    return np.array(losses), trainer.predict(), model.state_dict()


CHUNKED = ("gcnii", "residual sage", "batch norm", "frozen batch norm")
CHUNKS = [{"chunks": 4}, {"chunks": 3, "recompute": True}]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:model. Net normalises over all vertices")
@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {}) for name in NETS] + [(name, settings) for name in CHUNKED for settings in CHUNKS],
)
def test_trains_to_the_numbers_of_single_calls(name, settings, monkeypatch):
    fused = trained(made(name), **settings)
    monkeypatch.setattr(facts, "fuse", lambda *_: [])
    single = trained(made(name), **settings)
    np.testing.assert_allclose(fused[0], single[0], rtol=1e-9)
    torch.testing.assert_close(fused[1], single[1], rtol=1e-7, atol=1e-9)
    for key, value in single[2].items():
        torch.testing.assert_close(fused[2][key], value, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:--matmul-dtype bf16")
def test_rounded_products_are_those_of_single_calls(monkeypatch):
    settings = {"matmul_dtype": "bf16", "dtype": "float32"}
    fused = trained(made("gcnii"), **settings)
    monkeypatch.setattr(facts, "fuse", lambda *_: [])
    np.testing.assert_allclose(fused[0], trained(made("gcnii"), **settings)[0], rtol=2e-3)
    plain = trained(made("gcnii"), dtype="float32")
    assert not np.allclose(fused[0], plain[0], rtol=1e-6)


class LogitsWithResidual(nn.Module):
    """The logits are the sum of a map and of the rows that a map was made of."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.last = pyg.GCNConv(7, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return self.first(x).tanh() + self.last(x)


def test_maps_behind_a_residual_of_the_logits_are_not_rounded():
    recording = capture(LogitsWithResidual(), small_graph()).recording
    assert "model.first" in {str(call.target) for call in recording.scoring}


def test_a_layer_is_one_call():
    for name, kind in (
        ("gcn", layer_norm_relu),
        ("sage", layer_norm_relu),
        ("gcnii", gcnii_norm_relu),
    ):
        found = targets(made(name))
        assert found.count(kind) == LAYERS
        assert not {summed, mixed_map, F.relu, F.linear} & set(found)
    found = targets(made("batch norm"))
    assert (found.count(batch_norm_relu), found.count(summed)) == (LAYERS, LAYERS)
    assert not {normalise, F.relu} & set(found)
    found = targets(made("residual gcn"))
    assert (found.count(layer_norm_relu), found.count(summed)) == (LAYERS, LAYERS)


def _with_hook(model):
    model.norms[1].register_forward_hook(lambda module, given, out: 2 * out)
    return model


class _Twice(Net):
    """The norm's result is read beside its ReLU."""

    def forward(self, x, edge_index):
        x = self.norms[0](self.convs[0](self.encode(x), edge_index))
        return self.decode(x.relu() + 0.1 * x)


class _ByKeyword(Net):
    """ReLU gets its rows by keyword."""

    def __init__(self, kind):
        super().__init__(kind)
        self.act = nn.ReLU()

    def forward(self, x, edge_index):
        x = self.norms[0](self.convs[0](self.encode(x), edge_index))
        return self.decode(self.act(input=x))


class _Cubes(Net):
    """Rows of two dimensions."""

    def forward(self, x, edge_index):
        x = self.convs[0](self.encode(x), edge_index)
        x = self.norms[0](torch.stack([x, 2 * x], dim=1)).relu()
        return self.decode(x.sum(1))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: _with_hook(Net("gcn")), LAYERS - 1),
        (lambda: Net("gcn", lambda n: nn.LayerNorm(n, bias=False)), 0),
        (lambda: Net("gcn", lambda n: nn.LayerNorm(n, elementwise_affine=False)), 0),
        (lambda: _Twice("gcn"), 0),
        (lambda: _ByKeyword("gcn"), 0),
        (lambda: _Cubes("gcn"), 0),
    ],
)
def test_other_calls_stay_as_they_are(model, count, monkeypatch):
    torch.manual_seed(0)
    model = model()
    assert targets(copy.deepcopy(model)).count(layer_norm_relu) == count
    fused = trained(copy.deepcopy(model))
    monkeypatch.setattr(facts, "fuse", lambda *_: [])
    np.testing.assert_allclose(fused[0], trained(model)[0], rtol=1e-9)


@pytest.mark.parametrize(("name", "count"), [("gcn", 2), ("residual gcn", 3), ("gcnii", 2)])
def test_rows_that_are_pushed_are_made_in_the_table(name, count, monkeypatch):
    """All but the first layer's rows, which a ReLU and no fused call makes."""
    seen = []
    check = OutputBuffer.check

    def checked(self, pushed):
        check(self, pushed)
        seen.append(pushed)

    monkeypatch.setattr(OutputBuffer, "check", checked)
    trained(made(name), chunks=4, eval_every=0)
    assert len(seen) >= 4 * 4 * count
