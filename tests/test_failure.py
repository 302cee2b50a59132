"""A rank that fails, falls silent or sees no numbers ends the run promptly, and says where."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers import run_ranks, small_graph, struck_rows
from resume_runs import config, table

from gnnpipe import Trainer
from gnnpipe.errors import FailedError, InputError
from gnnpipe.run import signals
from gnnpipe.run.rank_log import is_lost_peer, lost_rank
from gnnpipe.run.signals import Stopping
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.train import loop

ROOT = Path(__file__).resolve().parents[1]


def launch(out, *words, script=None):
    program = [str(script)] if script else ["-m", "gnnpipe"]
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *program,
        "train",
        "--dataset",
        "karate",
        "--hidden",
        "8",
        "--stages",
        "2",
        "--chunks",
        "3",
        "--epochs",
        "100000",
        "--cache-dir",
        "off",
        "--out",
        str(out),
        *words,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def begun(process, out, epochs=3):
    """Until a few epochs are done; the pids of the ranks."""
    while not (out / "metrics.csv").exists() or len(table(out)) < epochs:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


TORCHRUN_WAITS_S = 30
"""torchrun's wait from SIGTERM to SIGKILL, which alone ends a stopped process."""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_falls_silent_ends_all(number, tmp_path):
    out = tmp_path / "run"
    process = launch(out, "--timeout", "32", "--checkpoint-every", "2")
    ranks = begun(process, out)
    os.kill(ranks[1], number)
    # A dead rank is noticed at once, not by its silence or the limit of --timeout.
    is_silent = number == signal.SIGSTOP
    said = process.communicate(timeout=30 + TORCHRUN_WAITS_S * is_silent)[0]
    assert process.returncode != 0
    assert ("has been silent" in said) == is_silent
    if is_silent:
        assert "rank 1 has been silent for 4 s" in said
        assert "Last known: rank 1 (stage 1, shard 0)" in said
        assert "The others: rank 0 (stage 0, shard 0)" in said
        assert "silent" in (out / "logs" / "rank-0.txt").read_text()
        assert "has been silent" in said[said.index("Root Cause") :]
    else:
        assert "gnnpipe: rank 0 lost another rank (" in said
        assert f"; go on with --resume {out} (the newest checkpoint is epoch-00" in said
        assert "pair.cc" not in said.replace((out / "logs" / "rank-0.txt").read_text(), "")


@pytest.mark.slow
def test_a_stopped_rank_that_wakes_up_ends_itself(tmp_path):
    """Without torchrun, nobody else ends the stopped rank."""
    out = tmp_path / "run"
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = "--dataset karate --hidden 8 --stages 2 --chunks 3 --epochs 100000 --timeout 32"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "gnnpipe", "train", *words.split(), "--out", str(out)],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        while not (out / "metrics.csv").exists() or len(table(out)) < 3:
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGSTOP)
        assert "rank 1 has been silent for 4 s" in ranks[0].communicate(timeout=60)[1]
        assert ranks[0].returncode == 1
        ranks[1].send_signal(signal.SIGCONT)
        said = ranks[1].communicate(timeout=60)[1]
        assert ranks[1].returncode == 1
        assert "lost another rank" in said or "no word from the other ranks" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_what_gloo_says_of_a_rank_that_is_gone():
    plain = RuntimeError(
        "[/__w/pytorch/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
        "closed by peer [127.0.0.1]:22411. This is typically caused by a remote worker crashing. "
        "Check the logs of the\nremote process. GLHF!"
    )
    assert is_lost_peer(plain)
    assert str(lost_rank(plain, 3, None)) == (
        "rank 3 lost another rank (Connection closed by peer [127.0.0.1]:22411); nothing was "
        "written (--out off)"
    )


@pytest.mark.parametrize(
    "own",
    [
        KeyboardInterrupt("go on with --resume gloo_runs/a"),
        ValueError("no /data/gloo/w.pt"),
        OSError(28, "No space left", "/scratch/gloo/transport/x"),
        SystemExit(1),
        FailedError("runs/gloo/transport/a: cannot be written"),
        RuntimeError("of gloo/w.pt"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_its_own_is_none_of_a_lost_rank(own):
    assert not is_lost_peer(own)


def test_a_rank_that_lost_another_waits_for_sigterm_which_ends_nothing_meanwhile(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    stop = Stopping(0)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection closed"), stop:
        raise RuntimeError("Connection closed by peer")
    assert 0.2 < time.monotonic() - start < signals.PATIENCE_S
    assert signal.getsignal(signal.SIGTERM) == before
    # Told by nobody, it waits its time, and once.
    monkeypatch.setattr(signals, "PATIENCE_S", 0.3)
    other = Stopping(0)
    start = time.monotonic()
    other.hear_out()
    other.hear_out()
    assert 0.3 <= time.monotonic() - start < 0.55


def test_sigterm_to_torchrun_leaves_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    process = launch(out)
    begun(process, out)
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - start < 30
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("epoch-")) == len(table(out))


RAISING = """
import os, sys
from gnnpipe.runtime.stage import Stage
plain = Stage.backward
def backward(self, chunk, steps, following=None):
    if os.environ["RANK"] == "1" and self._epoch == 2 and chunk == 1:
        raise MemoryError("made on purpose")
    return plain(self, chunk, steps, following)
Stage.backward = backward
from gnnpipe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_first_cause_stands_last_and_marks_the_program(tmp_path):
    script = tmp_path / "raising.py"
    script.write_text(RAISING)
    process = launch(tmp_path / "run", "--no-predict", script=script)
    said = process.communicate(timeout=120)[0]
    last = said[said.index("Root Cause") :]
    cause = "rank 1 (stage 1, shard 0), chunk 1, epoch 3, action 1B1: MemoryError: made on purpose"
    assert cause in last
    assert ">>> 1B1 <<<" in last
    assert ">>> 1B1 <<<" in (tmp_path / "run" / "logs" / "rank-1.txt").read_text()


@pytest.fixture
def poisoned():
    """Rows of layer 2 that are no numbers, where ``bad(epoch, training)`` says so."""
    with ExitStack() as stack:

        def poison(bad):
            def strikes(layer, rows):
                return layer == 2 and not rows.is_probe and bad(rows.epoch, rows.training)

            stack.enter_context(struck_rows(strikes))

        yield poison


def test_numbers_that_are_none_are_named(poisoned, tmp_path):
    seen = []
    poisoned(lambda epoch, training: seen.append(epoch) or 3 in seen)
    out = tmp_path / "run"
    with pytest.raises(FloatingPointError) as caught:
        Trainer(config(out, eval_every=0), small_graph()).fit()
    text = str(caught.value)
    assert "epoch 4: the loss is nan, first in stage 0, op aggregate_2, chunk 0; try a" in text
    assert len(table(out)) == 3, "what was done before stays"


def test_a_step_without_numbers_is_left_out(poisoned, tmp_path):
    poisoned(lambda epoch, training: training and epoch == 3)
    result = Trainer(config(tmp_path / "run", on_nan="skip"), small_graph()).fit()
    losses = [row.loss for row in result.history]
    assert [i for i, loss in enumerate(losses) if loss != loss] == [3]
    assert len(losses) == 9


def test_restore_goes_back_with_half_the_learning_rate(poisoned, tmp_path):
    seen = []

    def bad(epoch, training):
        """All four chunks of epoch 5, the first two times that it is trained."""
        seen.append(epoch if training else -1)
        return training and epoch == 5 and seen.count(5) <= 8

    poisoned(bad)
    run = config(tmp_path / "run", on_nan="restore", checkpoint_every=2)
    result = Trainer(run, small_graph()).fit()
    assert [row.epoch for row in result.history] == list(range(1, 10))
    assert {row.lr for row in result.history[:4]} == {0.05}
    assert {row.lr for row in result.history[4:]} == {0.0125}
    assert [float(row["loss"]) for row in table(tmp_path / "run")] == [
        row.loss for row in result.history
    ]


def test_restore_needs_checkpoints():
    with pytest.raises(InputError, match="--on-nan restore: --out off"):
        config("off", on_nan="restore")


def differing(out):
    run = config(out, stages=1, shards=2, check_weights=True)
    trainer = Trainer(run, small_graph())
    if Mesh.join(1, 2).rank == 1:
        with torch.no_grad():
            real = loop.train_epochs

            def train(rank_runtime, *words):
                found = real(rank_runtime, *words)
                next(iter(rank_runtime.executor.stage.stage_module.parameters())).data += 1e-7
                return found

            loop.train_epochs = train
    try:
        trainer.fit()
    except FailedError as error:
        return str(error)


def test_weights_that_differ_between_shards_are_found(tmp_path):
    text = "epoch 2: ranks 0 and 1 hold other weights of stage 0"
    assert [text in found for found in run_ranks(differing, 2, str(tmp_path / "run"))] == [True] * 2


def clipped(stages, limit):
    mesh = Mesh.join(stages, 1)
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for i, weight in enumerate(weights):
        weight.grad = torch.full((3,), float(1 + i + 2 * mesh.rank))
    grad_clip = GradClip([(f"w{i}", w) for i, w in enumerate(weights)], mesh, limit)
    assert grad_clip.clip(1.0)
    return grad_clip.norm, [w.grad.tolist() for w in weights]


def test_gradients_are_clipped_by_their_length_over_all_stages():
    whole = (3 * (1 + 4 + 9 + 16)) ** 0.5
    for rank, (norm, grads) in enumerate(run_ranks(clipped, 2, 2, whole / 2)):
        assert norm == pytest.approx(whole)
        assert [g[0] for g in grads] == pytest.approx([0.5 + rank, 1 + rank])
    (_, free), _ = run_ranks(clipped, 2, 2, 0.0)
    assert free == [[1.0] * 3, [2.0] * 3]
