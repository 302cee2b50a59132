"""``--plan auto`` recomputes in the stages that do not fit into memory otherwise, in no other."""

import json
from dataclasses import replace

import pytest
from helpers import small_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import BIG, FAST, GRAPH, SLOW, devices, space_of

from gnnpipe import TrainConfig, Trainer
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, StageDag
from gnnpipe.plan.cluster import Cluster
from gnnpipe.planner import find_plan
from gnnpipe.planner.auto import every_candidate
from gnnpipe.profiling import search

CONFIG = TrainConfig(model="gcn", layers=4, hidden=32, epochs=4, cache_dir="off", quiet=True)


def needed_without(candidate):
    """The memory of every rank without any recomputation."""
    return candidate.recomputing(()).memory_bytes


def test_nothing_is_recomputed_without_a_limit():
    for speeds in ([1.0], [1.0, 1.0], [1.0, 0.5, 1.0]):
        space = replace(space_of(Cluster(devices(*speeds), SLOW)), device_bytes=())
        assert not any(candidate.plan.recomputes for candidate in every_candidate(space))
        assert not find_plan(space).plan.recomputes


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    speeds=st.lists(st.sampled_from([0.5, 1.0]), min_size=1, max_size=4),
    share=st.floats(0.2, 1.1),
    small=st.integers(0, 3),
)
def test_only_stages_that_do_not_fit_otherwise_recompute(speeds, share, small):
    space = replace(space_of(Cluster(devices(*speeds), FAST), layers=4), max_chunks=4)
    most = max(find_plan(replace(space, device_bytes=())).best.memory_bytes)
    limits = [int(most * share) if d == small else most for d in range(space.num_devices)]
    space = replace(space, device_bytes=limits)
    try:
        best = find_plan(space).best
    except InputError:
        assert all(c.stages_over(limits) for c in every_candidate(space))
        return
    needed = needed_without(best)
    for stage in best.plan.stages:
        sizes = [(needed[rank], limits[best.devices[rank]]) for rank in stage.ranks]
        assert stage.recompute == any(size > limit for size, limit in sizes)
        for rank in stage.ranks:
            assert best.memory_bytes[rank] <= limits[best.devices[rank]]


def test_one_stage_alone_recomputes_where_one_device_is_small():
    # Shards would read many rows of one another, so that two stages are the fastest plan.
    space = space_of(Cluster(devices(1.0, 1.0), SLOW), replace(GRAPH, halo=50.0), layers=8)
    pairs = [c for c in every_candidate(space) if c.plan.num_stages == 2 and c.form.is_exact]
    # Plans with stale rows may have a smaller first stage, but take longer than recomputation.
    few = min(needed_without(c)[0] for c in pairs) - 1
    found = find_plan(replace(space, device_bytes=[few, BIG], uses_all=True))
    assert [stage.recompute for stage in found.plan.stages] == [True, False]
    text = "\n".join(found.lines())
    assert "stages that recompute, because they do not fit into memory otherwise: 0\n" in text
    assert ", recompute)" in text


def test_a_stage_that_recomputes_costs_what_the_flag_costs():
    cluster = Cluster(devices(1.0, 1.0), SLOW)
    plain, flagged = space_of(cluster), space_of(cluster, recompute=True)
    for one, other in zip(every_candidate(plain), every_candidate(flagged), strict=True):
        # The flag's candidates may be cut elsewhere.
        plan = replace(other.plan, stages=one.plan.stages)
        other = replace(other, plan=plan, dag=StageDag.of(plan, one.form.model))
        again = one.recomputing(range(one.plan.num_stages))
        assert again.memory_bytes == other.memory_bytes
        assert again.form.time_s(again.dag) == pytest.approx(other.form.time_s(other.dag), rel=1e-9)
        if one.plan.chunks in (1, 8):
            time_s = other.timeline.makespan_s
            assert again.timeline.makespan_s == pytest.approx(time_s, rel=1e-9)
            assert time_s > one.timeline.makespan_s


def test_a_plan_keeps_what_recomputes_in_its_file():
    space = space_of(Cluster(devices(1.0, 1.0), SLOW))
    plan = next(iter(every_candidate(space))).recomputing([0]).plan
    assert Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    data["stages"][0]["recompute"] = 1
    with pytest.raises(InputError, match=r"recompute 1: must be true or false"):
        Plan.from_json(json.dumps(data))


def losses(result):
    return [row.loss for row in result.history]


def test_a_run_that_does_not_fit_recomputes_and_so_does_its_plan(tmp_path, monkeypatch):
    graph, config = small_graph(n=600), replace(CONFIG, out=str(tmp_path / "run"))
    plain = Trainer(replace(config, out="off"), graph=graph).fit()
    found = search.find_plan
    limits = []

    def limited(space):
        # Less than any plan needs that does not recompute.
        least = min(max(needed_without(c)) for c in every_candidate(space))
        limits.append(least - 1)
        return found(replace(space, device_bytes=[least - 1]))

    monkeypatch.setattr(search, "find_plan", limited)
    monkeypatch.setattr(search, "rank_memory_bytes", lambda world: 1)
    trainer = Trainer(replace(config, plan="auto"), graph=graph)
    result = trainer.fit()
    assert limits
    assert [stage.recompute for stage in trainer.plan.stages] == [True]
    if trainer.plan.chunks == 1:
        assert losses(result) == losses(plain)
    file = tmp_path / "run" / "plan.json"
    again = Trainer(replace(config, plan=str(file), out="off"), graph=graph)
    assert losses(again.fit()) == losses(result)
    assert again.plan == trainer.plan
