"""gcnii_mix with ``overwrites``: results and gradients in the memory of the received rows."""

import pytest
import torch
from helpers import quick_config, small_graph
from torch import nn

from gnnpipe.capture.stage import row_work
from gnnpipe.ops import norm_relu_blocks
from gnnpipe.ops.hashed_dropout import Mask
from gnnpipe.ops.norm_relu import NormReluOptions, gcnii_mix
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.linear import LinearHistory
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import evaluate, train_epoch

ROWS, WIDTH, CHUNKS, EPOCHS = 7, 5, 5, 3


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_same_values_in_place(is_dropped, rows, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(norm_relu_blocks, "rows_at_once", lambda x, width: rows)
    layer = nn.LayerNorm(WIDTH).double()
    kept = (torch.rand(ROWS, WIDTH) < 0.6).to(torch.int8)
    mask = Mask(kept, 1 / 0.6) if is_dropped else None
    inputs = [draw(ROWS, WIDTH), draw(ROWS, WIDTH), draw(WIDTH, WIDTH)]

    def made(overwrites):
        copies = [t.detach().clone().requires_grad_() for t in inputs]
        out = gcnii_mix(*copies, layer, 0.1, 0.3, NormReluOptions(mask=mask), overwrites)
        found = out.detach().clone()
        is_changed = not torch.equal(copies[0], inputs[0])
        out.pow(3).sum().backward()
        is_over = copies[0].grad.data_ptr() == copies[0].data_ptr()
        return [found, *(t.grad for t in copies)], (is_changed, is_over)

    plain, was_over = made(False)
    found, is_over = made(True)
    assert is_over == (True, True)
    assert was_over == (False, False)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


def trained(**settings):
    """Losses, weights and scores after some epochs."""
    model = {"model": "gcnii", "layers": 3, "hidden": 16, "dropout": 0.3}
    config = quick_config(epochs=EPOCHS, **model, **settings)
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, small_graph(n=120, degree=3))
    rank_runtime = build_rank(prepared, mesh)
    losses = [
        train_epoch(rank_runtime, mesh, prepared.program_of(e), prepared.chunk_order(e), e)
        for e in range(EPOCHS)
    ]
    weights = [p.detach().clone() for p in prepared.model.module.parameters()]
    return losses, weights, evaluate(rank_runtime, mesh)


def watched(monkeypatch):
    """For each recorded gradient, whether it lies in the memory of the rows that were read."""
    found, places, read, record = [], {}, LinearHistory.read, LinearHistory.record

    def note(self, chunk):
        rows = read(self, chunk)
        places[id(self), chunk] = rows.data_ptr()
        return rows

    def look(self, chunk, grad):
        found.append(grad.data_ptr() == places[id(self), chunk])
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
def test_same_bits_as_without_overwriting(settings, monkeypatch):
    seen = watched(monkeypatch)
    over = trained(**settings)
    assert sum(seen) == 3 * settings["chunks"] * EPOCHS
    seen.clear()
    mix = row_work.gcnii_mix
    monkeypatch.setattr(row_work, "gcnii_mix", lambda *given: mix(*given[:7]))
    beside = trained(**settings)
    assert not any(seen)
    assert over[0] == beside[0]
    assert over[2] == beside[2]
    for one, other in zip(over[1], beside[1], strict=True):
        assert torch.equal(one, other)
