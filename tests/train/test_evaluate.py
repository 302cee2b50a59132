"""Scores and what depends on them (early stopping, kept weights, learning rate)."""

import csv
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from helpers import run_ranks, small_graph

from gnnpipe import InputError, TrainConfig, Trainer
from gnnpipe.data.links import split_links
from gnnpipe.train.evaluate import Scores


def several_labels(n=60, labels=5):
    """Several labels at once, some unknown."""
    graph = small_graph(n)
    y = np.random.default_rng(1).integers(-1, 2, (n, labels)).astype(np.int8)
    y[:, 0] = np.abs(y[:, 0])
    return replace(graph, y=y, num_classes=labels)


def rare_class():
    graph = small_graph()
    y = np.where(graph.y >= 0, (graph.y == 0) & (np.arange(60) % 2 == 0), -1)
    return replace(graph, y=y.astype(np.int64), num_classes=2)


def linked():
    return split_links(small_graph(), "60/20/20", 0)


def config(**settings):
    defaults = {
        "layers": 3,
        "hidden": 8,
        "chunks": 4,
        "epochs": 6,
        "eval_every": 2,
        "dtype": "float64",
        "cache_dir": "off",
        "out": "off",
        "quiet": True,
    }
    return TrainConfig(**(defaults | settings))


def everything():
    """What the tests below ask of four ranks, in one start of them."""
    return {
        "scores": scores_of_cases(2, 2),
        "parity": compare_several((2, 2), "auto"),
        "best": best_weights((2, 2), "best"),
        "last": best_weights((2, 2), "last"),
        "stopped": stopped(2, 2),
    }


@pytest.fixture(scope="module")
def on_four_ranks():
    return run_ranks(everything, 4)


CASES = [
    (several_labels, {}, "f1-micro"),
    (several_labels, {"metric": "rocauc"}, "rocauc"),
    (several_labels, {"metric": "accuracy"}, "accuracy"),
    (rare_class, {}, "rocauc"),
    (rare_class, {"metric": "f1-macro"}, "f1-macro"),
    (several_labels, {"metric": "ap"}, "ap"),
    (linked, {"metric": "ap"}, "ap"),
    (linked, {"metric": "mrr"}, "mrr"),
    (linked, {"metric": "hits@10"}, "hits@10"),
]


def scores_of_cases(stages, shards):
    found = []
    for make, settings, metric in CASES:
        trainer = Trainer(config(stages=stages, shards=shards, **settings), graph=make())
        assert trainer.fit().metric == metric
        found.append(trainer.evaluate())
    return found


def test_every_shape_gives_the_same_scores(on_four_ranks):
    alone = scores_of_cases(1, 1)
    for found in on_four_ranks:
        for mine, other in zip(alone, found["scores"], strict=True):
            for f in fields(mine):
                assert 0 < getattr(mine, f.name) <= 1
                assert getattr(other, f.name) == pytest.approx(getattr(mine, f.name), abs=1e-12)


def ranks_among_negatives(score, negatives):
    """The first and the last rank that a positive may have."""
    return 1 + (negatives > score).sum(), 1 + (negatives >= score).sum()


@pytest.mark.parametrize("metric", ["mrr", "hits@10", "hits@20"])
def test_links_are_ranked_among_all_negatives_of_their_part(metric):
    trainer = Trainer(config(metric=metric), graph=linked())
    result = trainer.fit()
    z, pairs = trainer.predict().numpy(), linked().pairs
    scores = (z[pairs.ends[0]] * z[pairs.ends[1]]).sum(axis=1)
    for part, found in enumerate((result.train_metric, result.val_metric, result.test_metric)):
        yes, no = (scores[(pairs.part == part) & (pairs.label == one)] for one in (1, 0))
        if metric == "mrr":
            truth = np.mean([2 / sum(ranks_among_negatives(score, no)) for score in yes])
        else:
            k = int(metric.removeprefix("hits@"))
            truth = np.mean([ranks_among_negatives(score, no)[1] <= k for score in yes])
        assert found == pytest.approx(truth)


def test_hits_of_few_negatives_cannot_choose_an_epoch():
    with pytest.raises(
        InputError, match=r"--patience 4: hits@100 is 1 for \d+ negative validation"
    ):
        Trainer(config(metric="hits@100", patience=4), graph=linked()).fit()
    assert Trainer(config(metric="hits@100"), graph=linked()).fit().val_metric == 1.0


def compare_several(shape, staleness):
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    mesh = Mesh.join(*shape)
    settings = config(stages=shape[0], shards=shape[1], staleness=staleness, dropout=0.5)
    return max(
        c.largest
        for c in compare_epochs(
            several_labels(), prepare(settings, mesh, several_labels()), mesh, 3
        )
    )


def test_several_labels_have_parity(on_four_ranks):
    assert compare_several((1, 1), "auto") < 1e-11
    assert compare_several((1, 1), "exact") < 1e-11
    assert max(found["parity"] for found in on_four_ranks) < 1e-11


def test_a_part_without_vertices_has_no_score():
    graph = small_graph()
    graph = replace(graph, val_mask=np.zeros(60, bool))
    result = Trainer(config(), graph=graph).fit()
    assert math.isnan(result.val_acc)
    assert math.isnan(result.val_metric)
    for wish in (
        {"patience": 4},
        {"keep_weights": "best"},
        {"lr_schedule": "plateau", "lr_patience": 3},
    ):
        with pytest.raises(InputError, match="no validation vertices; try --split 60/20/20"):
            Trainer(config(**wish), graph=graph).fit()


def falling(monkeypatch, values):
    """Evaluations whose validation scores are given."""
    made = iter(values)

    def fake(rank_runtime, mesh):
        value = next(made)
        return Scores(value, value, value, value, value, value)

    monkeypatch.setattr("gnnpipe.train.loop.evaluate", fake)


def test_patience_ends_the_run_and_keeps_the_best_weights(monkeypatch, tmp_path):
    falling(monkeypatch, [0.1, 0.5, 0.3, 0.5, 0.2, 0.9])
    folder = tmp_path / "run"
    settings = config(
        epochs=100, eval_every=1, patience=3, chunks=1, dropout=0.0, lr=0.05, out=str(folder)
    )
    trainer = Trainer(settings, graph=small_graph())
    result = trainer.fit()
    assert (result.epochs, result.best_epoch, result.weights_of_epoch) == (5, 2, 2)
    assert (result.test_acc, result.test_acc_at_best_val) == (0.2, 0.5)
    # Those are the weights after two epochs, here and on disk.
    falling(monkeypatch, [0.1, 0.2])
    short = Trainer(replace(settings, epochs=2, patience=0, out="off"), graph=small_graph())
    short.fit()
    weights = torch.load(folder / "model.pt")
    for name, tensor in short.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-12, atol=0)
        torch.testing.assert_close(weights[name], tensor, rtol=1e-12, atol=0)


def best_weights(shape, keep):
    stages, shards = shape
    settings = config(
        stages=stages, shards=shards, epochs=30, eval_every=1, keep_weights=keep, lr=0.1, chunks=1
    )
    trainer = Trainer(settings, graph=small_graph())
    result = trainer.fit()
    return result.best_val_acc, result.val_acc, trainer.evaluate().val_acc


@pytest.mark.parametrize("keep", ["best", "last"])
def test_kept_weights_are_scored_in_every_shape(keep, on_four_ranks):
    for found in [best_weights((1, 1), keep), *(found[keep] for found in on_four_ranks)]:
        best, last, after = found
        assert best > last, "the example must have its best epoch on the way"
        assert after == (best if keep == "best" else last)


def rates(folder, **settings):
    Trainer(config(out=str(folder), lr=0.4, **settings), graph=small_graph()).fit()
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return [float(row["lr"]) for row in csv.DictReader(file)]


def test_learning_rates(tmp_path, monkeypatch):
    assert rates(tmp_path / "1") == [0.4] * 6
    assert rates(tmp_path / "2", warmup_epochs=3) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    half = [0.2 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    assert rates(tmp_path / "3", lr_schedule="cosine") == pytest.approx(half)
    late = [0.2 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    found = rates(tmp_path / "4", lr_schedule="cosine", warmup_epochs=2)
    assert found == pytest.approx([0.4 / 3, 0.8 / 3, *late])
    falling(monkeypatch, [0.5, 0.4, 0.6, 0.6, 0.1, 0.1])
    plateau = {"lr_schedule": "plateau", "lr_patience": 2, "eval_every": 1}
    # Two evaluations below the best of the third epoch, then half.
    assert rates(tmp_path / "5", **plateau) == [0.4, 0.4, 0.4, 0.4, 0.4, 0.2]


def test_parity_holds_on_a_schedule():
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    settings = config(lr_schedule="cosine", warmup_epochs=2, lr=0.1)
    prepared = prepare(settings, Mesh.alone(), small_graph())
    assert max(c.largest for c in compare_epochs(small_graph(), prepared, Mesh.alone(), 6)) < 1e-11


def test_validation_of_one_class_cannot_steer():
    graph = rare_class()
    graph = replace(graph, val_mask=graph.val_mask & (graph.y == 0))
    assert math.isnan(Trainer(config(), graph=graph).fit().val_metric)
    for wish in (
        {"patience": 4},
        {"keep_weights": "best"},
        {"lr_schedule": "plateau", "lr_patience": 3},
    ):
        with pytest.raises(InputError, match="ROC AUC needs positive and negative validation"):
            Trainer(config(**wish), graph=graph).fit()
        Trainer(config(metric="accuracy", **wish), graph=graph).fit()


def stopped(stages, shards):
    settings = config(
        stages=stages, shards=shards, epochs=60, eval_every=1, patience=3, lr=0.1, dropout=0.5
    )
    trainer = Trainer(settings, graph=small_graph())
    result = trainer.fit()
    formula = result.comm_bytes_closed_form == result.comm_bytes_per_epoch
    weights = {k: v.numpy() for k, v in trainer.model.state_dict().items()}
    return result.epochs, result.best_epoch, trainer.evaluate().val_acc, formula, weights


def test_every_rank_stops_at_the_same_epoch(on_four_ranks):
    alone = stopped(1, 1)
    assert alone[0] == alone[1] + 3 < 60
    for found in (found["stopped"] for found in on_four_ranks):
        assert found[:4] == alone[:4]
        for name, value in alone[4].items():
            np.testing.assert_allclose(found[4][name], value, rtol=1e-6, atol=1e-9)


def early(stages, shards):
    settings = config(
        stages=stages, shards=shards, epochs=60, eval_every=1, patience=1, exact_epochs=50, lr=1.0
    )
    result = Trainer(settings, graph=small_graph()).fit()
    return result.epochs, result.comm_bytes_per_epoch, result.comm_bytes_closed_form


def test_bytes_of_a_run_that_stops_while_it_is_exact():
    for epochs, counted, formula in run_ranks(early, 2, 2, 1):
        assert epochs < 50
        assert counted == formula
        assert counted["control"] == 0  # exact epochs have no forecast
