"""A stage of a recorded model.

``Cut`` assigns the ops of the stage to steps, ``StepFunction`` generates one function for each
step, and ``RecordedStageModule`` runs them.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from gnnpipe.capture.fx_names import attribute, is_input
from gnnpipe.capture.markers import aggregate, in_training, is_mean, is_sum, of_all
from gnnpipe.capture.recording import Recording
from gnnpipe.capture.rules.norms import update_running_statistics
from gnnpipe.capture.stage.block_conv import BlockConv
from gnnpipe.capture.stage.replay import can_replay
from gnnpipe.capture.stage.row_work import (
    PRODUCTS,
    ROW_WORK,
    batch_norm_relu,
    gcnii_norm_relu,
    multiplies,
)
from gnnpipe.capture.stage.step_calls import (
    OF_ROWS,
    LinearBy,
    aggregated_features,
    dense_features,
    edge_data_of,
    flat,
    for_all,
    is_linear,
    linear_of_features,
    normalise,
    rounded_linear,
    shaped,
    squares,
)
from gnnpipe.graph.graph import EDGE_DATA
from gnnpipe.models.rows import Rows, Values
from gnnpipe.models.stage_module import Aggregation, MeanOfRows, Received, StageModule
from gnnpipe.plan import op_steps


class Cut:
    """Some ops of a recording, laid out in steps."""

    def __init__(self, recording: Recording, ops: Sequence[int]) -> None:
        """``ops``: ascending positions in ``recording.ops``."""
        self.recording = recording
        self.ops = [recording.ops[i] for i in ops]
        self._positions = dict(zip(self.ops, ops, strict=True))
        self.depth = self._steps()
        """The step in which each op runs."""
        self.num_steps = max(self.depth.values()) + 1
        self.running: list[list[fx.Node]] = [[] for _ in range(self.num_steps)]
        """By step: ops that are computed in it."""
        for op, step in self.depth.items():
            self.running[step].append(op)
        self.pushing = [[op for op in ops if recording.aggregates(op)] for ops in self.running[1:]]
        """By step except the last: aggregations whose rows are pushed at its end."""
        self.blocks = {op: self._block(op) for op in self.ops if recording.facts[op].form}
        self.rounds = [tuple(map(self._aggregation, ops)) for ops in self.pushing]
        used: dict[fx.Node, int] = {}
        for op in self.ops:
            for source, when in self._uses(op):
                used[source] = max(used.get(source, 0), when)
        others = (op for op in recording.ops if op not in self.depth)
        later = {s for op in others for s in recording.inputs(op)}
        self.leaving = [op for op in self.ops if op in later or op is recording.result]
        self.entering = [s for s in used if s not in self.depth]
        self.carried: list[list[fx.Node]] = [[] for _ in range(self.num_steps - 1)]
        """By step: values that pass to the next step, or from the last step out of the stage."""
        stays = set(self.leaving)
        for value in (*self.entering, *self.ops):
            last = self.num_steps - 1 if value in stays else used.get(value, 0)
            for step in range(self.depth.get(value, 0), last):
                self.carried[step].append(value)
        self.carried.append(self.leaving)

    def _steps(self) -> dict[fx.Node, int]:
        """The step in which each op runs, as in ``ModelGraph.depths``."""
        recording = self.recording

        def is_row_wise(op: fx.Node) -> bool:
            return not (recording.aggregates(op) or recording.reads_features(op) or is_mean(op))

        return op_steps(
            self.ops,
            recording.inputs,
            recording.readers.__getitem__,
            recording.aggregates,
            is_row_wise,
            lambda op: recording.facts[op].width,
        )

    def pushed(self, op: fx.Node) -> list[fx.Node]:
        """Values whose rows an aggregation pushes; of a sum, the chunk's part of it."""
        return self.blocks[op].pushed if op in self.blocks else [op.all_input_nodes[0]]

    def _uses(self, op: fx.Node) -> Iterable[tuple[fx.Node, int]]:
        """Values that an op reads, each with the step that reads it."""
        if not self.recording.aggregates(op):
            for source in self.recording.inputs(op):
                yield source, self.depth[op]
            return
        if is_sum(op):
            for source in self.recording.inputs(op):
                yield source, self.depth[op] - 1
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
        site = (self._positions[op] + 1) << 16
        form = facts[op].form
        assert form is not None
        return BlockConv(conv, op, shapes, form, facts[op].drops, site, of_edges)

    def _aggregation(self, op: fx.Node) -> Aggregation:
        structure, pushed_type, vertex_type = self.recording.over(op)
        facts, block, pushed = self.recording.facts[op], self.blocks.get(op), self.pushed(op)
        of_row, of_edge, of_read, structure_per_edge = 0, 0, 0, 0
        if block is not None:
            memory = facts.memory
            measured = (
                memory.per_row,
                memory.per_edge,
                memory.per_read_row,
                block.structure_per_edge,
            )
            kept = block.attention_memory or measured
            of_row, of_edge, of_read, structure_per_edge = kept
        return Aggregation(
            op.name,
            structure,
            facts.width if block is None else block.width,
            pushed_type,
            vertex_type,
            kept_per_edge=of_edge,
            kept_per_row=of_row,
            kept_per_read_row=of_read,
            structure_per_edge=structure_per_edge,
            moves=not is_sum(op) and not all(map(self.recording.is_fixed, pushed)),
        )


class StepFunction:
    """A step's generated function with the names of its arguments and results."""

    def __init__(self, cut: Cut, step: int) -> None:
        before = cut.entering if step == 0 else cut.carried[step - 1]
        arrived = [op for op in cut.running[step] if cut.recording.aggregates(op)]
        ends = step == cut.num_steps - 1
        pushing, leaving = [] if ends else cut.pushing[step], cut.carried[step]
        writer = _Writer(cut)
        writer.take(before, flat=step == 0, has_means=step > 0 and not _may_choose(cut, step))
        writer.arrive(arrived)
        if not ends:
            writer.in_table = made_in_table(cut, step)
        for op in cut.running[step]:
            writer.make(op)
        pushed = tuple(
            writer.single_row(cut.pushed(op)[0])
            if is_sum(op)
            else writer.side_by_side(cut.pushed(op))
            for op in pushing
        )
        self.function = writer.finish(
            pushed, leaving, flat=ends, has_means=not ends and not _may_choose(cut, step + 1)
        )
        self._before = [v.name for v in before]
        self._arrived = [op.name for op in arrived]
        self._pushing = [op.name for op in pushing]
        result = cut.recording.result
        self._leaving = ["x" if ends and v is result else v.name for v in leaving]

    def __call__(
        self, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """The rows to push, by aggregation, and the values for the next step."""
        given: list[Any] = [rows, *(values[name] for name in self._before)]
        for name in self._arrived:
            given += [received[name].rows, received[name].block]
        pushed, handed = self.function(*given)
        return (
            dict(zip(self._pushing, pushed, strict=True)),
            dict(zip(self._leaving, handed, strict=True)),
        )


def made_in_table(cut: Cut, step: int) -> fx.Node | None:
    """The fused call of a step that can write the rows it pushes into the history table, or None.

    This needs a step with one aggregation, by a fixed matrix, of rows that a call of ``ROW_WORK``
    computes in this step.
    """
    if len(cut.pushing[step]) != 1:
        return None
    (op,) = cut.pushing[step]
    (value, *others) = cut.pushed(op)
    is_made = value.target in ROW_WORK and value in cut.running[step]
    if value.target is batch_norm_relu:
        # With statistics of another stage [C, F] or frozen ones [F] it writes into no buffer.
        is_made = is_made and all(statistic in cut.depth for statistic in value.args[1:3])
    is_plain = op not in cut.blocks and not is_mean(op) and not is_sum(op)
    return value if is_made and is_plain and not others else None


def overwrites_received(call: fx.Node) -> bool:
    """Whether a fused call computes in the memory of the aggregated rows that it reads."""
    received: Any = call.args[0] if call.target is gcnii_norm_relu else None
    return received is not None and received.target is aggregate and len(received.users) == 1


def _may_choose(cut: Cut, step: int) -> bool:
    """Whether a step may be computed for the loss rows alone (``plan.loss_rows``)."""
    is_last = step == cut.num_steps - 1
    return is_last and not all(
        is_mean(op) for op in cut.running[step] if cut.recording.aggregates(op)
    )


class _Writer:
    """Builds a step's function from the recording's calls."""

    def __init__(self, cut: Cut) -> None:
        self._blocks, self._recording = cut.blocks, cut.recording
        self._facts, self._graph_module = cut.recording.facts, cut.recording.graph_module
        self._graph = fx.Graph()
        self._modules: dict[str, Any] = {}
        self._rows = self._graph.placeholder("rows")
        self._parts: dict[str, fx.Node] = {"": self._rows}
        self._made: dict[fx.Node, fx.Node] = {}
        self._means: dict[fx.Node, fx.Node] = {}
        """Single rows of values that are equal for all rows; ``_made`` has them expanded."""
        self._received: list[fx.Node] = []
        """Aggregations whose rows the step receives, except those of unchanged convolutions."""
        self.in_table: fx.Node | None = None
        """The call that writes its result into the history table."""

    def take(self, values: list[fx.Node], flat: bool, has_means: bool) -> None:
        """Add the values of the step before; ``flat``: they come from another stage.

        ``has_means``: values that are equal for all rows arrive as a single row.
        """
        for value in values:
            held = self._graph.placeholder(value.name)
            if has_means and is_mean(value):
                self._means[value] = held
            else:
                self._made[value] = self._shaped(held, value) if flat else held

    def arrive(self, ops: list[fx.Node]) -> None:
        """Add the aggregated rows and the block of each op."""
        names = [(f"{op.name}_rows", f"{op.name}_block") for op in ops]
        inputs = [tuple(map(self._graph.placeholder, pair)) for pair in names]
        for op, (found, block) in zip(ops, inputs, strict=True):
            if is_mean(op):
                self._means[op] = self._shaped(self._call(operator.getitem, found, slice(0, 1)), op)
            else:
                self._made[op] = self._arrive(op, found, block)
                self._received += [] if op in self._blocks else [op]

    def make(self, call: fx.Node) -> None:
        """Add a call with its sources, unless its value is there."""
        if call in self._made or call in self._means or call.op == "placeholder":
            return
        if call.op == "get_attr":
            self._modules[str(call.target)] = attribute(self._graph_module, str(call.target))
            self._made[call] = self._graph.get_attr(str(call.target))
        elif self._recording.maps_features(call):
            self._made[call] = self._linear_of_features(call)
        elif self._recording.aggregates_features(call):
            given = self._rows_of(call), str(call.kwargs["structure"])
            self._made[call] = self._shaped(self._call(aggregated_features, *given), call)
        elif call.target in PRODUCTS or call.target in ROW_WORK:
            self._made[call] = self._row_work(call)
        elif self._is_rounded(call):
            self._made[call] = self._rounded_linear(call)
        elif is_mean(call):
            self._means[call] = self._copy(call)
        else:
            self._made[call] = self._copy(call)

    def side_by_side(self, values: list[fx.Node]) -> fx.Node:
        """The rows of several values, flat and concatenated [C, F]."""
        for value in values:
            self.make(value)
        flat = [self._flat(self._value(value)) for value in values]
        return flat[0] if len(flat) == 1 else self._call(torch.cat, flat, dim=1)

    def single_row(self, value: fx.Node) -> fx.Node:
        """A value without rows as one row [1, F]."""
        self.make(value)
        return self._graph.call_method("reshape", (self._value(value), 1, -1))

    def finish(
        self, pushed: tuple[fx.Node, ...], leaving: list[fx.Node], flat: bool, has_means: bool
    ) -> fx.GraphModule:
        """The function; ``flat``: its values go to another stage; ``has_means``: as in ``take``."""
        handed = [
            self._means[v] if has_means and v in self._means else self._value(v) for v in leaving
        ]
        self._graph.output(
            (pushed, tuple(self._flat(value) if flat else value for value in handed))
        )
        return fx.GraphModule(self._modules, self._graph)

    def _rows_of(self, call: fx.Node) -> fx.Node:
        name = self._facts[call].vertex_type
        if name not in self._parts:
            self._parts[name] = self._graph.call_method("part", (self._rows, name))
        return self._parts[name]

    def _submodule(self, call: fx.Node) -> nn.Module:
        return self._graph_module.get_submodule(str(call.target))

    def _add_module(self, call: fx.Node) -> None:
        if call.op == "call_module":
            self._modules[str(call.target)] = self._submodule(call)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._graph.call_function(function, args, kwargs)

    def _flat(self, rows: fx.Node) -> fx.Node:
        return self._call(flat, rows)

    def _shaped(self, held: fx.Node, value: fx.Node) -> fx.Node:
        shape = self._facts[value].shape
        return held if len(shape) == 1 else self._call(shaped, held, shape)

    def _arrive(self, op: fx.Node, found: fx.Node, block: fx.Node) -> fx.Node:
        if op not in self._blocks:
            return self._shaped(found, op)
        path = f"{op.name}_on_block"
        self._modules[path] = self._blocks[op]
        conv = self._blocks[op]
        own = None if conv.own is None else self._value(conv.own)
        made: dict[fx.Node, fx.Node] = {}
        carried = tuple(self._of_edges(value, block, made) for value in conv.carried)
        return self._graph.call_module(path, (found, block, self._rows_of(op), own, carried))

    def _of_edges(self, call: fx.Node, block: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """An edge value of an op's block; ``made``: edge values already added for this op."""
        if call not in made:
            if call.op == "placeholder":
                name = str(call.target)
                # A block has edges of one relation alone.
                name = name.partition("__")[0] if is_input(call, *EDGE_DATA) else name
                made[call] = self._call(edge_data_of, block, name)
                return made[call]
            sources = {}
            for source in call.all_input_nodes:
                if self._facts[source].of_edges:
                    sources[source] = self._of_edges(source, block, made)
                else:
                    self.make(source)
                    sources[source] = self._value(source)
            self._add_module(call)
            made[call] = self._graph.node_copy(call, sources.__getitem__)
        return made[call]

    def _value(self, call: fx.Node) -> fx.Node:
        """A value that was added before, as rows; features are made dense."""
        if call.op == "placeholder":
            return self._call(dense_features, self._rows_of(call))
        if call not in self._made:
            self._made[call] = self._call(for_all, self._means[call], self._rows_of(call))
        return self._made[call]

    def _copy(self, call: fx.Node) -> fx.Node:
        """A copy of a call, with its sources."""
        for source in call.all_input_nodes:
            if source.op != "placeholder":
                self.make(source)
        self._add_module(call)
        rows = self._rows_of(call) if call.target in OF_ROWS else self._rows
        # These take single rows, except for x.
        x = call.args[0] if call.target in (squares, normalise, batch_norm_relu) else None
        takes_means = call.target in (squares, normalise, batch_norm_relu, in_training, of_all)

        def source_of(v: fx.Node) -> fx.Node:
            is_single = takes_means and v is not x and v in self._means
            return self._means[v] if is_single else self._value(v)

        copied = self._graph.node_copy(call, source_of)
        if call.target in OF_ROWS:
            target: Any = OF_ROWS[call.target]
            copied.target = target
            copied.args = (rows, *copied.args)
            copied.kwargs = {k: v for k, v in copied.kwargs.items() if k != "vertex_type"}
        return copied

    def _linear_of_features(self, call: fx.Node) -> fx.Node:
        function = partial(linear_of_features, is_rounded=self._is_rounded(call))
        if call.op == "call_module":
            path = f"{call.target}_of_features"
            self._modules[path] = LinearBy(self._submodule(call), function)
            return self._graph.call_module(path, (self._rows_of(call),))
        for source in call.all_input_nodes[1:]:
            self.make(source)
        rest = fx.node.map_arg(call.args[1:], self._value)
        kwargs = fx.node.map_arg(call.kwargs, self._value)
        kwargs = {**kwargs, **function.keywords}
        return self._call(linear_of_features, self._rows_of(call), *rest, **kwargs)

    def _is_rounded(self, call: fx.Node) -> bool:
        """Whether a call is a linear map to be computed in bf16."""
        recording = self._recording
        if not recording.is_rounded or call in recording.scoring:
            return False
        return is_linear(self._graph_module, call) or multiplies(call)

    def _row_work(self, call: fx.Node) -> fx.Node:
        """A copy of a fused call, with its sources."""
        # Added first: a call may only read what stands before it.
        rows = self._rows_of(call) if call.target in ROW_WORK else self._rows
        copied = self._copy(call)
        if call.target in PRODUCTS:
            copied.kwargs = {**copied.kwargs, "is_rounded": self._is_rounded(call)}
        if call.target in ROW_WORK:
            target: Any = ROW_WORK[call.target]
            copied.target = target
            copied.args = (rows, *copied.args)
            copied.kwargs = {**copied.kwargs, "is_pushed": call is self.in_table}
        if call.target is gcnii_norm_relu:
            is_here = call.args[0] in self._received
            copied.kwargs = {**copied.kwargs, "overwrites": is_here and overwrites_received(call)}
        return copied

    def _rounded_linear(self, call: fx.Node) -> fx.Node:
        copied = self._copy(call)
        if call.op == "call_module":
            path = f"{call.target}_rounded"
            self._modules[path] = LinearBy(self._submodule(call), rounded_linear)
            copied.target = path
        else:
            copied.target = rounded_linear
        return copied


class BufferUpdate:
    """The generated function of the values that forward assigns to buffers.

    Called at the end of an epoch, when all parts of the sums over all vertices are known.
    """

    def __init__(self, cut: Cut) -> None:
        found = cut.recording.assignments
        assignments = [one for op in cut.ops for one in found.get(op, ())]
        sums = list(dict.fromkeys(call for one in assignments for call in one.sums))
        writer = _Writer(cut)
        writer.arrive(sums)
        for one in assignments:
            writer.make(one.value)
        values = [one.value for one in assignments]
        self.function = writer.finish((), values, flat=False, has_means=False)
        self._sums = [call.name for call in sums]
        self._buffers = [(one.buffer, one.buffers[one.buffer]) for one in assignments]

    @torch.no_grad()
    def __call__(self, totals: Mapping[str, MeanOfRows], dtype: torch.dtype) -> None:
        """Update the buffers; ``totals``: sums over all vertices, by aggregation."""
        if not self._buffers:
            return
        rows = Rows(torch.empty(0), None, training=True)
        given = [part for name in self._sums for part in (totals[name].value.to(dtype)[None], None)]
        _, values = self.function(rows, *given)
        for (_, buffer), value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


class RecordedStageModule(StageModule):
    """Some ops of a recorded model."""

    def __init__(self, recording: Recording, ops: Sequence[int]) -> None:
        cut = Cut(recording, ops)
        self._recording, self._ops = recording, ops
        self.rounds = cut.rounds
        self._weights: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}
        for op in cut.ops:
            self._weights |= dict(recording.weights(op))
            self._buffers |= recording.buffers(op)
        made = dict(recording.graph_module.named_buffers(recurse=False))
        self._in_evaluation = {name: value.clone() for name, value in made.items()}
        """Values of vertices that forward makes of the edges."""
        self._steps = [StepFunction(cut, step) for step in range(cut.num_steps)]
        last = cut.num_steps - 1
        self._made_in_table = [made_in_table(cut, step) is not None for step in range(last)]
        self._update = BufferUpdate(cut)
        self._can_replay = all(can_replay(recording, op) for op in cut.ops)
        self._functions = [*(step.function for step in self._steps), self._update.function]
        self._observers = {
            op.name: (recording.model.get_submodule(path.removeprefix("model.")), what)
            for op in cut.ops
            for path, _, what in [str(op.kwargs.get("observed_by", "")).partition(":")]
            if path
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordedStageModule:
        """A copy with its own weights for its ops; weights of other stages are shared.

        The linked list of calls is shared: copying it recursively would exhaust the stack.
        """
        own = {id(value) for _, value in self.named_state()}
        for value in self._recording.model.state_dict(keep_vars=True).values():
            if id(value) not in own:
                memo[id(value)] = value
        return RecordedStageModule(copy.deepcopy(self._recording, memo), self._ops)

    def step(
        self, index: int, values: Values, received: Mapping[str, Received], rows: Rows
    ) -> tuple[Values, Values]:
        """Run one step (see ``StageModule``)."""
        return self._steps[index](values, received, rows)

    def maps_of_features(self, types: Collection[str]) -> list[nn.Parameter]:
        """Weights [F, in] of linear maps of features (see ``StageModule``)."""
        recording = self._recording
        found = {
            name: weight
            for op in (recording.ops[number] for number in self._ops)
            if recording.maps_features(op) and recording.facts[op].vertex_type in types
            for name, weight in recording.weights(op)
            if weight.dim() == 2
        }
        return list(found.values())

    @property
    def feature_structures(self) -> tuple[str, ...]:
        """Matrices that the features are aggregated with (see ``StageModule``)."""
        ops = (self._recording.ops[number] for number in self._ops)
        once = filter(self._recording.aggregates_features, ops)
        return tuple(dict.fromkeys(str(op.kwargs["structure"]) for op in once))

    @property
    def is_cuda_graph_safe(self) -> bool:
        """Whether a CUDA graph can replay the calls (see ``StageModule``)."""
        return self._can_replay and not self._recording.edges_are_random

    def writes_output_buffer(self, index: int) -> bool:
        """Whether a step writes pushed rows into the table (see ``StageModule``)."""
        return index < len(self._made_in_table) and self._made_in_table[index]

    def set_vertex_values(self, values: Mapping[str, Tensor] | None) -> None:
        """Set the values of vertices (see ``StageModule``)."""
        values = self._in_evaluation if values is None else values
        for function in self._functions:
            own = dict(function.named_buffers())
            for name in own.keys() & values.keys():
                own[name].copy_(values[name])

    def to(self, device: torch.device) -> None:
        """Move the weights and buffers of these ops."""
        for kept in self._buffers.values():
            # In place, because the user's module and the steps share the buffers.
            kept.data = kept.data.to(device)
        for function in self._functions:
            function.to(device)

    def observe(self, means: Mapping[str, MeanOfRows]) -> None:
        """Update running statistics and the buffers that forward assigns (see ``StageModule``)."""
        for name, observer in self._observers.items():
            if name in means:
                update_running_statistics(*observer, means[name].value, means[name].count)
        kept = (*self._weights.values(), *self._buffers.values())
        self._update(means, next((v.dtype for v in kept if v.is_floating_point()), torch.float32))

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and buffers, by the user's names."""
        yield from self._weights.items()
        yield from self._buffers.items()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Weights, by the user's names."""
        yield from self._weights.items()
