"""Callbacks: when they are called, on which ranks, and that they can end a run."""

import numpy as np
import pytest
import torch
from helpers import quick_config, run_ranks, small_graph
from resume_runs import config, table

from gnnpipe import Callback, Trainer
from gnnpipe.errors import InputError
from gnnpipe.run.resume import resumed_config


class Notes(Callback):
    """Notes every call; ends training after epoch ``last``."""

    def __init__(self, last=0):
        self.calls, self.last = [], last

    def on_fit_start(self, trainer):
        self.calls.append("start")

    def on_evaluate(self, trainer, row):
        self.calls.append(f"evaluated {row.epoch}: {row.scores.val_acc:.3f}")

    def on_epoch_end(self, trainer, row):
        self.calls.append(f"epoch {row.epoch}")
        return row.epoch == self.last

    def on_checkpoint(self, trainer, path):
        assert (path / "state.json").is_file()
        self.calls.append(path.name)

    def on_fit_end(self, trainer, result):
        self.calls.append(f"end {len(result.history)}")


class Everywhere(Notes):
    on_all_ranks = True

    def on_evaluate(self, trainer, row):
        assert trainer.evaluate() == row.scores
        assert trainer.predict().shape == (60, 3)
        self.calls.append(f"evaluated {row.epoch}")


def test_the_order_of_calls(tmp_path):
    notes = Notes()
    run = quick_config(epochs=4, eval_every=2, checkpoint_every=3, out=str(tmp_path / "run"))
    result = Trainer(run, small_graph(), callbacks=[notes]).fit()
    second, fourth = result.history[1].scores.val_acc, result.history[3].scores.val_acc
    assert notes.calls == [
        "start",
        "epoch 1",
        f"evaluated 2: {second:.3f}",
        "epoch 2",
        "epoch 3",
        "epoch-000003",
        f"evaluated 4: {fourth:.3f}",
        "epoch 4",
        "epoch-000004",
        "end 4",
    ]


def test_a_callback_ends_the_run(tmp_path, capsys):
    out = tmp_path / "run"
    first, second = Notes(last=3), Notes()
    run = config(out, checkpoint_every=10, quiet=False)
    Trainer(run, small_graph(), callbacks=[first, second]).fit()
    assert len(table(out)) == 3
    assert second.calls[-3:] == ["epoch 3", "epoch-000003", "end 3"]
    assert (out / "result.json").exists()
    assert "stopped after epoch 3: a callback asked for it" in capsys.readouterr().out
    Trainer(resumed_config(out, {}), small_graph(), resume=out, callbacks=[Notes(last=5)]).fit()
    assert len(table(out)) == 5


def calls_on_ranks(shape, last):
    stages, shards = shape
    alone, everywhere = Notes(last), Everywhere()
    run = quick_config(epochs=4, eval_every=2, stages=stages, shards=shards, chunks=2, layers=2)
    Trainer(run, small_graph(), callbacks=[alone, everywhere]).fit()
    return alone.calls, everywhere.calls


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_rank_0_ends_the_run_of_all(shape):
    found = run_ranks(calls_on_ranks, 2, shape, 3)
    assert found[0][0][-2:] == ["epoch 3", "end 3"]
    assert found[1][0] == []
    for _, everywhere in found:
        assert everywhere == ["start", "epoch 1", "evaluated 2", "epoch 2", "epoch 3", "end 3"]


class Alone(Callback):
    def on_epoch_end(self, trainer, row):
        trainer.evaluate()


def errors_on_ranks():
    run = quick_config(stages=2, layers=2, timeout_s=20)
    try:
        Trainer(run, small_graph(), callbacks=[Alone()]).fit()
    except Exception as error:
        return str(error)


def test_what_needs_all_ranks_is_refused_on_one():
    found = run_ranks(errors_on_ranks, 2)
    assert "evaluate() needs all ranks, and this callback runs on rank 0 alone" in found[0]
    assert found[1]


def test_a_callback_may_evaluate_on_one_rank():
    run = quick_config(eval_every=1)
    Trainer(run, small_graph(), callbacks=[Alone()]).fit()


class Draws(Callback):
    def on_epoch_end(self, trainer, row):
        torch.rand(3)
        np.random.rand(3)


def test_callbacks_change_no_number(tmp_path):
    plain, other = tmp_path / "plain", tmp_path / "other"
    Trainer(config(plain), small_graph()).fit()
    Trainer(config(other), small_graph(), callbacks=[Draws(), Alone()]).fit()
    assert table(plain) == table(other)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([print], "number 0 is of type builtin_function_or_method, not a gnnpipe.Callback"),
        ([Notes(), Notes], "number 1 is the class Notes, not a gnnpipe.Callback"),
    ],
)
def test_wrong_callbacks(given, words):
    with pytest.raises(InputError, match=words):
        Trainer(quick_config(), small_graph(), callbacks=given)


class Weights(Callback):
    """Keeps the sum of the model's weights after every epoch."""

    def __init__(self):
        self.sums = []

    def on_epoch_end(self, trainer, row):
        self.sums.append(sum(float(p.detach().sum()) for p in trainer.model.parameters()))


def test_a_callback_sees_the_current_weights():
    seen = Weights()
    trainer = Trainer(quick_config(), small_graph(), callbacks=[seen])
    trainer.fit()
    assert len(set(seen.sums)) == 3
    assert seen.sums[-1] == sum(float(p.detach().sum()) for p in trainer.model.parameters())


class Fails(Callback):
    """Fails in the second epoch, and again where it is told so."""

    def __init__(self, error):
        self.error, self.calls = error, []

    def on_epoch_end(self, trainer, row):
        if row.epoch == 2:
            raise self.error

    def on_exception(self, trainer, error):
        self.calls.append((len(trainer.model.state_dict()) > 0, error))
        raise ValueError("twice")

    def on_fit_end(self, trainer, result):
        self.calls.append("end")


@pytest.mark.parametrize("error", [RuntimeError("once"), KeyboardInterrupt("once")])
def test_a_callback_is_told_of_an_exception(error):
    callbacks = [Fails(error), Fails(None)]
    trainer = Trainer(quick_config(), small_graph(), callbacks=callbacks)
    with (
        pytest.raises(type(error)) as raised,
        pytest.warns(UserWarning, match="Fails.on_exception fails .ValueError: twice"),
    ):
        trainer.fit()
    assert [callback.calls for callback in callbacks] == [[(True, raised.value)]] * 2
