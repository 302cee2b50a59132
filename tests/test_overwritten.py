"""What was received is written over by who says so: by a mix or a sum, and by its own gradient."""

import pytest
import torch
from helpers import quick_config, small_graph
from torch import nn

from gnnpipe.errors import InputError
from gnnpipe.models import GNN, Layer, LayerSpec
from gnnpipe.models.gcn import GCNLayer
from gnnpipe.models.gcnii import GCNIILayer
from gnnpipe.models.layer_probe import check_layers
from gnnpipe.models.sage import SAGELayer
from gnnpipe.ops import norm_relu_blocks
from gnnpipe.ops.hashed_dropout import Mask
from gnnpipe.ops.norm_relu import gcnii_mix, norm_relu
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.linear import LinearHistory
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.model_graph import describe
from gnnpipe.setup.prepare import chunk_order, prepare
from gnnpipe.train.evaluate import evaluate, train_epoch

ROWS, WIDTH, CHUNKS, EPOCHS = 7, 5, 5, 3


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def made_by(call, inputs):
    """What is made of copies of ``inputs``, their gradients, and what the first is written over by.

    Forward, and in backward by its gradient.
    """
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    out = call(*copies)
    found = out.detach().clone()
    is_changed = not torch.equal(copies[0], inputs[0])
    out.pow(3).sum().backward()
    is_over = copies[0].grad.data_ptr() == copies[0].data_ptr()
    return [found, *(t.grad for t in copies)], (is_changed, is_over)


PAIRS = {
    "a product": lambda: (draw(ROWS, 3), draw(WIDTH, 3)),
    "two products": lambda: (draw(ROWS, 3), draw(WIDTH, 3), draw(ROWS, 4), draw(WIDTH, 4)),
    "as it is": lambda: (draw(ROWS, WIDTH), None),
    "two as they are": lambda: (draw(ROWS, WIDTH), None, draw(ROWS, WIDTH), None),
    "mixed": lambda: (draw(ROWS, WIDTH), None, draw(ROWS, 4), draw(WIDTH, 4)),
    "mixed the other way": lambda: (draw(ROWS, 4), draw(WIDTH, 4), draw(ROWS, WIDTH), None),
}


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", [*PAIRS, "mix"])
def test_the_same_numbers_in_the_rows_themselves(name, has_bias, is_dropped, rows, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(norm_relu_blocks, "rows_at_once", lambda x, width: rows)
    layer = nn.LayerNorm(WIDTH).double()
    kept = (torch.rand(ROWS, WIDTH) < 0.6).to(torch.int8)
    mask = Mask(kept, 1 / 0.6) if is_dropped else None
    if name == "mix":
        inputs = [draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(WIDTH, WIDTH)]

        def call(over):
            return lambda x, h, w: gcnii_mix(x, h, w, layer, 0.1, 0.3, mask=mask, overwrites=over)
    else:
        pairs, bias = PAIRS[name](), [draw(WIDTH)] if has_bias else []
        inputs = [*(t for t in pairs if t is not None), *bias]

        def call(over):
            def run(*given):
                left = iter(given)
                again = [None if t is None else next(left) for t in pairs]
                return norm_relu(layer, next(left, None), *again, mask=mask, overwrites=over)

            return run

    plain, was_over = made_by(call(False), inputs)
    found, is_over = made_by(call(True), inputs)
    # A single summand is read as it is.
    is_made = name in ("mix", "two as they are", "mixed") or (name == "as it is" and has_bias)
    assert is_over == (is_made, True)
    assert was_over == (False, False)
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_that_is_nobodys_leaves_the_rows_alone():
    x, weight, layer = draw(ROWS, 3).detach(), draw(WIDTH, 3), nn.LayerNorm(WIDTH).double()
    before = x.clone()
    norm_relu(layer, None, x, weight, overwrites=True).sum().backward()
    assert torch.equal(x, before)
    assert weight.grad is not None


class Reading(GCNLayer):
    """It looks at what it received once more, when the layer it is made of is done with it."""

    def after(self, received, values, rows):
        found = super().after(received, values, rows)
        return {"x": found["x"] if self.is_last else found["x"] + received.tanh()}


class ReadingMix(GCNIILayer):
    """The same, of rows that would be mixed in place."""

    def after(self, received, values, rows):
        found = super().after(received, values, rows)
        return found if self.is_last else {**found, "x": found["x"] * received}


STACKS = {"reading": Reading, "reading mix": ReadingMix}
OVER = {"gcn": 2, "sage": 2, "gcnii": 3, "resgcn": 0, "reading": 0, "reading mix": 0}
"""Layers of three whose gradients are made over what was received: those of GCN and SAGE have no
norm in the last one."""
EXACT = OVER | {"gcn": 1, "sage": 1}
"""Where nothing is stale dense features are aggregated once."""
HOME = OVER | {"gcnii": 2}
"""Of those, where some rows are stale, in their table: the last layer's has one to itself."""


def trained(name, **settings):
    """Losses, weights and scores behind some epochs."""
    kind = {"layers": 3, "hidden": 16, "dropout": 0.3}
    model = None
    if name in STACKS:
        torch.manual_seed(0)
        is_rounded = settings.get("matmul_dtype") == "bf16"
        spec = LayerSpec(7, 3, 3, 16, dropout=0.3, is_rounded=is_rounded)
        dtype = getattr(torch, settings.get("dtype", "float64"))
        model = GNN([STACKS[name](i, spec) for i in range(3)]).to(dtype)
    else:
        kind["model"] = name
    config = quick_config(epochs=EPOCHS, **kind, **settings)
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, small_graph(n=120, degree=3), model)
    rank_runtime = build_rank(prepared, mesh)
    losses = [
        train_epoch(rank_runtime, mesh, prepared.program_of(e), chunk_order(prepared.config, e), e)
        for e in range(EPOCHS)
    ]
    weights = [p.detach().clone() for p in prepared.model.module.parameters()]
    return losses, weights, evaluate(rank_runtime, mesh)


def watched(monkeypatch):
    """By gradient that is recorded, whether it lies over what was read, and where it belongs."""
    found, places, read, record = [], {}, LinearHistory.read, LinearHistory.record

    def note(self, chunk):
        rows = read(self, chunk)
        places[id(self), chunk] = rows.data_ptr()
        return rows

    def look(self, chunk, grad):
        is_home = self._is_shared and grad.data_ptr() == self._lent[chunk].data_ptr()
        found.append((grad.data_ptr() == places[id(self), chunk], is_home))
        record(self, chunk, grad)

    monkeypatch.setattr(LinearHistory, "read", note)
    monkeypatch.setattr(LinearHistory, "record", look)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"chunks": 1},
        {"chunks": CHUNKS},
        {"chunks": CHUNKS, "recompute": True},
        {"chunks": 1, "recompute": True},
        {"chunks": CHUNKS, "staleness": "exact"},
        {"chunks": CHUNKS, "staleness": "paper"},
        {"chunks": CHUNKS, "comm_dtype": "bf16", "dtype": "float32"},
        {"chunks": CHUNKS, "matmul_dtype": "bf16", "dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OVER)
def test_the_same_bits_as_beside_it(name, settings, monkeypatch):
    seen = watched(monkeypatch)
    over = trained(name, **settings)
    chunks = settings["chunks"]
    is_exact = chunks == 1 or settings.get("staleness") == "exact"
    # Rounded tables hold no rows as they were received, and that of one chunk is made anew.
    home = 0 if "comm_dtype" in settings or chunks == 1 else (EXACT if is_exact else HOME)[name]
    made = (EXACT if is_exact else OVER)[name]
    steps = chunks * EPOCHS
    assert [sum(of) for of in zip(*seen, strict=True)] == [made * steps, home * steps]
    monkeypatch.setattr(Layer, "may_overwrite", False)
    seen.clear()
    beside = trained(name, **settings)
    assert not any(is_over or is_home for is_over, is_home in seen)
    assert over[0] == beside[0]
    assert over[2] == beside[2]
    for one, other in zip(over[1], beside[1], strict=True):
        assert torch.equal(one, other)


def test_who_has_an_after_of_its_own_is_counted_as_it_keeps():
    graph = small_graph(n=60)
    spec = LayerSpec(graph.num_features, graph.num_classes, 3, 16)
    kept = {
        kind: [
            op.kept_per_row for op in describe(GNN([kind(i, spec) for i in range(3)]), graph).ops
        ]
        for kind in (GCNLayer, Reading, SAGELayer, GCNIILayer, ReadingMix)
    }
    assert kept[GCNLayer] == [36, 52, 16]
    assert kept[Reading] == [52, 52, 16]
    assert kept[SAGELayer] == [52, 52, 16]
    assert kept[GCNIILayer] == [72, 52, 52]
    assert kept[ReadingMix] == [88, 68, 68]


def test_time_and_blocks_go_by_what_is_written_memory_by_what_is_kept():
    graph = small_graph(n=60)
    spec = LayerSpec(graph.num_features, graph.num_classes, 3, 16)
    for kind, plain in ((GCNLayer, Reading), (GCNIILayer, ReadingMix)):
        over, beside = (
            describe(GNN([k(i, spec) for i in range(3)]), graph).ops for k in (kind, plain)
        )
        assert [op.written_per_row for op in over] == [op.written_per_row for op in beside]
        assert sum(op.kept_per_row for op in over) < sum(op.kept_per_row for op in beside)
        # The last layer of GCN makes its gradient beside.
        passing = [b.passing_per_row - o.passing_per_row for o, b in zip(over, beside, strict=True)]
        assert passing == ([16, 16, 0] if kind is GCNLayer else [16, 16, 16])


class Beginning(GCNLayer):
    """The layer that it is made of is not the last to read what it received."""

    def begin(self, aggregated, rows):
        h = self.encode.of(aggregated)
        return {"x": self.after(h, {}, rows)["x"] + h}


def test_who_begins_in_another_way_is_given_no_leave():
    spec = LayerSpec(7, 3, 3, 16)
    assert GCNLayer(0, spec).may_overwrite
    assert not Beginning(0, spec).may_overwrite


class Skipping(GCNIILayer):
    """It says that it may write over what it hands on."""

    overwrites_received = True

    def after(self, received, values, rows):
        found = super().after(received, values, rows)
        return found if self.is_last else {**found, "h0": received}


class Late(Skipping):
    """The same of what it reads too late."""

    overwrites_received = True

    def after(self, received, values, rows):
        found = GCNIILayer.after(self, received, values, rows)
        return found if self.is_last else {**found, "x": found["x"] + received}


class LateSum(GCNLayer):
    """The same, of a sum that is made with a bias: of zeros, at first."""

    overwrites_received = True

    def after(self, received, values, rows):
        found = super().after(received, values, rows)
        return found if self.is_last else {"x": found["x"] + 0.5 * received}


class Early(GCNLayer):
    """What its backward reads is gone by then."""

    overwrites_received = True

    def after(self, received, values, rows):
        square = received * received
        found = super().after(received, values, rows)
        return found if self.is_last else {"x": found["x"] + 0.1 * square}


class InPlace(GCNLayer):
    """Autograd cannot follow."""

    overwrites_received = True

    def after(self, received, values, rows):
        if rows.may_overwrite:
            received.mul_(2.0)
        return super().after(received, values, rows)


TOLD = {
    Skipping: "overwrites_received, but h0 is what it received",
    Late: "overwrites_received, but x is another",
    LateSum: "overwrites_received, but x is another",
    Early: "overwrites_received, but backward fails",
    InPlace: "after fails on 12 random rows: RuntimeError: a leaf",
}


@pytest.mark.parametrize("kind", TOLD)
def test_who_says_so_and_reads_it_again_is_told(kind):
    spec = LayerSpec(7, 3, 3, 16)
    layers = [kind(i, spec) for i in range(3)]
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    with pytest.raises(InputError, match=f"layer 0, {kind.__name__}: .*{TOLD[kind]}"):
        check_layers(layers, 60)
    after = [p for layer in layers for p in layer.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


class Honest(GCNIILayer):
    """What it hands on is a copy."""

    overwrites_received = True

    def after(self, received, values, rows):
        again = received.clone()
        found = super().after(received, values, rows)
        return found if self.is_last else {**found, "x": found["x"] + again}


def test_who_says_so_and_has_a_copy_is_tried_and_taken():
    spec = LayerSpec(7, 3, 3, 16)
    check_layers([Honest(i, spec) for i in range(3)], 60)
