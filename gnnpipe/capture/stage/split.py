"""Assigns the ops of a stage to steps and finds the values that pass from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from gnnpipe.capture.recording import Recording
from gnnpipe.capture.stage.block_conv import BlockConv
from gnnpipe.models.stage_module import Aggregation


class Cut:
    """Some ops of a recording, laid out in steps."""

    def __init__(self, recording: Recording, ops: Sequence[int]) -> None:
        """``ops``: ascending positions in ``recording.ops``."""
        self.recording = recording
        self.ops = [recording.ops[i] for i in ops]
        self.depth: dict[fx.Node, int] = {}
        for op in self.ops:
            reached = max((self.depth.get(s, 0) for s in recording.inputs(op)), default=0)
            self.depth[op] = reached + recording.aggregates(op)
        self.num_steps = max(self.depth.values()) + 1
        self._running: list[list[fx.Node]] = [[] for _ in range(self.num_steps)]
        for op, step in self.depth.items():
            self._running[step].append(op)
        self.blocks = {op: self._block(op) for op in self.ops if recording.facts[op].form}
        self.rounds = [
            tuple(self._aggregation(op) for op in self.pushing(step))
            for step in range(self.num_steps - 1)
        ]
        used: dict[fx.Node, int] = {}
        for op in self.ops:
            for source, when in self._uses(op):
                used[source] = max(used.get(source, 0), when)
        others = (op for op in recording.ops if op not in self.depth)
        later = {s for op in others for s in recording.inputs(op)}
        self.leaving = [op for op in self.ops if op in later or op is recording.result]
        self.entering = [s for s in used if s not in self.depth]
        self._carried: list[list[fx.Node]] = [[] for _ in range(self.num_steps - 1)]
        stays = set(self.leaving)
        for value in (*self.entering, *self.ops):
            last = self.num_steps - 1 if value in stays else used.get(value, 0)
            for step in range(self.depth.get(value, 0), last):
                self._carried[step].append(value)

    def pushing(self, step: int) -> list[fx.Node]:
        """Aggregations whose rows are pushed at the end of a step."""
        if step == self.num_steps - 1:
            return []
        return [op for op in self._running[step + 1] if self.recording.aggregates(op)]

    def running(self, step: int) -> list[fx.Node]:
        """Ops that are computed in a step."""
        return self._running[step]

    def carried(self, step: int) -> list[fx.Node]:
        """Values that pass from a step to the next, or from the last step out of the stage."""
        return self.leaving if step == self.num_steps - 1 else self._carried[step]

    def pushed(self, op: fx.Node) -> list[fx.Node]:
        """Values whose rows an aggregation pushes."""
        return self.blocks[op].pushed if op in self.blocks else [op.all_input_nodes[0]]

    def _uses(self, op: fx.Node) -> Iterable[tuple[fx.Node, int]]:
        """Values that an op reads, each with the step that reads it."""
        if not self.recording.aggregates(op):
            for source in self.recording.inputs(op):
                yield source, self.depth[op]
            return
        for source in self.pushed(op):
            if source.op != "placeholder":
                yield source, self.depth[op] - 1
        own = self.blocks[op].own if op in self.blocks else None
        if own is not None and own.op != "placeholder":
            yield own, self.depth[op]

    def _block(self, op: fx.Node) -> BlockConv:
        facts = self.recording.facts
        conv = self.recording.graph_module.get_submodule(str(op.target))
        of_edges = {call for call in op.all_input_nodes if facts[call].of_edges}
        shapes = {call: facts[call].shape for call in op.all_input_nodes if facts[call].is_rows}
        # Distinct from the sites of recorded dropouts and of other convolutions.
        site = (self.recording.ops.index(op) + 1) << 16
        form = facts[op].form
        assert form is not None
        return BlockConv(conv, op, shapes, form, facts[op].drops, site, of_edges)

    def _aggregation(self, op: fx.Node) -> Aggregation:
        structure, pushed_type, vertex_type = self.recording.over(op)
        block = self.blocks.get(op)
        width = self.recording.facts[op].width if block is None else block.width
        moves = not all(self.recording.is_fixed(value) for value in self.pushed(op))
        of_features = all(value.op == "placeholder" for value in self.pushed(op))
        found = Aggregation(
            op.name,
            structure,
            width,
            pushed_type,
            vertex_type,
            moves=moves,
            of_features=of_features,
        )
        if block is None:
            return found
        facts = self.recording.facts[op]
        of_row, of_edge, of_read = block.kept or (facts.saved, facts.saved_per_edge, 0)
        return replace(
            found,
            kept_per_row=of_row,
            kept_per_edge=of_edge,
            kept_per_read_row=of_read,
            structure_per_edge=block.structure_per_edge,
        )
