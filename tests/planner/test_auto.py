"""``--plan auto``: its plan beside all candidates, its limits, and what the search costs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned import FAST, GRAPH, SLOW, devices, space_of
from torch import nn
from torch_geometric.nn import GCNConv

import gnnpipe
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.plan.cluster import Cluster, Link
from gnnpipe.planner import GivenPlan, find_plan
from gnnpipe.planner.auto import every_candidate
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.profiling.scenario import model_on_shape
from gnnpipe.profiling.search import search_space, workload_of_shape

CLUSTERS = {
    "one": Cluster(devices(1.0), SLOW),
    "two": Cluster(devices(1.0, 1.0), SLOW),
    "four": Cluster(devices(*[1.0] * 4), FAST),
    "mixed": Cluster(devices(1.0, 0.5, 1.0, 0.5), SLOW, {(0, 1): FAST, (2, 3): FAST}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", ["gcn", "gcnii"])
@pytest.mark.parametrize("degree", [4, 200])
def test_the_plan_is_nearly_the_best_of_all_candidates(cluster, model, degree):
    shape = replace(GRAPH, edges=degree * GRAPH.vertices)
    space = space_of(CLUSTERS[cluster], shape, model=model, layers=4)
    space = replace(space, max_chunks=8)
    best_s = min(candidate.simulated_s for candidate in every_candidate(space))
    assert find_plan(space).best.simulated_s <= 1.05 * best_s


@pytest.mark.parametrize("staleness", ["exact", "auto"])
def test_the_time_is_that_of_the_simulate_command(staleness):
    """Whatever may be stale: the plan found is exact, and reads the rows of exact runs."""
    found = find_plan(space_of(CLUSTERS["four"], staleness="exact"))
    config = TrainConfig(layers=6, hidden=64, staleness=staleness, plan="auto")
    again = gnnpipe.simulate(config, shape=GRAPH, hardware="a100:100gbe", cluster=CLUSTERS["four"])
    assert again.predicted_epoch_time_s == pytest.approx(found.best.timeline.makespan_s, rel=0.02)
    assert again.stages * again.shards == found.plan.num_ranks


def test_one_device_takes_one_chunk():
    found = find_plan(space_of(CLUSTERS["one"]))
    assert (found.plan.num_ranks, found.plan.chunks) == (1, 1)


class Towers(nn.Module):
    """Four branches of four layers, which a last layer joins."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(
            nn.ModuleList(GCNConv(width, 256) for width in (64, 256, 256, 256)) for _ in range(4)
        )
        self.join = nn.Linear(1024, 16)

    def forward(self, x, edge_index):
        ends = []
        for tower in self.towers:
            h = x
            for layer in tower:
                h = layer(h, edge_index).relu()
            ends.append(h)
        return self.join(torch.cat(ends, dim=1))


@pytest.mark.parametrize("staleness", ["exact", "auto"])
def test_branches_get_stages_of_their_own(staleness):
    config = TrainConfig(staleness=staleness)
    four = Cluster(devices(*[1.0] * 4), Link(12.5e9, 5e-5))
    hardware = Hardware(sheets="a100:100gbe", cluster=four)
    # Shards would read many rows of one another.
    shape = replace(GRAPH, features=64, halo=4.0)
    model = model_on_shape(config, shape, Towers())
    space = search_space(config, workload_of_shape(config, shape, model, hardware), hardware)
    space = replace(space, max_chunks=8)
    found = find_plan(space).best
    every = (c for c in every_candidate(space) if c.dag.depth == c.plan.num_stages)
    chain_s = min(c.closed_form_s for c in every)
    assert found.simulated_s < 0.9 * chain_s
    assert found.dag.depth < found.plan.num_stages


def test_exact_runs_get_exact_schedules():
    space = space_of(CLUSTERS["two"], staleness="exact")
    for candidate in every_candidate(space):
        assert candidate.plan.chunks == 1 or candidate.plan.schedule == "layer-sync"


def test_a_stale_plan_pays_for_its_exact_epochs():
    space = space_of(CLUSTERS["two"])
    stale = next(c for c in every_candidate(space) if c.shape == (2, "1", 8, "fill-drain"))
    # One exact epoch of 200 at the start, and 5 % after jumps of the gradients.
    share = 1 / 200 + 0.05
    exact_s = stale.exact_form.time_s(stale.dag)
    mean_s = (1 - share) * stale.timeline.makespan_s + share * exact_s
    assert stale.simulated_s == pytest.approx(mean_s)


def memory_limited(space, limit):
    return replace(space, device_bytes=[limit] * space.num_devices)


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_the_limit_of_memory_is_kept(share):
    space = space_of(CLUSTERS["four"])
    limit = int(share * max(find_plan(space).best.memory_bytes))
    assert max(find_plan(memory_limited(space, limit)).best.memory_bytes) <= limit


def test_what_fits_nowhere_names_the_nearest():
    with pytest.raises(InputError, match=r"--plan auto: no plan fits.* needs .* 1\.0 KiB; try"):
        find_plan(memory_limited(space_of(CLUSTERS["two"]), 1024))


def test_the_explanation_names_reasons_and_runner_up():
    text = "\n".join(find_plan(space_of(CLUSTERS["four"])).lines())
    for word in ("plan: ", "predicted: ", "why: critical path", "runner-up: ", "memory of rank 0"):
        assert word in text


clusters = st.builds(
    lambda speeds, magnitude: Cluster(devices(*speeds), Link(10**magnitude, 2e-5)),
    st.lists(st.floats(0.1, 1.0), min_size=1, max_size=6),
    st.floats(7, 11.5),
)
works = st.fixed_dictionaries(
    {
        "shape": st.builds(
            lambda degree, halo: replace(GRAPH, edges=degree * GRAPH.vertices, halo=halo),
            st.integers(1, 400),
            st.floats(0.05, 3.0),
        ),
        "layers": st.integers(2, 8),
        "model": st.sampled_from(["gcn", "gcnii", "sage"]),
        "staleness": st.sampled_from(["auto", "exact"]),
    }
)

NOT_SIMULATED = 1.001
"""Only three plans are simulated, those that are best by the closed form. Which three these are
changes with the links and with the limit, and the closed form errs, so that a plan that is faster
by simulation may be left out. 43 random cases had none; earlier ones had .1 %."""


def test_other_shares_are_searched_for_all_plans_that_are_nearly_as_fast():
    """Here the plan on six devices is second before its shares are searched."""
    cluster = Cluster(devices(0.875, 0.75, 0.375, 0.5, 0.375, 0.2), Link(3.5e10, 2e-5))
    work = {"shape": replace(GRAPH, edges=152 * GRAPH.vertices, halo=2.0), "layers": 5}
    space = space_of(cluster, **work, model="gcn", staleness="exact")
    found = find_plan(space)
    assert found.plan.num_ranks == 6
    simulated = sorted(every_candidate(space), key=lambda c: c.simulated_s)
    assert simulated[0].plan.num_ranks == 4
    assert found.best.simulated_s < 0.95 * simulated[0].simulated_s
    assert found.best.simulated_s <= found.runner_up.simulated_s


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(cluster=clusters, work=works)
def test_twice_the_bandwidth_is_never_slower(cluster, work):
    link = replace(cluster.link, bandwidth_bytes_per_s=2 * cluster.link.bandwidth_bytes_per_s)
    before = find_plan(space_of(cluster, **work)).best.simulated_s
    after = find_plan(space_of(replace(cluster, link=link), **work)).best.simulated_s
    assert after <= before * NOT_SIMULATED


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(cluster=clusters, work=works, share=st.floats(0.05, 1.0))
def test_without_a_limit_of_memory_no_plan_is_slower(cluster, work, share):
    space = space_of(cluster, **work)
    free = find_plan(space).best
    limit = int(max(free.memory_bytes) * share)
    try:
        limited = find_plan(memory_limited(space, limit)).best
    except InputError:
        return
    assert max(limited.memory_bytes) <= limit
    assert free.simulated_s <= limited.simulated_s * NOT_SIMULATED


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(cluster=clusters, work=works, data=st.data())
def test_the_order_of_devices_changes_nothing(cluster, work, data):
    other = Cluster(tuple(data.draw(st.permutations(cluster.devices))), cluster.link)
    times = [find_plan(space_of(c, **work)).best.simulated_s for c in (cluster, other)]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@example(place=0, degree=10, vertices=100_000, model="gcn", uses_all=True)
@given(
    place=st.integers(0, 3),
    degree=st.integers(10, 200),
    vertices=st.sampled_from([100_000, 1_000_000]),
    model=st.sampled_from(["gcn", "gcnii"]),
    uses_all=st.booleans(),
)
def test_a_very_slow_device_gets_next_to_no_work(place, degree, vertices, model, uses_all):
    speeds = [1e-3 if device == place else 1.0 for device in range(4)]
    shape = replace(GRAPH, vertices=vertices, edges=degree * vertices)
    space = space_of(Cluster(devices(*speeds), FAST), shape, model=model)
    found = find_plan(replace(space, uses_all=uses_all))
    for stage in found.plan.stages:
        for rank, share in zip(stage.ranks, stage.shares, strict=True):
            assert found.devices[rank] != place or share < 0.01


def test_a_found_plan_runs_as_a_given_plan():
    found = find_plan(space_of(CLUSTERS["mixed"]))
    text = found.plan.to_json()
    assert GivenPlan(type(found.plan).from_json(text)).given == found.plan
