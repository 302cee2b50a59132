"""A resumed run keeps its plan, or is planned anew with the speeds that the ranks have now."""

import csv

import pytest
from helpers import quick_config, run_ranks
from slow_ranks import slow_devices

from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.runtime.comm.world import World

GRAPH = "synthetic:planted:n=800,degree=10,classes=4,features=16"
FLAGS = ["--dataset", GRAPH, "--layers", "3", "--hidden", "16", "--dtype", "float64", "--quiet"]
FLAGS += ["--eval-every", "0", "--cache-dir", "off", "--staleness", "exact", "--no-predict"]


def train(flags):
    """Runs the command on all ranks while rank 1 has half the speed."""
    with slow_devices(1), pytest.MonkeyPatch.context() as patched:
        patched.setattr(World, "can_shrink", property(lambda self: False))
        return main(["train", "--device", "cpu", *flags])


def work_of_rank_1(folder):
    plan = Plan.from_json((folder / "plan.json").read_text())
    return sum(
        len(stage.ops) * share / plan.num_ops
        for stage in plan.stages
        for rank, share in zip(stage.ranks, stage.shares, strict=True)
        if rank == 1
    )


def losses(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_the_flag_plans_anew_and_losses_go_on(tmp_path):
    folder, alone = tmp_path / "run", tmp_path / "alone"
    first = [*FLAGS, "--shards", "2", "--epochs", "3", "--checkpoint-every", "3"]
    assert run_ranks(train, 2, [*first, "--out", str(folder)]) == [0, 0]
    assert work_of_rank_1(folder) == pytest.approx(0.5)
    again = ["--resume", str(folder), "--quiet", "--epochs"]
    assert run_ranks(train, 2, [*again, "5", "--plan", "auto"]) == [0, 0]
    planned = work_of_rank_1(folder)
    assert 0 < planned < 0.42
    # Without the flag the run keeps its plan.
    assert run_ranks(train, 2, [*again, "6"]) == [0, 0]
    assert work_of_rank_1(folder) == planned
    assert main(["train", *FLAGS, "--epochs", "6", "--out", str(alone)]) == 0
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-9)


def test_only_a_search_plans_anew():
    with pytest.raises(InputError, match="replan: no effect without --plan auto"):
        Trainer(quick_config(), replan=True)


def test_a_run_keeps_the_plan_of_a_file_that_is_gone(tmp_path):
    folder, file = tmp_path / "run", tmp_path / "plan.json"
    file.write_text(Plan((StagePlan((*range(7),), (0,), (1.0,)),), 2, "layer-sync").to_json())
    first = [*FLAGS, "--plan", str(file), "--out", str(folder), "--checkpoint-every", "2"]
    assert main(["train", *first, "--epochs", "2"]) == 0
    file.write_text("")
    assert main(["train", "--resume", str(folder), "--epochs", "4", "--quiet"]) == 0
    assert Plan.from_json((folder / "plan.json").read_text()).chunks == 2
    assert len(losses(folder)) == 4
