"""Optimizers of the settings and of the user, against plain PyG, on ranks and after a resume."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from resume_runs import EPOCHS, config, table
from torch import nn
from torch.optim import lr_scheduler
from torch_geometric.nn import GraphSAGE

from gnnpipe import Trainer
from gnnpipe.config.settings import OPTIMIZERS
from gnnpipe.errors import InputError
from gnnpipe.run.resume import resumed_config


class Sage(nn.Module):
    """Two layers between linear maps, so that groups can be chosen by module."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(7, 8), nn.Linear(8, 3)
        self.body = GraphSAGE(8, 8, 2)

    def forward(self, x, edge_index):
        return self.decode(self.body(self.encode(x).relu(), edge_index).relu())


def sage():
    torch.manual_seed(5)
    return Sage()


def two_groups(kind, model, **settings):
    """Linear maps with their own rate and decay, as PyG's examples of GCNII do."""
    outer = [*model.encode.parameters(), *model.decode.parameters()]
    groups = [
        {"params": outer, "lr": 0.02, "weight_decay": 5e-4},
        {"params": model.body.parameters(), "weight_decay": 0.01},
    ]
    return kind(groups, lr=0.01, **settings)


def only_the_body(model):
    return torch.optim.SGD(model.body.parameters(), lr=0.1)


CHOICES = {
    "class": torch.optim.AdamW,
    "function": functools.partial(two_groups, torch.optim.AdamW),
    "momentum": functools.partial(two_groups, torch.optim.SGD, momentum=0.9, nesterov=True),
    "RMSprop": functools.partial(two_groups, torch.optim.RMSprop, momentum=0.5, centered=True),
    "part of the model": only_the_body,
}


def plain(optimizer_of, epochs=5, scheduler_of=None):
    """Losses in plain PyG."""
    graph, model = small_graph(), sage().double()
    x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
    y, train = torch.from_numpy(graph.y), torch.from_numpy(graph.train_mask)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    losses = []
    for _ in range(epochs):
        model.zero_grad()
        loss = F.cross_entropy(model(x, edges)[train], y[train])
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses


def ours(choice=None, epochs=5, scheduler=None, **settings):
    run = quick_config(epochs=epochs, **settings)
    trainer = Trainer(run, small_graph(), sage(), optimizer=choice, scheduler=scheduler)
    return [row.loss for row in trainer.fit().history]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_named_optimizers_are_those_of_torch(name):
    momentum = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    settings = {"lr": 0.01, "weight_decay": 1e-3, **momentum}
    wanted = plain(lambda model: getattr(torch.optim, name)(model.parameters(), **settings))
    assert ours(optimizer=name, **settings) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", CHOICES)
def test_own_optimizers_are_those_of_plain_pyg(name):
    choice = CHOICES[name]
    given = (
        (lambda m: choice(m.parameters(), lr=0.01, weight_decay=0.0)) if name == "class" else choice
    )
    assert ours(choice) == pytest.approx(plain(given), rel=1e-9)


def test_an_optimizer_of_the_models_parameters():
    model = sage()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = Trainer(quick_config(epochs=5), small_graph(), model, optimizer=optimizer)
    wanted = plain(lambda plain_model: torch.optim.AdamW(plain_model.parameters(), lr=0.02))
    assert [row.loss for row in trainer.fit().history] == pytest.approx(wanted, rel=1e-9)


SCHEDULERS = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05], total_steps=6),
    "chained": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_own_schedulers_are_those_of_plain_pyg(name):
    wanted = plain(CHOICES["function"], scheduler_of=SCHEDULERS[name])
    found = ours(CHOICES["function"], scheduler=SCHEDULERS[name])
    assert found == pytest.approx(wanted, rel=1e-9)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)


class TakesAnything(torch.optim.SGD):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)


@pytest.mark.parametrize("kind", [torch.optim.SGD, TakesAnything])
def test_a_class_gets_momentum(kind):
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    wanted = plain(lambda model: torch.optim.SGD(model.parameters(), **settings))
    assert ours(kind, **settings) == pytest.approx(wanted, rel=1e-9)


def instance_losses(stages, chunks):
    model = sage()
    run = quick_config(
        epochs=12, stages=stages, chunks=chunks, staleness="exact", out="off", predict=True
    )
    optimizer = two_groups(torch.optim.AdamW, model)
    trainer = Trainer(run, small_graph(), model, optimizer=optimizer)
    return [row.loss for row in trainer.fit().history]


def test_an_optimizer_is_not_changed_by_the_prediction():
    """A short profile before the first epoch steps the optimizer of every stage."""
    wanted = plain(CHOICES["function"], epochs=12)
    assert instance_losses(1, 1) == pytest.approx(wanted, rel=1e-9)
    for found in run_ranks(instance_losses, 2, 2, 4):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_state_that_the_constructor_makes():
    def choice(model):
        return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.3)

    assert ours(choice) == pytest.approx(plain(choice), rel=1e-9)


class Scaled(Sage):
    """With a weight of no dimension, and one that two modules share."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.again = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.twice.weight = self.again.weight

    def forward(self, x, edge_index):
        x = self.twice(self.again(self.encode(x).relu())) * self.scale
        return self.decode(self.body(x, edge_index).relu())


def test_a_weight_without_dimensions_and_a_shared_one(tmp_path):
    def choice(model):
        return torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)

    graph, whole, out = small_graph(), tmp_path / "whole", tmp_path / "stopped"
    for folder, epochs in ((whole, EPOCHS), (out, 4)):
        torch.manual_seed(1)
        run = config(folder, checkpoint_every=2, epochs=epochs)
        Trainer(run, graph, Scaled(), optimizer=choice).fit()
    Trainer(
        resumed_config(out, {"epochs": EPOCHS}), graph, Scaled(), optimizer=choice, resume=out
    ).fit()
    assert table(out) == table(whole)


def test_a_plateau_gets_the_validation_metric():
    run = quick_config(epochs=12, eval_every=2, lr=0.4)
    rows = Trainer(run, small_graph(), sage(), scheduler=plateau).fit().history
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule, wanted = plateau(optimizer), []
    for row in rows:
        wanted.append(optimizer.param_groups[0]["lr"])
        if row.scores is not None:
            schedule.step(row.scores.val_metric)
    assert [row.lr for row in rows] == wanted
    assert wanted[-1] < 0.4


def on_ranks(name, shape):
    stages, shards, chunks = shape
    return ours(
        CHOICES[name],
        scheduler=SCHEDULERS["cosine"],
        stages=stages,
        shards=shards,
        chunks=chunks,
        staleness="exact",
    )


@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 2, 1), (4, 1, 4)])
@pytest.mark.parametrize("name", ["function", "momentum", "part of the model"])
def test_ranks_step_the_groups_of_their_stage(name, shape):
    wanted = plain(CHOICES[name], scheduler_of=SCHEDULERS["cosine"])
    for found in run_ranks(on_ranks, shape[0] * shape[1], name, shape):
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHOICES)
def test_a_resumed_run_is_the_same_to_the_bit(name, tmp_path):
    parts = {"optimizer": CHOICES[name], "scheduler": SCHEDULERS["cosine"]}
    graph, whole, out = small_graph(), tmp_path / "whole", tmp_path / "stopped"
    Trainer(config(whole, checkpoint_every=2), graph, sage(), **parts).fit()
    Trainer(config(out, checkpoint_every=2, epochs=4), graph, sage(), **parts).fit()
    run = resumed_config(out, {"epochs": EPOCHS})
    Trainer(run, graph, sage(), resume=out, **parts).fit()
    assert table(out) == table(whole)
    weights = [torch.load(o / "model.pt", weights_only=True) for o in (whole, out)]
    for first, second in zip(*(w.values() for w in weights), strict=True):
        assert np.array_equal(first.numpy(), second.numpy())


def test_a_resumed_run_has_the_optimizer_of_the_run(tmp_path):
    graph, out = small_graph(), tmp_path / "run"
    given = {"optimizer": torch.optim.SGD}
    Trainer(config(out, checkpoint_every=2, epochs=2), graph, sage(), **given).fit()
    run = resumed_config(out, {"epochs": 4})
    with pytest.raises(InputError, match=r"--optimizer: is Adam now, and SGD in"):
        Trainer(run, graph, sage(), resume=out).fit()
    with pytest.raises(InputError, match=r"--optimizer SGD: the run in .* has Adam"):
        resumed_config(out, {"optimizer": "SGD"})
    with pytest.raises(InputError, match="the scheduler of the run: is passed in now, and by --lr"):
        Trainer(run, graph, sage(), resume=out, **given, scheduler=plateau).fit()


def test_a_resumed_run_needs_its_own_groups_and_loss(tmp_path):
    graph, out = small_graph(), tmp_path / "run"
    given = {"optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.1)}
    given |= {"loss_fn": lambda rows, y: F.cross_entropy(rows, y, reduction="sum")}
    Trainer(config(out, checkpoint_every=2, epochs=2), graph, sage(), **given).fit()
    run = resumed_config(out, {"epochs": 4})
    for name, words in (
        ("optimizer", "the choice of the optimizer of the run: is by --optimizer now, and passed"),
        ("loss_fn", "the loss of the run: is that of the labels now, and passed in"),
    ):
        others = {key: value for key, value in given.items() if key != name}
        with pytest.raises(InputError, match=words):
            Trainer(run, graph, sage(), resume=out, **others).fit()
    Trainer(run, graph, sage(), resume=out, **given).fit()


class Keeps(torch.optim.Optimizer):
    """Keeps a number that is no tensor for every weight, as hand-written optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["last"] = None
                p.sub_(p.grad, alpha=group["lr"] / float(state["step"]))


def test_state_that_is_no_tensor_is_resumed(tmp_path):
    graph, whole, out = small_graph(), tmp_path / "whole", tmp_path / "stopped"
    given = {"optimizer": lambda model: Keeps(model.parameters())}
    Trainer(config(whole, checkpoint_every=2), graph, sage(), **given).fit()
    Trainer(config(out, checkpoint_every=2, epochs=4), graph, sage(), **given).fit()
    Trainer(resumed_config(out, {"epochs": EPOCHS}), graph, sage(), resume=out, **given).fit()
    assert table(out) == table(whole)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        closure()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"optimizer": "AdamW"}, r"optimizer: is a str; pass a class such as torch\.optim\.AdamW"),
        ({"optimizer": nn.Linear}, "optimizer: is the class Linear, not a torch.optim.Optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times"),
        ({"optimizer": NeedsClosure}, "NeedsClosure needs a closure in its step"),
        ({"optimizer": lambda model: None}, "optimizer: returned an object of type NoneType"),
        (
            {"optimizer": lambda model: torch.optim.SGD(nn.Linear(2, 3).parameters())},
            r"group 0 has a parameter of shape \[3, 2\] that is not the model's",
        ),
        ({"scheduler": 0.5}, "scheduler: is a float; pass a function of the optimizer"),
        ({"scheduler": lambda optimizer: None}, "scheduler: returned an object of type NoneType"),
        (
            {"scheduler": lambda _: lr_scheduler.ConstantLR(only_the_body(sage()))},
            "scheduler: was made for another optimizer",
        ),
    ],
)
def test_wrong_arguments(parts, words):
    with pytest.raises(InputError, match=words):
        Trainer(quick_config(), small_graph(), sage(), **parts).fit()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_schedule": "cosine"}, "--lr-schedule cosine: a scheduler was passed in, too"),
        ({"warmup_epochs": 1}, "--warmup-epochs 1: not used with a scheduler that is passed in"),
    ],
)
def test_two_schedules_contradict(settings, words):
    with pytest.raises(InputError, match=words):
        Trainer(quick_config(**settings), scheduler=SCHEDULERS["cosine"])


def test_a_setting_needs_an_optimizer_that_has_it():
    with pytest.raises(InputError, match=r"--momentum 0\.9: not used by the optimizer Adam"):
        Trainer(quick_config(momentum=0.9))
    with pytest.raises(InputError, match=r"--weight-decay 0\.1: not used by the optimizer Rprop"):
        Trainer(quick_config(weight_decay=0.1), optimizer=torch.optim.Rprop)


class KeepsText(Keeps):
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["name"] = "text"


def test_state_that_cannot_be_stored_is_named(tmp_path):
    run = config(tmp_path / "run", checkpoint_every=2)
    given = {"optimizer": lambda model: KeepsText(model.parameters())}
    with pytest.raises(InputError, match=r"optimizer: its state .*/name is a str, which a checkp"):
        Trainer(run, small_graph(), sage(), **given).fit()


def test_weights_in_no_group_and_hooks_are_left_as_they_were():
    model = sage()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    Trainer(quick_config(dtype="float32"), small_graph(), model, optimizer=optimizer).fit()
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {k for k in before if k.startswith("body.")}
    assert optimizer.state_dict()["param_groups"] == groups
    assert not optimizer.state
