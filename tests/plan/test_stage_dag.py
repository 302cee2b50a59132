"""Stages that cannot run are refused, with the reason."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_dags import chain, dags

from gnnpipe.errors import InputError
from gnnpipe.plan import ModelGraph, Op, Placement, Plan, StageDag, StagePlan
from gnnpipe.planner import check_plan

DIAMOND = [(), (0,), (0,), (1, 2)]
"""Two branches of one op each."""
TWO_CHAINS = [(), (0,), (), (2,), (1, 3)]


def model_of(reads, **settings):
    """Row-wise ops, of which each reads the ops given; ``settings`` of the last one."""
    ops = tuple(
        Op(
            f"op{i}",
            tuple(f"op{j}" for j in sources),
            {f"op{i}": 4},
            num_parameters=0,
            flops_per_row=1,
            **(settings if i == len(reads) - 1 else {}),
        )
        for i, sources in enumerate(reads)
    )
    return ModelGraph("model", 7, 3, ops)


def plan_of(*stages):
    ranks = Placement.grid(len(stages), 1).stages
    each = (StagePlan.even(tuple(ops), r) for ops, r in zip(stages, ranks, strict=True))
    return Plan(tuple(each), 1, "fill-drain")


def message(reads, *stages, **settings):
    with pytest.raises(InputError) as error:
        check_plan(plan_of(*stages), model_of(reads, **settings))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_branches_pass_values_to_the_join_alone():
    dag = StageDag.of(plan_of([0, 1], [2, 3], [4]), model_of(TWO_CHAINS))
    assert [(t.source, t.target, dict(t.widths)) for t in dag.transfers] == [
        (0, 2, {"op1": 4}),
        (1, 2, {"op3": 4}),
    ]


def test_a_value_that_every_stage_reads_goes_from_stage_to_stage():
    dag = StageDag.of(plan_of([0], [1], [2], [3]), model_of([(), (0,), (0, 1), (0, 2)]))
    assert [(t.source, t.target, sorted(t.widths)) for t in dag.transfers] == [
        (0, 1, ["op0"]),
        (1, 2, ["op0", "op1"]),
        (2, 3, ["op0", "op2"]),
    ]
    assert [sorted(dag.passed_on(stage)) for stage in range(4)] == [[], ["op0"], ["op0"], []]


def test_what_a_stage_reads_of_all_others_comes_from_these():
    reads = [(), (0,), (1,), (0, 1, 2)]  # jumping knowledge
    dag = StageDag.of(plan_of([0], [1], [2], [3]), model_of(reads))
    assert [(t.source, t.target, sorted(t.widths)) for t in dag.transfers] == [
        (0, 1, ["op0"]),
        (0, 3, ["op0"]),
        (1, 2, ["op1"]),
        (2, 3, ["op1", "op2"]),
    ]


def test_branches_do_not_wait_for_a_value_from_each_other():
    dag = StageDag.of(plan_of([0], [1], [2], [3]), model_of(DIAMOND))
    ends = [(t.source, t.target) for t in dag.transfers]
    assert ends == [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_a_stage_that_is_not_convex():
    found = message(DIAMOND, [0, 1, 3], [2])
    assert "stage 0 is not convex: ops 0 and 3 are in the stage" in found
    assert "op 2 between them is in stage 1" in found


def test_a_way_through_several_stages_is_not_convex_either():
    found = message([(), (0,), (1,), (2,)], [0, 3], [1], [2])
    assert "stage 0 is not convex: ops 0 and 3 are in the stage, but op 1" in found


def test_stages_that_read_each_other():
    reads = [(), (), (0,), (1,), (2, 3)]
    found = message(reads, [0, 3], [1, 2], [4])
    assert "stages 0 and 1 read each other's values" in found
    assert "op 3 of stage 0 reads op 1, op 2 of stage 1 reads op 0" in found


def test_a_wrong_order_of_stages():
    found = message(TWO_CHAINS, [2, 3], [4], [0, 1])
    assert "stage 1 reads op 1, which stage 2 computes later" in found
    assert "in the order 0, 2, 1" in found


def test_the_logits_are_computed_in_the_last_stage():
    # As a sum over the vertices that forward assigns to a buffer: no op reads the sum.
    found = message([(), (0,), (0,)], [0, 2], [1])
    assert "op 2 computes the logits in stage 0" in found


def test_scores_are_in_the_stage_of_the_rows_that_they_read():
    reads = [(), (0,), (0,), (2,)]
    pairs = {"over_pairs": True, "push_width": 4}
    found = message(reads, [0, 1], [2], [3], **pairs)
    assert "op 3 must be in the stage of op 2" in found
    model = model_of([(), (0,), (0,), (1,)], **pairs)
    assert model.cuts == (1,)
    check_plan(plan_of([0, 2], [1, 3]), model)


@st.composite
def partitions(draw):
    """Reads of up to 7 ops, of which each but the last is read, and the stage of each op."""
    count = draw(st.integers(2, 7))
    reads = [
        set(draw(st.lists(st.integers(0, i - 1), max_size=2))) if i else set() for i in range(count)
    ]
    for i in range(count - 1):
        if not any(i in sources for sources in reads):
            reads[draw(st.integers(i + 1, count - 1))].add(i)
    stages = [draw(st.integers(0, 3)) for _ in range(count)]
    number = {s: i for i, s in enumerate(draw(st.permutations(sorted(set(stages)))))}
    return [tuple(sorted(sources)) for sources in reads], [number[s] for s in stages]


def reachable(edges):
    """Whether a path leads from row to column."""
    found = edges.copy()
    for _ in range(len(found)):
        found |= (found.astype(int) @ edges.astype(int)) > 0
    return found


@settings(deadline=None, max_examples=300)
@given(partitions())
def test_the_reason_is_that_of_brute_force(case):
    reads, stage_of = case
    count, number = len(reads), max(stage_of) + 1
    edges = np.zeros((count, count), dtype=bool)
    between = np.zeros((number, number), dtype=bool)
    for op, sources in enumerate(reads):
        for source in sources:
            edges[source, op] = True
            between[stage_of[source], stage_of[op]] |= stage_of[source] != stage_of[op]
    reach, inside = reachable(edges), np.equal.outer(stage_of, stage_of)
    is_convex = not ((reach & ~inside).astype(int) @ (reach & ~inside) * inside).any()
    has_cycle = reachable(between).diagonal().any()
    is_in_order = not np.tril(between, -1).any()
    plan = plan_of(*([op for op in range(count) if stage_of[op] == s] for s in range(number)))
    try:
        check_plan(plan, model_of(reads))
    except InputError as error:
        text = str(error)
        assert not is_in_order
        assert ("is not convex" in text) == (not is_convex)
        assert ("read each other" in text) == (is_convex and has_cycle)
        if not has_cycle:
            order = [int(s) for s in re.search(r"in the order ([\d, ]+)", text)[1].split(",")]
            assert not np.tril(between[np.ix_(order, order)], -1).any()
    else:
        assert is_in_order


@settings(deadline=None, max_examples=300)
@given(partitions())
def test_each_reader_gets_a_value_once_and_waits_for_no_other_stage(case):
    reads, stage_of = case
    number = max(stage_of) + 1
    plan = plan_of(*([op for op in range(len(reads)) if stage_of[op] == s] for s in range(number)))
    try:
        dag = StageDag.of(plan, model_of(reads))
    except InputError:
        return
    needed = {
        (stage_of[op], f"op{source}")
        for op, sources in enumerate(reads)
        for source in sources
        if stage_of[source] != stage_of[op]
    }
    arrivals = [(t.target, value) for t in dag.transfers for value in t.widths]
    assert len(arrivals) == len(needed)
    assert set(arrivals) == needed
    have = needed | {(stage_of[op], f"op{op}") for op in range(len(reads))}
    assert all((t.source, value) in have for t in dag.transfers for value in t.widths)
    made = {(stage_of[op], f"op{op}") for op in range(len(reads))}
    direct = [t for t in dag.transfers if any((t.source, value) in made for value in t.widths)]
    assert len(direct) == len(dag.transfers)
    waits = {(stage_of[int(value[2:])], target) for target, value in needed}
    assert {(t.source, t.target) for t in dag.transfers} <= waits


def test_a_chain_is_as_deep_as_its_stages():
    dag = chain(4, 2)
    assert dag.depths == (1, 2, 3, 4)
    assert dag.depth == 4


@settings(deadline=None)
@given(dags())
def test_the_depth_is_the_longest_path(dag):
    paths = np.zeros((dag.plan.num_stages,) * 2, dtype=int)
    for transfer in dag.transfers:
        paths[transfer.source, transfer.target] = 1
    # Number of paths of each length, by the stage in which they end.
    counts = [np.ones(len(paths), dtype=int)]
    while counts[-1].any():
        counts.append(counts[-1] @ paths)
    longest = np.stack(counts).astype(bool).sum(0)
    assert dag.depths == tuple(longest)
    assert dag.depth == len(counts) - 1


def test_a_negative_op_is_told_as_such():
    with pytest.raises(InputError, match=r"stages\[0\]: ops \[-1, 0\]: op -1: must be at least 0"):
        Plan((StagePlan((-1, 0), (0,), (1.0,)),), 1, "fill-drain")
