"""Ctrl-C, SIGTERM, and disks that take no more: one line, the right code, advice to follow."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from gnnpipe.files import how_to_write
from gnnpipe.run.signals import Stopping
from gnnpipe.tools.collective_check import round_trip

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
    assert told.splitlines() == [line]


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
    advice = f"start again with another --out, or without {run} (it holds no checkpoint)"
    assert told.splitlines() == [f"gnnpipe: interrupted; {advice}"]


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
