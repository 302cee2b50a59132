"""A model that cannot be recorded runs as it is on one rank, to the numbers of plain PyG."""

import copy
import warnings

import hetero_models
import pytest
import torch
import torch.nn.functional as F
from helpers import plain_pyg_losses, pyg_data, quick_config, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Graph, Trainer
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.run.resume import resumed_config
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

IN, OUT, EPOCHS = 7, 3, 6


class Two(nn.Module):
    def __init__(self, conv=pyg.GCNConv):
        super().__init__()
        self.first, self.second = conv(IN, 8), conv(8, OUT)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        return self.second(F.dropout(x, 0.3, training=self.training), edge_index)


class Softmax(Two):
    """Attends over all vertices."""

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        x = (x @ x.t()).softmax(dim=1) @ x
        return self.second(F.dropout(x, 0.3, training=self.training), edge_index)


class Noise(Two):
    def forward(self, x, edge_index):
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return super().forward(x, edge_index)


class Moving(Two):
    """A buffer that forward assigns; a sum or a mean could be recorded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().amax(0)
        return self.second(F.dropout(x * (1 + self.mean), 0.3, self.training), edge_index)


class Keeps(Two):
    def forward(self, x, edge_index):
        self.hidden = self.first(x, edge_index)
        return self.second(self.hidden, edge_index)


class LSTM(pyg.SAGEConv):
    """A class of its own, because PyG generates code for a class from its first instance."""

    def __init__(self, i, o):
        super().__init__(i, o, aggr="lstm")


MODELS = {"softmax": Softmax, "noise": Noise, "moving": Moving, "lstm": lambda: Two(LSTM)}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def plain_training(model, data, arguments):
    """Losses, and the logits of the last epoch, in plain PyG."""
    losses = plain_pyg_losses(model, data, arguments, EPOCHS)
    with torch.no_grad():
        return losses, model.eval()(*arguments)


@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_pyg_to_the_last_mask(name):
    graph = small_graph()
    data, model = pyg_data(graph), made(name)
    plain = copy.deepcopy(model).double()
    torch.manual_seed(5)
    trainer = Trainer(quick_config(epochs=EPOCHS, eval_every=1), graph=graph, model=model)
    found = [row.loss for row in trainer.fit().history]
    logits = trainer.predict()
    torch.manual_seed(5)
    losses, truth = plain_training(plain, data, (data.x.double(), data.edge_index))
    assert found == pytest.approx(losses, rel=1e-12)
    assert torch.allclose(logits, truth, 1e-10, 1e-12)
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.allclose(a, b, 1e-10, 1e-12)


def test_several_types_of_vertices():
    class Pooled(nn.Module):
        """Attends over all papers."""

        def __init__(self):
            super().__init__()
            self.inner = hetero_models.MODELS[sorted(hetero_models.MODELS)[0]]()

        def forward(self, x_dict, edge_index_dict):
            out = self.inner(x_dict, edge_index_dict)
            out = out["paper"] if isinstance(out, dict) else out
            return (out @ out.t()).softmax(dim=1) @ out

    data = hetero_models.hetero_data(subjects=True)
    model = Pooled()
    model(data.x_dict, data.edge_index_dict)  # lazy weights
    plain = copy.deepcopy(model).double()
    torch.manual_seed(5)
    run = quick_config(epochs=EPOCHS)
    found = [r.loss for r in Trainer(run, graph=Graph.from_pyg(data), model=model).fit().history]
    torch.manual_seed(5)
    x = {k: v.double() for k, v in data.x_dict.items()}
    losses, _ = plain_training(plain, data["paper"], (x, data.edge_index_dict))
    assert found == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("name", ["noise", "moving"])
def test_resumed_runs_have_the_same_bits(name, tmp_path):
    """Random numbers and assigned buffers included."""

    def run(epochs, **more):
        model = made(name)
        torch.manual_seed(5)
        config = quick_config(epochs=epochs, eval_every=2, **more)
        return model, Trainer(config, graph=small_graph(), model=model).fit()

    model, whole = run(8)
    run(4, checkpoint_every=2, out=str(tmp_path / "a"))
    again = made(name)
    torch.manual_seed(99)
    config = resumed_config(tmp_path / "a", {"epochs": 8})
    rest = Trainer(config, graph=small_graph(), model=again, resume=tmp_path / "a").fit()
    assert [r.loss for r in rest.history] == [r.loss for r in whole.history]
    for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_best_weights_hold_assigned_buffers():
    torch.manual_seed(0)
    model = made("moving")
    run = quick_config(epochs=8, eval_every=1, keep_weights="best", lr=0.3)
    trainer = Trainer(run, graph=small_graph(), model=model)
    result = trainer.fit()
    assert result.best_epoch < 8
    assert trainer.evaluate().val_metric == result.best_val_metric


def test_why_it_runs_as_it_is_is_said():
    lines = head_lines(prepare(quick_config(), Mesh.alone(), small_graph(), made("softmax")))
    (said,) = [line for line in lines if "runs as it is" in line and "plain PyG" in line]
    assert "no chunks, stages or shards" in said
    assert "softmax" in said
    assert "test_whole_model.py, line" in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"require_capture": True}, "^model: .*softmax"),
        ({"chunks": 2}, "^model: .*softmax"),
        ({"recompute": True}, "--recompute: no effect on a model that runs as it is.*softmax"),
        ({"order": "metis"}, "--order metis: no effect"),
        ({"matmul_dtype": "bf16", "dtype": "float32"}, "--matmul-dtype bf16: no effect"),
    ],
)
def test_what_needs_a_recording_is_refused(settings, words):
    with pytest.raises(InputError, match=words):
        Trainer(quick_config(**settings), graph=small_graph(), model=made("softmax")).fit()


def test_wrong_results_are_refused_by_name():
    class Wide(Softmax):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index)[:, :2]

    with pytest.raises(InputError, match=r"gives 2 numbers for each vertex, .* 3 classes"):
        Trainer(quick_config(), graph=small_graph(), model=Wide()).fit()


@pytest.mark.parametrize("model", [Keeps, lambda: made("softmax"), Two], ids=["kept", "as", "rec"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_module_stays_usable(model, chunks, tmp_path):
    graph, model = small_graph(), model()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    data = pyg_data(graph)
    try:
        Trainer(quick_config(chunks=chunks), graph=graph, model=model).fit()
    except InputError:
        assert chunks == 2
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert before.keys() == after.keys()
    torch.save(model, tmp_path / "model.pt")
    copy.deepcopy(model)
    assert model(data.x.double(), data.edge_index).shape == (graph.num_vertices, OUT)


def test_cached_convolutions_are_left_empty():
    """Capture runs the convolutions on a sample, whose edges must not be kept."""
    graph = small_graph()
    data = pyg_data(graph)
    model = Two(lambda i, o: pyg.GCNConv(-1, o, cached=True))
    with pytest.raises(InputError):
        Trainer(
            quick_config(recompute=True, require_capture=True),
            graph=graph,
            model=nn.Sequential(model, nn.Linear(OUT, 2)),
        ).fit()
    Trainer(quick_config(epochs=1), graph=graph, model=model).fit()
    assert model.double().eval()(data.x.double(), data.edge_index).shape == (60, OUT)


def test_edge_data_that_a_model_cannot_take_is_left_out():
    """PNA has a parameter edge_attr and fails with it unless it was built with edge_dim."""
    graph = small_graph()
    data = pyg_data(graph)
    data.edge_attr = torch.rand(data.edge_index.shape[1], 4)
    degrees = torch.bincount(torch.bincount(data.edge_index[1]))
    model = pyg.PNA(IN, 8, 2, OUT, aggregators=["mean"], scalers=["identity"], deg=degrees)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Trainer(quick_config(chunks=2), graph=Graph.from_pyg(data), model=model).fit()
    assert any("is called without edge_attr, with which it fails" in str(w.message) for w in told)


def test_memory_of_a_model_that_runs_as_it_is_is_estimated():
    from gnnpipe.setup.memory_estimate import memory_by_rank

    config = TrainConfig(out="off", cache_dir="off", quiet=True)
    small, large = (prepare(config, Mesh.alone(), small_graph(n), made("noise")) for n in (60, 600))
    kept = [memory_by_rank(p)[0].total for p in (small, large)]
    assert 3 < kept[1] / kept[0] < 15


class Autocast(Two):
    """Computes in bf16 by itself."""

    def forward(self, x, edge_index):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x, edge_index).relu()
            return self.second(x, edge_index).float()


@pytest.mark.filterwarnings("ignore:torch.autocast. has no effect")
@pytest.mark.parametrize("is_around", [False, True])
def test_autocast_in_forward_uses_the_weights_of_the_step(is_around):
    """torch keeps rounded weights until the outermost autocast ends."""
    graph = small_graph()
    data, model = pyg_data(graph), Autocast()
    truth, _ = plain_training(copy.deepcopy(model), data, (data.x, data.edge_index))
    trainer = Trainer(quick_config(epochs=EPOCHS, dtype="float32"), graph=graph, model=model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_around):
        found = [row.loss for row in trainer.fit().history]
    assert found == pytest.approx(truth, rel=1e-5)
    assert "forward uses torch.autocast" in "".join(head_lines(trainer._setup()[1]))
