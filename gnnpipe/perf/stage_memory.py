"""Memory of the ranks of a plan's stages, estimated once for stages that are alike.

Two stages are alike if their ops have equal sizes and read each other, and values of other stages,
in the same way. A deep model has few kinds of stages, so a plan of many stages costs few estimates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gnnpipe.perf.memory import MemoryEstimate, estimate_memory
from gnnpipe.perf.op_table import OpTable
from gnnpipe.plan import Plan, RowWay, StageDag, StagePlan

Key = tuple[object, ...]


class StageMemory:
    """Estimates for plans with K chunks of a workload."""

    def __init__(self, table: OpTable, chunks: int, is_exact: bool) -> None:
        """``is_exact``: the program has no stale reads."""
        self.table, self.workload = table, table.workload
        self.chunks, self.is_exact = chunks, is_exact
        self._found: dict[Key, MemoryEstimate] = {}

    def bytes_by_share(self, dag: StageDag, stage: int) -> dict[float, int]:
        """Return the memory of the ranks of a stage that holds all chunks, by their share."""
        shares = dict.fromkeys(dag.plan.stages[stage].shares)
        return {share: self.shard_bytes(dag, stage, share) for share in shares}

    def shard_bytes(self, dag: StageDag, stage: int, share: float) -> int:
        """Return the memory of a rank of a stage, if the rank had this share."""
        key = *self._key(dag, stage), dag.plan.stages[stage].shards, share
        if key not in self._found:
            self._found[key] = self._estimate(dag, stage, share)
        return self._found[key].on_device

    def alone_bytes(
        self, ops: Sequence[int], shards: int, in_flight: int, by_columns: Collection[int]
    ) -> int:
        """Return the memory of each of G equal ranks of a stage whose neighbours are not planned.

        ``in_flight``: chunks that it holds for backward. ``by_columns``: ops whose rows travel by
        columns.
        """
        columns = tuple(op for op in ops if op in by_columns)
        key: Key = ("alone", tuple(ops), shards, columns)
        if key not in self._found:
            dag, stage = self._alone(ops, shards, by_columns)
            self._found[key] = self._estimate(dag, stage, 1 / shards)
        found = self._found[key]
        held = min(in_flight / self.chunks, 1.0)
        return int(found.on_device - found.activations * (1 - held))

    def _alone(
        self, ops: Sequence[int], shards: int, by_columns: Collection[int]
    ) -> tuple[StageDag, int]:
        """Return a stage of these ops between one of the ops before and one of all others."""
        model, own = self.workload.model, set(ops)
        before: set[int] = set()
        for op in reversed(range(model.num_ops)):
            if op in own or op in before:
                before |= set(model.reads[op])
        before -= own
        after = set(range(model.num_ops)) - own - before
        parts = [tuple(sorted(part)) for part in (before, own, after) if part]
        ranks = (tuple(range(i * shards, (i + 1) * shards)) for i in range(len(parts)))
        stages = tuple(StagePlan.even(*part) for part in zip(parts, ranks, strict=True))
        ways = dict.fromkeys(own.intersection(by_columns), RowWay.COLUMNS)
        plan = Plan(stages, self.chunks, "fill-drain", ways=ways)
        return StageDag.of(plan, model), int(bool(before))

    def _key(self, dag: StageDag, stage: int) -> Key:
        """Return what the estimates of a stage depend on, beside the sizes of the shard."""
        table, plan, own = self.table, dag.plan, dag.plan.stages[stage]
        place = {op: i for i, op in enumerate(own.ops)}
        outside: dict[tuple[int, int], int] = {}
        ops: list[object] = []
        for op in own.ops:
            reads: list[object] = []
            for maker, value in table.reads[op]:
                if maker in place:
                    reads.append((place[maker], value))
                else:
                    number = outside.setdefault((maker, value), len(outside))
                    reads.append((-1 - number, value, table.classes[maker]))
            writer = table.writers[op]
            ops.append((table.classes[op], place.get(writer), plan.ways.get(op), *reads))
        sent = (
            tuple(
                (place[maker] if maker in place else -1 - outside[maker, value], value)
                for maker, value in map(table.makers.__getitem__, t.widths)
            )
            for t in dag.sends(stage)
        )
        is_single = plan.most_shards == 1
        return (tuple(ops), tuple(sent), own.recompute, is_single)

    def _estimate(self, dag: StageDag, stage: int, share: float) -> MemoryEstimate:
        work, shards = self.workload, dag.plan.stages[stage].shards
        settings = replace(
            work.memory,
            is_exact=self.is_exact,
            extra_weights=work.memory.extra_weights + (work.probes > 0) * (not self.is_exact),
        )
        sizes = work.shard_sizes(share, shards, self.is_exact)
        return estimate_memory(dag, work.model, stage, sizes, settings)
