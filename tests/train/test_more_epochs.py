"""``fit`` called again: 3 + 3 epochs are 6 epochs to the bit."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import quick_config, run_ranks, small_graph
from resume_runs import config, table

from gnnpipe import Callback, TrainConfig, Trainer
from gnnpipe.errors import InputError, StoppedError
from gnnpipe.run.resume import resumed_config
from gnnpipe.train import loop


class Drops(torch.nn.Module):
    """Draws its dropout from torch's global generator, and cannot be recorded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.linear = torch.nn.Linear(7, 3)

    def forward(self, x, edge_index):
        mask = torch.rand(x.shape) > 0.5
        x = x * mask.numpy().astype("float32").sum() / mask.numel() if self.training else x
        return self.linear(x)


def steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


CASES = {
    "stale rows": {},
    "own scheduler": {"scheduler": steps},
    "warm-up": {"warmup_epochs": 5},
    "best weights": {"keep_weights": "best", "lr": 0.5},
    "own draws": {"model": Drops, "chunks": 1},
}


def trainer(out, epochs, settings):
    parts = {name: settings[name] for name in ("scheduler", "model") if name in settings}
    if "model" in parts:
        parts["model"] = parts["model"]()
    rest = {name: value for name, value in settings.items() if name not in parts}
    run = config(out, epochs=epochs, eval_every=3, **rest)
    return Trainer(run, small_graph(), **parts)


def weights_of(out):
    return {k: v.numpy().tobytes() for k, v in torch.load(Path(out) / "model.pt").items()}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:model. .* runs as it is")
@pytest.mark.parametrize("name", CASES)
def test_three_and_three_are_six(name, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    result = trainer(whole, 6, CASES[name]).fit()
    parted = trainer(halves, 6, CASES[name])
    first = parted.fit(epochs=3)
    assert [row.epoch for row in first.history] == [1, 2, 3]
    second = parted.fit(3)
    assert table(halves) == table(whole)
    assert weights_of(halves) == weights_of(whole)
    assert [row.loss for row in second.history] == [row.loss for row in result.history]
    assert json.loads((halves / "result.json").read_text())["epochs"] == 6
    for name, value in parted.model.state_dict().items():
        assert value.numpy().tobytes() == weights_of(whole)[name]


def test_the_run_on_its_own_ends_at_the_number_of_its_config(tmp_path):
    out = tmp_path / "run"
    whole = trainer(tmp_path / "whole", 8, {}).fit()
    again = trainer(out, 3, {})
    again.fit()
    assert len(again.fit().history) == 6
    assert resumed_config(out).epochs == 6
    found = again.fit(epochs=2).history
    assert [row.loss for row in found] == [row.loss for row in whole.history]


class Notes(Callback):
    def __init__(self):
        self.calls = []

    def on_fit_start(self, trainer):
        self.calls.append("start")

    def on_epoch_end(self, trainer, row):
        self.calls.append(row.epoch)
        return row.epoch == 2

    def on_fit_end(self, trainer, result):
        self.calls.append(f"end {len(result.history)}")


def test_callbacks_are_called_in_every_fit():
    notes = Notes()
    more = Trainer(quick_config(), small_graph(), callbacks=[notes])
    more.fit()
    more.fit(epochs=1)
    assert notes.calls == ["start", 1, 2, "end 2", "start", 3, "end 3"]


def halves_on_ranks(out, stages, shards):
    run = config(out, epochs=3, eval_every=3, stages=stages, shards=shards)
    parted = Trainer(run, small_graph())
    parted.fit()
    return [row.loss for row in parted.fit().history]


def whole_on_ranks(out, stages, shards):
    run = config(out, epochs=6, eval_every=3, stages=stages, shards=shards)
    return [row.loss for row in Trainer(run, small_graph()).fit().history]


def test_on_ranks(tmp_path):
    whole = run_ranks(whole_on_ranks, 2, tmp_path / "whole", 2, 1)
    assert run_ranks(halves_on_ranks, 2, tmp_path / "halves", 2, 1) == whole
    assert table(tmp_path / "halves") == table(tmp_path / "whole")
    assert weights_of(tmp_path / "halves") == weights_of(tmp_path / "whole")


def other_numbers_on_ranks():
    run = quick_config(stages=2, layers=2)
    try:
        parted = Trainer(run, small_graph())
        parted.fit(epochs=1 + int(os.environ["RANK"]))
    except InputError as error:
        return str(error)


def test_ranks_that_want_other_numbers():
    words = "fit: epochs differs between ranks; call it with the same on each"
    assert run_ranks(other_numbers_on_ranks, 2) == [words, words]


def interrupted_at(epoch, monkeypatch):
    real = loop.train_epochs

    def train(rank_runtime, mesh, program, order, number, *more):
        if number + 1 == epoch:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(rank_runtime, mesh, program, order, number, *more)

    monkeypatch.setattr(loop, "train_epochs", train)


def test_a_stopped_second_fit_is_resumed_up_to_its_end(tmp_path, monkeypatch):
    out = tmp_path / "run"
    whole = trainer(tmp_path / "whole", 6, {}).fit()
    parted = trainer(out, 3, {})
    parted.fit()
    with monkeypatch.context() as patched:
        interrupted_at(5, patched)
        with pytest.raises(StoppedError, match="after epoch 5"):
            parted.fit()
    with pytest.raises(InputError, match="after it ended with an error"):
        parted.fit()
    result = Trainer(resumed_config(out), small_graph(), resume=out).fit()
    assert [row.loss for row in result.history] == [row.loss for row in whole.history]
    assert weights_of(out) == weights_of(tmp_path / "whole")


def test_a_script_of_two_fits_that_torchrun_restarts_in_the_second(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    whole = trainer(tmp_path / "whole", 6, {}).fit()

    def script():
        parted = trainer(tmp_path / "run", 3, {})
        parted.fit()
        return parted.fit()

    with monkeypatch.context() as patched:
        interrupted_at(5, patched)
        with pytest.raises(StoppedError, match="after epoch 5"):
            script()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [row.loss for row in script().history] == [row.loss for row in whole.history]


def refused(**settings):
    more = Trainer(quick_config(**settings), small_graph())
    more.fit()
    with pytest.raises(InputError) as found:
        more.fit()
    return str(found.value)


def test_what_more_epochs_would_change_is_refused(tmp_path):
    told = refused(lr_schedule="cosine")
    assert told.startswith("--lr-schedule cosine: the learning rate is 0 after --epochs 3, and fit")
    assert "make the Trainer with epochs=6 and call fit(epochs=...)" in told
    told = refused(epochs=1, chunks=3)
    assert told.startswith("--epochs 1: so few epochs are all exact (--exact-epochs)")
    settings = {"patience": 1, "eval_every": 1, "lr": 1e-20, "epochs": 9}
    told = refused(**settings)
    assert told.startswith("--patience 1: has stopped the run after epoch 2")
    for epochs in (0, True, 2.5, "3"):
        with pytest.raises(InputError, match=f"fit: epochs = {epochs!r}; give a whole number"):
            Trainer(quick_config(), small_graph()).fit(epochs)
    run = TrainConfig(out=str(tmp_path / "none"), quiet=True)
    with pytest.raises(InputError, match="a resumed run is trained up to config"):
        Trainer(run, small_graph(), resume=tmp_path / "none").fit(epochs=2)
    assert not (tmp_path / "none").exists()


def test_a_folder_that_has_been_removed(tmp_path):
    out = tmp_path / "run"
    more = trainer(out, 3, {})
    more.fit()
    out.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="the run's files have been removed; make a new Trainer"):
        more.fit()
