"""The trainer: run folder, repetition, and the same curve on one rank and on many."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import run_ranks, small_graph

from gnnpipe import InputError, TrainConfig, Trainer
from gnnpipe.plan import Plan

RESULT_KEYS = {
    "dataset", "model", "layers", "hidden", "stages", "shards", "chunks", "world_size", "epochs",
    "seed", "exact", "loss", "train_acc", "val_acc", "test_acc", "best_val_acc",
    "test_acc_at_best_val", "best_epoch", "epoch_time_s", "comm_bytes_per_epoch",
    "comm_bytes_closed_form", "peak_memory_bytes", "versions",
}  # fmt: skip


def losses(shape, epochs, **settings):
    stages, shards = shape
    config = TrainConfig(
        stages=stages, shards=shards, epochs=epochs, eval_every=0, out="off", cache_dir="off",
        **settings,
    )  # fmt: skip
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
        dataset="karate", model="gcnii", layers=4, hidden=8, chunks=3, epochs=7, eval_every=3,
        out=str(out), cache_dir="off",
    )  # fmt: skip
    result = Trainer(config).fit()
    names = {p.name for p in out.iterdir()}
    assert names == {
        "config.toml", "plan.json", "program.txt", "metrics.csv", "result.json", "model.pt",
    }  # fmt: skip
    with open(out / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["epoch"]) for r in rows] == list(range(1, 8))
    assert [r["epoch"] for r in rows if r["val_acc"]] == ["3", "6", "7"]
    assert [float(r["loss"]) for r in rows] == [h.loss for h in result.history]
    written = json.loads((out / "result.json").read_text())
    assert set(written) >= RESULT_KEYS
    assert written["exact"] is False
    assert set(written["comm_bytes_per_epoch"]) == {"pipeline", "graph", "gradient", "total"}
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
        model="gcnii", layers=4, hidden=8, stages=shape[0], shards=shape[1], chunks=4, epochs=3,
        out="off", cache_dir="off",
    )  # fmt: skip
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
    paper = TrainConfig(chunks=4).techniques
    assert (paper.shuffle_chunks, paper.snapshot_every, paper.scale_live_gradients) == (True, 23, 2)
    none = TrainConfig(chunks=4, staleness="none", snapshot_every=5).techniques
    assert (none.shuffle_chunks, none.snapshot_every, none.scale_live_gradients) == (False, 5, 1)
    assert TrainConfig(chunks=1).techniques.snapshot_every == 1


def test_parts_that_do_not_fit_are_refused():
    graph = small_graph()
    config = TrainConfig(layers=3, hidden=8, out="off", cache_dir="off")
    other = Trainer(config, graph=small_graph(features=9)).model
    with pytest.raises(InputError, match="num_features = 9"):
        Trainer(config, graph=graph, model=other).fit()
    plan = Trainer(config, graph=graph).plan
    with pytest.raises(InputError, match="plan: is for 3 layers, not 4"):
        Trainer(TrainConfig(layers=4, out="off"), graph=graph, plan=plan).fit()
    synced = Trainer(replace(config, chunks=2, staleness="exact"), graph=graph).plan
    with pytest.raises(InputError, match="try --staleness exact"):
        Trainer(replace(config, chunks=2), graph=graph, plan=synced).fit()
    with pytest.raises(InputError, match="--chunks"):
        Trainer(TrainConfig(layers=3, chunks=2, out="off"), graph=graph, plan=plan).fit()
