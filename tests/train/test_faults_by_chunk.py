"""NaN in one of several epochs between two flushes."""

import pytest
from helpers import quick_config, small_graph, struck_rows

from gnnpipe import Trainer
from gnnpipe.optim.predicted_step import StepRates
from gnnpipe.setup import build
from gnnpipe.train import loop


@pytest.fixture
def struck():
    """The rows that the second layer pushes in the first chunk of the second epoch are NaN."""
    passes = []

    def strikes(layer, rows):
        is_due = layer == 1 and rows.training and rows.epoch == 1 and not passes
        passes.extend([1] * is_due)
        return is_due

    with struck_rows(strikes):
        yield


def trained(on_nan):
    run = quick_config(
        model="gcnii", layers=3, hidden=8, chunks=4, schedule="async", eval_every=0, epochs=5,
        predict=False, on_nan=on_nan,
    )  # fmt: skip
    return Trainer(run, small_graph()).fit()


def test_the_epoch_of_the_first_fault_is_told(struck):
    with pytest.raises(FloatingPointError, match="epoch 2: the loss is nan, "):
        trained("stop")


def test_a_step_that_was_skipped_counts_for_the_rates_of_predictions(struck, monkeypatch):
    done, made = [], build.WeightUpdate

    def counting(*parts, **named):
        return made(*parts, **named, count_step=lambda: done.append(1))

    monkeypatch.setattr(build, "WeightUpdate", counting)
    executors, real = [], loop.train_epochs

    def train(rank_runtime, *rest):
        executors.append(rank_runtime.executor)
        return real(rank_runtime, *rest)

    monkeypatch.setattr(loop, "train_epochs", train)
    trained("skip")
    assert len(done) == 5 * 4
    assert not executors[0].has_stepped
    assert executors[0].fault_pass == 4
    rates = StepRates([{"lr": 3.0}])
    rates.begin([[1.0], [2.0]], 2)
    rates.count_step()
    assert [*rates(0), *rates(1)] == [1.0, 2.0]
    rates.count_step()
    assert [*rates(0), *rates(2)] == [2.0, 3.0]
