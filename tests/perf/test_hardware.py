"""Profiles by hand: what a data sheet says decides what is fast."""

from dataclasses import replace

import pytest
import torch
from helpers import small_graph
from profiles import prepared_of

from gnnpipe.config import TrainConfig
from gnnpipe.perf import Profile
from gnnpipe.perf.hardware import DEVICES, LINKS, hardware_profile
from gnnpipe.perf.profile import op_kind
from gnnpipe.perf.simulate import simulate
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.profiling.predict import run_costs
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepare import prepare

PLAIN = TrainConfig(dtype="float32")


def epoch_s(name, **shape):
    prepared = prepared_of(model="gcnii", layers=4, **{"hidden": 64} | shape)
    profile = hardware_profile(name, prepared.model_graph, PLAIN)
    assert Profile.from_json(profile.to_json()) == profile
    return simulate(program_tasks(prepared.program, run_costs(prepared, profile, 1))).makespan_s


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("link", LINKS)
def test_every_device_and_link_simulates(device, link):
    assert epoch_s(f"{device}:{link}", stages=2, shards=2, chunks=3) > 0


@pytest.mark.slow
def test_a_faster_device_and_a_faster_link_are_faster():
    planted = {"dataset": "synthetic:planted:n=20000", "stages": 1}
    assert epoch_s("h100:10gbe", **planted) < epoch_s("a100:10gbe", **planted)
    apart = planted | {"shards": 2}
    assert epoch_s("h100:nvlink4", **apart) < epoch_s("h100:10gbe", **apart)


def test_no_product_is_faster_than_the_sheet():
    prepared = prepared_of(model="gcn", layers=3, hidden=512)
    profile = hardware_profile("a100:10gbe", prepared.model_graph, PLAIN)
    flops = 2 * 512 * 512  # of the second layer, the only one from hidden to hidden width
    (op,) = (op for op in prepared.model_graph.ops if op.flops_per_row == flops)
    found = profile.compute[0].ops[op_kind(op)]
    assert found.forward_after.per_row_s >= flops / 19.5e12
    assert found.backward_after.per_row_s >= 2 * flops / 19.5e12


def test_an_edge_costs_by_what_is_kept_of_it():
    """As many numbers are read of a row, whatever they are cut into; weights are of each head."""
    models = [
        prepared_of(model="gat", layers=3, hidden=64, model_args=f"heads={heads}").model_graph
        for heads in (1, 8)
    ]
    kinds = [op_kind(model.aggregations[1]) for model in models]
    assert kinds[0] != kinds[1]
    times = [
        hardware_profile("a100:10gbe", model, PLAIN).compute[0].ops[kind]
        for model, kind in zip(models, kinds, strict=True)
    ]
    assert times[0].forward_after.per_edge_s < times[1].forward_after.per_edge_s
    assert times[0].forward_after.per_row_s == times[1].forward_after.per_row_s


def test_recomputation_costs_in_backward():
    prepared = prepared_of(model="gcn", layers=2)
    plain = hardware_profile("a100:10gbe", prepared.model_graph, PLAIN)
    again = hardware_profile("a100:10gbe", prepared.model_graph, replace(PLAIN, recompute=True))
    for kind, op in plain.compute[0].ops.items():
        other = again.compute[0].ops[kind]
        assert other.forward_after == op.forward_after
        assert other.backward_after.per_row_s == pytest.approx(
            op.backward_after.per_row_s + op.forward_after.per_row_s
        )
        assert other.backward_after.per_edge_s == op.backward_after.per_edge_s


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(16, 64), torch.nn.Linear(64, 3)

    def forward(self, x, edge_index):
        x = self.enter(x)
        return self.leave(x @ (x.t() @ x) / x.size(0))


def test_a_sum_over_all_vertices_costs_a_product_and_not_a_row_for_each_vertex():
    graph = small_graph(features=16)
    model = prepare(PLAIN, World.alone(), graph, Attending()).model_graph
    (op,) = model.aggregations
    assert op.push_width == 64 * 64
    found = hardware_profile("a100:100gbe", model, PLAIN).compute[0].ops[op_kind(op)]
    # At half of the sheet's 19.5 TFLOP/s, multiply and add; twice as much back.
    assert found.forward_before.per_row_s == pytest.approx(2 * 64 * 64 / (0.5 * 19.5e12))
    assert found.backward_before.per_row_s == pytest.approx(4 * 64 * 64 / (0.5 * 19.5e12))
    assert found.forward_after.per_row_s == found.forward_after.per_edge_s == 0
