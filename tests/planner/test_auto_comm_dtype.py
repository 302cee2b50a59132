"""``--plan auto`` and rows in bf16: only if allowed, only where faster, and kept by the plan."""

from dataclasses import replace

import pytest
from helpers import small_graph
from planned import FAST, GRAPH, SLOW, devices, space_of

import gnnpipe
from gnnpipe import TrainConfig, Trainer
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import find_plan
from gnnpipe.planner.auto import every_candidate
from gnnpipe.run.resume import resumed_config

TWO = Cluster(devices(1.0, 1.0), SLOW)
CONFIG = TrainConfig(model="gcn", layers=4, hidden=16, epochs=3, cache_dir="off", quiet=True)
# With features that are narrower than the model: 4 aggregations, 3 row-wise calls behind them, and
# the map before and the bias behind the last one.
OPS = tuple(range(9))
BF16 = Plan((StagePlan(OPS, (0,), (1.0,)),), 2, "fill-drain", comm_dtype="bf16")


@pytest.mark.parametrize("link", [SLOW, FAST])
def test_rows_are_rounded_only_if_allowed_and_what_it_would_gain_is_told(link):
    cluster = Cluster(devices(1.0, 1.0), link)
    usual, forced = space_of(cluster), space_of(cluster, comm_dtype="bf16")
    assert {c.plan.comm_dtype for c in every_candidate(usual)} == {"same"}
    found = find_plan(usual)
    assert found.plan.comm_dtype == "same"
    (line,) = [line for line in found.lines() if "bf16" in line]
    saved = 1 - find_plan(forced).best.simulated_s / found.best.simulated_s
    assert f"would save {saved:.1%}: " in line
    assert not any("changes results" in line for line in find_plan(forced).lines())


@pytest.mark.parametrize("link", [SLOW, FAST])
def test_an_allowed_bf16_is_chosen_where_faster(link):
    cluster = Cluster(devices(1.0, 1.0), link)
    same, bf16, auto = (
        find_plan(space_of(cluster, plan="auto", comm_dtype=name)).best
        for name in ("same", "bf16", "auto")
    )
    assert auto.simulated_s == min(same.simulated_s, bf16.simulated_s)
    faster = bf16 if bf16.simulated_s < same.simulated_s else same
    assert auto.plan.comm_dtype == faster.plan.comm_dtype


def test_a_simulation_has_the_rows_that_were_found():
    config = TrainConfig(layers=6, hidden=64, plan="auto", comm_dtype="auto")
    found = gnnpipe.simulate(config, shape=GRAPH, hardware="a100:100gbe", cluster=TWO)
    forced = replace(config, comm_dtype="bf16")
    again = gnnpipe.simulate(forced, shape=GRAPH, hardware="a100:100gbe", cluster=TWO)
    assert "bf16 rows" in found.search[0]
    assert found.comm_bytes_per_epoch == again.comm_bytes_per_epoch
    assert found.predicted_epoch_time_s == again.predicted_epoch_time_s


def test_one_rank_rounds_nothing(tmp_path):
    config = replace(CONFIG, plan="auto", comm_dtype="auto", out=str(tmp_path / "run"))
    trainer = Trainer(config, graph=small_graph())
    trainer.fit()
    assert trainer.plan.comm_dtype == "same"
    assert resumed_config(tmp_path / "run").comm_dtype == "same"


def test_a_plan_with_rounded_rows_is_run_only_if_allowed(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(BF16.to_json())
    config = replace(CONFIG, plan=str(file), out="off")
    with pytest.raises(InputError, match=r"rows in bf16, which change results; add --comm-dtype"):
        Trainer(config, graph=small_graph()).fit()
    asked = replace(CONFIG, out="off", chunks=2, comm_dtype="bf16")
    losses = [row.loss for row in Trainer(asked, graph=small_graph()).fit().history]
    run = tmp_path / "run"
    found = replace(config, comm_dtype="auto", out=str(run), checkpoint_every=1)
    assert [row.loss for row in Trainer(found, graph=small_graph()).fit().history] == losses
    # A resumed run, and one that is repeated with its files, goes on with the same rows.
    again = resumed_config(run, {"epochs": 4})
    assert again.comm_dtype == "bf16"
    more = Trainer(again, graph=small_graph(), resume=run).fit()
    assert [row.loss for row in more.history][:3] == losses


def test_nothing_decides_without_a_plan():
    with pytest.raises(InputError, match=r"--comm-dtype auto: only --plan auto or a plan file"):
        TrainConfig(comm_dtype="auto")
    with pytest.raises(InputError, match=r"plan: comm_dtype 'f8': must be same or bf16"):
        replace(BF16, comm_dtype="f8")
