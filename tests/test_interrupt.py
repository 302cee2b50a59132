"""Ctrl-C, SIGTERM, and disks that take no more: one line, the right code, advice to follow."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers import small_graph
from resume_runs import config, table
from test_failure import begun, launch

from gnnpipe import Callback, Trainer, resumed_config
from gnnpipe.files import how_to_write
from gnnpipe.run.signals import INTERRUPTED, Stopping
from gnnpipe.tools.collective_check import round_trip
from gnnpipe.train import loop

IN_PYTHON = "; in Python: Trainer(resumed_config(run), ..., resume=run)"
LARGE = "synthetic:planted:n=20000,features=64,classes=4"


@pytest.fixture(autouse=True)
def interrupts_are_heard():
    """A job that a shell put into the background ignores them, and so would what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def started(folder, *words, **settings):
    return subprocess.Popen(
        [sys.executable, "-m", "gnnpipe", "train", *words, "--out", str(folder), "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def until(is_there, process, limit_s=120):
    end = time.monotonic() + limit_s
    while not is_there():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.15, 0.4])
def test_an_interrupt_while_a_checkpoint_is_written(tmp_path, delay_s):
    run = tmp_path / "run"
    words = ["--dataset", LARGE, "--model", "gcnii", "--layers", "6", "--chunks", "8"]
    process = started(run, *words, "--epochs", "500", "--checkpoint-every", "1")
    try:
        until(lambda: (run / "checkpoints" / "epoch-000002").exists(), process)
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, told
    newest = max(p.name for p in (run / "checkpoints").iterdir() if p.name.startswith("epoch-"))
    line = f"gnnpipe: interrupted; go on with --resume {run} (the newest checkpoint is {newest})"
    assert told.splitlines() == [line + IN_PYTHON]


@pytest.mark.slow
def test_an_interrupt_before_the_first_checkpoint(tmp_path):
    run = tmp_path / "run"
    process = started(run, "--dataset", "karate", "--epochs", "100000")
    try:
        until(lambda: (run / "metrics.csv").exists(), process)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, told
    (newest,) = (run / "checkpoints").iterdir()
    assert newest.name == f"epoch-{len(table(run)):06d}"
    line = f"interrupted; go on with --resume {run} (the newest checkpoint is {newest.name})"
    assert told.splitlines() == [f"gnnpipe: {line}{IN_PYTHON}"]


LONG_EPOCH = """
import hashlib, sys, time
from pathlib import Path
from gnnpipe.train import loop
real = loop.train_epochs
def long(rank_runtime, mesh, program, order, epoch, *more):
    if epoch == 2:
        flag.touch()
        {wait}
    return real(rank_runtime, mesh, program, order, epoch, *more)
loop.train_epochs = long
from gnnpipe.__main__ import run
out, flag = sys.argv[1], Path(sys.argv[2])
sys.argv[1:] = ["train", "--dataset", "karate", "--checkpoint-every", "1", "--out", out]
sys.exit(run())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "told"),
    [
        ("time.sleep(600)", "interrupted; go on with --resume {} (the newest checkpoint is epoch-"),
        # Python's handlers are not called until it returns.
        ("hashlib.pbkdf2_hmac('sha256', b'', b'', 2 * 10**9)", "the epoch did not end within 1 s"),
    ],
    ids=["in Python", "in C"],
)
def test_a_second_interrupt_ends_a_long_epoch(tmp_path, wait, told):
    run, flag = tmp_path / "run", tmp_path / "flag"
    process = subprocess.Popen(
        [sys.executable, "-c", LONG_EPOCH.format(wait=wait), str(run), str(flag)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(flag.exists, process)
        process.send_signal(signal.SIGINT)
        while (line := process.stdout.readline()) and "again: at once" not in line:
            pass
        assert line == f"{INTERRUPTED}\n"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, error
    (line,) = error.splitlines()
    assert line.startswith(f"gnnpipe: {told.format(run)}")
    newest = max(path.name for path in (run / "checkpoints").iterdir())
    assert newest == "epoch-000002"


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "torchrun alone"])
def test_an_interrupt_of_torchrun_leaves_a_checkpoint(tmp_path, whole_group):
    """A terminal sends Ctrl-C to torchrun and to the ranks, and torchrun sends it to them again."""
    out = tmp_path / "run"
    process = launch(out)
    try:
        begun(process, out)
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=90)[0]
    finally:
        process.kill()
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("epoch-")) == len(table(out))
    line = f"interrupted; go on with --resume {out} (the newest checkpoint is {checkpoint.name})"
    assert told.count(f"gnnpipe: {line}{IN_PYTHON}") == 1


def interrupt_in(epoch, monkeypatch):
    real = loop.train_epochs

    def train(rank_runtime, mesh, program, order, number, *more):
        if number + 1 == epoch:
            os.kill(os.getpid(), signal.SIGINT)
        return real(rank_runtime, mesh, program, order, number, *more)

    monkeypatch.setattr(loop, "train_epochs", train)


def test_an_interrupted_run_is_resumed_to_the_bit(tmp_path, monkeypatch, capsys):
    whole, out = tmp_path / "whole", tmp_path / "run"
    Trainer(config(whole), small_graph()).fit()
    with monkeypatch.context() as patched:
        interrupt_in(4, patched)
        with pytest.raises(KeyboardInterrupt, match=f"--resume {out}.*{re.escape(IN_PYTHON)}"):
            Trainer(config(out, quiet=False), small_graph()).fit()
    assert len(table(out)) == 4
    assert capsys.readouterr().out.count(INTERRUPTED) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    Trainer(resumed_config(out, {"quiet": True}), small_graph(), resume=out).fit()
    assert table(out) == table(whole)


def test_an_interrupt_in_the_last_epoch_leaves_the_result(tmp_path, monkeypatch):
    out = tmp_path / "run"
    interrupt_in(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match=f"the run has ended; its folder is {out}"):
        Trainer(config(out, epochs=3), small_graph()).fit()
    assert (out / "result.json").exists()


def test_without_a_folder_an_interrupt_ends_the_run_at_once(monkeypatch):
    epochs = []
    interrupt_in(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="nothing was written"):
        Trainer(config("off"), small_graph(), callbacks=[Notes(epochs)]).fit()
    assert epochs == [1]


class Notes(Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, trainer, row):
        self.epochs.append(row.epoch)


def test_an_ignored_interrupt_stays_ignored(tmp_path, monkeypatch):
    """As in a job that a shell put into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt_in(2, monkeypatch)
    assert len(Trainer(config(tmp_path / "run"), small_graph()).fit().history) == 9


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    run = tmp_path / "run"
    process = started(run, "--dataset", "karate", "--epochs", "2000", preexec_fn=small_files)
    told = process.communicate(timeout=120)[1]
    assert process.returncode == 1, told
    (line,) = told.splitlines()
    assert "cannot be written any more (File too large); allow larger files (ulimit -f)" in line
    assert line.endswith(f"or without {run} (it holds no checkpoint)")


def test_other_faults_of_a_disk():
    import errno

    assert how_to_write(errno.EMFILE).endswith("(ulimit -n)")
    assert how_to_write(errno.EROFS) == "make it writable"
    assert how_to_write(errno.ENOSPC) == how_to_write(None) == "free some space"


@pytest.mark.slow
def test_the_small_trial_of_doctor_without_buffers(monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    for _ in range(4):
        assert round_trip("cpu", 2, 60.0)[1] == ""


def test_a_signal_is_heard_before_the_thread_that_listens_has_its_turn(monkeypatch):
    turn = threading.Event()
    real = Stopping._listen

    def late(self):
        turn.wait(60)
        real(self)

    monkeypatch.setattr(Stopping, "_listen", late)
    with Stopping(0) as stopping:
        assert not stopping.is_due(0)
        os.kill(os.getpid(), signal.SIGTERM)
        is_due, reason = stopping.is_due(0), stopping.reason
        threading.Timer(0.1, turn.set).start()
    assert is_due
    assert reason == "SIGTERM"
    # The clock that would end the process is not left behind.
    assert stopping._timer.finished.is_set()
