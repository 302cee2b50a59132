"""``--matmul-dtype bf16``: products with weights are rounded, and nothing else."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, MessagePassing, SAGEConv, SimpleConv

from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.ops import bf16_matmul, norm_relu_blocks
from gnnpipe.ops.norm_relu import NormReluOptions, gcnii_mix, norm_relu
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh

LOW = torch.bfloat16

# So few rows may be no faster in bf16.
pytestmark = pytest.mark.filterwarnings("ignore:--matmul-dtype bf16:UserWarning")


def rounded(x):
    return x.to(LOW).float()


def drawn(*shape):
    """Numbers with few bits, whose products are exact in bf16 and in any order."""
    return torch.randint(-4, 5, shape).float()


@pytest.mark.parametrize("leading", [(7,), (3, 4)])
def test_rounded_linear_and_its_gradients(leading):
    torch.manual_seed(0)
    x, weight, bias, grad = (torch.randn(s) for s in ((*leading, 33), (17, 33), (17,), (17,)))
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    found = bf16_matmul.linear(x, weight, bias, is_rounded=True)
    assert found.dtype == torch.float32
    assert torch.equal(found, rounded(rounded(x) @ rounded(weight).t()) + bias)
    found.backward(grad.expand_as(found))
    g, rows = rounded(grad.expand_as(found)).reshape(-1, 17), rounded(x).reshape(-1, 33)
    assert torch.equal(x.grad, rounded(g @ rounded(weight)).reshape(x.shape))
    assert torch.allclose(weight.grad, rounded(g.t() @ rows), atol=0.1, rtol=0.01)
    assert torch.allclose(bias.grad, grad * x[..., 0].numel())


def norm_of(width):
    torch.manual_seed(1)
    found = nn.LayerNorm(width)
    nn.init.normal_(found.weight)
    return found


@pytest.mark.parametrize("rows_at_once", [7, 10**6])
@pytest.mark.parametrize("kind", ["norm_relu", "gcnii_mix"])
def test_fused_work_differs_by_the_rounding_alone(kind, rows_at_once, monkeypatch):
    """If rounding is exact, values and gradients are those of float32."""
    monkeypatch.setattr(norm_relu_blocks, "rows_at_once", lambda x, width: rows_at_once)
    torch.manual_seed(0)
    norm = norm_of(8)
    x, first = drawn(40, 8).requires_grad_(), drawn(40, 8).requires_grad_()
    weight, bias = (drawn(8, 8) / 4).requires_grad_(), drawn(8)

    def run(is_rounded):
        options = NormReluOptions(is_rounded)
        if kind == "norm_relu":
            found = norm_relu(norm, bias, x, weight, first, None, options=options)
        else:
            found = gcnii_mix(x, first, weight, norm, 0.5, 0.5, options)
        inputs = [x, first, weight, *norm.parameters()]
        return found, torch.autograd.grad(found.square().sum(), inputs)

    (plain, grads), (low, low_grads) = run(False), run(True)
    assert torch.allclose(plain, low, atol=1e-5)
    for a, b in zip(grads, low_grads, strict=True):
        # What comes back through the norm is rounded.
        assert torch.allclose(a, b, rtol=0.02, atol=0.02 * float(a.abs().max()))


def test_two_weights_and_a_bias_of_one_norm():
    """As in SAGE: each product is rounded, the sum and the bias's gradient are not."""
    torch.manual_seed(0)
    norm, given = norm_of(8), []
    for shape in ((8,), (40, 8), (8, 8), (40, 6), (8, 6)):
        given.append(torch.randn(shape).requires_grad_())
    bias, x, first, y, second = given
    found = norm_relu(norm, bias, x, first, y, second, options=NormReluOptions(is_rounded=True))
    made = [rounded(rounded(a) @ rounded(w).t()) for a, w in ((x, first), (y, second))]
    total = (bias + made[0] + made[1]).detach().requires_grad_()
    expected = F.relu(norm(total))
    assert torch.allclose(found, expected, atol=1e-6)
    to_total = torch.autograd.grad(expected.square().sum(), total)[0]
    grads = torch.autograd.grad(found.square().sum(), given)
    low = rounded(to_total)
    wanted = [
        to_total.sum(0),
        rounded(low @ rounded(first)),
        rounded(low.t() @ rounded(x)),
        rounded(low @ rounded(second)),
        rounded(low.t() @ rounded(y)),
    ]
    # Sums in another order may be rounded to the other side.
    for a, b in zip(grads, wanted, strict=True):
        assert torch.allclose(a, b, rtol=0.01, atol=0.01)
    assert torch.allclose(grads[0], wanted[0], rtol=1e-5, atol=1e-4)


class OwnModel(nn.Module):
    """A linear map, a convolution, and logits by a linear map."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(7, 16), GCNConv(16, 16), nn.Linear(16, 3)

    def forward(self, x, edge_index):
        x = F.relu(self.first(x))
        return self.last(F.relu(self.conv(x, edge_index)))


MODELS = ("gcn", "sage", "gcnii", "resgcn", "gat", "own")


def losses_of(shape, kind):
    """Losses of each epoch, by model."""
    stages, shards, chunks = shape
    mesh, found = Mesh.join(stages, shards), {}
    for model in MODELS:
        torch.manual_seed(0)
        module = OwnModel() if model == "own" else None
        config = quick_config(
            model="gcn" if module else model,
            layers=4,
            hidden=8,
            stages=stages,
            shards=shards,
            chunks=chunks,
            dtype="float32",
            matmul_dtype=kind,
        )
        # Sparse features are not rounded, so it is the layers' products that differ.
        graph = small_graph(sparse=True)
        result = Trainer(config, graph=graph, model=module, world=mesh).fit()
        found[model] = [row.loss for row in result.history]
    return found


@pytest.mark.parametrize("chunks", [1, 6])
def test_losses_are_close_and_do_not_depend_on_the_stages(chunks):
    """Chunks do not depend on the stages, so every bit is the same."""
    whole, alone = (losses_of((1, 1, chunks), kind) for kind in ("same", "bf16"))
    staged = run_ranks(losses_of, 2, (2, 1, chunks), "bf16")[0]
    shared = run_ranks(losses_of, 2, (1, 2, chunks), "bf16")[0]
    for model in MODELS:
        assert alone[model] == pytest.approx(whole[model], rel=0.05), model
        assert alone[model] != whole[model], model
        assert staged[model] == alone[model], model
        # Sums over shards are made in another order, and may be rounded to the other side.
        assert shared[model] == pytest.approx(alone[model], rel=0.01), model


def rounded_maps(module, sparse=True):
    """Shapes of the weights that are rounded in a training pass."""
    found, real = set(), bf16_matmul.rounded
    graph = small_graph(sparse=sparse)

    def note(x, is_rounded):
        if is_rounded and isinstance(x, nn.Parameter | torch.Tensor):
            found.add(tuple(x.shape))
        return real(x, is_rounded)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bf16_matmul, "rounded", note)
        patched.setattr("gnnpipe.setup.inputs.is_worth_rounding", lambda *_: True)
        config = quick_config(dtype="float32", matmul_dtype="bf16", epochs=1, eval_every=0)
        Trainer(config, graph=graph, model=module).fit()
    return {shape for shape in found if graph.num_vertices not in shape}


class Chain(nn.Module):
    """Calls one after the other, the convolutions with edges."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = nn.ModuleList(calls)

    def forward(self, x, edge_index):
        for call in self.calls:
            x = call(x, edge_index) if isinstance(call, MessagePassing) else call(x)
        return x


FIRST, MIDDLE = (7, 16), (16, 12)
SCORING = {
    "a linear map": (Chain(nn.Linear(7, 16), nn.Linear(16, 12), nn.Linear(12, 3)), {MIDDLE}),
    "behind a softmax": (
        Chain(nn.Linear(7, 16), nn.Linear(16, 12), nn.Linear(12, 3), nn.LogSoftmax(1)),
        {MIDDLE},
    ),
    # These add up the narrower rows, so what the first map multiplies is dense.
    "a convolution": (Chain(GCNConv(7, 16), GCNConv(16, 12), GCNConv(12, 3)), {FIRST, MIDDLE}),
    "two maps of one": (Chain(SAGEConv(7, 16), SAGEConv(16, 12), SAGEConv(12, 3)), {FIRST, MIDDLE}),
    "an aggregation": (Chain(nn.Linear(7, 16), nn.Linear(16, 3), SimpleConv()), set()),
}


@pytest.mark.parametrize("name", SCORING)
def test_last_linear_map_is_not_rounded(name):
    module, of_sparse = SCORING[name]
    assert rounded_maps(module) == of_sparse
    # Dense features are, unless their map gives the scores.
    assert rounded_maps(module, sparse=False) == of_sparse | {FIRST}


def test_linear_map_before_the_last_attention_is_not_rounded():
    chain = Chain(GATConv(7, 16), GATConv(16, 12), GATConv(12, 3, residual=True))
    assert rounded_maps(chain, sparse=False) == {MIDDLE}


def test_features_of_a_single_layer_are_not_rounded():
    assert rounded_maps(Chain(nn.Linear(7, 3)), sparse=False) == set()


def test_warning_if_a_model_has_nothing_to_round():
    config = quick_config(dtype="float32", matmul_dtype="bf16")
    with pytest.warns(UserWarning, match="is rounded here"):
        Trainer(config, graph=small_graph(), model=Chain(nn.Linear(7, 3), SimpleConv())).fit()


@pytest.mark.parametrize(
    ("model", "layers", "hidden", "sparse", "is_any"),
    [
        # Of 7 features, which are not wider, the sums over neighbours are dense and multiplied.
        ("gcn", 2, 8, True, True),
        ("sage", 2, 8, True, True),
        # Wider ones are multiplied first, as they are; the other product gives the scores.
        ("gcn", 2, 4, True, False),
        ("sage", 2, 4, True, False),
        ("gcn", 2, 4, False, True),
        ("sage", 2, 4, False, True),
        ("gcn", 3, 4, True, True),
        # The products of a single layer give the scores.
        ("gcn", 1, 8, False, False),
        ("sage", 1, 8, False, False),
        ("gat", 2, 8, True, True),
        ("gat", 1, 8, True, False),
        ("resgcn", 1, 8, True, True),
        ("gcnii", 1, 8, True, True),
    ],
)
def test_warning_if_a_built_in_model_has_nothing_to_round(
    model, layers, hidden, sparse, is_any, monkeypatch
):
    monkeypatch.setattr("gnnpipe.setup.inputs.is_worth_rounding", lambda *_: True)
    counted, real = [], bf16_matmul.rounded

    def note(x, is_rounded):
        counted.append(is_rounded)
        return real(x, is_rounded)

    for module in ("bf16_matmul", "norm_relu"):
        monkeypatch.setattr(f"gnnpipe.ops.{module}.rounded", note)
    config = quick_config(
        dtype="float32", matmul_dtype="bf16", model=model, layers=layers, hidden=hidden, epochs=1
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = Trainer(config, graph=small_graph(sparse=sparse))
        assert trainer.plan.num_stages == 1, "set up, which runs the layers on samples"
        counted.clear()
        trainer.fit()
    assert any(counted) == is_any
    assert ("is rounded here" in " ".join(str(w.message) for w in told)) == (not is_any)
    line = "products with weights, except the last, are rounded to bf16"
    assert (line in head_lines(trainer._setup()[1])) == is_any


def test_a_weight_that_is_a_vector_is_not_rounded():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate = nn.Linear(7, 16), nn.Parameter(torch.ones(16))
            self.last = nn.Linear(16, 3)

        def forward(self, x, edge_index):
            x = self.first(x)
            return self.last(x * torch.sigmoid(F.linear(x, self.gate))[:, None])

    assert rounded_maps(Gated(), sparse=False) == {(7, 16)}


class Watched(nn.Module):
    """A linear map with a hook, and one that gives the logits: neither is rounded."""

    def __init__(self, factor):
        super().__init__()
        self.first, self.last = nn.Linear(7, 16), nn.Linear(16, 3)
        self.factor = factor
        if factor == 1:
            self.first.register_forward_hook(lambda module, given, found: 2 * found)
        self.conv = SimpleConv(aggr="mean")

    def forward(self, x, edge_index):
        return self.last(self.conv(self.factor * self.first(x), edge_index))


def test_a_linear_map_with_a_hook_runs_as_it_is():
    found = []
    for kind, factor in (("same", 1), ("bf16", 1), ("same", 2)):
        torch.manual_seed(0)
        module = Watched(factor)
        config = quick_config(dtype="float32", matmul_dtype=kind)
        result = Trainer(config, graph=small_graph(), model=module).fit()
        found.append([row.loss for row in result.history])
    assert found[0] == found[1]
    assert found[0] == pytest.approx(found[2])


def test_warning_on_a_processor_without_bf16(monkeypatch):
    monkeypatch.setattr("gnnpipe.setup.inputs.is_worth_rounding", lambda *_: False)
    config = quick_config(dtype="float32", matmul_dtype="bf16")
    with pytest.warns(UserWarning, match="--matmul-dtype bf16: no faster here"):
        Trainer(config, graph=small_graph()).fit()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["verify"], "--matmul-dtype bf16: rounds, which the reference"),
        (["verify", "--dtype", "float32"], "--matmul-dtype bf16: rounds, which the reference"),
        (["train", "--matmul-dtype", "fp8"], "--matmul-dtype 'fp8'"),
    ],
)
def test_invalid_combinations_are_refused(words, text, capsys):
    if "fp8" not in words:
        words = [*words, "--matmul-dtype", "bf16"]
    assert main([*words, "--dataset", "karate", "--device", "cpu"]) == 2
    assert text in capsys.readouterr().err
