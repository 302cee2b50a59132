"""Measured steps cover all parts of all ops."""

from dataclasses import replace

import pytest
import torch
from helpers import small_graph
from profiles import prepared_of, profile_of

from gnnpipe.perf.fit import fit_costs
from gnnpipe.perf.profile import op_kind
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.profiling import steps
from gnnpipe.profiling.steps import measure_steps
from gnnpipe.setup.chunk_sizes import chunk_sizes

CPU = torch.device("cpu")


def test_samples_cover_every_step_and_every_kind(monkeypatch):
    monkeypatch.setattr(steps, "MIN_TIME_S", 0.0)
    prepared = prepared_of(model="gcnii", layers=3, chunks=2)
    samples = measure_steps(prepared, CPU)
    kinds = {op_kind(op): op.aggregates for op in prepared.model_graph.ops}
    sides = ("forward_before", "forward_after", "backward_before", "backward_after")
    # A row-wise op pushes no rows.
    pushing = ("forward_before", "backward_before", "carry")
    for kind, aggregates in kinds.items():
        for part in (*sides, "forecast", "carry"):
            is_measured = any((kind, part) in s.parts for s in samples)
            assert is_measured == (aggregates or part not in pushing), (kind, part)
    # As one stage 4 steps; cut everywhere, an aggregation has 2 steps and another op 1; both ways,
    # both chunks.
    found = [s for s in samples if any(isinstance(p, tuple) and p[1] in sides for p in s.parts)]
    steps_cut = sum(1 + op.aggregates for op in prepared.model_graph.ops)
    assert len(found) == (4 + steps_cut) * 2 * 2
    rows = sum(s.parts[k].rows for s in found for k in s.parts if k[1] == "forward_before")
    assert rows == 2 * 3 * prepared.graph.num_vertices


@pytest.mark.slow
def test_masks_are_part_of_an_epoch_of_one_chunk_too():
    """They are made where the pass begins, which is not a step of any op."""
    torch.set_num_threads(1)
    graph = small_graph(6000)
    cases = {"hidden": 128, "layers": 3, "dropout": 0.5}
    shapes = [prepared_of(graph=graph, chunks=chunks, **cases) for chunks in (1, 4)]
    samples = [measure_steps(prepared, CPU) for prepared in shapes]
    fitted = fit_costs([s for some in samples for s in some])
    for prepared, some in zip(shapes, samples, strict=True):
        profile = profile_of(prepared.model_graph)
        times = replace(profile.compute[0], begin=fitted.costs["begin"])
        costs = ProfiledCosts(
            replace(profile, compute=(times,)),
            prepared.dag,
            prepared.model_graph,
            chunk_sizes(prepared),
            number_bytes=4,
            row_bytes=4,
            ranks_at_once=1,
        )
        measured = max(s.time_s for s in some if list(s.parts) == ["begin"])
        assert measured > 1e-4, "masks of 6,000 x 128 x 3 entries"
        assert costs.begin_s(0, 0) == pytest.approx(measured, rel=0.5)


@pytest.mark.filterwarnings("ignore:model. GAT normalises")
def test_a_model_of_the_users_own_is_measured(monkeypatch):
    """Attention, a norm over all vertices, and a value that skips ahead: no chain of layers."""
    monkeypatch.setattr(steps, "MIN_TIME_S", 0.0)
    from torch_geometric.nn import GAT

    module = GAT(7, 8, num_layers=3, out_channels=3, heads=2, norm="BatchNorm", jk="cat")
    prepared = prepared_of(graph=small_graph(), module=module, chunks=3)
    fitted = fit_costs(measure_steps(prepared, CPU))
    kinds = {op_kind(op) for op in prepared.model_graph.ops}
    assert {part[0] for part in fitted.costs if isinstance(part, tuple)} == kinds
    assert {"begin", "update"} <= set(fitted.costs)
