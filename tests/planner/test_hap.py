import random
from itertools import count, product

import numpy as np
import pytest
from planner.exhaustive_programs import MOST_CHOICES, least_time_s, num_choices, random_costs
from planner.program_oracle import Problem, Ranks
from planner.programs import random_ops

from gnnpipe.errors import InputError
from gnnpipe.planner.device_group import Shares
from gnnpipe.planner.distributed_program import PLAN_RULES, OpKind, State
from gnnpipe.planner.hap import Bound, alternate, best_shares, find_program, rounded
from gnnpipe.planner.program_check import check_program
from gnnpipe.planner.program_costs import Maximum


def small_ops(seed):
    """Few enough ops to try all."""
    drawn = (random_ops(seed + 1000 * i, most=5) for i in count())
    return next(ops for ops in drawn if num_choices(ops) <= MOST_CHOICES)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 40)) for seed in range(200)]
)
def test_the_search_finds_what_exhaustive_search_finds(seed):
    costs = random_costs(small_ops(seed), seed)
    least_s = least_time_s(costs)
    # Without a good bound, many ops take long.
    for bound in list(Bound) if len(costs.ops) < 7 else [Bound.CHAINS]:
        found = find_program(costs, bound=bound)
        assert found.time_s == pytest.approx(least_s, rel=1e-9)
        assert costs.program_s(found.program) == pytest.approx(found.time_s, rel=1e-9)
        check_program(found.program, State.PARTIAL)


@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_what_is_found_computes_the_model(seed):
    ops = random_ops(seed)
    costs = random_costs(ops, seed)
    n = costs.group.count
    ranks = Ranks(Problem.random(ops, seed), rounded(np.ones(n), 11), [1 / n] * n)
    program = find_program(costs).program
    ranks.run(program)
    loss = ranks.assemble(ranks.values["loss", State.PARTIAL], State.PARTIAL)
    np.testing.assert_allclose(loss, ranks.problem.plain()["loss"], rtol=1e-9)
    ranks.backward(program)
    for name, expected in ranks.problem.plain_gradients().items():
        np.testing.assert_allclose(ranks.gradients[name], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_the_bounds_prune():
    expanded = dict.fromkeys(Bound, 0)
    for seed in range(20):
        costs = random_costs(small_ops(seed), seed)
        for bound in Bound if len(costs.ops) < 8 else ():
            expanded[bound] += find_program(costs, bound=bound).expanded
    assert expanded[Bound.CHAINS] < 0.6 * expanded[Bound.SPEEDS]
    assert expanded[Bound.SPEEDS] < expanded[Bound.NONE]


def test_a_program_for_a_plan_uses_its_rules_alone():
    for seed in range(10):
        ops = random_ops(seed)
        costs = random_costs(ops, seed)
        found = find_program(costs, PLAN_RULES)
        assert found.time_s >= find_program(costs).time_s * (1 - 1e-12)
        names = {op.name for op in ops if op.kind in (OpKind.AGGREGATION, OpKind.ATTENTION)}
        assert found.program.aggregation_ways().keys() == names


def test_a_search_gives_up():
    with pytest.raises(InputError, match="gave up after 3 states; give --stages"):
        find_program(random_costs(random_ops(1), 1), most_expanded=3)


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_linear_program_equals_the_best_of_a_grid(seed, is_limited):
    """The same sum of maxima at all shares in steps of 1/24, rows and columns."""
    costs = random_costs(random_ops(seed), 1000 + seed)
    n = costs.group.count
    parts = costs.program(find_program(costs).program)
    most = np.ones(n)
    if is_limited and n > 1:
        # The memory of one device is full before its fair share.
        most[seed % n] = 1 / (2 * n)
    found = best_shares(parts, n, most)
    assert (np.array([found.rows, found.columns]) <= most + 1e-9).all()
    steps = 24 if n <= 3 else 12
    grid = [
        np.array([*cut, steps - sum(cut)]) / steps
        for cut in product(range(steps + 1), repeat=n - 1)
        if sum(cut) <= steps
    ]
    grid = [shares for shares in grid if (shares <= most).all()]

    def time_s(rows, columns):
        return sum(part.at(Shares(rows, columns)) for part in parts)

    # The sum of maxima of rows and of columns apart: no maximum has both.
    by_rows = min(grid, key=lambda rows: time_s(rows, found.columns))
    by_columns = min(grid, key=lambda columns: time_s(by_rows, columns))
    best_s = time_s(by_rows, by_columns)
    found_s = time_s(found.rows, found.columns)
    assert found_s <= best_s * (1 + 1e-9)


def test_equal_layers_count_as_often_as_they_are_there():
    """One op that pulls to the second device and one that pulls to the first, which is cheaper."""

    def maximum(first, second):
        return Maximum(np.array([[first, 0, 0, 0], [0, second, 0, 0.0]]), np.zeros(2))

    down, up = maximum(3.0, 1.0), maximum(1.0, 4.0)
    assert best_shares([down, up], 2).rows == pytest.approx([0.8, 0.2])
    assert best_shares([down, down, down, up], 2).rows == pytest.approx([0.25, 0.75])


def test_shares_that_cost_nothing_are_those_of_the_others():
    """Else the next search would see columns that one device has alone."""
    rows_only = Maximum(np.array([[3.0, 0, 0, 0], [0, 1.0, 0, 0]]), np.zeros(2))
    assert best_shares([rows_only], 2).columns == pytest.approx([0.25, 0.75])
    columns_only = Maximum(np.roll(rows_only.terms, 2, axis=1), np.zeros(2))
    assert best_shares([columns_only], 2).rows == pytest.approx([0.25, 0.75])


def test_parts_are_rounded_to_the_largest_deficit():
    assert rounded([0.4, 0.35, 0.25], 10) == [4, 4, 2]
    assert rounded([1, 1, 1], 10) == [4, 3, 3]
    draw = random.Random(0)
    for _ in range(100):
        shares = [draw.random() for _ in range(draw.randint(1, 9))]
        total = draw.randint(0, 50)
        parts = rounded(shares, total)
        assert sum(parts) == total
        wanted = [s * total / sum(shares) for s in shares]
        assert all(abs(p - w) < 1 for p, w in zip(parts, wanted, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_turns_never_make_it_slower(seed):
    ops = random_ops(seed)
    start = random_costs(ops, seed)

    def costs_of(shares):
        return type(start)(ops, start.work, start.group, start.sizes, shares)

    equal = Shares.alike(start.group.equal)
    fixed = alternate(costs_of, equal, moves_shares=False)
    found = alternate(costs_of, equal)
    assert found.time_s <= fixed.time_s
    assert costs_of(found.shares).program_s(found.found.program) == pytest.approx(found.time_s)
