"""Fused calls compute the rows that a step pushes inside the history table."""

import pytest
import torch
from helpers import quick_config, small_graph
from torch_geometric.nn import GAT

from gnnpipe import InputError, Trainer, info
from gnnpipe.capture.stage.stage_module import RecordedStageModule
from gnnpipe.models import GCN
from gnnpipe.ops.norm_relu import NormReluOptions, norm_relu
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.base import History
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import evaluate, train_epoch

PLACES = {"gcn": 3, "sage": 3, "gcnii": 3, "resgcn": 4, "gat": 0}
"""Steps whose pushed rows need no copy, of 4 layers: not where features or a product are pushed, as
in the last layer of an exact GCN or SAGE."""
EPOCHS, CHUNKS = 4, 5


def trained(name, epochs=EPOCHS, chunks=CHUNKS, **settings):
    """Losses, weights, tables, drift and scores after some epochs."""
    kind = {"model": name, "layers": 4, "hidden": 16, "dropout": 0.3}
    config = quick_config(epochs=epochs, chunks=chunks, **kind, **settings)
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, small_graph(n=120, degree=3))
    rank_runtime = build_rank(prepared, mesh)
    losses = [
        train_epoch(rank_runtime, mesh, prepared.program_of(e), prepared.chunk_order(e), e)
        for e in range(epochs)
    ]
    histories = rank_runtime.executor.stage.histories.values()
    weights = [p.detach().clone() for p in prepared.model.module.parameters()]
    drift = [h.drift.sums for h in histories if h.drift is not None]
    return losses, [*weights, *(h.table for h in histories), *drift], evaluate(rank_runtime, mesh)


def counted(monkeypatch):
    """For each push, whether the rows were computed in the table."""
    found, push = [], History.push

    def watched(self, chunk, rows):
        start, _ = self.rows(chunk)
        found.append(rows.data_ptr() == self.table[start:].data_ptr())
        push(self, chunk, rows)

    monkeypatch.setattr(History, "push", watched)
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": True},
        {"staleness": "exact"},
        {"staleness": "paper", "recompute": True},
        {"staleness": "none", "snapshot_every": 2},
        {"comm_dtype": "bf16", "dtype": "float32"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PLACES)
def test_same_bits_as_with_copies(name, settings, monkeypatch):
    made = counted(monkeypatch)
    placed = trained(name, **settings)
    # Evaluation makes its rows there, too.
    is_narrow = name in ("gcn", "sage") and settings.get("staleness") == "exact"
    places = PLACES[name] - is_narrow
    expected = 0 if "comm_dtype" in settings else places * CHUNKS * (EPOCHS + 1)
    assert sum(made) == expected
    monkeypatch.setattr(RecordedStageModule, "writes_output_buffer", lambda self, index: False)
    made.clear()
    copied = trained(name, **settings)
    assert not any(made)
    assert placed[0] == copied[0]
    assert placed[2] == copied[2]
    for one, other in zip(placed[1], copied[1], strict=True):
        assert torch.equal(one, other)


def test_backward_when_other_rows_of_the_table_change():
    table = torch.zeros(6, 4)
    norm, x = torch.nn.LayerNorm(4), torch.randn(3, 4, requires_grad=True)
    buffer = OutputBuffer.of(table, 2, 5)
    made = norm_relu(norm, None, x, None, options=NormReluOptions(output_buffer=buffer))
    assert torch.equal(table[2:5], made.detach())
    assert not table[[0, 1, 5]].any()
    table[:2] = 7.0
    weight = torch.randn(3, 4)
    (made * weight).sum().backward()
    found, x.grad = x.grad, None
    (torch.relu(norm(x)) * weight).sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_empty_chunk_has_an_empty_buffer():
    output_buffer = OutputBuffer.of(torch.zeros(4, 3), 2, 2)
    assert output_buffer.rows.shape == (0, 3)


def test_error_if_other_rows_are_pushed():
    buffer = OutputBuffer.of(torch.zeros(6, 3), 2, 5)
    buffer.check({"aggregate": buffer.rows})
    with pytest.raises(
        TypeError,
        match=r"aggregate: .* other rows than those that it computed in rows\.output_buffer",
    ):
        buffer.check({"aggregate": buffer.rows.clone()})


def test_error_if_pushed_rows_are_written_to():
    buffer = OutputBuffer.of(torch.zeros(6, 3), 2, 5)
    buffer.check({"aggregate": buffer.rows})
    buffer.check_kept()
    buffer.rows.mul_(0.5)
    with pytest.raises(TypeError, match="wrote to rows after they were pushed"):
        buffer.check_kept()


def test_error_if_widths_differ():
    norm, buffer = torch.nn.LayerNorm(4), OutputBuffer.of(torch.zeros(6, 3), 2, 5)
    with pytest.raises(ValueError, match=r"\[3, 4\] rows do not fit"):
        norm_relu(
            norm, None, torch.randn(3, 4), None, options=NormReluOptions(output_buffer=buffer)
        )


@pytest.mark.parametrize("staleness", ["auto", "exact"])
@pytest.mark.parametrize("name", ["gcn", "gcnii", "resgcn"])
def test_evaluation_in_inference_mode(name, staleness):
    config = quick_config(epochs=1, chunks=CHUNKS, model=name, staleness=staleness)
    trainer = Trainer(config, graph=small_graph(n=120, degree=3))
    trainer.fit()
    found = trainer.predict()
    with torch.inference_mode():
        assert torch.equal(trainer.predict(), found)
        assert trainer.evaluate() is not None


@pytest.mark.parametrize("staleness", ["auto", "exact"])
@pytest.mark.parametrize("name", ["gcn", "gcnii", "gat"])
def test_training_after_evaluation_in_inference_mode(name, staleness):
    config = quick_config(epochs=2, chunks=CHUNKS, model=name, staleness=staleness)
    graph = small_graph(n=120, degree=3)
    with torch.inference_mode():
        trainer = Trainer(config, graph=graph)
        trainer.predict()
        trainer.evaluate()
    assert trainer.fit().history[-1].loss == Trainer(config, graph=graph).fit().history[-1].loss


def test_training_in_inference_mode_changes_no_weight():
    config, graph = quick_config(epochs=2, chunks=CHUNKS), small_graph(n=120, degree=3)
    with torch.inference_mode():
        made = GCN(7, 3, layers=2, hidden=16, dropout=0.0)
        with pytest.raises(InputError, match=r"fit\(\) was called under torch.inference_mode"):
            Trainer(config, graph=graph).fit()
        counted = info(config, graph, GAT(7, 8, 2, 3))
    assert counted.memory == info(config, graph, GAT(7, 8, 2, 3)).memory
    with pytest.raises(InputError, match=r"its weight convs.0.bias was made under torch"):
        Trainer(config, graph=graph, model=made).fit()
