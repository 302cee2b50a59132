"""The trainer: run folder, repetition, and the same curve on one rank and on many."""

import csv
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import quick_config, run_ranks, small_graph
from stage_dags import plan_of_runs

from gnnpipe import InputError, TrainConfig, Trainer
from gnnpipe.perf import read_trace
from gnnpipe.plan import Plan
from gnnpipe.setup.prepared import chunk_order
from gnnpipe.train.evaluate import Scores

RESULT_KEYS = {
    "dataset",
    "model",
    "layers",
    "hidden",
    "stages",
    "shards",
    "chunks",
    "world_size",
    "epochs",
    "seed",
    "exact",
    "loss",
    "train_acc",
    "val_acc",
    "test_acc",
    "best_val_acc",
    "test_acc_at_best_val",
    "best_epoch",
    "epoch_time_s",
    "comm_bytes_per_epoch",
    "comm_bytes_closed_form",
    "peak_memory_bytes",
    "versions",
}


def losses(shape, epochs, **settings):
    stages, shards = shape
    config = TrainConfig(
        stages=stages,
        shards=shards,
        epochs=epochs,
        eval_every=0,
        out="off",
        cache_dir="off",
        **settings,
    )
    result = Trainer(config, graph=small_graph(n=300, features=20)).fit()
    return [row.loss for row in result.history]


def test_one_two_and_four_ranks_agree_with_dropout():
    """At K = 1: rel. 1e-5 over 6 epochs and 1e-3 over 50, dropout 0.5."""
    settings = {"model": "gcnii", "layers": 4, "hidden": 16, "dropout": 0.5}
    alone = losses((1, 1), 50, **settings)
    for ranks, shapes in ((2, [(1, 2), (2, 1)]), (4, [(2, 2)])):
        for shape in shapes:
            found = run_ranks(_many_losses, ranks, shape, settings)
            assert all(f == found[0] for f in found)
            np.testing.assert_allclose(found[0][:6], alone[:6], rtol=1e-5)
            np.testing.assert_allclose(found[0], alone, rtol=1e-3)


def _many_losses(shape, settings):
    return losses(shape, 50, **settings)


def test_run_folder_is_whole_and_repeats(tmp_path):
    out = tmp_path / "run"
    config = TrainConfig(
        dataset="karate",
        model="gcnii",
        layers=4,
        hidden=8,
        chunks=3,
        epochs=7,
        eval_every=3,
        out=str(out),
        cache_dir="off",
    )
    result = Trainer(config).fit()
    names = {p.name for p in out.iterdir()}
    assert names == {
        "config.toml",
        "plan.json",
        "program.txt",
        "metrics.csv",
        "result.json",
        "model.pt",
        "logs",
        "trace.json",
    }
    trace = read_trace(out / "trace.json")
    assert trace.predicted == ()
    kinds = [(s.kind, s.steps) for s in trace.measured if s.kind != "WAIT"]
    program = Trainer(config)._setup()[1].program_of(6).stages[0]
    assert kinds == [(a.kind, a.steps) for a in program]
    with open(out / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["epoch"]) for r in rows] == list(range(1, 8))
    assert [r["epoch"] for r in rows if r["val_acc"]] == ["3", "6", "7"]
    assert [float(r["loss"]) for r in rows] == [h.loss for h in result.history]
    written = json.loads((out / "result.json").read_text())
    assert set(written) >= RESULT_KEYS
    assert written["exact"] is False
    assert set(written["comm_bytes_per_epoch"]) == {
        "pipeline",
        "graph",
        "gradient",
        "control",
        "total",
    }
    assert written["peak_memory_bytes"][0] > 2**20

    values = TrainConfig.read_toml(out / "config.toml") | {"out": "off"}
    plan = Plan.from_json((out / "plan.json").read_text())
    again = Trainer(TrainConfig.from_dict(values), plan=plan).fit()
    assert [r.loss for r in again.history] == [r.loss for r in result.history]
    assert [r.scores for r in again.history] == [r.scores for r in result.history]


def test_model_holds_the_trained_weights_and_predict_uses_the_graphs_order():
    graph = small_graph()
    config = TrainConfig(layers=3, hidden=8, chunks=4, epochs=3, out="off", cache_dir="off")
    trainer = Trainer(config, graph=graph)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    result = trainer.fit()
    assert any(not torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    right = trainer.predict().argmax(1).numpy() == graph.y
    assert right[graph.test_mask].mean() == pytest.approx(result.test_acc)
    # The same weights on one chunk predict the same: evaluation is exact.
    whole = Trainer(TrainConfig(layers=3, hidden=8, out="off"), graph=graph, model=trainer.model)
    torch.testing.assert_close(whole.predict(), trainer.predict())


def trained_weights(shape):
    config = TrainConfig(
        model="gcnii",
        layers=4,
        hidden=8,
        stages=shape[0],
        shards=shape[1],
        chunks=4,
        epochs=3,
        out="off",
        cache_dir="off",
    )
    trainer = Trainer(config, graph=small_graph())
    trainer.fit()
    return trainer.model.state_dict(), trainer.predict(), trainer.evaluate()


def test_every_rank_ends_with_all_weights():
    weights, logits, scores = trained_weights((1, 1))
    for other in run_ranks(trained_weights, 4, (2, 2)):
        assert list(other[0]) == list(weights)
        for name, tensor in other[0].items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(other[1], logits, rtol=1e-3, atol=1e-4)
        assert other[2] == scores


def test_techniques_follow_the_preset_unless_set_one_by_one():
    auto = TrainConfig(chunks=4).staleness_settings_for(4, "fill-drain")
    assert (auto.probes, auto.exact_epochs, auto.snapshot_every) == (512, 1, 1)
    paper = TrainConfig(chunks=4, staleness="paper").staleness_settings_for(4, "fill-drain")
    assert paper.probes == 0
    short = TrainConfig(chunks=4, epochs=3, exact_epochs=3).staleness_settings_for(4, "fill-drain")
    assert short.is_exact, "a run of exact epochs alone is an exact run"
    assert not short.probes
    assert (paper.shuffle_chunks, paper.snapshot_every, paper.scale_live_gradients) == (True, 23, 2)
    none = TrainConfig(chunks=4, staleness="none", snapshot_every=5).staleness_settings_for(
        4, "fill-drain"
    )
    assert (none.shuffle_chunks, none.snapshot_every, none.scale_live_gradients) == (False, 5, 1)
    assert TrainConfig(chunks=4).staleness_settings_for(1, "fill-drain").snapshot_every == 1


def test_evaluation_drops_nothing_and_training_drops_anew_every_epoch():
    graph = small_graph()
    config = TrainConfig(
        layers=2, hidden=8, dropout=0.5, lr=1e-30, weight_decay=0.0, epochs=3, out="off", quiet=True
    )
    with_dropout = Trainer(config, graph=graph)
    without = Trainer(replace(config, dropout=0.0), graph=graph)
    torch.testing.assert_close(with_dropout.predict(), without.predict())
    losses = [row.loss for row in with_dropout.fit().history]
    assert len(set(losses)) == 3, "the weights stand still, the masks do not"
    assert len({row.loss for row in without.fit().history}) == 1


def test_chunks_are_walked_in_a_new_order_every_epoch():
    orders = [tuple(chunk_order(9, 0, epoch)) for epoch in range(6)]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert orders == [tuple(chunk_order(9, 0, epoch)) for epoch in range(6)]
    assert tuple(chunk_order(9, None, 3)) == tuple(range(9))


def test_best_epoch_is_the_first_with_the_best_validation_and_time_is_training_alone(monkeypatch):
    made = iter([(0.1, 0.4, 0.1), (0.2, 0.9, 0.2), (0.3, 0.9, 0.3), (0.4, 0.5, 0.4)])

    def slow(rank_runtime, mesh):
        time.sleep(0.2)
        scores = next(made)
        return Scores(*scores, *scores)

    monkeypatch.setattr("gnnpipe.train.loop.evaluate", slow)
    config = TrainConfig(dataset="karate", epochs=4, eval_every=1, out="off", quiet=True)
    result = Trainer(config).fit()
    assert (result.best_epoch, result.best_val_acc, result.test_acc_at_best_val) == (2, 0.9, 0.2)
    assert (result.train_acc, result.val_acc, result.test_acc) == (0.4, 0.5, 0.4)
    assert result.epoch_time_s < 0.15
    assert all(row.eval_time_s >= 0.2 for row in result.history)


def test_nan_loss_ends_the_run():
    config = TrainConfig(dataset="karate", epochs=50, lr=1e25, out="off", quiet=True)
    with pytest.raises(FloatingPointError, match=r"epoch \d+: the loss is .*--lr"):
        Trainer(config).fit()


def test_a_run_with_a_passed_graph_does_not_pretend_to_be_another(tmp_path):
    config = TrainConfig(layers=2, hidden=8, epochs=1, out=str(tmp_path / "run"), quiet=True)
    Trainer(config, graph=small_graph()).fit()
    values = TrainConfig.read_toml(tmp_path / "run" / "config.toml")
    with pytest.raises(InputError, match="passed-in:small"):
        Trainer(TrainConfig.from_dict(values | {"out": "off"})).fit()


class Identity(torch.nn.Module):
    def forward(self, edge_index):
        return edge_index


def test_parts_of_the_wrong_kind_are_refused():
    config = TrainConfig(layers=3, hidden=8, out="off", quiet=True)
    with pytest.raises(InputError, match=r"Identity\.forward\(edge_index\) should take features"):
        Trainer(config, model=Identity()).fit()
    with pytest.raises(InputError, match=r"Graph\.from_pyg"):
        Trainer(config, graph=object()).fit()
    with pytest.raises(InputError, match="--split"):
        Trainer(replace(config, split="60/20/20"), graph=small_graph()).fit()
    two = plan_of_runs(((0, 1), (1, 3)), 1, 1)
    with pytest.raises(InputError, match="plan: need 2 ranks, not 1"):
        Trainer(config, graph=small_graph(), plan=two).fit()
    with pytest.raises(InputError, match="plan: is a dict"):
        Trainer(config, graph=small_graph(), plan={})


def test_parts_that_do_not_fit_are_refused():
    graph = small_graph()
    config = TrainConfig(layers=3, hidden=8, out="off", cache_dir="off")
    other = Trainer(config, graph=small_graph(features=9)).model
    with pytest.raises(InputError, match="takes 9 features, but graph 'small' has 7"):
        Trainer(config, graph=graph, model=other).fit()
    plan = Trainer(config, graph=graph).plan
    # An inner layer is a sum over neighbours and the rest; the last has a product before both.
    with pytest.raises(InputError, match="plan: is for 7 ops, and GCN has 9"):
        Trainer(TrainConfig(layers=4, out="off"), graph=graph, plan=plan).fit()
    stale = Trainer(replace(config, chunks=2), graph=graph).plan
    with pytest.raises(InputError, match="--staleness exact allows none"):
        Trainer(replace(config, chunks=2, staleness="exact"), graph=graph, plan=stale).fit()
    with pytest.raises(InputError, match="--staleness exact allows none"):  # chunks of the plan
        Trainer(replace(config, staleness="exact"), graph=graph, plan=stale).fit()
    with pytest.raises(InputError, match="schedule 'zigzag'"):
        Trainer(config, graph=graph, plan=replace(stale, schedule="zigzag")).fit()


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_autocast_around_a_trainer_changes_nothing(model):
    graph, run = small_graph(), quick_config(model=model, hidden=8, dtype="float32")
    plain = Trainer(run, graph=graph)
    losses = [row.loss for row in plain.fit().history]
    trainer = Trainer(run, graph=graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(
            UserWarning, match=r"torch\.autocast: has no effect .*--matmul-dtype bf16"
        ):
            found = [row.loss for row in trainer.fit().history]
        assert found == losses
        with pytest.warns(UserWarning, match="autocast"):
            assert torch.equal(trainer.predict(), plain.predict())
        with pytest.warns(UserWarning, match="autocast"):
            assert trainer.evaluate() == plain.evaluate()
        assert torch.is_autocast_enabled("cpu"), "it is on again for the caller"
