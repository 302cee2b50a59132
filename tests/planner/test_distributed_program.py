import random
from dataclasses import replace

import numpy as np
import pytest
from planner.program_oracle import Problem, Ranks
from planner.programs import random_ops, random_program

from gnnpipe.errors import InputError
from gnnpipe.plan import RowWay
from gnnpipe.planner.distributed_program import (
    CONVERSIONS,
    PLAN_RULES,
    RULES,
    Conversion,
    DistributedProgram,
    Instruction,
    OpKind,
    PrimitiveOp,
    Rule,
    Split,
    State,
    check_ops,
)
from gnnpipe.planner.program_check import check_program

CASES = range(150)


def run(seed: int) -> tuple[DistributedProgram, Ranks]:
    ops = random_ops(seed)
    program = random_program(ops, seed)
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(12), k=draw.randint(0, 3)))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, 11], strict=True)]
    parts = [draw.random() for _ in counts]
    ranks = Ranks(Problem.random(ops, seed), counts, [p / sum(parts) for p in parts])
    ranks.run(program)
    return program, ranks


@pytest.mark.parametrize("seed", CASES)
def test_every_property_is_the_value_of_the_plain_computation(seed):
    program, ranks = run(seed)
    check_program(program, State.PARTIAL)
    plain = ranks.problem.plain()
    for value, state in ranks.values:
        whole = ranks.assemble(ranks.values[value, state], state)
        np.testing.assert_allclose(whole, plain[value], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", CASES)
def test_the_adjoint_program_gives_the_gradients_of_one_device(seed):
    program, ranks = run(seed)
    ranks.backward(program)
    plain = ranks.problem.plain_gradients()
    assert ranks.gradients.keys() == plain.keys()
    for name, expected in plain.items():
        np.testing.assert_allclose(ranks.gradients[name], expected, rtol=1e-9, atol=1e-11)


def test_every_rule_and_conversion_is_tried():
    programs = [random_program(random_ops(seed), seed) for seed in CASES]
    works = {i.work for program in programs for i in program.instructions}
    kinds = {(op.kind, rule) for program in programs for op, rule in program.chosen_rules()}
    assert works >= set(CONVERSIONS)
    assert kinds == {(kind, rule) for kind, rules in RULES.items() for rule in rules}


def test_halo_rows_are_exact_and_no_others_are_there():
    ops = chain(OpKind.AGGREGATION)
    program = DistributedProgram(ops, by_rows(ops))
    ranks = Ranks(Problem.random(ops, 0), [4, 4, 3], [0.5, 0.3, 0.2])
    ranks.run(program)
    matrix = ranks.problem.matrix
    for g, held in enumerate(ranks.values["x", State.HALO]):
        read = set(np.flatnonzero(matrix[ranks.rows[g]].any(0))) | set(ranks.rows[g])
        assert set(np.flatnonzero(~held[:, 0].isnan())) == read


def chain(*kinds: OpKind) -> tuple[PrimitiveOp, ...]:
    names = ["x", *(f"v{i}" for i in range(len(kinds))), "loss"]
    all_kinds = [OpKind.FEATURES, *kinds, OpKind.LOSS]
    return tuple(
        PrimitiveOp(name, kind, (names[i - 1],) if i else (), 4 if name != "loss" else 1)
        for i, (name, kind) in enumerate(zip(names, all_kinds, strict=True))
    )


def by_rows(ops) -> tuple[Instruction, ...]:
    """Every op on its own rows, with halo exchanges."""
    found = []
    for op in ops:
        rule = RULES[op.kind][0]
        if rule.needs is State.HALO:
            found.append(Instruction.convert(op.inputs[0], CONVERSIONS[0]))
        found.append(Instruction.compute(op, rule))
    return tuple(found)


def test_a_program_without_its_exchange_is_refused():
    ops = chain(OpKind.AGGREGATION)
    instructions = [i for i in by_rows(ops) if isinstance(i.work, Rule)]
    with pytest.raises(
        InputError, match=r"instruction 1 .*needs x as rows and halo; it is there as"
    ):
        check_program(DistributedProgram(ops, tuple(instructions)), State.PARTIAL)


def test_an_op_that_is_not_computed_or_computed_twice_is_refused():
    ops = chain(OpKind.DENSE)
    good = by_rows(ops)
    with pytest.raises(InputError, match="needs v0 as rows; it is not there"):
        check_program(DistributedProgram(ops, (good[0], good[2])), State.PARTIAL)
    with pytest.raises(InputError, match="'loss' is never computed"):
        check_program(DistributedProgram(ops, good[:2]), State.PARTIAL)
    with pytest.raises(InputError, match="was computed before"):
        check_program(DistributedProgram(ops, (*good[:2], *good[1:])), State.PARTIAL)


def test_a_conversion_of_what_is_there_is_refused():
    ops = chain(OpKind.AGGREGATION)
    good = by_rows(ops)
    with pytest.raises(InputError, match="its result is there already"):
        check_program(DistributedProgram(ops, (*good[:2], *good[1:])), State.PARTIAL)


def test_an_instruction_outside_the_language_is_refused():
    ops = chain(OpKind.ROW_WISE)
    good = by_rows(ops)
    columns = Rule(State.COLUMNS, State.COLUMNS, Split.BY_COLUMNS)
    wrong = (good[0], Instruction.compute(ops[1], columns), good[2])
    with pytest.raises(InputError, match="there is no such way for row-wise"):
        check_program(DistributedProgram(ops, wrong), State.PARTIAL)
    moved = Conversion(CONVERSIONS[0].collective, State.ROWS, State.REPLICATED)
    wrong = (good[0], Instruction.convert("x", moved), *good[1:])
    with pytest.raises(InputError, match="there is no such way"):
        check_program(DistributedProgram(ops, wrong), State.PARTIAL)
    without = replace(good[1], needs=())
    with pytest.raises(InputError, match="its conditions are not those of its work"):
        check_program(DistributedProgram(ops, (good[0], without, good[2])), State.PARTIAL)
    unknown = (*good, replace(good[1], op="other"))
    with pytest.raises(InputError, match="there is no such op"):
        check_program(DistributedProgram(ops, unknown), State.PARTIAL)


def test_a_program_must_reach_its_goal():
    ops = chain(OpKind.DENSE)
    with pytest.raises(
        InputError, match="at the end: needs loss as replicated; it is there as par"
    ):
        check_program(DistributedProgram(ops, by_rows(ops)), State.REPLICATED)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ((PrimitiveOp("x", OpKind.FEATURES, (), 4),) * 2, "'x' is there twice"),
        ((PrimitiveOp("a", OpKind.DENSE, ("b",), 4),), "reads 'b', which is no earlier op"),
        ((PrimitiveOp("a", OpKind.DENSE, (), 4),), "input features alone have no inputs"),
    ],
)
def test_ops_that_are_no_dag_are_refused(ops, words):
    with pytest.raises(InputError, match=words):
        check_ops(ops)


def test_the_way_of_every_aggregation():
    kinds = (OpKind.AGGREGATION, OpKind.AGGREGATION, OpKind.ATTENTION)
    ops = tuple(replace(op, part_of=f"layer of {op.name}") for op in chain(*kinds))
    named = {(c.collective.name, c.source, c.target): c for c in CONVERSIONS}
    columns = RULES[OpKind.AGGREGATION][2]
    instructions = (
        Instruction.compute(ops[0], RULES[OpKind.FEATURES][1]),
        Instruction.compute(ops[1], columns),
        Instruction.convert("v0", named["ALL_TO_ALL", State.COLUMNS, State.ROWS]),
        Instruction.convert("v0", named["HALO_EXCHANGE", State.ROWS, State.HALO]),
        Instruction.compute(ops[2], RULES[OpKind.AGGREGATION][0]),
        Instruction.convert("v1", named["BROADCASTS", State.ROWS, State.REPLICATED]),
        Instruction.compute(ops[3], RULES[OpKind.ATTENTION][1]),
        Instruction.compute(ops[4], RULES[OpKind.LOSS][0]),
    )
    program = DistributedProgram(ops, instructions)
    check_program(program, State.PARTIAL)
    assert program.aggregation_ways() == {
        "layer of v0": RowWay.COLUMNS,
        "layer of v1": RowWay.HALO,
        "layer of v2": RowWay.GATHER,
    }
    assert [str(i) for i in instructions[1:4]] == [
        "v0: by columns -> columns",
        "v0: all-to-all -> rows",
        "v0: halo exchange -> rows and halo",
    ]


def test_a_plan_cannot_replicate_an_aggregation():
    ops = chain(OpKind.AGGREGATION)
    whole = RULES[OpKind.AGGREGATION][3]
    instructions = (
        Instruction.compute(ops[0], RULES[OpKind.FEATURES][2]),
        Instruction.compute(ops[1], whole),
        Instruction.compute(ops[2], RULES[OpKind.LOSS][1]),
    )
    program = DistributedProgram(ops, instructions)
    check_program(program, State.PARTIAL)
    with pytest.raises(InputError, match="PLAN_RULES"):
        program.aggregation_ways()
    assert whole not in PLAN_RULES[OpKind.AGGREGATION]
    assert all(PLAN_RULES.values())
