"""Buffers that forward assigns in training are updated once an epoch, as in plain PyG."""

import copy

import pytest
import torch
from helpers import plain_pyg_losses, pyg_data, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.errors import InputError
from gnnpipe.run.resume import resumed_config
from gnnpipe.run.summary import head_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.verification.verify import verify

IN, HIDDEN, OUT, EPOCHS = 7, 8, 3, 6


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.GCNConv(IN, HIDDEN), pyg.GCNConv(HIDDEN, OUT)
        self.register_buffer("kept", torch.full((HIDDEN,), 0.5))

    def forward(self, x, edge_index):
        x = self.between(self.first(x, edge_index).relu())
        return self.second(x, edge_index)


class RunningMean(Base):
    """Reads the new value in training and the kept one in evaluation."""

    def between(self, x):
        if self.training:
            self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)
        return x * (1 + self.kept)


class InPlace(Base):
    """As the centre of DINO: without gradients, in place."""

    def between(self, x):
        centred = x - self.kept
        if self.training:
            with torch.no_grad():
                self.kept.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)
        return centred * self.kept


class WithoutGradients(Base):
    """Assigned and read without gradients."""

    def between(self, x):
        if self.training:
            with torch.no_grad():
                self.kept = torch.lerp(self.kept, x.mean(0), 0.1)
        return x - self.kept


class Teacher(Base):
    """Rows made without gradients."""

    def between(self, x):
        with torch.no_grad():
            teacher = torch.tanh(x * 2.0) * x
        return x * teacher


class Copied(Base):
    """Reads the sum of the epoch before."""

    def between(self, x):
        x = x / (1 + self.kept.abs().sum())
        if self.training:
            self.kept.copy_(x.detach().sum(0))
        return x


class CopiedAndRead(Base):
    """Reads the new value where gradients are recorded."""

    def between(self, x):
        if self.training:
            self.kept.copy_(0.9 * self.kept + 0.1 * x.detach().mean(0))
        return x - self.kept


class Centred(Base):
    """Two buffers, made of two sums one after the other."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(HIDDEN))

    def between(self, x):
        if self.training:
            mean = x.detach().mean(0)
            variance = (x.detach() - mean).square().mean(0)
            self.kept = 0.9 * self.kept + 0.1 * mean
            self.scale = 0.9 * self.scale + 0.1 * (variance + self.kept.square())
        return (x - self.kept) / (self.scale + 0.1).sqrt()


class Steps(Base):
    """A counter of whole numbers, read for a warm-up."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def between(self, x):
        if self.training:
            self.steps += 1
        return x * (self.steps / (self.steps + 4.0))


class Unread(Steps):
    """A counter and a statistic of the logits, which nothing reads."""

    def between(self, x):
        return x

    def forward(self, x, edge_index):
        logits = super().forward(x, edge_index)
        if self.training:
            self.steps.add_(1)
            self.kept[:OUT] = logits.detach().mean(0)
        return logits


MODELS = [
    RunningMean,
    InPlace,
    WithoutGradients,
    Teacher,
    Copied,
    CopiedAndRead,
    Centred,
    Steps,
    Unread,
]


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def plain(kind, graph, epochs=EPOCHS):
    model, data = made(kind), pyg_data(graph)
    losses = plain_pyg_losses(model, data, (data.x.double(), data.edge_index), epochs)
    return losses, model


def run(**settings):
    settings = {"epochs": EPOCHS, "staleness": "exact", "eval_every": 2} | settings
    return quick_config(require_capture=True, **settings)


def assert_equal_states(state, truth):
    assert state.keys() == truth.keys()
    for name, value in state.items():
        assert torch.allclose(value.double(), truth[name].double(), 1e-9, 1e-12), name


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_equals_plain_pyg(kind, chunks):
    graph, model = small_graph(), made(kind)
    trainer = Trainer(run(chunks=chunks), graph=graph, model=model)
    losses = [row.loss for row in trainer.fit().history]
    truth, expected = plain(kind, graph)
    assert losses == pytest.approx(truth, rel=1e-9)
    assert_equal_states(model.state_dict(), expected.state_dict())
    data = pyg_data(graph)
    logits = expected.eval()(data.x.double(), data.edge_index)
    assert torch.allclose(trainer.predict(), logits, 1e-8, 1e-9)


def on_ranks(shapes):
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for kind in MODELS:
            model = made(kind)
            config = run(stages=stages, shards=shards, chunks=chunks)
            result = Trainer(config, graph=small_graph(), model=model, world=mesh).fit()
            found.append(([row.loss for row in result.history], model.state_dict()))
    return found


@pytest.mark.slow
def test_ranks_equal_plain_pyg():
    shapes = ((2, 1, 4), (1, 2, 1), (1, 2, 4))
    truth = [plain(kind, small_graph()) for kind in MODELS] * len(shapes)
    for found in run_ranks(on_ranks, 2, shapes):
        for (losses, state), (expected, model) in zip(found, truth, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)
            assert_equal_states(state, model.state_dict())


@pytest.mark.filterwarnings("ignore:model. .* over all vertices")
@pytest.mark.parametrize("kind", [Centred, Unread])
def test_resumed_runs_have_the_same_bits(kind, tmp_path):
    def train(epochs, **more):
        model = made(kind)
        config = run(epochs=epochs, chunks=4, staleness="auto", **more)
        return model, Trainer(config, graph=small_graph(), model=model).fit()

    model, whole = train(8)
    train(4, checkpoint_every=2, out=str(tmp_path / "a"))
    again = made(kind)
    config = resumed_config(tmp_path / "a", {"epochs": 8})
    rest = Trainer(config, graph=small_graph(), model=again, resume=tmp_path / "a").fit()
    assert [r.loss for r in rest.history] == [r.loss for r in whole.history]
    for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)


class OfRows(Base):
    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(60, HIDDEN)

    def between(self, x):
        if self.training:
            self.kept = x.detach()
        return x + self.kept


class OfWeights(Base):
    def between(self, x):
        if self.training:
            self.kept = self.first.bias.detach() + x.mean(0).detach()
        return x + self.kept


class InEvaluation(Base):
    def between(self, x):
        self.kept = 0.5 * self.kept
        return x + self.kept


class InPlaceInEvaluation(Base):
    def between(self, x):
        self.kept.mul_(0.5)
        return x + self.kept


class OfAView(Base):
    """The recording sees a change of a slice, and not of the buffer."""

    def between(self, x):
        if self.training:
            self.kept[:2].mul_(0.5)
        return x + 1


class NoState(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("passing", torch.zeros(HIDDEN), persistent=False)

    def between(self, x):
        if self.training:
            self.passing = 0.5 + self.passing
        return x + self.passing


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OfRows, r"assigns the buffer kept .*each vertex \(.*self\.kept = x\.detach"),
        (OfWeights, "assigns the buffer kept .*weights"),
        (InEvaluation, r"buffer kept .*in evaluation"),
        (InPlaceInEvaluation, r"kept in place"),
        (OfAView, "changes the buffer kept"),
        (NoState, "assigns the buffer passing, which is not part of the state dict"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_kept_runs_as_it_is(kind, words):
    graph, model = small_graph(), made(kind)
    with pytest.raises(InputError, match=words):
        Trainer(run(), graph=graph, model=copy.deepcopy(model)).fit()
    trainer = Trainer(quick_config(epochs=EPOCHS, eval_every=0), graph=graph, model=model)
    losses = [row.loss for row in trainer.fit().history]
    assert losses == pytest.approx(plain(kind, graph)[0], rel=1e-9)
    assert "runs as it is" in "".join(head_lines(trainer._setup()[1]))


def test_verify_refuses_by_name():
    with pytest.raises(InputError, match="assigns the buffer kept"):
        verify(run(), small_graph(), RunningMean())
