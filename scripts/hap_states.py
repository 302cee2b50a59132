"""States that the search for a distributed program expands, by its bound; part of hap_table.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gnnpipe.errors import InputError
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.planner.device_group import DeviceGroup, Shares
from gnnpipe.planner.distributed_program import PLAN_RULES, RULES, OpKind, PrimitiveOp
from gnnpipe.planner.hap import Bound, Rules, find_program
from gnnpipe.planner.primitive_work import Work
from gnnpipe.planner.program_costs import GraphSizes, ProgramCosts

SPEEDS = (1.0, 1.0, 0.5, 0.5)
MOST_STATES = 3_000
"""The search without a good bound is stopped there."""
WORK = {
    OpKind.AGGREGATION: Work(20e-3, 20e-3),
    OpKind.ATTENTION: Work(30e-3, 60e-3, 0.0, 256),
    OpKind.DENSE: Work(1e-3, 2e-3, 0.0, 128 * 128),
    OpKind.ROW_WISE: Work(2e-3, 2e-3),
}


class Builder:
    """Collects primitive ops of width 128."""

    def __init__(self) -> None:
        self.ops = [PrimitiveOp("x", OpKind.FEATURES, (), 128)]

    def add(self, kind: OpKind, *inputs: str, width: int = 128) -> str:
        name = f"v{len(self.ops)}"
        self.ops.append(PrimitiveOp(name, kind, inputs, width))
        return name

    def layer(self, x: str, kind: OpKind = OpKind.AGGREGATION, skip: str = "") -> str:
        value = self.add(OpKind.DENSE, x) if kind is OpKind.ATTENTION else x
        value = self.add(kind, value)
        if skip:
            value = self.add(OpKind.ADD, value, skip)
        if kind is OpKind.AGGREGATION:
            value = self.add(OpKind.DENSE, value)
        return self.add(OpKind.ROW_WISE, value)

    def end(self, *values: str) -> tuple[PrimitiveOp, ...]:
        last = values[0]
        if len(values) > 1:
            last = self.add(OpKind.CONCAT, *values, width=128 * len(values))
            last = self.add(OpKind.DENSE, last)
        self.ops.append(PrimitiveOp("loss", OpKind.LOSS, (last,), 1))
        return tuple(self.ops)


def chain(layers: int, kind: OpKind = OpKind.AGGREGATION) -> tuple[PrimitiveOp, ...]:
    built, value = Builder(), "x"
    for _ in range(layers):
        value = built.layer(value, kind)
    return built.end(value)


def skips(layers: int) -> tuple[PrimitiveOp, ...]:
    """The first rows are added in every layer, as in GCNII."""
    built = Builder()
    first = value = built.add(OpKind.DENSE, "x")
    for _ in range(layers):
        value = built.layer(value, skip=first)
    return built.end(value)


def branches(count: int, layers: int) -> tuple[PrimitiveOp, ...]:
    built, ends = Builder(), []
    for _ in range(count):
        value = "x"
        for _ in range(layers):
            value = built.layer(value)
        ends.append(value)
    return built.end(*ends)


def jumping(layers: int) -> tuple[PrimitiveOp, ...]:
    """All layers are read at the end, as by JumpingKnowledge."""
    built, value, ends = Builder(), "x", []
    for _ in range(layers):
        value = built.layer(value)
        ends.append(value)
    return built.end(*ends)


MODELS = {
    "chain of 4": chain(4),
    "chain of 32": chain(32),
    "attention, 8 layers": chain(8, OpKind.ATTENTION),
    "skips from the first rows, 4 layers": skips(4),
    "skips from the first rows, 8 layers": skips(8),
    "2 branches of 2": branches(2, 2),
    "4 branches of 2": branches(4, 2),
    "jumping knowledge, 4 layers": jumping(4),
    "jumping knowledge, 8 layers": jumping(8),
    "jumping knowledge, 16 layers": jumping(16),
}


def expanded(ops: tuple[PrimitiveOp, ...], bound: Bound, rules: Rules = RULES) -> str:
    """Number of states, or that the search was stopped."""
    near, devices = Link(1e10, 1e-5), tuple(Device(speed, 10**10) for speed in SPEEDS)
    cluster = Cluster(devices, Link(1.3e9, 5e-5), {(0, 1): near, (2, 3): near})
    group = DeviceGroup.of(cluster, range(4))
    sizes = GraphSizes(100_000, 150_000, 1, 4, 4, 1e-11)
    work = {op.name: WORK.get(op.kind, Work()) for op in ops}
    costs = ProgramCosts(ops, work, group, sizes, Shares.alike(group.by_speed))
    try:
        return f"{find_program(costs, rules, bound, MOST_STATES).expanded:,}"
    except InputError:
        return f"over {MOST_STATES:,}"


def states_section() -> Iterator[str]:
    """The table of states, for the page."""
    yield "## States that the search expands"
    yield ""
    yield (
        "Programs on two machines with two devices each, of speeds 1 and 0.5. Bound 0 is that of "
        "HAP's release. Exhaustive: the ways to choose a rule for every op, without the "
        f"collectives. Searches are stopped after {MOST_STATES:,} states. Dominance pruning "
        "is on in all three. The chain bound is `planner.hap.Bound.CHAINS`. Rules of a plan: "
        "between aggregations, values are rows (`PLAN_RULES`)."
    )
    yield ""
    yield (
        "| model | ops | chain bound | compute at the sum of speeds | bound 0 | chain bound, rules "
        "of a plan | exhaustive |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, ops in MODELS.items():
        states = [expanded(ops, b) for b in (Bound.CHAINS, Bound.SPEEDS, Bound.NONE)]
        states.append(expanded(ops, Bound.CHAINS, PLAN_RULES))
        choices = math.prod(len(RULES[op.kind]) for op in ops)
        yield f"| {name} | {len(ops)} | {' | '.join(states)} | {choices:.1e} |"
