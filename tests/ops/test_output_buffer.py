"""Layers that declare a push_maker compute pushed rows inside the history table."""

import pytest
import torch
from helpers import quick_config, small_graph
from torch_geometric.nn import GAT

from gnnpipe import InputError, Trainer, info
from gnnpipe.models import GNN, LayerSpec
from gnnpipe.models.gcn import GCNLayer
from gnnpipe.models.layer import PushMaker
from gnnpipe.models.layer_stack import LayerStageModule
from gnnpipe.models.resgcn import ResGCNLayer
from gnnpipe.models.sage import SAGELayer
from gnnpipe.ops.norm_relu import NormReluOptions, norm_relu
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.base import History
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import evaluate, train_epoch


class Doubled(GCNLayer):
    """Returns other rows than those in the output buffer; backward needs both."""

    def after(self, received, values, rows):
        found = super().after(received, values, rows)
        return {"x": found["x"] * 2 + 1}


class Twice(GCNLayer):
    """Pushes other rows than the layer before returned, without declaring a push_maker."""

    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        return pushed.tanh(), kept


class Declaring(GCNLayer):
    """Overrides both methods and declares its push_maker."""

    push_maker = PushMaker.AFTER

    def before(self, values, rows):
        return super().before(values, rows)

    def after(self, received, values, rows):
        return super().after(received, values, rows)


STACKS = {
    "after of its own": [Doubled] * 4,
    "before of its own": [Twice] * 4,
    "both, and it says so": [Declaring] * 4,
    "mixed": [GCNLayer, ResGCNLayer, ResGCNLayer, GCNLayer, SAGELayer, Twice],
}
PLACES = {"after of its own": 0, "before of its own": 0, "both, and it says so": 3, "mixed": 3}
PLACES |= {"gcn": 3, "sage": 3, "gcnii": 3, "resgcn": 4, "gat": 0}
EPOCHS, CHUNKS = 4, 5


def stack(name):
    kinds = STACKS[name]
    spec = LayerSpec(7, 3, len(kinds), 16, dropout=0.3)
    torch.manual_seed(0)
    return GNN([kind(i, spec) for i, kind in enumerate(kinds)]).double()


def trained(name, epochs=EPOCHS, chunks=CHUNKS, **settings):
    """Losses, weights, tables, drift and scores after some epochs."""
    kind = {"layers": len(STACKS.get(name, [None] * 4)), "hidden": 16, "dropout": 0.3}
    kind |= {} if name in STACKS else {"model": name}
    config = quick_config(epochs=epochs, chunks=chunks, **kind, **settings)
    mesh = Mesh.alone()
    model = stack(name) if name in STACKS else None
    prepared = prepare(config, mesh, small_graph(n=120, degree=3), model)
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
@pytest.mark.parametrize("name", ["gcn", "sage", "gcnii", "resgcn", "gat", *STACKS])
def test_same_bits_as_with_copies(name, settings, monkeypatch):
    if "dtype" in settings and name in STACKS:
        settings = settings | {"dtype": "float64"}
    made = counted(monkeypatch)
    placed = trained(name, **settings)
    # Evaluation makes its rows there, too.
    expected = 0 if "comm_dtype" in settings else PLACES[name] * CHUNKS * (EPOCHS + 1)
    assert sum(made) == expected
    monkeypatch.setattr(LayerStageModule, "writes_output_buffer", lambda self, index: False)
    made.clear()
    copied = trained(name, **settings)
    assert not any(made)
    assert placed[0] == copied[0]
    assert placed[2] == copied[2]
    for one, other in zip(placed[1], copied[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", STACKS)
def test_which_pushes_need_no_copy(name):
    model = stack(name)
    count = len(STACKS[name])
    stage_module = model.stage_module(range(count))
    assert sum(stage_module.writes_output_buffer(i) for i in range(count + 1)) == PLACES[name]
    # In front of a stage there is nobody in the same one.
    assert model.stage_module(range(2, count)).writes_output_buffer(0) == (
        STACKS[name][2] is ResGCNLayer
    )


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


class Breaking(GCNLayer):
    """Declares AFTER, but ``after`` returns other rows."""

    push_maker = PushMaker.AFTER

    def after(self, received, values, rows):
        return {"x": super().after(received, values, rows)["x"] + 1}


class Beginning(GCNLayer):
    """Overrides the method of the first layer for aggregated features."""

    def from_aggregated_features(self, aggregated, rows):
        return {"x": 2 * super().from_aggregated_features(aggregated, rows)["x"]}


def test_error_if_the_declaration_is_wrong(monkeypatch):
    monkeypatch.setitem(STACKS, "breaking", [Breaking] * 3)
    with pytest.raises(TypeError, match=r"pushes other rows than rows\.output_buffer"):
        trained("breaking")


def test_rows_of_an_overridden_first_layer_are_copied(monkeypatch):
    monkeypatch.setitem(STACKS, "beginning", [Beginning, GCNLayer, GCNLayer])
    made = counted(monkeypatch)
    trained("beginning", epochs=1, staleness="exact")
    assert sum(made) == CHUNKS * 2  # of layer 1, in training and in evaluation


def test_error_if_widths_differ():
    first, second = (LayerSpec(7, 3, 2, hidden) for hidden in (16, 8))
    with pytest.raises(
        InputError, match=r"layer 1, GCNLayer, pushes rows of 8, but layer 0 returns"
    ):
        GNN([GCNLayer(0, first), GCNLayer(1, second)])
    norm, buffer = torch.nn.LayerNorm(4), OutputBuffer.of(torch.zeros(6, 3), 2, 5)
    with pytest.raises(ValueError, match=r"\[3, 4\] rows do not fit"):
        norm_relu(
            norm, None, torch.randn(3, 4), None, options=NormReluOptions(output_buffer=buffer)
        )


class WritingLater(Declaring):
    """Writes to its pushed rows after the push."""

    push_maker = PushMaker.AFTER

    def after(self, received, values, rows):
        if not self.is_first:
            with torch.no_grad():
                self.pushed.mul_(0.5)
        return super().after(received, values, rows)

    def before(self, values, rows):
        pushed, kept = super().before(values, rows)
        self.pushed = pushed.detach()
        return pushed, kept


@pytest.mark.parametrize("staleness", ["auto", "exact"])
def test_error_if_pushed_rows_are_written_to(staleness, monkeypatch):
    monkeypatch.setitem(STACKS, "writing later", [WritingLater] * 4)
    with pytest.raises(TypeError, match="wrote to rows after they were pushed"):
        trained("writing later", staleness=staleness)


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
        made = stack("mixed").float()
        with pytest.raises(InputError, match=r"fit\(\) was called under torch.inference_mode"):
            Trainer(config, graph=graph).fit()
        counted = info(config, graph, GAT(7, 8, 2, 3))
    assert counted.memory == info(config, graph, GAT(7, 8, 2, 3)).memory
    with pytest.raises(InputError, match=r"its weight layers\.0\..* was made under torch"):
        Trainer(config, graph=graph, model=made).fit()
