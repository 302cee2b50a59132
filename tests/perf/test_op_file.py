"""Networks from a file of ops: planned and simulated by the code for GNNs."""

import json
import re
from functools import partial

import pytest

from gnnpipe.errors import InputError
from gnnpipe.perf.op_file import OpFile, RowCosts, row_timeline
from gnnpipe.plan import Plan, StageDag, StagePlan
from gnnpipe.planner.graphpipe import GraphPipe
from gnnpipe.planner.interval import Interval
from gnnpipe.planner.pipedream import PipeDream, as_chain
from gnnpipe.planner.stage_search import Limits, Request, search

ROWS = 64


def content(branches=3, length=2, is_chained=False):
    """Branches of equal ops, a light join, and a fast link."""
    ops = []

    def add(name, inputs, row_s):
        times = {"base_s": 0.0, "per_row_s": row_s}
        back = {"base_s": 0.0, "per_row_s": 2 * row_s}
        outputs = {f"{name}.y": 4}
        fields = {"name": name, "inputs": inputs, "outputs": outputs, "num_parameters": 8}
        ops.append({**fields, "kept_per_row": 4, "forward": times, "backward": back})

    for b in range(branches):
        for i in range(length):
            before = [f"b{b}_{i - 1}.y"] if i else [f"b{b - 1}_{length - 1}.y"] * is_chained
            add(f"b{b}_{i}", before if b or i else [], 1e-3)
    add("join", [f"b{b}_{length - 1}.y" for b in range(branches)], 1e-5)
    link = {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9}
    return {"name": "towers", "link": link, "update_s_per_parameter": 1e-9, "ops": ops}


def file_of(**shape):
    return OpFile.from_json(json.dumps(content(**shape)))


def simulated(dag, file):
    return row_timeline(dag, file.model(), file.profile(), ROWS)


def best_of(planner, file, devices=7, chunks=(4, 8)):
    """A planner's result; a chain is simulated with every stage waiting for the one before."""
    model, profile = file.model(), file.profile()

    def simulated_s(plan):
        dag = StageDag.of(plan, model)
        return simulated(as_chain(dag) if planner is PipeDream else dag, file).makespan_s

    limits = Limits(devices, 10**9, shard_counts=(1,))
    costs_of = partial(RowCosts, model, profile, ROWS)
    return search(planner, Request(costs_of, chunks, limits, simulated_s))


def test_a_stage_costs_what_its_ops_cost():
    file = file_of()
    model, profile = file.model(), file.profile()
    costs = RowCosts(model, profile, ROWS, chunks=4)
    assert costs.stage_s((0, 6), 1) == pytest.approx(16 * 3 * (1e-3 + 1e-5))
    assert costs.stage_s((0, 6), 2) == pytest.approx(8 * 3 * (1e-3 + 1e-5))
    assert costs.epoch_s((0, 1), 1) == pytest.approx(16e-9)
    # A sum over two shards: each sends half of the 64 bytes twice.
    assert costs.epoch_s((0, 1), 2) == pytest.approx(16e-9 + 2 * 1e-6 + 64e-9, rel=1e-6)
    assert costs.message_s(4, 1) == pytest.approx(1e-6 + 16 * 4 * 4 / 1e9)
    assert costs.memory_bytes((0, 1), 1, 2) == 4 * (4 * 16 + 2 * 16 * 8)


def test_stages_of_unlike_devices_share_the_rows_of_a_chunk():
    """Stages of 1, 2 and 4 devices: each device computes its rows, and every row is sent once."""
    file = file_of(branches=1)
    model, shards = file.model(), (1, 2, 4)
    ends = [sum(shards[:i]) for i in range(4)]
    stages = (StagePlan.even((i,), tuple(range(*ends[i : i + 2]))) for i in range(len(shards)))
    dag = StageDag.of(Plan(tuple(stages), 4, "fill-drain"), model)
    timeline = row_timeline(dag, model, file.profile(), 67)
    for i, count in enumerate(shards):
        row_s = 3 * (1e-3 if i < 2 else 1e-5)
        busy = timeline.busy_s()[ends[i] : ends[i + 1]]
        assert sum(busy) == pytest.approx(67 * row_s, rel=1e-3)
        assert max(busy) - min(busy) <= 4 * row_s + 1e-9
        assert len(busy) == count
    sent = sum(t.size_bytes for t in timeline.tasks.what if t.kind.is_send)
    assert sent == 2 * 2 * 67 * 4 * 4


@pytest.mark.parametrize("planner", [GraphPipe, Interval, PipeDream])
def test_the_cost_of_a_plan_is_the_simulators(planner):
    file = file_of()
    found = best_of(planner, file)
    dag = StageDag.of(found.plan, file.model())
    if planner is PipeDream:
        dag = as_chain(dag)
    timeline = simulated(dag, file)
    assert found.epoch_s == timeline.makespan_s
    # No device is busy longer than the bottleneck for every chunk.
    assert max(timeline.busy_s()) <= found.bottleneck_s * found.plan.chunks + 1e-9
    assert found.epoch_s >= found.bottleneck_s * found.plan.chunks - 1e-9


def test_branches_side_by_side_are_faster_and_the_gain_is_due_to_their_independence():
    """Work is conserved; the gain vanishes if each branch reads the end of the one before."""
    gains = []
    for is_chained in (False, True):
        file = file_of(is_chained=is_chained)
        chain = best_of(PipeDream, file, chunks=(4,))
        for planner in (GraphPipe, Interval):
            found = best_of(planner, file, chunks=(4,))
            gains.append(chain.epoch_s / found.epoch_s)
            assert busy_s(found.plan, file) == pytest.approx(busy_s(chain.plan, file))
    # Of 4 chunks, 6 stages in a row need 4 + 5 times the time of a stage, branches of 2 need 4 + 1.
    assert gains[:2] == pytest.approx([9 / 5] * 2, rel=0.02)
    assert gains[2:] == pytest.approx([1.0] * 2, rel=0.01)


def busy_s(plan, file):
    """Time that all devices compute."""
    return sum(simulated(StageDag.of(plan, file.model()), file).busy_s()[: plan.num_ranks])


def changed(**fields):
    return {**content(), **fields}


def op_changed(**fields):
    data = content()
    data["ops"][1] = {**data["ops"][1], **fields}
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "f.json: is [], not a JSON object"),
        (changed(ops=[]), "f.json: ops: the list is empty; give at least one op"),
        (changed(link={"latency_s": 0.0}), "f.json: link: bandwidth_bytes_per_s is missing"),
        (
            changed(link={"latency_s": 0, "bandwidth_bytes_per_s": 0}),
            "f.json: link: bandwidth_bytes_per_s: must be at least 0.1",
        ),
        (changed(colour="red"), "f.json: 'colour' is not a field"),
        (op_changed(name="b0_0"), "f.json: ops[1] (b0_0): another op has this name"),
        (op_changed(inputs=["b9.y"]), "ops[1] (b0_1): reads 'b9.y', which no earlier op computes"),
        (op_changed(inputs=["b0_1.y"]), "reads 'b0_1.y', which no earlier op computes"),
        (op_changed(outputs={"b0_0.y": 4}), "outputs: 'b0_0.y': another op computes this value"),
        (op_changed(outputs={"y": 0}), "outputs: 'y': has no width"),
        (op_changed(outputs={}), "ops[1] (b0_1): has no outputs; give at least one"),
        (op_changed(num_parameters=-1), "ops[1]: num_parameters -1: must be a whole number from 0"),
        (op_changed(forward={"base_s": 1}), "ops[1]: forward: per_row_s is missing"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(data, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        OpFile.from_json(json.dumps(data), "f.json")
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "ops.json"
    with pytest.raises(InputError, match=r"ops.json.: cannot be read .*; give a JSON file"):
        OpFile.read(str(path))
    path.write_text("{")
    with pytest.raises(InputError, match=r"ops.json: not JSON"):
        OpFile.read(str(path))
    path.write_text(json.dumps(content()))
    assert OpFile.read(str(path)).model().num_ops == 7
