"""Training with ``--schedule 1f1b`` and ``async``: what users see, and what is refused."""

import math
import re

import pyg_models
import pytest
import torch
from helpers import carrying, quick_config, small_graph
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import dropout_edge

from gnnpipe import Trainer
from gnnpipe.callbacks.callback import Callback
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepare import prepare
from gnnpipe.train import loop
from gnnpipe.verification.comparison import compare_epochs


def trained(model=None, **settings):
    """Losses and weights after six epochs, with dropout."""
    run = quick_config(**{"model": "gcnii", "layers": 3, "hidden": 8, "epochs": 6} | settings)
    torch.manual_seed(2)
    trainer = Trainer(run, small_graph(sparse=True), model)
    result = trainer.fit()
    weights = {k: v.numpy().tobytes() for k, v in trainer.model.state_dict().items()}
    return [row.loss for row in result.history], weights


def test_one_stage_async_is_chunk_after_chunk_to_the_bit():
    settings = {"chunks": 5, "lr_schedule": "cosine", "warmup_epochs": 2, "eval_every": 4}
    flowing = trained(schedule="async", **settings)
    assert flowing == trained(schedule="1f1b", steps_every=1, **settings)
    assert flowing != trained(schedule="1f1b", **settings)


def test_one_chunk_is_the_full_batch_to_the_bit():
    # With Adam as torch chooses it for the full batch: fused kernels round in another order.
    plain = [trained(lr_schedule="cosine", optimizer="SGD", lr=0.5, momentum=0.9)]
    for schedule in ("1f1b", "async"):
        more = {"lr_schedule": "cosine", "optimizer": "SGD", "lr": 0.5, "momentum": 0.9}
        plain.append(trained(schedule=schedule, **more))
    assert plain[0] == plain[1] == plain[2]


OWN = {
    "gat": lambda: Attention(),
    "edge features": pyg_models.Attributed,
    "statistics": lambda: pyg_models.Normed(pyg.GraphNorm(pyg_models.HIDDEN)),
}


@pytest.mark.parametrize("model", OWN)
def test_one_chunk_over_several_epochs_to_a_flush_is_the_full_batch_to_the_bit(model):
    graph = small_graph()
    if model == "edge features":
        graph = carrying(graph, "edge_attr")
    found = []
    for schedule in ("fill-drain", "1f1b", "async"):
        torch.manual_seed(2)
        run = quick_config(
            schedule=schedule, epochs=5, eval_every=0, optimizer="SGD", lr=0.2, predict=False
        )
        result = Trainer(run, graph, OWN[model]()).fit()
        found.append([row.loss for row in result.history])
    assert found[0] == found[1] == found[2]


def test_metrics_have_a_row_for_every_epoch():
    run = quick_config(chunks=4, schedule="async", epochs=7, eval_every=3)
    seen = []

    class Listener(Callback):
        def on_epoch_end(self, trainer, row):
            seen.append(row.epoch)

    result = Trainer(run, small_graph(), callbacks=[Listener()]).fit()
    assert [row.epoch for row in result.history] == seen == list(range(1, 8))
    assert [row.scores is not None for row in result.history] == [
        False,
        False,
        True,
        False,
        False,
        True,
        True,
    ]
    rates = [row.lr for row in result.history]
    assert rates == pytest.approx([0.0025 * (1 + math.cos(math.pi * e / 7)) for e in range(7)])
    assert all(row.staleness.stale_reads > 0 for row in result.history)
    assert not result.exact
    assert result.exact_epochs == 0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = pyg.GATConv(7, 6), pyg.GATConv(6, 3)

    def forward(self, x, edge_index):
        return self.b(self.a(x, edge_index).tanh(), edge_index)


def attention_by_hand(graph, chunk_of, orders):
    """PyG's layers on the whole graph, where the rows of other chunks are constants of a table.

    The table holds the rows behind the product, which gnnpipe pushes.
    """
    model = Attention().double()
    x, y = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.y).long()
    edges = torch.from_numpy(graph.edge_index.copy()).long()
    train = torch.from_numpy(graph.train_mask)
    tables = [torch.zeros(len(x), 6).double(), torch.zeros(len(x), 3).double()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for order in orders:
        total = 0.0
        for chunk in order:
            mine = torch.from_numpy(chunk_of == chunk)
            rows = x[mine]
            for table, layer in zip(tables, (model.a, model.b), strict=True):
                product, layer.lin = layer.lin, nn.Identity()
                rows = product(rows)
                table[mine] = rows.detach()
                whole = table.clone()
                whole[mine] = rows
                rows, layer.lin = layer(whole, edges)[mine], product
                rows = rows.tanh() if layer is model.a else rows
            chosen = train[mine]
            wrong = nn.functional.cross_entropy(rows[chosen], y[mine][chosen], reduction="sum")
            loss = wrong / train.sum()
            total += loss.item()
            optimizer.zero_grad()
            (loss * train.sum() / chosen.sum()).backward()
            optimizer.step()
        losses.append(total)
    return losses


def test_convolutions_on_blocks_keep_gradients_in_their_chunk():
    graph = small_graph(directed=True)
    run = quick_config(
        chunks=4, schedule="async", epochs=3, eval_every=2, lr=0.02, lr_schedule="constant"
    )
    trainer = Trainer(run, graph, Attention())
    prepared = trainer._setup()[1]
    chunk_of = prepared.chunking.chunk_of_row()[prepared.chunking.inverse]
    orders = [prepared.chunk_order(epoch) for epoch in range(3)]
    losses = [row.loss for row in trainer.fit().history]
    assert losses == pytest.approx(attention_by_hand(graph, chunk_of, orders), rel=1e-10)


REFUSED = {
    "--staleness paper: not used with --schedule async": {"staleness": "paper"},
    "--exact-above 3.0: has no effect with --schedule async": {"exact_above": 3.0},
    "--snapshot-every 2: has no effect": {"snapshot_every": 2},
    "--steps-every 3: does not divide --chunks 8; try 1, 2, 4, 8": {"steps_every": 3},
    "--steps-every 2: --schedule fill-drain takes one optimizer step an epoch": {
        "steps_every": 2,
        "schedule": "fill-drain",
    },
    "--weights stash: has no effect with --schedule 1f1b": {"schedule": "1f1b", "weights": "stash"},
    "--schedule async: no effect with --plan auto": {"plan": "auto", "chunks": 1},
    "--steps-every 4: --schedule fill-drain takes one": {
        "plan": "auto",
        "chunks": 1,
        "schedule": "fill-drain",
        "steps_every": 4,
    },
    "--no-checkpoint-tables: --schedule async has no epochs that fill": {
        "checkpoint_tables": False
    },
    "--label-inputs 0.5: changes the features in every epoch": {"label_inputs": 0.5},
    "--passes-ahead 2: with --stages 1 no stage is ahead": {"passes_ahead": 2},
}


@pytest.mark.parametrize("text", REFUSED)
def test_settings_that_contradict_are_refused(text):
    with pytest.raises(InputError, match=text):
        quick_config(**{"chunks": 8, "schedule": "async"} | REFUSED[text])


def test_too_few_chunks_and_policies_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="--chunks 2: stage 0 works on 3 chunks at once"):
        prepared_of(stages=3, chunks=2)
    with pytest.raises(InputError, match="--chunks 4: stage 0 works on 5 chunks at once"):
        prepared_of(stages=3, chunks=4, passes_ahead=2)
    with pytest.raises(InputError, match="--weights 2bw: a stage makes up to 2 optimizer steps"):
        prepared_of(stages=3, chunks=6, weights="2bw")
    assert prepared_of(stages=3, chunks=6, weights="2bw", steps_every=3).program.largest_gap == 1


def test_an_optimizer_that_cannot_be_predicted_is_refused_before_the_graph_is_cut(monkeypatch):
    monkeypatch.setattr(
        "gnnpipe.setup.prepare._partition", lambda *_: pytest.fail("the graph was cut")
    )
    settings = {"stages": 3, "chunks": 6, "optimizer": torch.optim.Adagrad}
    with pytest.raises(InputError, match=r"predict: .* Adagrad .* try SGD, .*, or --weights stash"):
        prepared_of(**settings)
    monkeypatch.undo()
    assert prepared_of(**settings, weights="stash").program.largest_gap == 2


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_number_of_chunks_that_2bw_is_refused_with_suits(ahead):
    settings = {"stages": 3, "chunks": 24, "weights": "2bw", "passes_ahead": ahead}
    with pytest.raises(InputError) as error:
        prepared_of(**settings)
    named = int(re.search(r"--steps-every of at least (\d+),", str(error.value)).group(1))
    suits = next(n for n in (2, 3, 4, 6, 8, 12) if n >= named)
    assert prepared_of(**settings, steps_every=suits).program.largest_gap == 1
    if named > 2:
        with pytest.raises(InputError):
            prepared_of(**settings, steps_every=max(n for n in (2, 3, 4) if n < named))


def test_recompute_is_refused_where_backward_has_other_weights_than_forward():
    with pytest.raises(InputError, match="--recompute: with --schedule async --weights predict"):
        prepared_of(stages=2, chunks=6, recompute=True)
    assert prepared_of(stages=2, chunks=6, recompute=True, weights="stash").program.largest_gap
    assert not prepared_of(stages=1, chunks=6, recompute=True).program.largest_gap


class RandomEdges(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = pyg.GCNConv(7, 3)

    def forward(self, x, edge_index):
        return self.a(x, dropout_edge(edge_index, 0.3, training=self.training)[0])


def test_a_model_that_draws_edges_is_refused_by_async_alone():
    with pytest.raises(InputError, match="--schedule async: the model draws other edges"):
        Trainer(quick_config(chunks=4, schedule="async"), small_graph(), RandomEdges()).fit()
    Trainer(quick_config(chunks=4, schedule="1f1b"), small_graph(), RandomEdges()).fit()


def test_a_scheduler_of_the_user_may_train_on():
    run = quick_config(chunks=4, schedule="async", epochs=2)
    constant = torch.optim.lr_scheduler.ConstantLR
    trainer = Trainer(run, small_graph(), scheduler=lambda optimizer: constant(optimizer, 0.5))
    trainer.fit()
    assert len(trainer.fit(1).history) == 3


def test_running_statistics_move_once_an_epoch():
    found = []
    for schedule in ("fill-drain", "async"):
        torch.manual_seed(2)
        model = pyg_models.Normed(pyg.BatchNorm(pyg_models.HIDDEN))
        run = quick_config(schedule=schedule, epochs=4, eval_every=0, optimizer="SGD")
        trainer = Trainer(run, small_graph(), model)
        trainer.fit()
        found.append({k: v.numpy().tobytes() for k, v in trainer.model.state_dict().items()})
    assert found[0] == found[1]
    run = quick_config(schedule="async", chunks=4, epochs=4, eval_every=0, predict=False)
    trainer = Trainer(run, small_graph(), pyg_models.Normed(nn.BatchNorm1d(pyg_models.HIDDEN)))
    with pytest.warns(UserWarning, match="exact with --chunks 1, or --schedule fill-drain"):
        trainer.fit()
    assert int(trainer.model.state_dict()["norm.num_batches_tracked"]) == 4


def test_stale_label_inputs_are_told_with_what_is_exact():
    run = quick_config(schedule="1f1b", chunks=4, label_inputs=0.5, predict=False)
    with pytest.warns(UserWarning, match="label-inputs 0.5: .* exact with --chunks 1, or"):
        Trainer(run, small_graph()).fit()


def prepared_of(stages, optimizer=None, **settings):
    """A run of several stages, decided in one process."""
    config = quick_config(stages=stages, layers=stages, schedule="async", **settings)
    return prepare(config, World.alone(), small_graph(), optimizer=optimizer)


def test_the_plan_of_a_file_gives_the_schedule(tmp_path):
    run = quick_config(chunks=4, layers=2)
    plan = Trainer(run, small_graph()).plan
    told = Plan.from_json(plan.to_json().replace("fill-drain", "async"))
    refused = {
        "--label-inputs 0.5: changes": ("async", {"label_inputs": 0.5}),
        "--weights stash: has no effect": ("fill-drain", {"weights": "stash"}),
        "--steps-every 2: --schedule fill-drain takes": ("fill-drain", {"steps_every": 2}),
        "--passes-ahead 2: --schedule fill-drain runs": ("fill-drain", {"passes_ahead": 2}),
        "--no-checkpoint-tables: --schedule async": ("async", {"checkpoint_tables": False}),
    }
    for text, (schedule, more) in refused.items():
        file = tmp_path / "plan.json"
        file.write_text((told if schedule == "async" else plan).to_json())
        with pytest.raises(InputError, match=text):
            Trainer(quick_config(plan=str(file), layers=2, **more), small_graph()).fit()
    with pytest.raises(InputError, match="--staleness exact: not used with --schedule async"):
        Trainer(quick_config(chunks=4, staleness="exact"), small_graph(), plan=told).fit()
    with pytest.raises(InputError, match="--steps-every 3: does not divide --chunks 4"):
        Trainer(
            quick_config(schedule="async", chunks=3, steps_every=3), small_graph(), plan=told
        ).fit()
    trainer = Trainer(run, small_graph(), plan=told)
    losses = [row.loss for row in trainer.fit().history]
    with pytest.raises(InputError, match="--lr-schedule auto: the learning rate is 0 after"):
        trainer.fit(1)
    assert losses == [
        row.loss
        for row in Trainer(quick_config(chunks=4, layers=2, schedule="async"), small_graph())
        .fit()
        .history
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_an_epoch_is_predicted_from_epochs_of_fill_drain(schedule):
    settings = {"chunks": 4, "schedule": schedule, "eval_every": 5, "layers": 3, "hidden": 8}
    run = quick_config(epochs=12, **settings)
    trainer = Trainer(run, small_graph())
    result = trainer.fit()
    assert result.predicted_epoch_time_s > 0
    assert result.predicted_time_shares[0].epoch_s == pytest.approx(result.predicted_epoch_time_s)
    # The profile leaves no trace in the run.
    plain = Trainer(quick_config(epochs=12, predict=False, **settings), small_graph()).fit()
    assert [row.loss for row in plain.history] == [row.loss for row in result.history]


def test_verify_says_what_it_does_not_follow():
    config = quick_config(chunks=4, schedule="async")
    prepared = prepare(config, World.alone(), small_graph())
    with pytest.raises(InputError, match="--schedule async: gradients stay in their chunk"):
        compare_epochs(small_graph(), prepared, Mesh.alone(), 1)
    # One chunk is the full batch, which verify follows.
    whole = prepare(quick_config(schedule="1f1b"), World.alone(), small_graph())
    assert compare_epochs(small_graph(), whole, Mesh.alone(), 2)[-1].largest < 1e-11


@pytest.mark.parametrize(("schedule", "count"), [("async", 3), ("1f1b", 3), ("fill-drain", 1)])
def test_an_evaluation_finds_no_holes_of_chunks(schedule, count, monkeypatch):
    """Before each evaluation, and if an epoch uses the memory of all chunks before the last one."""
    freed = []
    monkeypatch.setattr(loop, "free_holes", freed.append)
    config = quick_config(schedule=schedule, chunks=4, epochs=6, eval_every=2)
    Trainer(config, small_graph()).fit()
    assert len(freed) == count
