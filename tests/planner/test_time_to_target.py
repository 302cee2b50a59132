"""``--plan auto --target-metric``: epoch times by simulation, and a stated ratio of epochs."""

import re
from dataclasses import replace

import pytest
import torch
from helpers import quick_config, small_graph
from planned import FAST, GRAPH, devices, space_of

import gnnpipe
from gnnpipe import Trainer
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import find_plan, find_plan_for_target, time_to_target
from gnnpipe.planner.time_to_target import async_candidates, epochs_of_async
from gnnpipe.profiling.search import RunPlanner
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.by_chunk import why_not_async

FOUR = Cluster(devices(*[1.0] * 4), FAST)
TWO = Cluster(devices(1.0, 1.0), FAST)
LARGE = replace(GRAPH, vertices=4_000_000, edges=40_000_000)
"""So large that a chunk is no smaller than what a device needs to be busy."""


@pytest.mark.parametrize("above", [False, True])
def test_the_ratio_of_epochs_decides(monkeypatch, above):
    space = space_of(TWO, LARGE, layers=4)
    usual = find_plan(space).best
    chunked = min(async_candidates(space, 2), key=lambda c: c.simulated_s)
    border = usual.simulated_s / chunked.simulated_s
    monkeypatch.setattr(time_to_target, "EPOCHS_OF_ASYNC", border * (1.01 if above else 0.99))
    found = find_plan_for_target(space, 2)
    assert found.plan.schedule == (usual.plan.schedule if above else "async")
    assert found.best.simulated_s == (usual if above else chunked).simulated_s
    line = next(line for line in found.lines() if line.startswith("time to the target"))
    for one in (usual, chunked):
        assert f"{one.name} {one.simulated_s:.4g} s" in line
    assert f"need {border * (1.01 if above else 0.99):g} times as many epochs" in line
    assert re.search(r"1\.01 times as long$" if above else r"0\.99 times as long$", line)
    assert any("trains otherwise than the full batch" in line for line in found.lines()) != above


def test_deep_models_need_as_many_epochs():
    ratios = {
        layers: epochs_of_async(space_of(FOUR, layers=layers).workload.model)
        for layers in (1, 8, 9, 16)
    }
    assert ratios == {1: 0.5, 8: 0.5, 9: 1.0, 16: 1.0}


@pytest.mark.parametrize("stages", [1, 2])
def test_the_epoch_is_that_of_the_simulate_command(stages):
    cluster = Cluster(devices(*[1.0] * stages), FAST)
    space = replace(space_of(cluster, LARGE, layers=4), uses_all=True)
    found = [c for c in async_candidates(space, 2) if c.plan.num_stages == stages]
    config = TrainConfig(
        layers=4, hidden=64, stages=stages, chunks=32, schedule="async", eval_every=2
    )
    again = gnnpipe.simulate(config, shape=LARGE, hardware="a100:100gbe", cluster=cluster)
    assert found[0].simulated_s == pytest.approx(again.predicted_epoch_time_s, rel=0.1)


def test_epochs_without_a_flush_have_a_smaller_bubble():
    space = space_of(FOUR, LARGE, layers=4)
    one, four = (
        next(c for c in async_candidates(space, epochs) if c.plan.num_stages == 4)
        for epochs in (1, 4)
    )
    assert four.epoch_s < one.epoch_s
    assert four.timeline.makespan_s > 3 * four.epoch_s


def test_a_stage_holds_the_chunks_in_flight():
    space = space_of(FOUR, LARGE, layers=16)
    chunked = next(c for c in async_candidates(space, 2) if c.plan.num_stages == 4)
    drained = chunked.with_plan(replace(chunked.plan, schedule="fill-drain"))
    drained = replace(drained, epochs=1)
    first, last = chunked.memory_bytes[0], chunked.memory_bytes[-1]
    assert first < 0.6 * drained.memory_bytes[0]
    assert first > last
    limited = replace(space, device_bytes=[first - 1] * 4)
    assert all(c.plan.num_stages != 4 for c in async_candidates(limited, 2))


def test_stages_have_four_chunks_each():
    cluster = Cluster(devices(*[1.0] * 16), FAST)
    space = replace(space_of(cluster, LARGE, layers=16), uses_all=True)
    found = list(async_candidates(space, 1))
    assert found
    assert all(c.plan.chunks == 32 and c.plan.num_stages <= 8 for c in found)


def test_without_a_plan_by_chunk_the_reason_is_told():
    space = space_of(FOUR, layers=4)
    found = find_plan_for_target(space, 10, "--label-inputs 0.5: no")
    assert "time to the target: no async plan: --label-inputs 0.5: no" in found.lines()
    assert found.plan == find_plan(space).plan
    exact = replace(space, max_stale_chunks=1)
    lines = list(find_plan_for_target(exact, 10).lines())
    assert any("no async plan: none of 32 chunks" in line for line in lines)
    with pytest.raises(InputError, match="the run began with --schedule async, and none of 32"):
        find_plan_for_target(exact, 10, must_be_async=True)


def test_a_run_that_is_planned_anew_keeps_its_kind_of_steps():
    space = space_of(TWO, layers=4)  # small chunks: async is slower
    assert find_plan_for_target(space, 2).plan.schedule != "async"
    assert find_plan_for_target(space, 2, must_be_async=True).plan.schedule == "async"
    config = TrainConfig(plan="auto", target_metric=0.9)
    for kept, compares in (("", True), ("async", True), ("fill-drain", False)):
        planner = RunPlanner(config, World.alone(), print, kept_schedule=kept)
        assert planner._is_for_target == compares
    planner = RunPlanner(replace(config, target_metric=None), World.alone(), print)
    assert not planner._is_for_target


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"optimizer": "RMSprop"}, ""),
        ({"optimizer": "Adagrad"}, "optimizer Adagrad cannot be predicted"),
        ({"staleness": "exact"}, "--staleness exact: not used with --schedule async"),
        ({"label_inputs": 0.5}, "--label-inputs 0.5: changes the features"),
        ({"recompute": True}, "--recompute: backward would have other weights"),
        ({"checkpoint_tables": False}, "--no-checkpoint-tables"),
    ],
)
def test_what_async_refuses_is_a_reason(settings, reason):
    model = Trainer(quick_config(), small_graph()).model
    found = why_not_async(TrainConfig(**settings), model, None)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_users_optimizer_is_looked_at():
    model = Trainer(quick_config(), small_graph()).model
    assert "Rprop" in why_not_async(TrainConfig(), model, torch.optim.Rprop)
    assert why_not_async(TrainConfig(), model, torch.optim.AdamW) == ""
    assert why_not_async(TrainConfig(), model, lambda module: None) == ""


def test_commands_without_a_run_refuse_it():
    config = TrainConfig(plan="auto", target_metric=0.9, layers=2)
    with pytest.raises(InputError, match=r"--target-metric 0.9: this command plans by the time"):
        gnnpipe.simulate(config, shape=GRAPH, hardware="a100:100gbe", devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("wins", [True, False])
def test_a_run_takes_the_plan(monkeypatch, capsys, wins):
    monkeypatch.setattr(time_to_target, "EPOCHS_OF_ASYNC", 1e-6 if wins else 1e6)
    config = TrainConfig(
        dataset="synthetic:planted:n=4000,degree=6,classes=3,features=8",
        layers=2,
        hidden=8,
        epochs=4,
        eval_every=2,
        plan="auto",
        target_metric=1.0,
        out="off",
        predict=False,
        cache_dir="off",
    )
    trainer = Trainer(config)
    trainer.fit()
    assert trainer.plan.schedule == ("async" if wins else "fill-drain")
    assert trainer.plan.chunks == 32 or not wins
    out = capsys.readouterr().out
    assert "time to the target: " in out
    assert ("an optimizer step after 1 chunk" in out) == wins
    assert "--target-metric 1: not reached in 4 epochs" in out
