"""A run that was stopped and gone on with is the run that was never stopped, to the bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import run_ranks, small_graph
from pyg_models import Normed
from resume_runs import EPOCHS, config, table
from torch_geometric import nn as pyg

from gnnpipe import Callback, TrainConfig, Trainer
from gnnpipe.checkpoint.reader import StoredCheckpoint
from gnnpipe.checkpoint.retention import newest_whole
from gnnpipe.errors import FailedError, InputError, StoppedError
from gnnpipe.run.resume import resumed_config
from gnnpipe.train import loop

STOP = 4
ROOT = Path(__file__).resolve().parents[2]


def outcome(out):
    weights = torch.load(Path(out) / "model.pt", weights_only=True)
    return table(out), {k: v.numpy().tobytes() for k, v in weights.items()}


def stop_after(epoch):
    """SIGTERM, as a scheduler sends it, while epoch ``epoch`` (from 1) is trained."""
    real = loop.train_epochs

    def train(rank_runtime, mesh, program, order, number, *more):
        if number + 1 <= epoch <= number + program.epochs:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(rank_runtime, mesh, program, order, number, *more)

    return train


def normed():
    torch.manual_seed(3)
    return Normed(pyg.BatchNorm(8))


CASES = {
    "auto": {},
    "paper": {"staleness": "paper", "snapshot_every": 3},
    "none": {"staleness": "none"},
    "exact": {"staleness": "exact"},
    "one chunk": {"chunks": 1},
    "blocks of attention": {"model": "gat", "model_args": "heads=2"},
    "best": {"keep_weights": "best", "lr_schedule": "plateau", "lr_patience": 2},
    "cosine": {"lr_schedule": "cosine", "warmup_epochs": 2, "clip_norm": 0.1},
    "bf16": {"comm_dtype": "bf16"},
    "bf16 products": {"matmul_dtype": "bf16"},
    "recompute": {"recompute": True},
    "jumps": {"exact_above": 0.5},
    "1f1b": {"schedule": "1f1b", "steps_every": 2},
    "async": {"schedule": "async", "lr_schedule": "cosine", "clip_norm": 0.1},
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.filterwarnings("ignore:--matmul-dtype bf16. no faster")
@pytest.mark.parametrize("name", [*CASES, "batch norm"])
def test_stopped_and_gone_on_with_is_the_same_to_the_bit(name, tmp_path, monkeypatch):
    settings = CASES.get(name, {})
    model = normed if name == "batch norm" else lambda: None
    graph = small_graph(features=7, sparse=name == "auto")
    Trainer(config(tmp_path / "whole", **settings), graph, model()).fit()
    out = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_epochs", stop_after(STOP))
        with pytest.raises(StoppedError, match=f"after epoch {STOP} .SIGTERM.; go on with"):
            Trainer(config(out, **settings), graph, model()).fit()
    assert len(table(out)) == STOP
    assert not (out / "result.json").exists()
    # A kill may leave a row that no checkpoint knows of.
    with open(out / "metrics.csv", "a", encoding="utf-8") as file:
        file.write("5,0.1,")
    Trainer(resumed_config(out, {}), graph, model(), resume=out).fit()
    assert outcome(out) == outcome(tmp_path / "whole")
    assert json.loads((out / "result.json").read_text())["epochs"] == EPOCHS
    if name == "jumps":
        assert any(float(row["stale_reads"]) == 0 for row in table(out)[STOP:])


def fit(out, resume, settings, epochs):
    run = (
        resumed_config(out, settings | {"epochs": epochs})
        if resume
        else config(out, **settings | {"epochs": epochs})
    )
    Trainer(run, graph=small_graph(), resume=out if resume else None).fit()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "chunks"), [((1, 1), 4), ((4, 1), 4), ((2, 2), 4), ((1, 2), 4), ((2, 1), 3)]
)
def test_a_checkpoint_of_two_stages_loads_under_another_shape(shape, chunks, tmp_path):
    out, whole = str(tmp_path / "run"), str(tmp_path / "whole")
    first = {"stages": 2, "checkpoint_every": 2, "dtype": "float64"}
    run_ranks(fit, 2, out, False, first, STOP)
    fit(whole, False, {"dtype": "float64"}, EPOCHS)
    stages, shards = shape
    then = {"stages": stages, "shards": shards, "chunks": chunks}
    run_ranks(fit, stages * shards, out, True, then, EPOCHS)
    losses = [[float(row["loss"]) for row in table(o)] for o in (out, whole)]
    assert len(losses[0]) == EPOCHS
    # Other chunks read other rows stale; the curve goes on all the same.
    tolerance = 1e-9 if chunks == 4 else 0.2
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    assert (tmp_path / "run" / "config-before-1.toml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"comm_dtype": "bf16"}, {"matmul_dtype": "bf16"}])
def test_on_two_stages_it_is_the_same_to_the_bit_too(changes, tmp_path):
    whole, out = str(tmp_path / "whole"), str(tmp_path / "stopped")
    settings = {"stages": 2, "checkpoint_every": 2, **changes}
    run_ranks(fit, 2, whole, False, settings, EPOCHS)
    run_ranks(fit, 2, out, False, settings, STOP)
    run_ranks(fit, 2, out, True, {}, EPOCHS)
    assert outcome(out) == outcome(whole)


def test_without_tables_the_first_epoch_is_exact(tmp_path):
    out = tmp_path / "run"
    Trainer(
        config(out, epochs=STOP, checkpoint_every=2, checkpoint_tables=False), small_graph()
    ).fit()
    names = StoredCheckpoint(out / "checkpoints" / "epoch-000004").tensors
    assert not [n for n in names if n.startswith(("rows/", "vertices/"))]
    Trainer(resumed_config(out, {"epochs": EPOCHS}), small_graph(), resume=out).fit()
    reads = [float(row["stale_reads"]) for row in table(out)]
    assert reads[STOP] == 0 < min(reads[STOP - 1], reads[STOP + 1])


def test_two_checkpoints_remain_and_a_new_folder_leaves_the_old_one_alone(tmp_path):
    out, new = tmp_path / "run", tmp_path / "new"
    Trainer(config(out, epochs=7, checkpoint_every=2), small_graph()).fit()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "epoch-000006",
        "epoch-000007",
    ]
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    run = resumed_config(out, {"epochs": EPOCHS, "out": str(new)})
    Trainer(run, small_graph(), resume=out).fit()
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert len(table(new)) == EPOCHS


def damage(path, how):
    size = path.stat().st_size
    if how == "gone":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[size // 2] ^= 1
    else:
        del data[int(size * how) :]
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    """A run with two checkpoints; tests change a copy."""
    out = tmp_path_factory.mktemp("runs") / "run"
    Trainer(config(out, epochs=STOP, checkpoint_every=2), small_graph()).fit()
    return out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", [0.0, 0.3, 0.999, "flipped", "gone"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "rank-0.safetensors"])
def test_a_torn_checkpoint_is_passed_over(name, how, checkpointed, tmp_path, capsys):
    out = shutil.copytree(checkpointed, tmp_path / "run")
    damage(out / "checkpoints" / "epoch-000004" / name, how)
    stored, faults = newest_whole(out)
    assert stored.path.name == "epoch-000002"
    assert len(faults) == 1
    assert "epoch-000004" in faults[0]
    run = resumed_config(out, {"epochs": 6, "quiet": False})
    Trainer(run, small_graph(), resume=out).fit()
    said = capsys.readouterr().out
    assert "damaged checkpoint" in said
    assert "resuming from" in said
    assert len(table(out)) == 6


def test_no_whole_checkpoint_is_an_error(tmp_path):
    out = tmp_path / "run"
    Trainer(config(out, epochs=2, checkpoint_every=2), small_graph()).fit()
    damage(out / "checkpoints" / "epoch-000002" / "state.json", 0.5)
    with pytest.raises(InputError, match=r"--resume .* no complete checkpoint .*damaged"):
        Trainer(resumed_config(out, {"epochs": 6}), small_graph(), resume=out).fit()


REFUSED = {
    "no run": (lambda out: resumed_config(out / "none", {}), "contains no run"),
    "another model": (lambda out: resumed_config(out, {"hidden": 16}), "--hidden 16: the run in"),
    "all done": (
        lambda out: resumed_config(out, {}),
        "4 epochs are done, --epochs is 4; to train on, give more, such as --epochs 8",
    ),
}


@pytest.mark.parametrize("name", [*REFUSED, "another graph", "another run's folder"])
def test_what_cannot_be_gone_on_with(name, tmp_path):
    out = tmp_path / "run"
    Trainer(config(out, epochs=STOP, checkpoint_every=2), small_graph()).fit()
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    graph = small_graph(seed=7 if name == "another graph" else 0)
    make, text = REFUSED.get(name, (None, "graph: its vertices, edges.* differ from"))
    if name == "another run's folder":
        Trainer(config(tmp_path / "other", epochs=1), small_graph()).fit()
        text = "holds another run"
    more = {"out": str(tmp_path / "other")} if "folder" in name else {}
    make = make or (lambda out: resumed_config(out, {"epochs": 6} | more))
    with pytest.raises(InputError, match=text):
        Trainer(make(out), graph, resume=out).fit()
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    from gnnpipe.checkpoint import writer

    out = tmp_path / "run"
    real = writer._write_text

    def full(path, content):
        if "epoch-000004" in str(path):
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(writer, "_write_text", full)
    with pytest.raises(FailedError, match=r"epoch 4 .* No space left on device; .* of epoch 2;"):
        Trainer(config(out, checkpoint_every=2), small_graph()).fit()
    stored, _ = newest_whole(out)
    assert stored.path.name == "epoch-000002"


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 300 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    out = small_disk / "run"
    run = config(out, checkpoint_every=1, keep=9, epochs=100)
    with pytest.raises(FailedError, match=r"No space left on device.*go on with --resume"):
        Trainer(run, small_graph(n=400)).fit()
    assert newest_whole(out)[0] is not None
    assert not [p for p in (out / "checkpoints").iterdir() if p.name.startswith(".")]


@pytest.mark.slow
def test_two_processes_do_not_write_one_run(tmp_path):
    out = tmp_path / "run"
    Trainer(config(out, epochs=STOP, checkpoint_every=2), small_graph()).fit()
    line = f"import fcntl, os, time; f = os.open({str(out)!r}, 0); fcntl.flock(f, fcntl.LOCK_EX)"
    other = subprocess.Popen(
        [sys.executable, "-c", line + "; print('held', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match="another process is writing"):
            Trainer(resumed_config(out, {"epochs": 6}), small_graph(), resume=out).fit()
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


def test_restarts_need_a_folder(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(InputError, match="--out: torchrun --max-restarts 3"):
        Trainer(replace(config("x"), out=""), small_graph()).fit()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fill-drain", "async"])
def test_a_killed_rank_is_started_again_and_nothing_is_lost(schedule):
    options = ["--times", "1", "--epochs", "16", "--schedule", schedule]
    found = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "kill_ranks.py"), *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "exit code 0" in found.stdout
    assert ": same" in found.stdout.partition("later, epoch-0000")[2], found.stdout


class Hostile:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_hostile_checkpoint_runs_no_code(tmp_path):
    import hashlib
    import pickle

    out = tmp_path / "run"
    Trainer(config(out, epochs=2, checkpoint_every=2), small_graph()).fit()
    folder = out / "checkpoints" / "epoch-000002"
    trap = tmp_path / "trapped"
    manifest = json.loads((folder / "manifest.json").read_text().partition("\n")[2])
    # A pickle in place of the tensors, with a checksum that is right.
    (folder / "rank-0.safetensors").write_bytes(pickle.dumps(Hostile(trap)))
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    text = json.dumps(manifest)
    head = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(f"{head}\n{text}")
    with pytest.raises(InputError, match="cannot be read"):
        Trainer(resumed_config(out, {"epochs": 6}), small_graph(), resume=out).fit()
    assert not trap.exists()


@pytest.mark.parametrize("place", ["../state.json", "/etc/passwd", "sub/x"])
def test_a_manifest_does_not_lead_out_of_its_folder(place, tmp_path):
    import hashlib

    out = tmp_path / "run"
    Trainer(config(out, epochs=2, checkpoint_every=2), small_graph()).fit()
    folder = out / "checkpoints" / "epoch-000002"
    manifest = json.loads((folder / "manifest.json").read_text().partition("\n")[2])
    manifest["files"][place] = "0" * 64
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n" + text)
    with pytest.raises(InputError, match="is no file of its folder"):
        StoredCheckpoint(folder)


class Strides(Callback):
    """Of what the optimizer keeps and of its weights, at the end of each epoch."""

    def __init__(self):
        self.found = []

    def on_epoch_end(self, trainer, row):
        for weight, kept in trainer._rank_runtime.executor.optimizer.state.items():
            strides = (value.stride() for value in kept.values() if value.dim())
            self.found.extend((stride, weight.stride()) for stride in strides)


def test_what_the_optimizer_keeps_lies_as_its_weight_does(tmp_path):
    """A fused Adam asks for it; the weight of sparse features is stored by column."""
    graph, strides = small_graph(sparse=True), Strides()
    config = TrainConfig(
        layers=2, hidden=4, epochs=2, checkpoint_every=2, out=str(tmp_path / "run")
    )
    Trainer(config, graph=graph).fit()
    again = resumed_config(config.out, {"epochs": 3})
    trainer = Trainer(again, graph=graph, resume=config.out, callbacks=[strides])
    trainer.fit()
    trainer.fit(1)
    assert any(weight[0] == 1 and len(weight) == 2 for _, weight in strides.found)
    assert all(kept == weight for kept, weight in strides.found)
