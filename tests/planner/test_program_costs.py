from dataclasses import replace

import numpy as np
import pytest
from planner.program_oracle import Problem, Ranks
from planner.programs import random_ops

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.perf.closed_form import ClosedForm
from gnnpipe.plan import StagePlan
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.planner.device_group import DeviceGroup, Shares
from gnnpipe.planner.distributed_program import (
    CONVERSIONS,
    RULES,
    Collective,
    Conversion,
    DistributedProgram,
    Instruction,
    OpKind,
    PrimitiveOp,
    Rule,
    Split,
    State,
)
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.planner.primitive_work import Work, primitive_model
from gnnpipe.planner.program_costs import GraphSizes, ProgramCosts
from gnnpipe.profiling.scenario import GraphShape, model_on_shape
from gnnpipe.profiling.search import workload_of_shape

FAST, SLOW = Device(1.0, 10**11), Device(0.5, 10**11)
ALL_TO_ALL = Conversion(Collective.ALL_TO_ALL, State.ROWS, State.COLUMNS)


def workload_on(cluster, model="gcn", **settings):
    config = TrainConfig(model=model, layers=4, hidden=64, **settings)
    shape = GraphShape(100_000, 2_000_000, 50, 7, halo=0.8)
    hardware = Hardware(sheets="a100:10gbe", cluster=cluster)
    return workload_of_shape(config, shape, model_on_shape(config, shape), hardware)


def by_rows(ops):
    """Every op on its own rows, each value sent once."""
    found, sent = [], set()
    for op in ops:
        rule = RULES[op.kind][0]
        if rule.needs is State.HALO and op.inputs[0] not in sent:
            sent.add(op.inputs[0])
            found.append(Instruction.convert(op.inputs[0], CONVERSIONS[0]))
        found.append(Instruction.compute(op, rule))
    return DistributedProgram(tuple(ops), tuple(found))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "gat"])
def test_halo_exchanges_cost_what_the_closed_form_of_an_epoch_says(model, chunks):
    """The same forward and backward on equal devices; sums of gradients are counted besides."""
    link = Link(1e9, 2e-5)
    cluster = Cluster((FAST,) * 4, link)
    work = workload_on(cluster, model)
    made = primitive_model(work)
    group = DeviceGroup.of(cluster, range(4))
    compute = work.profile.compute_of(4)
    boundary_s = compute.boundary_per_number_s
    sizes = GraphSizes(100_000 / chunks, 80_000 / chunks, chunks, 4, 4, boundary_s)
    costs = ProgramCosts(made.ops, made.work, group, sizes, Shares.alike(group.equal))
    form = ClosedForm(work, chunks)
    ops = tuple(range(work.model.num_ops))
    expected = chunks * sum(form.pass_s(ops, form.group(StagePlan.even(ops, (0, 1, 2, 3)))))
    times = [
        compute.ops[kind]
        for kind, op in zip(work.kinds, work.model.ops, strict=True)
        if op.reads_features
    ]
    entries = 100_000 * 50 / 4
    expected += sum(t.finish.time_s(100_000 / 4, entries=entries) for t in times)
    # GCN reads nothing but aggregated features.
    assert any(t.finish.base_s for t in times) == (model != "gcn")
    weights = sum(
        made.work[op.name].num_weights
        for op in made.ops
        if op.kind in (OpKind.DENSE, OpKind.ATTENTION)
    )
    expected += 2 * weights * 4 * 0.75 / link.bandwidth_bytes_per_s
    assert chunks * costs.program_s(by_rows(made.ops)) == pytest.approx(expected, rel=1e-9)
    assert costs.program_s(by_rows(made.ops)) > 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("conversion", CONVERSIONS, ids=str)
def test_no_link_is_busy_for_longer_than_the_numbers_that_are_sent(seed, conversion):
    """Devices on one machine each, without latency: the busiest sends or receives all the time."""
    if conversion.collective in (Collective.HALO_EXCHANGE, Collective.SLICE):
        return
    draw = np.random.default_rng(seed)
    n = int(draw.integers(2, 5))
    ops = (PrimitiveOp("x", OpKind.FEATURES, (), 12), PrimitiveOp("loss", OpKind.LOSS, ("x",), 1))
    counts = draw.multinomial(7, np.ones(n) / n) + 1
    widths = draw.multinomial(12, np.ones(n) / n)
    shares = Shares(counts / counts.sum(), widths / 12)
    problem = Problem.random(ops, seed, int(counts.sum()))
    ranks = Ranks(problem, list(counts), list(shares.columns))
    whole = problem.features["x"]
    held = (
        [whole / n] * n
        if conversion.source is State.PARTIAL
        else ranks.distribute(whole, conversion.source)
    )
    ranks.convert(conversion, held)
    group = DeviceGroup(np.ones(n), np.ones(n), np.eye(n), np.inf, 1.0, 0.0)
    sizes = GraphSizes(len(whole), 0, 1, 1, 1, 0.0)
    work = dict.fromkeys(("x", "loss"), Work())
    time_s = ProgramCosts(ops, work, group, sizes, shares).convert_s("x", conversion)
    sent, received = ranks.sent.sum(1), ranks.sent.sum(0)
    if conversion.collective is Collective.ALL_TO_ALL:
        busiest = max(sent.max(), received.max())
    else:
        # Rings; a device passes on what it received.
        busiest = received.max()
    assert time_s == pytest.approx(2 * busiest)


def test_halo_bytes_add_up_to_the_crossings():
    shares = np.array([0.5, 0.3, 0.2])
    group = DeviceGroup(np.ones(3), np.ones(3), np.eye(3), np.inf, 1.0, 0.0)
    ops = random_ops(0)
    work = {op.name: Work() for op in ops}
    costs = ProgramCosts(ops, work, group, GraphSizes(1000, 700, 1, 4, 4, 0), Shares.alike(shares))
    sent = costs.halo_rows() * shares[:, None]
    assert sent.sum() == pytest.approx(700)
    np.testing.assert_allclose(sent, sent.T)


def test_devices_of_a_machine_share_its_link():
    """Four devices on two machines send as much between machines as two devices of twice the rows;
    the same devices on a machine each have a link of their own."""
    near = Link(1e12, 0.0)
    two = Cluster((FAST,) * 4, Link(1e9, 0.0), {(0, 1): near, (2, 3): near})
    four = Cluster((FAST,) * 4, Link(1e9, 0.0))
    ops = (PrimitiveOp("x", OpKind.FEATURES, (), 8), PrimitiveOp("loss", OpKind.LOSS, ("x",), 1))
    work = dict.fromkeys(("x", "loss"), Work())

    def time_s(cluster):
        group = DeviceGroup.of(cluster, range(4))
        sizes = GraphSizes(1000, 0, 1, 4, 4, 0.0)
        costs = ProgramCosts(ops, work, group, sizes, Shares.alike(group.equal))
        return costs.convert_s("x", ALL_TO_ALL)

    size_bytes = 1000 * 8 * 4
    assert time_s(two) == pytest.approx(2 * size_bytes * 0.5 * 0.5 / 1e9, rel=1e-2)
    assert time_s(four) == pytest.approx(2 * size_bytes * 0.25 * 0.75 / 1e9)


def test_numbers_that_are_sent_are_copied():
    ops = (PrimitiveOp("x", OpKind.FEATURES, (), 8), PrimitiveOp("loss", OpKind.LOSS, ("x",), 1))
    group = DeviceGroup(np.ones(4), np.full(4, 0.5), np.ones((1, 4)), np.inf, np.inf, 0.0)
    sizes, work = GraphSizes(1000, 600, 1, 4, 4, 1e-9), dict.fromkeys(("x", "loss"), Work())
    costs = ProgramCosts(ops, work, group, sizes, Shares.alike(group.equal))
    by_rows, all_rows = 2 * 1e-9 * 8 * 1000 / 4 / 0.5, 2 * 1e-9 * 8 * 1000 / 0.5
    expected = {
        Collective.HALO_EXCHANGE: by_rows * 0.6,
        Collective.ALL_TO_ALL: by_rows * 0.75,
        Collective.ALL_GATHER: by_rows,
        Collective.BROADCASTS: by_rows,
        Collective.REDUCE_SCATTER: by_rows,
        Collective.ALL_REDUCE: all_rows / 2,
        Collective.SLICE: 0.0,
    }
    for conversion in CONVERSIONS:
        assert costs.convert_s("x", conversion) == pytest.approx(expected[conversion.collective])


def test_an_aggregation_of_few_columns_reads_all_edges():
    group = DeviceGroup(np.ones(16), np.ones(16), np.ones((1, 16)), 1e12, np.inf, 0.0)
    ops = (
        PrimitiveOp("x", OpKind.FEATURES, (), 64),
        PrimitiveOp("a", OpKind.AGGREGATION, ("x",), 64),
        PrimitiveOp("loss", OpKind.LOSS, ("a",), 1),
    )
    work = {"x": Work(), "a": Work(1.0, 1.0), "loss": Work()}
    sizes = GraphSizes(1000, 0, 1, 4, 4, 0.0)
    costs = ProgramCosts(ops, work, group, sizes, Shares.alike(group.equal))
    columns = Rule(State.COLUMNS, State.COLUMNS, Split.BY_COLUMNS)
    # 4 columns are 16 bytes, of which 32 are read, and 8 of the index, of 256 + 8.
    assert costs.compute_s(ops[1], columns) == pytest.approx(2 * (32 + 8) / (256 + 8))
    assert costs.compute_s(ops[1], RULES[OpKind.AGGREGATION][0]) == pytest.approx(2 / 16)


def test_the_slowest_device_counts():
    group = DeviceGroup.of(Cluster((FAST, SLOW), Link(1e9, 0.0)), [0, 1])
    ops = random_ops(0)
    work = {op.name: Work(1.0, 2.0) for op in ops}
    costs = ProgramCosts(ops, work, group, GraphSizes(10, 0, 2, 4, 4, 0), Shares.alike(group.equal))
    dense = PrimitiveOp("d", OpKind.DENSE, (ops[0].name,), 4)
    costs.work["d"] = Work(1.0, 2.0)
    assert costs.compute_s(dense, RULES[OpKind.DENSE][0]) == pytest.approx(3 / 2 * 0.5 / 0.5)
    assert costs.compute_s(dense, RULES[OpKind.DENSE][3]) == pytest.approx(3 / 2 / 0.5)
    assert group.by_speed == pytest.approx([2 / 3, 1 / 3])


def test_graphs_of_several_types_are_refused():
    work = replace(workload_on(Cluster((FAST,), Link(1e9, 0.0))), num_vertices={"a": 1, "b": 2})
    with pytest.raises(InputError, match="one vertex type; this graph has 2"):
        primitive_model(work)


def test_the_parts_of_a_layer():
    parts = [
        (op.name, op.kind.value, op.inputs)
        for op in primitive_model(workload_on(Cluster((FAST,), Link(1e9, 0.0)), "gcnii")).ops
    ]
    assert parts[:5] == [
        ("features", "features", ()),
        ("model_encode.encode", "dense", ("features",)),
        ("model_encode.rows", "row-wise", ("model_encode.encode",)),
        ("relu.rows", "row-wise", ("model_encode.rows",)),
        ("drop.rows", "row-wise", ("relu.rows",)),
    ]
    # A layer: an aggregation, and a map of what was aggregated and of the initial rows.
    assert parts[5:11] == [
        ("aggregate.aggregate", "aggregation", ("drop.rows",)),
        ("aggregate.rows", "row-wise", ("aggregate.aggregate",)),
        ("drop_1.concat", "concat", ("aggregate.rows", "relu.rows")),
        ("drop_1.dense", "dense", ("drop_1.concat",)),
        ("drop_1.rows", "row-wise", ("drop_1.dense",)),
        ("aggregate_1.aggregate", "aggregation", ("drop_1.rows",)),
    ]
