"""Loggers: event files that TensorBoard's own reader reads back; Weights & Biases by a stand-in."""

import csv
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import run_ranks, small_graph
from resume_runs import config
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gnnpipe import Callback, TensorBoardLogger, TrainConfig, Trainer, WandbLogger, resumed_config
from gnnpipe.errors import InputError, StoppedError
from gnnpipe.train import loop


def logged(folder):
    """The scalars in event files: (epoch, value) by name."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {n: [(e.step, e.value) for e in events.Scalars(n)] for n in events.Tags()["scalars"]}


def written(out):
    """The filled cells of metrics.csv in float32, as event files hold them."""
    with open(out / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: [(int(r["epoch"]), float(np.float32(r[name]))) for r in rows if r[name]]
        for name in rows[0]
        if name != "epoch" and any(r[name] for r in rows)
    }


def test_tensorboard_reads_the_columns_of_metrics_csv(tmp_path):
    out = tmp_path / "run"
    trainer = Trainer(config(out, log="tensorboard"), small_graph())
    trainer.fit()
    found = logged(out / "tensorboard")
    assert {"loss", "lr", "epoch_time_s", "val_acc", "test_metric"} <= set(found)
    assert [step for step, _ in found["loss"]] == [*range(1, 10)]
    assert [step for step, _ in found["val_acc"]] == [2, 4, 6, 8, 9]
    assert found == written(out)
    trainer.fit(epochs=2)
    assert logged(out / "tensorboard") == written(out)


def test_a_resumed_run_goes_on_in_the_same_log(tmp_path, monkeypatch):
    out, real = tmp_path / "run", loop.train_epochs

    def train(rank_runtime, mesh, program, order, number, *more):
        if number + 1 == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(rank_runtime, mesh, program, order, number, *more)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_epochs", train)
        with pytest.raises(StoppedError):
            Trainer(config(out, log="tensorboard"), small_graph()).fit()
    # What a process that was killed has written is there.
    assert logged(out / "tensorboard") == written(out)
    again = resumed_config(out)
    assert again.log == "tensorboard"
    Trainer(again, small_graph(), resume=out).fit()
    assert logged(out / "tensorboard") == written(out)
    assert len(written(out)["loss"]) == 9


def test_epochs_that_are_trained_again_are_logged_once(tmp_path):
    out = tmp_path / "run"
    Trainer(config(out, log="tensorboard"), small_graph()).fit()
    before = written(out)
    other = tmp_path / "other"
    logger = TensorBoardLogger(out / "tensorboard")
    Trainer(config(other, epochs=6, lr=0.5), small_graph(), callbacks=[logger]).fit()
    found = logged(out / "tensorboard")
    assert found["loss"] == written(other)["loss"] != before["loss"][:6]


class Stops(TensorBoardLogger):
    def on_epoch_end(self, trainer, row):
        super().on_epoch_end(trainer, row)
        return row.epoch == 3


def test_scores_of_an_epoch_that_was_told_to_be_the_last(tmp_path):
    out = tmp_path / "run"
    Trainer(config(out), small_graph(), callbacks=[Stops()]).fit()
    assert [step for step, _ in logged(out / "tensorboard")["val_acc"]] == [2, 3]
    found, want = logged(out / "tensorboard"), written(out)
    assert {n: v for n, v in found.items() if n != "eval_time_s"} == {
        n: v for n, v in want.items() if n != "eval_time_s"
    }


def log_on_ranks(out):
    Trainer(config(out, stages=2, log="tensorboard"), small_graph()).fit()


def test_rank_0_logs(tmp_path):
    run_ranks(log_on_ranks, 2, tmp_path / "run")
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    assert logged(tmp_path / "run" / "tensorboard") == written(tmp_path / "run")


STAND_IN = """
calls = []
class Run:
    id = "one"
    def log(self, numbers, step):
        calls.append((step, numbers))
    def finish(self):
        calls.append("finish")
def init(**settings):
    calls.append(settings)
    return Run()
"""


def test_wandb_by_a_stand_in_module(tmp_path, monkeypatch):
    """The real package is not installed here: only the calls to it are tested."""
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    out = tmp_path / "run"
    trainer = Trainer(config(out, epochs=3), small_graph(), callbacks=[WandbLogger(project="mine")])
    trainer.fit()
    import wandb

    first, *rows, last = wandb.calls
    assert (first["project"], first["dir"], last) == ("mine", str(out), "finish")
    assert first["config"]["lr"] == 0.05
    assert "id" not in first
    assert [step for step, _ in rows] == [1, 2, 3]
    assert "val_acc" not in rows[0][1]
    assert {"loss", "lr", "epoch_time_s", "val_acc"} <= set(rows[1][1])
    trainer.fit(epochs=1)
    second = wandb.calls[len(rows) + 2]
    assert (second["id"], second["resume"]) == ("one", "allow")
    del sys.modules["wandb"]


class Fails(Callback):
    def on_epoch_end(self, trainer, row):
        if row.epoch == 2:
            raise RuntimeError("disk")


def test_logs_are_closed_when_training_fails(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    events = TensorBoardLogger()
    run = config(tmp_path / "run", epochs=3)
    callbacks = [WandbLogger(project="mine"), events, Fails()]
    with pytest.raises(RuntimeError, match="disk"):
        Trainer(run, small_graph(), callbacks=callbacks).fit()
    import wandb

    assert wandb.calls[-1] == "finish"
    assert events._writer is None
    assert [step for step, _ in logged(tmp_path / "run" / "tensorboard")["loss"]] == [1, 2]
    del sys.modules["wandb"]


@pytest.mark.slow
def test_a_package_that_is_missing_is_said_before_any_work(tmp_path, monkeypatch):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    # An import hook that finds neither package, in a fresh process.
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n in ('tensorboard', 'wandb') else real(n, *a)\n"
    )
    path = os.pathsep.join([str(hidden), os.getcwd()])
    for name in ("tensorboard", "wandb"):
        words = ["train", "--dataset", "karate", "--log", name, "--out", str(tmp_path / "run")]
        done = subprocess.run(
            [sys.executable, "-m", "gnnpipe", *words],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr == (
            f"gnnpipe: error: --log {name}: needs the package {name}; try `pip install "
            f"'gnnpipe[{name}]'`, or leave it out\n"
        )
        assert not (tmp_path / "run").exists()


def test_wrong_names_and_places():
    with pytest.raises(InputError, match=r"--log 'csv': 'csv' is not known .metrics.csv in the"):
        TrainConfig(log="csv")
    with pytest.raises(InputError, match="--log 'tensorboard,x': 'x' is not known; try tensorb"):
        TrainConfig(log="tensorboard,x")
    for parts in ({"log": "tensorboard"}, {}):
        callbacks = [] if parts else [TensorBoardLogger()]
        with pytest.raises(InputError, match="--log tensorboard: writes to the run folder"):
            Trainer(TrainConfig(out="off", **parts), callbacks=callbacks)
