"""`gnnpipe compare`: two runs, or the seeds of two settings, side by side."""

import json
import math
import re
import shutil
import statistics

import pytest
from helpers import small_graph

from gnnpipe import TrainConfig, fit_seeds
from gnnpipe.cli.main import main


def config(out, **settings):
    defaults = {
        "layers": 3,
        "hidden": 8,
        "chunks": 4,
        "epochs": 6,
        "eval_every": 1,
        "cache_dir": "off",
        "out": str(out),
        "quiet": True,
        "predict": False,
    }
    return TrainConfig(**(defaults | settings))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Seeds 0 to 2 exactly, 0 to 1 stale."""
    place = tmp_path_factory.mktemp("seeds")
    exact, stale = place / "exact", place / "stale"
    fit_seeds(config(exact, staleness="exact"), 3, small_graph())
    fit_seeds(config(stale, staleness="none"), 2, small_graph())
    return exact, stale


def result(folder, seed):
    return json.loads((folder / f"seed-{seed}" / "result.json").read_text())


@pytest.mark.slow
def test_seeds_side_by_side(folders, capsys):
    exact, stale = folders
    assert main(["compare", str(exact), str(stale)]) == 0
    out = capsys.readouterr().out
    apart = []
    for seed in (0, 1):
        a, b = (result(folder, seed)["test_metric"] for folder in folders)
        apart.append(b - a)
        assert re.search(rf"seed {seed}, last epoch +{a:.4f} +{b:.4f} +\{b - a:+.4f}\n", out)
    error = statistics.stdev(apart) / math.sqrt(2)
    (line,) = re.findall(r"2 seeds, last epoch .*", out)
    assert f"{statistics.fmean(apart):+.4f} ± {error:.4f}: " in line
    assert ("not significant" in line) == (
        abs(statistics.fmean(apart)) <= 12.706 * error
    )  # t of one degree
    assert "2 seeds, last epochs, at most 20" in out
    assert "2 seeds, best validation" in out
    assert "only A or B has them: seeds 2\n" in out


def test_one_run_against_itself(folders, capsys):
    run = str(folders[0] / "seed-1")
    assert main(["compare", run, run]) == 0
    out = capsys.readouterr().out
    assert out.count("+0.0000") == 4
    assert "one seed says little" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset": "another"}, ["its dataset is another"]),
        ({"metric": "rocauc"}, ["its metric is rocauc"]),
        ({"test_metric": "x"}, ["test_metric 'x'"]),
        (None, ["has not ended", "--resume"]),
    ],
)
def test_what_cannot_be_compared_is_one_line(change, words, folders, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(folders[0] / "seed-0", other)
    file = other / "result.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(["compare", str(folders[0]), str(other)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_folders_without_a_common_seed_or_without_runs(folders, tmp_path, capsys):
    exact, stale = folders
    assert main(["compare", str(stale), str(exact / "seed-2")]) == 2
    assert "has no seed in common" in capsys.readouterr().err
    for bad in (tmp_path, tmp_path / "nowhere"):
        assert main(["compare", str(exact), str(bad)]) == 2
        assert str(bad) in capsys.readouterr().err
