"""State of the executor after an epoch, and after a pass that failed."""

import gc
import math

import pytest
from helpers import quick_config, small_graph, struck_rows

from gnnpipe import Trainer
from gnnpipe.capture.stage.stage_module import RecordedStageModule
from gnnpipe.run.exact_epochs import ExactEpochs
from gnnpipe.runtime.history.base import History


@pytest.mark.parametrize("chunks", [1, 4])
def test_gradients_of_a_skipped_step_are_dropped(chunks, monkeypatch):
    """The epochs after a fault train again: NaN added to their gradients would stop every step."""
    plain_end = ExactEpochs.end
    norms, stepped = [], []

    def strikes(layer, rows):
        return rows.training and not rows.is_probe and layer == 1 and rows.epoch == 2

    def end(self, program, length, has_stepped):
        norms.append(length)
        stepped.append(has_stepped)
        plain_end(self, program, length, has_stepped)

    monkeypatch.setattr(ExactEpochs, "end", end)
    settings = {"model": "gcnii", "layers": 3, "hidden": 8, "dropout": 0.0, "lr": 0.01}
    run = quick_config(epochs=6, chunks=chunks, on_nan="skip", **settings)
    with struck_rows(strikes):
        losses = [row.loss for row in Trainer(run, small_graph()).fit().history]
    assert stepped == [epoch != 2 for epoch in range(6)]
    assert [math.isfinite(norm) for norm in norms] == stepped
    assert [math.isfinite(loss) for loss in losses] == stepped
    assert losses[5] < losses[3], "the weights change again"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_evaluation_that_fails_leaves_nothing(chunks, monkeypatch):
    """Its tables are freed, and the numbers after it are those of a run without it."""
    plain = RecordedStageModule.step
    run = quick_config(chunks=chunks, model="gcnii", layers=3, hidden=8, dropout=0.5)

    def step(self, index, values, received, rows):
        if index == 3:
            raise MemoryError("no memory is left")
        return plain(self, index, values, received, rows)

    def tables():
        return sum(issubclass(type(found), History) for found in gc.get_objects())

    expected = Trainer(run, small_graph()).fit()
    trainer = Trainer(run, small_graph())
    before = trainer.predict()
    gc.collect()
    held = tables()
    with monkeypatch.context() as patched:
        patched.setattr(RecordedStageModule, "step", step)
        with pytest.raises(MemoryError, match="no memory"):
            trainer.evaluate()
    gc.collect()
    assert tables() == held
    assert trainer.predict().equal(before)
    assert [row.loss for row in trainer.fit().history] == [row.loss for row in expected.history]
