"""Profiles: a file that survives, a fit that finds the truth, costs that count bytes rightly."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import run_ranks, small_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.perf import Profile
from gnnpipe.perf.fit import Sample, Work, fit_costs, fit_link
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes, op_kind
from gnnpipe.perf.profiled_costs import ProfiledCosts
from gnnpipe.profile.predict import run_costs
from gnnpipe.profile.steps import measure_steps
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.schedule import PROBE_POSITIONS
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepare import prepare

CPU = torch.device("cpu")

LINK = LinkTimes(1e-4, 1e9, 0.1)


def profile_of(model, **changes):
    """Every op a millisecond for each row, in all it does."""
    part = Affine(0.5, 1e-3, 1e-6, 1e-7)
    times = OpTimes(part, part, part, part, part, part, part, part, 0.2)
    ops = {op_kind(op): times for op in model.ops}
    compute = tuple(ComputeTimes(n, ops, part, part, 1e-9) for n in (1, 2))
    fields = {
        "machine": "made up",
        "source": "by hand",
        "note": "",
        "device": "cpu",
        "dtype": "float32",
        "comm_dtype": "same",
        "matmul_dtype": "same",
        "kernel": "auto",
        "recompute": False,
        "threads": 1,
        "compute": compute,
        "message": LINK,
        "exchange": LINK,
        "gradient_sum": LINK,
    }
    return Profile(**fields | changes)


def prepared_of(graph=None, module=None, **changes):
    config = TrainConfig(
        **{"dataset": "karate", "hidden": 8, "out": "off", "cache_dir": "off", "quiet": True}
        | changes
    )
    return prepare(config, Mesh.alone(), graph, module)


@pytest.fixture(scope="module")
def profile():
    return profile_of(prepared_of().model_graph)


def test_a_profile_survives_json(profile):
    assert Profile.from_json(profile.to_json()) == profile
    alone = replace(profile, message=None, exchange=None, gradient_sum=None)
    assert Profile.from_json(alone.to_json()) == alone


def spoiled(profile, path, value):
    """The JSON with what is at ``path`` replaced, or gone."""
    data = json.loads(profile.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


OP = ("compute", 0, "ops")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 7, ["version", "5"]),
        (("version",), None, ["gnnpipe profile"]),
        (("machine",), None, ["machine", "missing"]),
        (("machine",), 3, ["machine", "text"]),
        (("speed",), 3, ["speed", "no field"]),
        (("source",), "guessed", ["source", "'guessed'", "by hand"]),
        (("threads",), -1, ["threads", "-1"]),
        (("threads",), 1.5, ["threads", "1.5"]),
        (("threads",), True, ["threads", "True"]),
        (("recompute",), 1, ["recompute", "true or false"]),
        (("compute",), [], ["compute"]),
        (("compute",), {}, ["compute", "list"]),
        (("compute", 0, "ranks"), 0, ["compute.ranks"]),
        (("compute", 0, "ranks"), 2, ["compute.ranks", "ascend"]),
        (("compute", 1, "boundary_per_number_s"), -1e-9, ["compute[1]", "boundary_per_number_s"]),
        (("compute", 0, "begin", "base_s"), float("nan"), ["compute[0]", "begin", "base_s", "nan"]),
        (("compute", 0, "begin", "base_s"), float("inf"), ["base_s", "inf"]),
        (("compute", 0, "begin", "base_s"), "fast", ["base_s", "'fast'"]),
        (("compute", 0, "begin", "base_s"), 10**400, ["base_s", "1000"]),
        (("compute", 0, "begin", "base_s"), 1e308, ["base_s", "from 0 to 1e+30"]),
        (("compute", 0, "begin", "base_s"), True, ["base_s", "True"]),
        (("compute", 0, "update", "per_row_s"), None, ["update", "per_row_s", "missing"]),
        ((*OP,), [1], ["ops", "object"]),
        (("message", "latency_s"), [0], ["message", "latency_s"]),
        (("exchange", "bandwidth_bytes_per_s"), 0, ["exchange.bandwidth_bytes_per_s"]),
        (("exchange", "bandwidth_bytes_per_s"), 1e-320, ["at least 0.1"]),
    ],
)
def test_a_wrong_profile_is_refused_by_field(profile, path, value, words):
    with pytest.raises(InputError) as caught:
        Profile.from_json(spoiled(profile, path, value), "file.json")
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 100_000, '{"version": 1}'])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(InputError):
        Profile.from_json(text)


def test_times_of_other_numbers_of_ranks_are_those_of_the_nearest(profile):
    assert [profile.compute_of(n).ranks for n in (1, 2, 8)] == [1, 2, 2]


costs = st.floats(1e-9, 1e-3)


@settings(max_examples=25, deadline=None)
@given(truth=st.lists(st.tuples(costs, costs, costs), min_size=2, max_size=3), seed=st.integers(0))
def test_an_affine_truth_is_found(truth, seed):
    """Parts that are timed alone and in pairs, as those of cut and uncut stages are."""
    rng = np.random.default_rng(seed % 2**32)
    kinds = range(len(truth))
    samples = []
    for which in [*((k,) for k in kinds), *((k, (k + 1) % len(truth)) for k in kinds)]:
        for _ in range(12):
            work = {k: Work(*rng.integers(1, 1000, 2).tolist()) for k in which}
            time_s = sum(
                b + r * work[k].rows + e * work[k].edges
                for k, (b, r, e) in ((k, truth[k]) for k in which)
            )
            samples.append(Sample(time_s, work))
    fitted = fit_costs(samples)
    for k, (base, per_row, per_edge) in enumerate(truth):
        found = fitted.costs[k]
        assert max(fitted.errors.values()) < 1e-6
        largest = base + 1000 * (per_row + per_edge)
        assert found.time_s(700, 300) == pytest.approx(
            base + 700 * per_row + 300 * per_edge, abs=1e-4 * largest
        )


def test_noise_gives_no_negative_cost_and_an_error():
    rng = np.random.default_rng(0)
    samples = [
        Sample(float(1e-3 * rng.uniform(0.7, 1.3)), {"a": Work(float(rows), 3.0 * rows)})
        for rows in range(1, 50)
    ]
    fitted = fit_costs(samples)
    found = fitted.costs["a"]
    assert min(found.base_s, found.per_row_s, found.per_edge_s, found.per_entry_s) >= 0
    assert 0.02 < fitted.errors["a"] < 0.4


def test_latency_and_bandwidth_are_found():
    sizes = [1000, 10_000, 1_000_000]
    found = fit_link(sizes, [3 * 1e-4 + size / 2e9 for size in sizes], messages=3)
    assert found.latency_s == pytest.approx(1e-4)
    assert found.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert found.time_s(2e9, 3) == pytest.approx(1.0003)


def test_what_passes_at_once_does_not_make_a_link_fast():
    """50 Mbit/s and a bucket of 64 KiB, as measured."""
    sizes, times = (1 << 10, 1 << 14, 1 << 17, 1 << 20), (2.3e-4, 2.1e-4, 0.0118, 0.165)
    found = fit_link(sizes, times)
    assert found.bandwidth_bytes_per_s == pytest.approx(50e6 / 8, rel=0.05)
    assert found.time_s(sizes[-1]) == pytest.approx(times[-1])
    assert 0.05 < found.relative_error < 0.2


def test_samples_cover_every_step_and_every_kind():
    prepared = prepared_of(model="gcnii", layers=3, chunks=2)
    samples = measure_steps(prepared, CPU)
    kinds = {op_kind(op) for op in prepared.model_graph.ops}
    sides = ("forward_before", "forward_after", "backward_before", "backward_after")
    for kind in kinds:
        for part in (*sides, "forecast", "carry"):
            assert any((kind, part) in s.parts for s in samples), (kind, part)
    # As one stage 4 steps, cut in three 2 steps each; both ways, both chunks.
    steps = [s for s in samples if any(isinstance(p, tuple) and p[1] in sides for p in s.parts)]
    assert len(steps) == (4 + 3 * 2) * 2 * 2
    rows = sum(s.parts[k].rows for s in steps for k in s.parts if k[1] == "forward_before")
    assert rows == 2 * 3 * prepared.graph.num_vertices


def test_a_profile_of_other_heads_is_refused():
    """Attention's time goes by its heads."""
    profile = profile_of(prepared_of(model="gat", layers=3, hidden=16, heads=2).model_graph)
    other = prepared_of(model="gat", layers=3, hidden=16, heads=4)
    with pytest.raises(InputError, match=r"no layer like gat0 .*kept 4 an edge.*kept 2 an edge"):
        run_costs(other, profile, 1)


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
            prepared.plan,
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
def test_a_model_of_the_users_own_is_measured():
    """Attention, a norm over all vertices, and a value that skips ahead: no chain of layers."""
    from torch_geometric.nn import GAT

    module = GAT(7, 8, num_layers=3, out_channels=3, heads=2, norm="BatchNorm", jk="cat")
    prepared = prepared_of(graph=small_graph(), module=module, chunks=3)
    fitted = fit_costs(measure_steps(prepared, CPU))
    kinds = {op_kind(op) for op in prepared.model_graph.ops}
    assert {part[0] for part in fitted.costs if isinstance(part, tuple)} == kinds
    assert {"begin", "update"} <= set(fitted.costs)


def bytes_of(shapes, model):
    """Counted bytes, and those that the costs say, by shape."""
    from gnnpipe import Trainer

    found = []
    for stages, shards, chunks in shapes:
        config = TrainConfig(
            model=model,
            layers=4,
            hidden=8,
            stages=stages,
            shards=shards,
            chunks=chunks,
            epochs=2,
            out="off",
            cache_dir="off",
            quiet=True,
        )
        trainer = Trainer(config, graph=small_graph())
        counted = trainer.fit().comm_bytes_per_epoch
        found.append((counted, predicted_bytes(trainer._setup()[1])))
    return found


def costs_of(prepared):
    return ProfiledCosts(
        profile_of(prepared.model_graph),
        prepared.plan,
        prepared.model_graph,
        chunk_sizes(prepared),
        number_bytes=prepared.dtype.itemsize,
        row_bytes=prepared.row_dtype.itemsize,
        ranks_at_once=2,
    )


def predicted_bytes(prepared):
    plan, said = prepared.plan, costs_of(prepared)
    shards, chunks = range(plan.shards), range(plan.chunks)
    both = [(t.source, t.target) for t in plan.transfers]
    pipeline = sum(
        said.message_bytes("F", a, b, g, c) + said.message_bytes("B", b, a, g, c)
        for a, b in both
        for g in shards
        for c in chunks
    )
    graph = sum(
        said.exchange_bytes(way, stage, g, c, step)
        for way in "FB"
        for stage, steps in enumerate(plan.steps)
        for step in range(steps - 1)
        for g in shards
        for c in chunks
    )
    gradient = sum(
        2 * (plan.shards - 1) * said.gradient_bytes(s, (0, steps))
        for s, steps in enumerate(plan.steps)
    )
    probes = sum(
        said.message_bytes("F", a, b, g, p)
        for a, b in both
        for g in shards
        for p in PROBE_POSITIONS
    )
    return {"pipeline": pipeline, "graph": graph, "gradient": gradient, "pilots": probes}


@pytest.mark.parametrize("model", ["gcnii", "sage"])
def test_costs_count_the_bytes_that_are_sent(model):
    shapes = [(2, 1, 3), (1, 2, 3)]
    for counted, said in run_ranks(bytes_of, 2, shapes, model)[0]:
        assert {k: counted[k] for k in ("pipeline", "graph", "gradient")} == {
            k: said[k] for k in ("pipeline", "graph", "gradient")
        }
        assert said["pilots"] <= counted["control"]
        assert (said["pilots"] > 0) == (said["pipeline"] > 0)


def test_costs_are_those_of_the_profile():
    prepared = prepared_of(model="gcn", layers=2, chunks=2)
    said, sizes = costs_of(prepared), chunk_sizes(prepared)
    rows, edges = int(sizes.rows[""][0, 1]), int(sizes.edges[""][0, 1])
    assert rows + int(sizes.rows[""][0, 0]) == 34
    assert edges + int(sizes.edges[""][0, 0]) == prepared.graph.num_edges
    # The last op reads for the rows that the loss asks for, and makes no others.
    assert prepared.loss_rows.ops == {"gcn1"}
    loss_rows, into_asked = int(sizes.loss_row_counts[0, 1]), int(sizes.loss_row_edges[0, 1])
    assert 0 < loss_rows < rows
    # The middle step is of two ops: what one aggregated, and what the next one pushes.
    made, pushed = 0.5 + 1e-3 * rows + 1e-6 * edges, 0.5 + 1e-3 * rows + 1e-6 * into_asked
    assert said.step_s("F", 0, 0, 1, 1) == pytest.approx(made + pushed)
    assert said.step_s("B", 0, 0, 1, 2) == pytest.approx(0.5 + 1e-3 * loss_rows + 1e-6 * into_asked)
    assert said.pull_s(0, 0, 1, 1) == pytest.approx(1e-6 * into_asked)
    assert said.pull_s(0, 0, 1, 1) < said.step_s("B", 0, 0, 1, 1)
    assert said.message_s(0, 1, 10**6) == pytest.approx(1e-4 + 1e-3)


def test_a_profile_of_something_else_is_refused():
    prepared = prepared_of(model="gcn", layers=2)
    other = profile_of(prepared_of(model="sage").model_graph)
    with pytest.raises(InputError, match="profile: has no layer like gcn0"):
        ProfiledCosts(
            other,
            prepared.plan,
            prepared.model_graph,
            chunk_sizes(prepared),
            number_bytes=4,
            row_bytes=4,
            ranks_at_once=1,
        )


def test_a_profile_without_links_is_refused_where_there_are_stages():
    prepared = prepared_of(model="gcn", layers=2, stages=2)
    profile = profile_of(prepared.model_graph, message=None)
    with pytest.raises(InputError, match="torchrun"):
        ProfiledCosts(
            profile,
            prepared.plan,
            prepared.model_graph,
            chunk_sizes(prepared),
            number_bytes=4,
            row_bytes=4,
            ranks_at_once=1,
        )


def test_stale_rows_are_counted_as_they_are_read():
    """Their mean over orders is near what the orders give."""
    from gnnpipe.setup.build import build_rank

    prepared = prepared_of(graph=small_graph(400, 4), model="gcn", layers=2, chunks=6)
    forecaster = build_rank(prepared, Mesh.alone()).executor.forecaster
    stale = next(iter(forecaster._stale.values()))
    stale._is_always[:] = False
    rng = np.random.default_rng(0)
    counts = [len(stale.in_order(rng.permutation(6).tolist())) for _ in range(40)]
    assert int(chunk_sizes(prepared).stale[""][0]) == pytest.approx(np.mean(counts), rel=0.05)
