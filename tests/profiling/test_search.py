"""``--plan auto`` in the commands: runs, wrong input, and graphs that are here."""

import pytest
from helpers import run_ranks

import gnnpipe
from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.config import TrainConfig
from gnnpipe.errors import IdleRank, InputError
from gnnpipe.plan import Plan
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.profiling.search import Hardware, hardware_of

SETTINGS = {"dataset": "karate", "layers": 3, "hidden": 8, "cache_dir": "off", "quiet": True}
SHAPE = "vertices=1e5,edges=1e6,features=64,classes=8"


def trained(folder):
    config = TrainConfig(**SETTINGS, epochs=2, plan="auto", out=str(folder))
    try:
        result = Trainer(config).fit()
    except IdleRank:
        return None
    return result.stages, result.shards, result.chunks


def test_one_rank_needs_no_measurement(tmp_path):
    assert trained(tmp_path / "run") == (1, 1, 1)


def test_all_ranks_get_the_plan_of_rank_0(tmp_path):
    shapes = run_ranks(trained, 2, tmp_path / "run")
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    of_plan = plan.num_stages, plan.most_shards, plan.chunks
    assert shapes == [of_plan if rank < plan.num_ranks else None for rank in range(2)]


def test_info_plans_for_devices_that_are_not_here():
    hardware = Hardware(sheets="a100:100gbe", devices=4)
    found = gnnpipe.info(TrainConfig(**SETTINGS, plan="auto"), hardware=hardware)
    assert str(found).startswith("plan: ")
    assert "runner-up" in str(found)


def test_simulate_counts_the_halo_of_a_graph():
    config = TrainConfig(**SETTINGS | {"dataset": "synthetic:planted:n=2000"}, plan="auto")
    found = gnnpipe.simulate(config, hardware="a100:100gbe", devices=4)
    assert found.search[0].startswith("plan: ")
    assert found.predicted_epoch_time_s > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hardware", "a100:100gbe"], "--plan auto: the number of devices is not known; give"),
        (["--devices", "4"], "give either --profile FILE"),
        (["--hardware", "a100:100gbe", "--devices", "0"], "--devices 0: must be 1 to"),
        (["--hardware", "a100:100gbe", "--devices", "2", "--stages", "2"], "--stages 2: no effect"),
    ],
)
def test_wrong_input_is_told_in_a_line(flags, message, capsys):
    assert main(["simulate", "--plan", "auto", "--shape", SHAPE, *flags]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_devices_need_the_search():
    with pytest.raises(InputError, match=r"--devices 4: only used by --plan auto"):
        gnnpipe.simulate(TrainConfig(**SETTINGS), hardware="a100:100gbe", devices=4)


def test_cluster_and_devices_are_not_given_together():
    cluster = Cluster((Device(1.0, 10**9),), Link(1e9, 1e-5))
    with pytest.raises(InputError, match=r"--devices 2: the cluster file says how many"):
        hardware_of(TrainConfig(plan="auto"), "a100:100gbe", cluster, 2)
