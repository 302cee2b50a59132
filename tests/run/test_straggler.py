"""A rank that computes longer than planned is named; noise and what the plan knows are not."""

import json
import random

import pytest
from helpers import quick_config, run_ranks
from slow_ranks import slow_devices

from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.plan import Placement, Plan, StagePlan
from gnnpipe.run.straggler import StragglerWatch

WORK = {
    "dataset": "synthetic:planted:n=1000,degree=12,classes=4,features=32",
    "layers": 4,
    "hidden": 32,
    "dtype": "float32",
    "eval_every": 0,
    "epochs": 6,
}


def named(speeds, noise, epochs=5, seed=0, work=None, assumed=None):
    """The ranks that are named in epochs whose compute times have lognormal noise."""
    draw, ranks = random.Random(seed), range(len(speeds))
    work = work or [1.0] * len(speeds)
    watch = StragglerWatch([ranks], work, assumed or [1.0] * len(speeds))
    for epoch in range(epochs):
        times = [w / s * draw.lognormvariate(0, noise) for w, s in zip(work, speeds, strict=True)]
        watch.see(epoch + 1, times, 1.1 * max(times))
    return watch.found


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rank_at_half_speed_is_named_within_five_epochs(ranks, noise):
    for seed in range(5):
        (found,) = named([1.0] * (ranks - 1) + [0.5], noise, seed=seed)
        assert (found.rank, found.epoch <= 5) == (ranks - 1, True)
        assert found.slowdown == pytest.approx(2, rel=0.2)
        # Equal work takes 2; shares by speed take ranks / (ranks - 0.5), plus what is not computed.
        even = ranks / (ranks - 0.5) + 0.2
        assert found.gain == pytest.approx(2.2 / even, rel=0.15)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_is_no_straggler(ranks, noise):
    assert not [found for seed in range(20) for found in named([1.0] * ranks, noise, 40, seed)]


def test_what_the_plan_knows_is_no_straggler():
    assert not named([1.0, 0.5], 0.02, work=[2.0, 1.0])
    assert not named([1.0, 0.5], 0.02, assumed=[1.0, 0.5])
    assert named([1.0, 0.25], 0.02, assumed=[1.0, 0.5])


def test_epochs_that_are_not_recorded_name_nobody():
    watch = StragglerWatch([range(2)], [1.0, 1.0], [1.0, 1.0])
    assert not [one for epoch in range(9) for one in watch.see(epoch, [0.0, 0.0], 0.0)]


def test_the_line_says_what_to_do(tmp_path):
    (found,) = named([1.0, 0.5], 0.0)
    line = found.line(Placement.grid(1, 2), tmp_path)
    assert "rank 1 (stage 0, shard 1) is slow: it computes 2.00 times as long" in line
    assert f"--resume {tmp_path} --plan auto" in line
    assert "\n" not in line


def trained(folder, slow, predicts, shares):
    plan = Plan((StagePlan(tuple(range(9)), (0, 1), shares),), 1, "fill-drain")
    config = quick_config(**WORK | {"epochs": 12 if predicts else 6}, out=folder)
    with slow_devices(slow, action_s=0.06):
        result = Trainer(config, plan=plan).fit()
    return [(one.rank, one.epoch) for one in result.stragglers]


@pytest.mark.parametrize("predicts", [False, True])
def test_a_throttled_rank_is_named_in_log_result_and_report(predicts, tmp_path, capfd):
    folder = tmp_path / "run"
    found = run_ranks(trained, 2, str(folder), 1, predicts, (0.5, 0.5))
    assert found[0] == found[1]
    ((rank, epoch),) = found[0]
    assert (rank, epoch <= 5) == (1, True)
    result = json.loads((folder / "result.json").read_text())
    assert 1.1 < result["stragglers"][0]["gain"] < 2
    assert main(["report", str(folder)]) == 0
    assert "Rank 1 is slow: it computed" in (folder / "report.html").read_text()


def test_equal_ranks_are_not_named(tmp_path):
    assert run_ranks(trained, 2, str(tmp_path / "run"), None, False, (0.5, 0.5)) == [[], []]
