"""Layers whose results would depend on the number of chunks are refused by name."""

from pathlib import Path

import pytest
import torch
from helpers import quick_config, small_graph
from torch import nn

from gnnpipe import InputError, Trainer
from gnnpipe.models import GNN, LayerSpec
from gnnpipe.models.gat import GATLayer
from gnnpipe.models.gcn import GCNLayer
from gnnpipe.models.layer import MODELS
from gnnpipe.models.layer_probe import check_layers

SPEC = LayerSpec(7, 3, 3, 16, dropout=0.3)


class Plain(GCNLayer):
    """Its own words, and nothing wrong with them."""

    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        return pushed.tanh(), kept

    def after(self, received, values, rows):
        return super().after(received + 1.0, values, rows)


class Normed(Plain):
    def __init__(self, index, spec):
        super().__init__(index, spec)
        self.mixing = nn.BatchNorm1d(16)

    def after(self, received, values, rows):
        return super().after(self.mixing(received), values, rows)


class Drawing(Plain):
    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        return torch.dropout(pushed, 0.5, True), kept


class Counting(Plain):
    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        return pushed / len(pushed), kept


class Narrow(Plain):
    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        return pushed[:, :8], kept


class Forgetful(Plain):
    def after(self, received, values, rows):
        return {"y": super().after(received, values, rows)["x"]}


class Bare(Plain):
    def after(self, received, values, rows):
        return super().after(received, values, rows)["x"]


class Alone(Plain):
    def before(self, values, rows):
        return super().before(values, rows)[0]


class Wrong(Plain):
    def after(self, received, values, rows):
        return super().after(received @ torch.ones(5, 16), values, rows)


class Dense(Plain):
    def before(self, values, rows):
        return torch.nn.functional.linear(rows.features, torch.ones(16, 7)), {}


class Attending(GATLayer):
    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        return pushed - pushed.mean(0), kept


WRONG = {
    Normed: "after mixes rows or draws random numbers",
    Drawing: "before mixes rows or draws random numbers",
    Counting: "before mixes rows",
    Narrow: r"before pushes rows as \[12, 8\] for 12 rows; declared is \[12, 16\]",
    Forgetful: "after returns x as NoneType",
    Bare: "after returns a Tensor",
    Alone: "before returns a Tensor",
    Wrong: "after fails on 12 random rows: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    Attending: "before mixes rows",
    Dense: "before fails .* not FeatureRows; rows.features may be sparse: use",
}


def stack(kind, place):
    kinds = [GCNLayer] * 3
    kinds[place] = kind
    return GNN([made(i, SPEC) for i, made in enumerate(kinds)])


@pytest.mark.parametrize(
    ("kind", "place"), [(k, i) for k in WRONG for i in range(3) if k is not Dense or i == 0]
)
def test_layers_that_mix_rows_are_refused(kind, place):
    config = quick_config(layers=3, hidden=16, chunks=2)
    model = stack(kind, place)
    state = torch.random.get_rng_state()
    with pytest.raises(InputError):
        check_layers(model.stack(), 40)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(InputError, match=f"model: layer {place}, {kind.__name__}: {WRONG[kind]}"):
        Trainer(config, graph=small_graph(n=40), model=model).fit()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_row_wise_layers_pass(dtype):
    model = stack(Plain, 1)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    check_layers(model.to(getattr(torch, dtype)).stack(), 40)
    check_layers(model.stack(), 3)  # a graph of fewer vertices than are tried
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name].to(value.dtype))
    config = quick_config(layers=3, hidden=16, chunks=2, dtype=dtype)
    assert Trainer(config, graph=small_graph(n=40), model=model).fit()


class Caching(Plain):
    """It holds on to what it made, which torch does not copy; and counts in a buffer."""

    def __init__(self, index, spec):
        super().__init__(index, spec)
        self.register_buffer("calls", torch.zeros(()))

    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        self.pushed = pushed
        self.calls += 1
        return pushed, kept


def test_a_layer_may_keep_its_output():
    model = stack(Caching, 1)
    config = quick_config(layers=3, hidden=16, chunks=2, epochs=1)
    Trainer(config, graph=small_graph(n=40), model=model).fit()
    layer = model.stack()[1]
    layer.pushed = torch.zeros(2, 3, requires_grad=True) * 1.0
    before, calls = layer.eval().training, layer.calls.clone()
    check_layers(model.stack(), 40)
    assert layer.training == before
    assert torch.equal(layer.calls, calls)


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_built_in_model_works_row_by_row(name, is_rounded):
    spec = LayerSpec(70, 3, 3, 64, dropout=0.3, heads=2, is_rounded=is_rounded)
    check_layers(GNN.build(name, spec, 0, torch.float32).stack(), 40)


def test_built_in_models_are_run_too(monkeypatch):
    monkeypatch.setattr(GCNLayer, "before", lambda self, values, rows: (rows.keys * 0.0, {}))
    with pytest.raises(InputError, match="layer 0, GCNLayer: before pushes rows as"):
        Trainer(quick_config(model="gcn"), graph=small_graph()).fit()


def test_the_layer_of_the_page_runs(capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-layers-by-hand.md"
    code = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    exec(code, {"__name__": "page"})
    assert 0.0 < float(capsys.readouterr().out.split()[-1]) <= 1.0
