"""The stages of a plan for one model, as a DAG: their steps, and the values that pass between them.

Steps and transfers follow from plan and model; a plan does not store them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from gnnpipe.errors import InputError
from gnnpipe.plan.model_graph import ModelGraph
from gnnpipe.plan.plan import Plan
from gnnpipe.plan.row_ways import RowWay


@dataclass(frozen=True)
class Transfer:
    """Values that stage ``source`` sends to stage ``target`` for every chunk; gradients return."""

    source: int
    target: int
    widths: Mapping[str, int]
    """Columns of each value, by name."""
    types: Mapping[str, str] = field(default_factory=dict)
    """The vertex type of each value, in a graph of several types."""


@dataclass(frozen=True)
class StageDag:
    """A plan, the steps of its stages (see ``schedule.program``), and their transfers."""

    plan: Plan
    steps: tuple[int, ...]
    """Steps of every stage."""
    transfers: tuple[Transfer, ...]
    """Each value arrives once at every other stage that reads it: from the latest earlier stage
    that reads the value and sends values of its own there, else from the stage that computes it. So
    a value that all stages read (``h0`` of GCNII) does not leave one host S - 1 times."""
    feature_stages: tuple[int, ...] = (0,)
    """The stages that read input features."""

    @classmethod
    def of(cls, plan: Plan, model: ModelGraph) -> StageDag:
        """Return the stages of ``plan`` for ``model``.

        Raises:
            InputError: A stage reads a value that a later stage computes, or the last stage does
                not compute the logits, or rows cannot travel as ``Plan.ways`` says.
        """
        _check_order(plan, model)
        _check_ways(plan, model)
        width_of = {value: width for op in model.ops for value, width in op.outputs.items()}
        types = {value: op.vertex_type for op in model.ops for value in op.outputs}
        sent: dict[tuple[int, int], dict[str, int]] = {}
        for value, ends in _routes(plan, model):
            sent.setdefault(ends, {})[value] = width_of[value]
        transfers = (
            Transfer(*ends, widths, {value: types[value] for value in widths if types[value]})
            for ends, widths in sorted(sent.items())
        )
        steps = (model.num_steps(stage.ops) for stage in plan.stages)
        reading = (
            i
            for i, stage in enumerate(plan.stages)
            if any(op.reads_features for op in model.select(stage.ops))
        )
        return cls(plan, tuple(steps), tuple(transfers), tuple(reading))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each stage, the number of stages on the longest path of transfers that ends there."""
        found = [1] * self.plan.num_stages
        for transfer in sorted(self.transfers, key=lambda t: t.source):
            found[transfer.target] = max(found[transfer.target], found[transfer.source] + 1)
        return tuple(found)

    @cached_property
    def distances(self) -> tuple[int, ...]:
        """For each stage, the number of stages behind it on the longest path of transfers."""
        found = [0] * self.plan.num_stages
        for transfer in sorted(self.transfers, key=lambda t: -t.source):
            found[transfer.source] = max(found[transfer.source], found[transfer.target] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """Number of stages on the longest path of transfers; S if the stages form a chain.

        The pipeline fills and drains in this many stages.
        """
        return max(self.depths)

    def sends(self, stage: int) -> Sequence[Transfer]:
        """The transfers that ``stage`` sends forward."""
        return self._sent_and_received[0][stage]

    def receives(self, stage: int) -> Sequence[Transfer]:
        """The transfers that ``stage`` receives from earlier stages."""
        return self._sent_and_received[1][stage]

    def passed_on(self, stage: int) -> frozenset[str]:
        """Names of the values that ``stage`` receives and sends forward, too."""
        arrive = {value for t in self.receives(stage) for value in t.widths}
        return frozenset(value for t in self.sends(stage) for value in t.widths if value in arrive)

    @cached_property
    def _sent_and_received(self) -> tuple[list[list[Transfer]], list[list[Transfer]]]:
        """The transfers by source, and by target."""
        by_source: list[list[Transfer]] = [[] for _ in self.plan.stages]
        by_target: list[list[Transfer]] = [[] for _ in self.plan.stages]
        for transfer in self.transfers:
            by_source[transfer.source].append(transfer)
            by_target[transfer.target].append(transfer)
        return by_source, by_target


def _routes(plan: Plan, model: ModelGraph) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each value with the source and the target of a transfer, once for each target."""
    maker: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for i, stage in enumerate(plan.stages):
        for op in model.select(stage.ops):
            maker |= dict.fromkeys(op.outputs, i)
            for value in op.inputs:
                targets = readers.setdefault(value, [])
                if maker[value] != i and i not in targets:
                    targets.append(i)
    pairs = {(maker[value], i) for value, targets in readers.items() for i in targets}
    sources: dict[int, set[int]] = {i: set() for i in range(plan.num_stages)}
    for source, target in pairs:
        sources[target].add(source)
    # A source that also sends to another source may need no transfer: it passes nothing on.
    last = {i: found.difference(*(sources[s] for s in found)) for i, found in sources.items()}
    for value, targets in readers.items():
        for i in targets:
            earlier = last[i].intersection(stage for stage in targets if stage < i)
            yield value, (max(earlier, default=maker[value]), i)


def _check_order(plan: Plan, model: ModelGraph) -> None:
    """Check that each value is computed before a stage reads it, and the logits in the last stage.

    Raises:
        InputError: Says whether a stage is not convex (a value leaves the stage, and what is made
            of it returns), several stages read each other's values, or only their order is wrong.
    """
    stage_of = {op: i for i, stage in enumerate(plan.stages) for op in stage.ops}
    reads = [
        (op, source)
        for op, sources in enumerate(model.reads)
        for source in sources
        if stage_of[op] != stage_of[source]
    ]
    backward = [(op, source) for op, source in reads if stage_of[op] < stage_of[source]]
    if backward:
        for stage in range(plan.num_stages):
            _check_convex(stage, stage_of, model)
        order = _stage_order(plan.num_stages, reads, stage_of)
        op, source = backward[0]
        raise InputError(
            f"plan: stage {stage_of[op]} reads op {source}, which stage "
            f"{stage_of[source]} computes later; list the stages in the order "
            f"{', '.join(map(str, order))}"
        )
    last = model.num_ops - 1
    if stage_of[last] != plan.num_stages - 1:
        raise InputError(
            f"plan: op {last} computes the logits in stage {stage_of[last]}; list this stage last"
        )


def _check_ways(plan: Plan, model: ModelGraph) -> None:
    """Check that each op of ``Plan.ways`` has several ranks and can use its way."""
    for stage in plan.stages:
        for op in sorted(plan.ways.keys() & set(stage.ops)):
            way, name = plan.ways[op], f"op {op} ({model.ops[op].name})"
            reason = model.ops[op].reason_against(way)
            if not reason and way is not RowWay.HALO and stage.shards == 1:
                reason = "is on a single rank, which sends no rows"
            if reason:
                raise InputError(f"plan: ways: {way}: {name} {reason}; leave it out, or try halo")


def _check_convex(stage: int, stage_of: Mapping[int, int], model: ModelGraph) -> None:
    """Check that no path of reads leaves a stage and comes back."""
    # Ops of other stages that depend on the stage: the first op on the way from the stage to each,
    # and the op of the stage that this first op reads.
    ways: dict[int, tuple[int, int]] = {}
    for op, sources in enumerate(model.reads):
        way = next((ways[source] for source in sources if source in ways), None)
        if stage_of[op] != stage:
            own = next((source for source in sources if stage_of[source] == stage), None)
            way = way if own is None else (op, own)
            ways |= {} if way is None else {op: way}
        elif way is not None:
            outside, before = way
            raise InputError(
                f"plan: stage {stage} is not convex: ops {before} and {op} are in the "
                f"stage, but op {outside} between them is in stage {stage_of[outside]}; "
                f"move op {outside} into stage {stage}, or split the stage"
            )


def _stage_order(
    count: int, reads: Sequence[tuple[int, int]], stage_of: Mapping[int, int]
) -> list[int]:
    """Return the stages in an order in which every value is computed before a stage reads it.

    ``reads``: pairs of an op and an op of another stage that the op reads. Raises ``InputError`` if
    stages read each other's values.
    """
    found: list[int] = []
    # By stage and other stage: an op of the stage, and an op of the other stage that the op reads.
    left: dict[int, dict[int, tuple[int, int]]] = {stage: {} for stage in range(count)}
    for read in reads:
        left[stage_of[read[0]]].setdefault(stage_of[read[1]], read)
    while left:
        ready = next((s for s in left if not left[s].keys() & left.keys()), None)
        if ready is None:
            break
        found.append(ready)
        del left[ready]
    if not left:
        return found
    # Each stage that is left reads another one that is left: following the reads closes a cycle.
    path = [min(left)]
    while path.count(path[-1]) < 2:
        path.append(min(left[path[-1]].keys() & left.keys()))
    cycle = path[path.index(path[-1]) :]
    steps = (left[a][b] for a, b in pairwise(cycle))
    text = ", ".join(f"op {op} of stage {stage_of[op]} reads op {s}" for op, s in steps)
    raise InputError(
        f"plan: stages {' and '.join(map(str, sorted(set(cycle))))} read each other's values "
        f"({text}), so that none of them can run first; move ops between them"
    )
