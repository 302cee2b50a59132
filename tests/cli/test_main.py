"""The command line: bad input is one line and exit code 2; good input runs, on many ranks too."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import free_port

from gnnpipe.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--dataset", "karate", "--hidden", "8", "--epochs", "3", "--cache-dir", "off"]


def good_npz():
    rng = np.random.default_rng(0)
    y = np.arange(40) % 4
    part = np.arange(40) % 3
    return {
        "edge_index": rng.integers(0, 40, (2, 160)),
        "x": rng.random((40, 5), np.float32),
        "y": y,
        "train_mask": part == 0,
        "val_mask": part == 1,
        "test_mask": part == 2,
    }


def npz(folder, **changes):
    """A good file with some arrays replaced, or dropped where None."""
    arrays = {k: v for k, v in (good_npz() | changes).items() if v is not None}
    np.savez(folder / "graph.npz", **arrays)
    return ["--dataset", str(folder / "graph.npz")]


def spoiled(value):
    x = good_npz()["x"]
    x[3, 2] = value
    return x


BAD_WORDS = [
    (["--dataset", "debain"], ["--dataset", "debain", "debian"]),
    (["--dataset", "nowhere/graph.npz"], ["nowhere/graph.npz"]),
    (["--dataset", "synthetic:planted:m=3"], ["synthetic", "m"]),
    (["--model", "gcnn"], ["--model", "'gcnn'", "gcn"]),
    (["--partitioner", "meits"], ["--partitioner", "'meits'", "metis"]),
    (["--stages", "2"], ["--stages 2", "torchrun --nproc-per-node 2"]),
    (["--shards", "3"], ["--shards 3", "torchrun --nproc-per-node 3"]),
    (["--chunks", "35"], ["--chunks 35", "34"]),
    (["--chunks", "0"], ["--chunks 0", "at least 1"]),
    (["--layers", "-2"], ["--layers -2", "at least 1"]),
    (["--hidden", "0"], ["--hidden 0", "at least 1"]),
    (["--epochs", "0"], ["--epochs 0", "at least 1"]),
    (["--epochs", "many"], ["--epochs", "'many'"]),
    (["--lr", "0"], ["--lr 0", "more than 0"]),
    (["--lr", "nan"], ["--lr nan", "finite"]),
    (["--dropout", "1"], ["--dropout 1", "less than 1"]),
    (["--weight-decay", "-1"], ["--weight-decay -1", "at least 0"]),
    (["--seed", "-1"], ["--seed -1"]),
    (["--dtype", "float16"], ["--dtype 'float16'", "float32"]),
    (["--staleness", "papre"], ["--staleness 'papre'", "paper"]),
    (["--chunks", "2", "--staleness", "exact", "--snapshot-every", "5"], ["--snapshot-every 5"]),
    (["--chunks", "2", "--staleness", "exact", "--exact-epochs", "5"], ["--exact-epochs 5"]),
    (["--chunks", "2", "--staleness", "exact", "--probes", "9"], ["--probes 9"]),
    (["--chunks", "2", "--snapshot-every", "5"], ["--snapshot-every 5", "--staleness paper"]),
    (["--probes", "-1"], ["--probes -1", "at least 0"]),
    (
        ["--chunks", "2", "--staleness", "paper", "--probes", "9"],
        ["--probes 9", "--snapshot-every 1"],
    ),
    (["--keep-weights", "best", "--eval-every", "0"], ["--keep-weights best", "--eval-every 10"]),
    (["--lr-schedule", "plateau", "--eval-every", "1"], ["--lr-patience 50", "--epochs 3"]),
    (
        ["--lr-schedule", "plateau", "--epochs", "90", "--patience", "20", "--lr-patience", "30"],
        ["--lr-patience 30", "--patience 20"],
    ),
    (["--seed", "4294967295", "--seeds", "2"], ["--seeds 2", "2^32"]),
    (["--exact-epochs", "-1"], ["--exact-epochs -1", "at least 0"]),
    (["--metric", "auc"], ["--metric 'auc'", "rocauc"]),
    (["--metric", "rocauc"], ["--metric rocauc", "karate has 4 classes", "f1-macro"]),
    (["--patience", "5"], ["--patience 5", "--eval-every 5"]),
    (["--patience", "5", "--eval-every", "0"], ["--patience 5", "--eval-every 5"]),
    (["--patience", "-1"], ["--patience -1", "at least 0"]),
    (["--keep-weights", "first"], ["--keep-weights 'first'", "best"]),
    (["--lr-schedule", "step"], ["--lr-schedule 'step'", "cosine"]),
    (["--warmup-epochs", "3"], ["--warmup-epochs 3", "--epochs 3"]),
    (["--lr-schedule", "plateau", "--lr-patience", "2"], ["--lr-patience 2", "--eval-every 2"]),
    (["--seeds", "0"], ["--seeds 0", "at least 1"]),
    (["--seeds", "two"], ["--seeds", "'two'"]),
    (["--model", "gat", "--model-args", "heads=3"], ["'heads=3'", "try hidden 9"]),
    (["--split", "60/20/30"], ["--split '60/20/30'", "60/20/20"]),
    pytest.param(
        ["--device", "cuda"],
        ["--device cuda", "--device cpu"],
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
    ),
    (["--out", "/dev/null/run"], ["--out", "/dev/null"]),
    (["--out", "/proc/run"], ["--out", "/proc"]),
    (["--config", "nowhere.toml"], ["--config", "nowhere.toml"]),
    (["--layer", "3"], ["--layer: unknown flag", "'--layers'"]),
    (["--zzz", "3"], ["--zzz: unknown flag", "gnnpipe train --help"]),
    (["--lr"], ["--lr", "expected one argument"]),
]


def refused(arguments, words, capsys, folder):
    """Exit code 2, one line with all the words, and nothing written."""
    before = sorted(folder.rglob("*"))
    start = time.monotonic()
    assert main(["train", *arguments]) == 2
    assert time.monotonic() - start < 10
    out, err = capsys.readouterr()
    assert err.count("\n") == 1, err
    assert err.startswith("gnnpipe: error: ")
    assert "Traceback" not in err + out
    for word in words:
        assert word in err, err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "words"), BAD_WORDS)
def test_bad_words(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused([*SMALL, *arguments], words, capsys, tmp_path)


BAD_FILES = [
    ({"edge_index": None}, ["edge_index"]),
    ({"x": None}, ["x"]),
    ({"y": None}, ["y"]),
    ({"train_mask": None}, ["train_mask"]),
    ({"x": spoiled(np.nan)}, ["x", "nan"]),
    ({"x": spoiled(np.inf)}, ["x", "inf"]),
    ({"edge_index": np.array([[0, 40], [1, 2]])}, ["edge_index", "40"]),
    ({"edge_index": np.array([[0, -1], [1, 2]])}, ["edge_index", "-1"]),
    ({"y": np.full(40, -1)}, ["y"]),
    ({"y": np.full(40, -7)}, ["y", "-7"]),
    ({"train_mask": np.zeros(40, bool)}, ["train_mask"]),
    ({"val_mask": np.zeros(7, bool)}, ["val_mask"]),
]


@pytest.mark.parametrize(("changes", "words"), BAD_FILES, ids=lambda v: str(v)[:40])
def test_bad_files(changes, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused([*npz(tmp_path, **changes), "--epochs", "2"], words, capsys, tmp_path)


def test_flags_complete_a_file_that_is_not_valid_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('dataset = "karate"\nstages = 4\n')
    assert main(["info", "--config", "run.toml", "--layers", "8"]) == 0


BAD_TOML = [
    ("layerz = 3", ["'layerz'", "layers"]),
    ("layers = ", ["not valid TOML"]),
    ("layers = 'three'", ["--layers 'three'"]),
    ("lr = true", ["--lr True"]),
    ("[train]\nlayers = 3", ["'train'"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_TOML)
def test_bad_toml(text, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(text)
    refused(["--config", "run.toml"], words, capsys, tmp_path)


def test_a_folder_of_another_run_is_not_touched(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, "--out", "run"]) == 0
    held = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    capsys.readouterr()
    refused([*SMALL, "--out", "run"], ["--out 'run'", "another run"], capsys, tmp_path)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == held


def test_flags_win_over_the_file_and_the_default_folder_is_new(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('dataset = "karate"\nhidden = 8\nepochs = 9\n')
    for _ in range(2):
        assert main(["train", "--config", "run.toml", "--epochs", "2"]) == 0
    results = [json.loads(p.read_text()) for p in tmp_path.glob("runs/*/result.json")]
    assert len(results) == 2
    assert {(r["hidden"], r["epochs"]) for r in results} == {(8, 2)}


def test_info_reports_any_shape_without_ranks(capsys):
    assert main(["info", *SMALL, "--layers", "4", "--stages", "2", "--shards", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 stages x 2 shards x 1 chunk on 4 ranks" in out
    assert out.count("rank ") >= 4
    assert "sent per epoch over all ranks" in out
    assert main(["info", "--list"]) == 0
    assert "debian" in capsys.readouterr().out


def test_verify_says_yes_and_no(capsys):
    shape = [*SMALL, "--layers", "4", "--model", "gcnii", "--chunks", "3"]
    assert main(["verify", *shape]) == 0
    assert "equal to one device" in capsys.readouterr().out
    assert main(["verify", *shape, "--tolerance", "1e-30"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    assert main(["verify", *shape, "--tolerance", "0"]) == 2
    assert main(["verify", *shape, "--lr", "1e30", "--dtype", "float32"]) == 1, "NaN is not equal"


def test_no_command_and_help(capsys):
    assert main([]) == 2
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    assert "--snapshot-every" in capsys.readouterr().out


def torchrun(ranks, *arguments, timeout_s=150):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        *arguments,
    ]
    return subprocess.run(
        command, env=environment, timeout=timeout_s, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_torchrun_trains_verifies_and_refuses(tmp_path):
    out = tmp_path / "run"
    shape = ["--layers", "4", "--stages", "2", "--chunks", "4"]
    done = torchrun(2, "-m", "gnnpipe", "train", *SMALL, *shape, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("graph karate") == 1, "only rank 0 speaks"
    result = json.loads((out / "result.json").read_text())
    assert result["world_size"] == 2
    assert len(result["peak_memory_bytes"]) == 2
    assert result["comm_bytes_per_epoch"] == result["comm_bytes_closed_form"]
    wrong = torchrun(2, "-m", "gnnpipe", "train", *SMALL, "--layers", "4", "--stages", "4")
    assert wrong.returncode != 0
    assert wrong.stderr.count("gnnpipe: error: --stages 4 --shards 1: need 4 ranks, not 2") == 1


RAISING = """
import sys
from gnnpipe.runtime.stage import Stage
import os
plain = Stage.backward
def backward(self, chunk, steps, following=None):
    if os.environ["RANK"] == "1" and self._epoch == 2 and chunk == 1:
        raise RuntimeError("a fault made on purpose")
    return plain(self, chunk, steps, following)
Stage.backward = backward
from gnnpipe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", [["--stages", "2"], ["--shards", "2"]])
def test_a_rank_that_raises_ends_all_with_its_own_error_first(tmp_path, shape):
    script = tmp_path / "raising.py"
    script.write_text(RAISING)
    start = time.monotonic()
    done = torchrun(2, str(script), "train", *SMALL, *shape, "--epochs", "500", "--chunks", "3")
    assert done.returncode != 0
    assert time.monotonic() - start < 60, "start included"
    assert "a fault made on purpose" in done.stderr
    assert "rank 1 (stage" in done.stderr
    assert "chunk 1, epoch 3, action" in done.stderr
    first = done.stderr.index("Traceback")
    assert "a fault made on purpose" in done.stderr[first : first + 4000]
    assert "lost another rank" not in done.stderr[: done.stderr.index("on purpose")]


UNCLOSED = """
import atexit, os, sys
import torch.distributed as dist
from gnnpipe import TrainConfig, Trainer
# Called last: behind all that a run has asked for.
atexit.register(lambda: os.write(1, f"still met: {dist.is_initialized()}\\n".encode()))
trainer = Trainer(TrainConfig(dataset="karate", stages=2, epochs=2, out="off", quiet=True))
print(trainer.fit().loss)
if sys.argv[1:]:
    raise ValueError("a fault of the script's own")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_raising", [False, True])
def test_ranks_part_where_a_script_does_not_say_so(tmp_path, is_raising):
    """Or torch's connections outlive the interpreter, which half of the time aborts."""
    script = tmp_path / "unclosed.py"
    script.write_text(UNCLOSED)
    done = torchrun(2, str(script), *["raise"] * is_raising)
    assert (done.returncode == 0) != is_raising, done.stderr
    if not is_raising:
        assert done.stdout.count("still met: False") == 2
    else:
        assert "a fault of the script's own" in done.stderr
        assert "still met: False" not in done.stdout


REFUSED = """
import atexit, os, sys
import torch.distributed as dist
from gnnpipe.cli.main import main
atexit.register(lambda: os.write(1, f"still met: {dist.is_initialized()}\\n".encode()))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [(["--metric", "r2"], "--metric"), (["--device", "cuda"], "--device cuda: torch sees no GPU")],
)
def test_ranks_that_refuse_their_input_part_first(tmp_path, words, said):
    """The same, with the exit code 2 that was meant."""
    if words[0] == "--device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    done = torchrun(2, str(script), "train", *SMALL, "--shards", "2", *words)
    assert done.stderr.count("gnnpipe: error: ") == 1
    assert said in done.stderr
    assert done.stdout.count("still met: False") == 2
    assert "exitcode  : 2 " in done.stderr


def test_what_a_run_on_a_gpu_takes_is_told_without_one(capsys):
    shape = ["--chunks", "8", "--staleness", "exact"]
    words = ["--device", "cuda", "--kernel", "triton"]
    assert main(["info", *SMALL, *shape, *words]) == 0
    there = capsys.readouterr().out
    assert "x 8 chunks on 1 rank" in there
    # The aggregated features, what is made of them, and of the second layer product, sum and bias.
    assert "rank 0 (ops 0-4): " in there


@pytest.mark.parametrize(("epochs", "told"), [("23", True), ("24", False)])
def test_a_run_too_short_for_its_snapshots_is_told_so(epochs, told, capsys):
    words = ["--chunks", "4", "--staleness", "paper", "--epochs", epochs]
    assert main(["info", *SMALL, *words]) == 0
    assert ("every stale row is zero; try --snapshot-every 4" in capsys.readouterr().out) == told


@pytest.mark.parametrize("more", [[], ["--seeds", "2"]], ids=["a run", "seeds"])
def test_the_result_is_printed_quietly_too(more, capsys):
    words = ["train", "--dataset", "karate", "--epochs", "2", "--cache-dir", "off", "--out", "off"]
    assert main([*words, *more]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if " s per epoch" not in line]
    assert main([*words, *more, "--quiet"]) == 0
    found = capsys.readouterr()
    lines = [line for line in found.out.splitlines() if " s per epoch" not in line]
    begin = "2 seeds, last epoch: " if more else "last epoch: loss "
    assert any(line.startswith(begin) for line in lines)
    assert set(lines) < set(said) | {line for line in lines if line.startswith("memory grew")}
    assert not any(line.startswith("epoch ") for line in lines)
    assert found.err == ""
