"""Alike stages are estimated once: their memory beside an estimate of every stage by itself."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from branch_models import BRANCH_BY_BRANCH, HIDDEN, IN, OUT, Jumping, Towers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.config import TrainConfig
from gnnpipe.perf import estimate_memory, stage_memory
from gnnpipe.perf.op_table import OpTable
from gnnpipe.perf.stage_memory import StageMemory
from gnnpipe.plan import Plan, RowWay, StageDag, StagePlan
from gnnpipe.profiling.scenario import GraphShape, model_on_shape
from gnnpipe.profiling.search import Hardware, workload_of_shape

SHAPE = GraphShape(6_400, 64_000, IN, OUT, halo=0.5)
MODELS = {"gcnii": None, "towers": Towers, "jumping": Jumping}


@cache
def memory_of(name, comm_dtype, chunks, is_exact):
    """One for all examples, so that a stage may meet the estimate of another one."""
    config = TrainConfig(model="gcnii", layers=6, hidden=HIDDEN, comm_dtype=comm_dtype)
    module = MODELS[name] and MODELS[name](BRANCH_BY_BRANCH)
    model = model_on_shape(config, SHAPE, module)
    work = workload_of_shape(config, SHAPE, model, Hardware(sheets="a100:10gbe"))
    return StageMemory(OpTable(work), chunks, is_exact)


@st.composite
def dags(draw, model, chunks):
    """Stages that are runs of any order in which values are made before they are read."""
    order, waiting = [], set(range(model.num_ops))
    while waiting:
        ready = sorted(op for op in waiting if not waiting & set(model.reads[op]))
        ready = [op for op in ready if op < model.num_ops - 1] or ready
        order.append(draw(st.sampled_from(ready)))
        waiting.remove(order[-1])
    cuts = draw(st.sets(st.integers(1, model.num_ops - 1), max_size=5))
    stages, ways, first = [], {}, 0
    for begin, end in pairwise([0, *sorted(cuts), model.num_ops]):
        ops, shards = tuple(sorted(order[begin:end])), draw(st.integers(1, 2))
        shares = (0.25, 0.75) if shards == 2 and draw(st.booleans()) else (1 / shards,) * shards
        ranks, first = tuple(range(first, first + shards)), first + shards
        stages.append(StagePlan(ops, ranks, shares, draw(st.booleans())))
        can = [op for op in ops if not model.ops[op].reason_against(RowWay.COLUMNS)]
        if shards > 1 and draw(st.booleans()):
            ways |= dict.fromkeys(can[:2], RowWay.COLUMNS)
    return StageDag.of(Plan(tuple(stages), chunks, "fill-drain", ways=ways), model)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    comm_dtype=st.sampled_from(["same", "bf16"]),
    chunks=st.sampled_from([1, 4]),
    is_exact=st.booleans(),
    data=st.data(),
)
def test_alike_stages_need_the_same(name, comm_dtype, chunks, is_exact, data):
    memory = memory_of(name, comm_dtype, chunks, is_exact)
    work = memory.workload
    dag = data.draw(dags(work.model, chunks))
    extra = work.memory.extra_weights + (work.probes > 0) * (not is_exact)
    rules = replace(work.memory, is_exact=is_exact, extra_weights=extra)
    for i, stage in enumerate(dag.plan.stages):
        found = memory.bytes_by_share(dag, i)
        assert set(found) == set(stage.shares)
        for share, size in found.items():
            sizes = work.shard_sizes(share, stage.shards, is_exact)
            assert size == estimate_memory(dag, work.model, i, sizes, rules).on_device


class Stacked(nn.Module):
    """Layers whose results are all read by the last one."""

    def __init__(self, layers):
        super().__init__()
        self.convs = nn.ModuleList(pyg.GCNConv(HIDDEN if i else IN, HIDDEN) for i in range(layers))
        self.end = nn.Linear(HIDDEN * layers, OUT)

    def forward(self, x, edge_index):
        rows = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            rows.append(x)
        return self.end(torch.cat(rows, dim=1))


def layer_by_layer(module, layers, is_exact=False, **changes):
    """The memory, and a plan with a stage for every layer, the last one with the ops behind."""
    config = TrainConfig(hidden=HIDDEN, **changes)
    model = model_on_shape(config, SHAPE, module)
    work = workload_of_shape(config, SHAPE, model, Hardware(sheets="a100:10gbe"))
    each = model.num_ops // layers
    ends = [*range(0, each * layers, each), model.num_ops]
    stages = [StagePlan.even(tuple(range(*run)), (i,)) for i, run in enumerate(pairwise(ends))]
    dag = StageDag.of(Plan(tuple(stages), 4, "fill-drain"), model)
    return StageMemory(OpTable(work), 4, is_exact), dag


@pytest.mark.parametrize("layers", [8, 16])
def test_many_stages_cost_few_estimates(layers, monkeypatch):
    counted = []

    def counting(*arguments):
        counted.append(arguments)
        return estimate_memory(*arguments)

    monkeypatch.setattr(stage_memory, "estimate_memory", counting)
    memory, dag = layer_by_layer(Stacked(layers), layers)
    for i in range(layers):
        memory.bytes_by_share(dag, i)
    # The first stage, those in the middle, the two before the last, of which one passes the
    # other's rows on, and the last.
    assert len(counted) == 5


def test_a_stage_that_passes_rows_on_is_not_like_one_that_sends_its_own_alone():
    memory, dag = layer_by_layer(Stacked(6), 6, comm_dtype="bf16")
    # The last stage reads the rows of stage 3, and gets them from stage 4.
    assert dag.passed_on(4) == {"relu_3"}
    *others, end = dag.transfers
    kept = *others, replace(end, widths={"relu_4": HIDDEN})
    both, own = (memory.bytes_by_share(d, 4)[1.0] for d in (dag, replace(dag, transfers=kept)))
    # The rows that are sent are rounded copies.
    assert both - own == HIDDEN * SHAPE.vertices * 4


@pytest.mark.parametrize("is_exact", [False, True])
def test_gradients_of_rows_that_a_stage_passes_on_wait_in_exact_programs(is_exact):
    memory, dag = layer_by_layer(Stacked(6), 6, is_exact)
    *others, end = dag.transfers
    kept = *others, replace(end, widths={"relu_4": HIDDEN})
    both, own = (memory.bytes_by_share(d, 4)[1.0] for d in (dag, replace(dag, transfers=kept)))
    # The rows of the received transfer count in both: they wait for their gradients either way.
    assert both - own == is_exact * HIDDEN * SHAPE.vertices * 4


def test_a_stage_by_columns_is_not_like_one_by_halo():
    """The memory of a stage alone is remembered, and depends on the ways of its rows."""
    memory, _ = layer_by_layer(Stacked(4), 4)
    ops = (0, 1, 2, 3)
    columns = {op for op in ops if memory.workload.model.ops[op].aggregates}
    by_halo, by_columns = (memory.alone_bytes(ops, 2, 4, ways) for ways in ((), columns))
    assert by_halo != by_columns
    again, _ = layer_by_layer(Stacked(4), 4)
    assert again.alone_bytes(ops, 2, 4, columns) == by_columns
