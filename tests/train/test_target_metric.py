"""``--target-metric``: training ends at the first evaluation that has reached it."""

import math
from dataclasses import replace

import pytest
from helpers import quick_config, small_graph
from resume_runs import table

from gnnpipe import Trainer
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.run.early_stopping import target_is_reached
from gnnpipe.run.resume import resumed_config
from gnnpipe.tasks.scoring import Scores

EVERY = {"eval_every": 1, "epochs": 6, "chunks": 1}


def scores(value):
    return Scores(value, value, value, value, value, value)


@pytest.fixture
def evaluations(monkeypatch):
    """Sets the validation metric of the coming evaluations."""

    def to(*values):
        made = iter(values)
        monkeypatch.setattr("gnnpipe.train.loop.evaluate", lambda *_: scores(next(made)))

    return to


def test_training_ends_at_the_first_evaluation_at_the_target(evaluations, capsys):
    evaluations(0.1, 0.49, 0.5, 0.9)
    config = quick_config(target_metric=0.5, **EVERY | {"eval_every": 2, "epochs": 20})
    result = Trainer(replace(config, quiet=False), graph=small_graph()).fit()
    assert (result.epochs, result.weights_of_epoch) == (6, 6)
    out = capsys.readouterr().out
    assert "stopped after epoch 6: validation accuracy has reached --target-metric 0.5" in out
    assert "not reached" not in out


def test_a_run_that_misses_its_target_says_so(evaluations, capsys):
    evaluations(0.1, 0.4, 0.3)
    config = quick_config(target_metric=0.5, **EVERY | {"epochs": 3})
    result = Trainer(replace(config, quiet=False), graph=small_graph()).fit()
    assert result.epochs == 3
    text = "--target-metric 0.5: not reached in 3 epochs; the best validation accuracy is 0.4, of"
    assert f"{text} epoch 2" in capsys.readouterr().out


def test_the_last_epoch_may_reach_the_target(evaluations, capsys):
    evaluations(0.1, 0.6)
    config = quick_config(target_metric=0.5, **EVERY | {"epochs": 2})
    Trainer(replace(config, quiet=False), graph=small_graph()).fit()
    out = capsys.readouterr().out
    assert "not reached" not in out
    assert "stopped after" not in out


def test_errors_are_reached_from_above_and_nan_never():
    for metric, value, reached in (
        ("accuracy", 0.5, True),
        ("accuracy", 0.49, False),
        ("mae", 0.5, True),
        ("mae", 0.51, False),
        ("rmse", 0.4, True),
        ("accuracy", math.nan, False),
        ("mae", math.nan, False),
    ):
        config = TrainConfig(metric=metric, target_metric=0.5)
        assert target_is_reached(config, scores(value)) == reached, (metric, value)
    assert not target_is_reached(TrainConfig(target_metric=0.5), None)
    assert not target_is_reached(TrainConfig(), scores(1.0))


def test_a_reached_target_ends_the_run_for_good_unless_it_is_raised(evaluations, tmp_path):
    run = tmp_path / "run"
    evaluations(0.1, 0.5)
    config = quick_config(target_metric=0.5, out=str(run), checkpoint_every=1, **EVERY)
    trainer = Trainer(config, graph=small_graph())
    trainer.fit()
    with pytest.raises(InputError, match=r"--target-metric 0.5: has stopped the run after epoch 2"):
        trainer.fit(epochs=2)
    with pytest.raises(InputError, match=r"--target-metric 0.5 has stopped the run; try more"):
        Trainer(resumed_config(run), small_graph(), resume=run).fit()
    evaluations(0.6, 0.7, 0.8)
    higher = resumed_config(run, {"target_metric": 0.8})
    assert Trainer(higher, small_graph(), resume=run).fit().epochs == 5
    assert [row["epoch"] for row in table(run)] == ["1", "2", "3", "4", "5"]


def test_it_may_be_combined_with_patience(evaluations):
    evaluations(0.4, 0.3, 0.3, 0.9)
    config = quick_config(target_metric=0.5, patience=2, **EVERY)
    result = Trainer(config, graph=small_graph()).fit()
    assert (result.epochs, result.weights_of_epoch) == (3, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_metric": 90.0}, "--target-metric 90: must be at most 1 for accuracy"),
        ({"target_metric": -0.1}, "--target-metric -0.1: must be more than 0 for accuracy"),
        ({"target_metric": 0.5, "eval_every": 0}, "--target-metric 0.5: needs evaluations during"),
        ({"target_metric": math.nan}, "--target-metric nan: must be a finite number"),
    ],
)
def test_wrong_use_is_one_line(settings, message):
    with pytest.raises(InputError) as told:
        Trainer(quick_config(**settings), graph=small_graph()).fit()
    assert message in str(told.value)
    assert "\n" not in str(told.value)
