"""A checkpoint is on disk as a whole or not at all, on all ranks alike."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import run_ranks, small_graph

from gnnpipe import TrainConfig, Trainer
from gnnpipe.checkpoint import writer
from gnnpipe.checkpoint.reader import MANIFEST, StoredCheckpoint
from gnnpipe.checkpoint.retention import has_unfinished, newest_whole
from gnnpipe.checkpoint.writer import write_checkpoint
from gnnpipe.errors import InputError
from gnnpipe.runtime.comm.mesh import Mesh


def write(run, epoch, fails_on=None):
    """The error of this rank, if any."""
    mesh = Mesh.join(2, 1)
    real = writer.write_rank_file

    def failing(path, tensors):
        real(path, tensors)
        if mesh.rank == fails_on:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "0" * 64

    if fails_on is not None:
        writer.write_rank_file = failing
    tensors = {f"weight/{mesh.rank}": torch.full((3,), float(mesh.rank + epoch))}
    try:
        write_checkpoint(Path(run), epoch, tensors, {"state.json": str(mesh.rank)}, 2, mesh)
    except OSError as error:
        return error.errno, error.strerror
    return None


def test_all_ranks_write_one_checkpoint(tmp_path):
    assert run_ranks(write, 2, str(tmp_path), 3) == [None, None]
    stored = StoredCheckpoint(tmp_path / "checkpoints" / "epoch-000003")
    assert stored.text("state.json") == "0"
    found = stored.read(["weight/0", "weight/1"])
    assert [t.tolist() for t in found.values()] == [[3.0] * 3, [4.0] * 3]
    assert not has_unfinished(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(rank, tmp_path):
    run_ranks(write, 2, str(tmp_path), 3)
    full = (errno.ENOSPC, "No space left on device")
    assert run_ranks(write, 2, str(tmp_path), 4, rank) == [full, full]
    assert os.listdir(tmp_path / "checkpoints") == ["epoch-000003"]


def test_the_newest_remain(tmp_path):
    mesh = Mesh.alone()
    for epoch in (1, 2, 3):
        write_checkpoint(tmp_path, epoch, {"a": torch.ones(1)}, {}, 2, mesh)
    assert newest_whole(tmp_path)[0].path.name == "epoch-000003"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["epoch-000002", "epoch-000003"]


def test_a_damaged_checkpoint_of_the_same_epoch_is_replaced(tmp_path):
    mesh = Mesh.alone()
    for value in (1.0, 2.0):
        write_checkpoint(tmp_path, 1, {"a": torch.tensor(value)}, {}, 2, mesh)
    assert newest_whole(tmp_path)[0].read(["a"])["a"] == 2.0


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    write_checkpoint(tmp_path, 1, {"a": torch.ones(1)}, {}, 2, Mesh.alone())
    path = tmp_path / "checkpoints" / "epoch-000001" / MANIFEST
    content = json.dumps(json.loads(path.read_text().partition("\n")[2]) | {"version": 1})
    path.write_text(f"{writer.manifest_text({}).partition(chr(10))[0]}\n{content}")
    with pytest.raises(InputError, match="is damaged"):
        StoredCheckpoint(path.parent)
    import hashlib

    path.write_text(f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}")
    with pytest.raises(InputError, match=r"is of checkpoint version 1, not 2; go on with"):
        StoredCheckpoint(path.parent)


def fit(out, epochs, resume):
    """Train on one of two ranks."""
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


def test_two_ranks_resume_to_the_bit(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_ranks(fit, 2, str(whole), 7, False)
    run_ranks(fit, 2, str(part), 5, False)
    shutil.rmtree(part / "checkpoints" / "epoch-000005")
    run_ranks(fit, 2, str(part), 7, True)
    assert (whole / "model.pt").read_bytes() == (part / "model.pt").read_bytes()
