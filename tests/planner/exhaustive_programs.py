"""The cheapest distributed program by trying all: the oracle of ``planner.hap``."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from math import prod

import numpy as np

from gnnpipe.planner.device_group import DeviceGroup, Shares
from gnnpipe.planner.distributed_program import CONVERSIONS, RULES
from gnnpipe.planner.primitive_work import Work
from gnnpipe.planner.program_costs import GraphSizes, ProgramCosts

MOST_CHOICES = 2500


def num_choices(ops) -> int:
    """The number of ways to choose a rule for every op."""
    return prod(len(RULES[op.kind]) for op in ops)


def least_time_s(costs: ProgramCosts) -> float:
    """Every choice of a rule for every op, and every set of conversions of every value."""
    readers = {op.name: [] for op in costs.ops}
    for i, op in enumerate(costs.ops):
        for value in op.inputs:
            readers[value].append(i)
    rule_times = [{r: costs.compute_s(op, r) for r in RULES[op.kind]} for op in costs.ops]
    sets = [_conversion_sets(costs, op.name) for op in costs.ops]

    @cache
    def least_conversions(i, made, needed):
        """The cheapest sets come first."""
        found = (time_s for time_s, reached in sets[i][made] if reached >= needed)
        return next(found, float("inf"))

    best = float("inf")
    for chosen in product(*(RULES[op.kind] for op in costs.ops)):
        total = 0.0
        for i, op in enumerate(costs.ops):
            needed = frozenset(chosen[j].needs for j in readers[op.name])
            total += rule_times[i][chosen[i]] + least_conversions(i, chosen[i].gives, needed)
        best = min(best, total)
    return best


_CACHE = {}


def _all_sets():
    """Every set of conversions, with the states that it reaches from every state."""
    if not _CACHE:
        sources = {c.source for c in CONVERSIONS}
        for source in sources:
            _CACHE[source] = []
            for size in range(4):
                for chosen in combinations(CONVERSIONS, size):
                    reached = {source}
                    for _ in chosen:
                        reached |= {c.target for c in chosen if c.source in reached}
                    _CACHE[source].append((chosen, frozenset(reached)))
    return _CACHE


def _conversion_sets(costs, value):
    times = {c: costs.convert_s(value, c) for c in CONVERSIONS}
    return {
        source: sorted(
            ((sum(times[c] for c in chosen), reached) for chosen, reached in sets),
            key=lambda one: one[0],
        )
        for source, sets in _all_sets().items()
    }


def random_costs(ops, seed: int) -> ProgramCosts:
    """Devices, links, times and shares by chance, also far from what is sensible."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 5))
    machine = draw.integers(0, 2, n)
    used = np.unique(machine)
    group = DeviceGroup(
        draw.uniform(0.2, 2, n),
        draw.uniform(0.2, 2, n),
        (machine == used[:, None]).astype(float),
        draw.choice([1e9, 1e10]),
        draw.choice([1e8, 1e9]),
        draw.choice([0.0, 1e-5]),
    )
    work = {
        op.name: Work(*(draw.choice([0, 1e-4, 1e-3, 1e-2]) * draw.random(2)), 1e-6, 1000)
        for op in ops
    }
    rows = 10 ** draw.uniform(1, 6)
    sizes = GraphSizes(rows, rows * draw.uniform(0, n), 1, 4, 4, draw.choice([0, 1e-10]))
    shares = [x / x.sum() for x in draw.uniform(0.1, 1, (2, n))]
    return ProgramCosts(ops, work, group, sizes, Shares(*shares))
