"""The process that writes a rank's checkpoint: the same tensors, and nobody depends on it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import run_ranks, small_graph
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gnnpipe import TrainConfig, Trainer
from gnnpipe.checkpoint import writer_process as module
from gnnpipe.checkpoint.async_saver import Saver
from gnnpipe.checkpoint.reader import StoredCheckpoint
from gnnpipe.checkpoint.staging import StagedTensors
from gnnpipe.checkpoint.writer import write_checkpoint
from gnnpipe.checkpoint.writer_process import AsyncWriter

TENSORS = {
    "weight/a": torch.arange(12.0).view(3, 4).t(),  # not contiguous
    "optimizer/a/step": torch.tensor(3.0),
    "rows/none/0": torch.empty(0, 8),
    "rows/some/0": torch.randn(1000, 7, dtype=torch.float64),
    "half": torch.randn(5).to(torch.bfloat16),
    "draws/0": torch.arange(9, dtype=torch.uint8),
    "is": torch.tensor([True, False]),
}


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_BYTES", 0)


def _ready(staged: StagedTensors) -> AsyncWriter:
    beside = AsyncWriter(staged)
    beside.start()
    assert beside._comes_up()
    return beside


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_it_is_not_kept_on_the_core_of_its_rank() -> None:
    cores = os.sched_getaffinity(0)
    staged = StagedTensors()
    staged.take(TENSORS)
    try:
        os.sched_setaffinity(0, {min(cores)})
        beside = AsyncWriter(staged, cores)
        beside.start()
        assert beside._comes_up()
        assert beside._process is not None
        assert os.sched_getaffinity(beside._process.pid) == cores
    finally:
        os.sched_setaffinity(0, cores)


def test_what_it_writes_is_read_as_what_was_given(tmp_path: Path) -> None:
    staged = StagedTensors()
    copies = staged.take(TENSORS)
    _same(copies, TENSORS)
    beside = _ready(staged)
    for number in (1, 2):  # the second in the memory of the first, with more in it
        tensors = {n: t + 1 if t.is_floating_point() else t for n, t in TENSORS.items()}
        tensors |= {f"more/{number}": torch.randn(100_000 * number)}
        copies = staged.take(tensors)
        told = beside.write(tmp_path, 7)
        assert told is not None
        assert told.name == "__7_0.distcp"
        path = tmp_path / f"epoch-00000{number}"
        write_checkpoint(path, copies, {"state.json": "{}"}, None, beside)
        stored = StoredCheckpoint(path)  # every file by its checksum
        _same(stored.read(tensors), tensors)


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    tensors = {n: t for n, t in TENSORS.items() if t.numel()}
    write_checkpoint(tmp_path / "epoch-000001", tensors, {}, None)
    dcp_to_torch_save(tmp_path / "epoch-000001", tmp_path / "all.pt")
    _same(torch.load(tmp_path / "all.pt", weights_only=True), tensors)


def test_without_it_the_rank_writes_the_same(tmp_path: Path) -> None:
    staged = StagedTensors()
    copies = staged.take(TENSORS)
    beside = _ready(staged)
    assert beside._process is not None
    os.kill(beside._process.pid, signal.SIGKILL)
    beside._process.wait()
    write_checkpoint(tmp_path / "epoch-000001", copies, {}, None, beside)
    _same(StoredCheckpoint(tmp_path / "epoch-000001").read(TENSORS), TENSORS)


def test_who_waits_does_not_wait_for_it_to_start(tmp_path: Path) -> None:
    staged = StagedTensors()
    staged.take(TENSORS)
    beside = AsyncWriter(staged)
    beside.start()
    beside.hurry()
    assert beside.write(tmp_path, 0) is None


def test_one_that_is_stopped_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.5)
    saver = Saver(tmp_path, 2, None, 0)
    saver._staged.take(TENSORS)
    saver._beside.start()
    assert saver._beside._comes_up()
    process = saver._beside._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    # More names than a pipe holds: it is stopped while the request is written.
    many = TENSORS | {f"weight/{'long ' * 40}{i}": torch.ones(1) for i in range(1000)}
    saver.save(2, many, {}, is_last=False)
    saver.wait()
    assert not saver.has_failed
    _same(StoredCheckpoint(tmp_path / "checkpoints" / "epoch-000002").read(many), many)


def test_it_is_killed_with_its_rank(tmp_path: Path) -> None:
    code = f"import sys, time; sys.path[:] = {sys.path!r}\n" + (
        "from gnnpipe.checkpoint import beside, staged\n"
        "beside.WORTH_BYTES = 0; s = staged.StagedTensors(); s.take({}); b = beside.Beside(s)\n"
        "b.start(); b._comes_up(); print(b._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # It cannot look whether anybody is there.
        rank.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                break
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_no_room_for_copies_is_a_fault_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", full)
    saver = Saver(tmp_path, 2, None, 0)
    saver.save(1, TENSORS, {}, is_last=False)
    saver.wait()
    assert saver.has_failed
    assert saver.fault == ("Cannot allocate memory", "free some space")


def test_what_the_disk_says_comes_back(tmp_path: Path) -> None:
    staged = StagedTensors()
    staged.take(TENSORS)
    beside = _ready(staged)
    with pytest.raises(OSError, match="No such file or directory"):
        beside.write(tmp_path / "gone", 0)
    (tmp_path / "there").mkdir()
    assert beside.write(tmp_path / "there", 0) is not None, "it goes on after an error"


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 1, None, 0)
    saver.save(1, TENSORS, {}, is_last=False)
    saver.wait()
    process = saver._beside._process
    handle = saver._staged.handle
    assert process is not None
    assert process.poll() is None
    del saver
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def fit(out: str, epochs: int, resume: bool) -> int:
    """One of two ranks; how often the process beside it has written."""
    module.WORTH_BYTES = 0
    # However long it takes to start.
    module.AsyncWriter.hurry = lambda self: None  # type: ignore[method-assign]
    module._PATIENCE_S = 90.0
    written = []
    plain = AsyncWriter.write

    def write(self: AsyncWriter, folder: Path, rank: int) -> module.RankFile | None:
        told = plain(self, folder, rank)
        written.append(told)
        return told

    module.AsyncWriter.write = write  # type: ignore[method-assign]
    config = TrainConfig(
        model="gcnii",
        layers=4,
        hidden=8,
        chunks=6,
        epochs=epochs,
        lr=0.05,
        dropout=0.5,
        stages=2,
        eval_every=1,
        cache_dir="off",
        quiet=True,
        out=out,
        checkpoint_every=2,
    )
    Trainer(config, graph=small_graph(), resume=out if resume else None).fit()
    return sum(told is not None for told in written)


def test_a_run_that_it_writes_for_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    assert run_ranks(fit, 2, whole, 7, False) == [4, 4]
    assert run_ranks(fit, 2, part, 5, False) == [3, 3]
    run_ranks(fit, 2, part, 7, True)
    for name in ("model.pt", "metrics.csv"):
        before, after = (_untimed(Path(out) / name) for out in (whole, part))
        assert before == after


def _untimed(path: Path) -> list[list[bytes]] | bytes:
    if path.suffix != ".csv":
        return path.read_bytes()
    lines = [line.split(b",") for line in path.read_bytes().splitlines()]
    kept = [i for i, name in enumerate(lines[0]) if not name.endswith(b"_time_s")]
    return [[line[i] for i in kept] for line in lines]
