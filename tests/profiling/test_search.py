"""``--plan auto`` in the commands: runs, wrong input, and graphs that are here."""

import re
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
from helpers import run_ranks

import gnnpipe
from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.config import TrainConfig
from gnnpipe.errors import IdleRank, InputError
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.planner.given_devices import Hardware, hardware_of
from gnnpipe.profiling.scenario import scenario_of
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare

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


@pytest.mark.parametrize("command", ["simulate", "info"])
def test_no_line_is_printed_twice(command):
    config = TrainConfig(**SETTINGS | {"dataset": "synthetic:planted:n=2000"}, plan="auto")
    hardware = Hardware(sheets="a100:100gbe", devices=2)
    if command == "info":
        text = str(gnnpipe.info(config, hardware=hardware))
    else:
        text = str(gnnpipe.simulate(config, hardware="a100:100gbe", devices=2))
    lines = text.splitlines()
    assert len(set(lines)) == len(lines)
    for start in ("plan: ", "predicted: "):
        assert sum(line.startswith(start) for line in lines) == 1
    assert sum("critical path" in line for line in lines) == 1
    # Each rank has one line of memory.
    ranks = [line for line in lines if re.match(r"memory of rank 0: ", line)]
    assert len(ranks) == (command == "simulate")


def test_verify_searches_as_a_run_does():
    found = gnnpipe.verify(TrainConfig(**SETTINGS, plan="auto", epochs=2, dtype="float64"))
    assert found.is_equal
    assert "1 stage x 1 shard x 1 chunk on 1 rank" in str(found)


@dataclass
class Asking:
    """Asks for the rows that shards read, and then plans one stage."""

    questions: list
    answers: list = field(default_factory=list)

    def num_ranks(self, shape):
        return 1

    def plan(self, request):
        self.answers = [request.halo(*question) for question in self.questions]
        return Plan((StagePlan.even(tuple(range(request.model.num_ops)), (0,)),), 1, "fill-drain")


def test_each_largest_number_of_shards_is_counted():
    config = TrainConfig(**SETTINGS | {"dataset": "synthetic:planted:n=2000"}, out="off")
    answers = []
    for questions in ([(2, 2), (8, 8)], [(8, 8)]):
        planner = Asking(questions)
        prepare(config, World.alone(), planner=planner)
        answers.append(planner.answers[-1])
    assert answers[0] == answers[1] > 0


def test_the_peak_of_the_setup_is_no_memory_of_a_device():
    config = TrainConfig(**SETTINGS | {"dataset": "synthetic:planted:n=2000"}, out="off")
    prepared = prepare(replace(config, shards=16, layers=1), World.alone())
    found = memory_by_rank(prepared)
    assert max(estimate.setup for estimate in found) > 0
    sizes = scenario_of(prepared).memory_bytes
    assert sizes == [estimate.total - estimate.setup for estimate in found]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hardware", "a100:100gbe"], "--plan auto: give the number of devices (--devices N, or"),
        (["--devices", "4"], "--plan auto: give the times of the ops (--hardware DEVICE"),
        ([], "--plan auto: give the number of devices (--devices N, or --cluster FILE) and the "),
        (["--hardware", "a100:100gb", "--devices", "4"], "did you mean '100gbe'?"),
        (["--hardware", "a100:100gbe", "--devices", "0"], "--devices 0: must be 1 to 4,096"),
        (["--hardware", "a100:100gbe", "--devices", "4097"], "--devices 4097: must be 1 to"),
        (["--hardware", "a100:100gbe", "--cluster", "c.toml"], "c.toml': number of devices 4097"),
        (["--hardware", "a100:100gbe", "--devices", "2", "--stages", "2"], "--stages 2: no effect"),
    ],
)
def test_wrong_input_is_told_in_a_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    many = Cluster((Device(1.0, 10**9),) * 4097, Link(1e9, 1e-5))
    (tmp_path / "c.toml").write_text(many.to_toml())
    assert main(["simulate", "--plan", "auto", "--shape", SHAPE, *flags]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_info_says_at_once_what_a_search_lacks(capsys):
    assert main(["info", "--plan", "auto", "--dataset", "debian"]) == 2
    error = capsys.readouterr().err
    for word in ("--devices N, or --cluster FILE", "--hardware DEVICE:LINK", "--profile FILE"):
        assert word in error


@pytest.mark.slow
def test_a_search_that_lacks_devices_is_refused_before_torch_is_loaded():
    code = "import sys; from gnnpipe.cli.main import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code if 'torch' not in sys.modules else 9)"
    done = subprocess.run(
        [sys.executable, "-c", code, "info", "--plan", "auto", "--dataset", "debian"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr


def test_the_runner_up_stands_beside_the_time_of_the_plan():
    config = TrainConfig(**SETTINGS | {"dataset": "synthetic:planted:n=2000"}, plan="auto")
    found = gnnpipe.simulate(config, hardware="a100:100gbe", devices=2)
    (line,) = [line for line in found.lines() if line.startswith("runner-up: ")]
    other, more, own = re.search(
        r"predicted (\S+) s an epoch, (\S+)% more than the (\S+) s of the plan", line
    ).groups()
    assert float(other) / float(own) - 1 == pytest.approx(float(more) / 100, abs=2e-3)


def test_devices_need_the_search():
    with pytest.raises(InputError, match=r"--devices 4: only used by --plan auto"):
        gnnpipe.simulate(TrainConfig(**SETTINGS), hardware="a100:100gbe", devices=4)


def test_cluster_and_devices_are_not_given_together():
    cluster = Cluster((Device(1.0, 10**9),), Link(1e9, 1e-5))
    with pytest.raises(InputError, match=r"--devices 2: cluster says how many there are"):
        hardware_of(TrainConfig(plan="auto"), "a100:100gbe", cluster, 2)
