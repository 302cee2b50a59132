"""Takes work on edges out of a recording, so that the rest can run chunk by chunk.

Calls that depend on the edges alone (added self-loops, degrees, norms) become a program that runs
once on the whole graph. The recording then has inputs for the edges that it makes and for their
data, and buffers with values of vertices. Calls on messages, from ``x[source]`` to
``scatter(..., target)``, become one call of an ``EdgeFragment``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from gnnpipe.capture.edge_work.edge_values import EdgeValues
from gnnpipe.capture.edge_work.kinds import Kind, kinds_of, reads_shape
from gnnpipe.capture.edge_work.modules import EdgeFragment, EdgeModule, EdgeUpdate
from gnnpipe.capture.edge_work.program import EdgeWork, ProgramWriter
from gnnpipe.capture.fx_names import (
    EDGE_VALUES,
    EDGES,
    FEATURES,
    attribute,
    input_name,
    is_input,
    name_of,
    refuse,
    refuse_conv,
)
from gnnpipe.capture.markers import aggregate, drop, is_of_all, of_vertices
from gnnpipe.capture.rewrite import product_of
from gnnpipe.graph.operators import RELATION, WEIGHTED

_SHAPING = ("view", "reshape", "unsqueeze", "expand", "expand_as", "long", "to", "contiguous")
_SHAPING_FUNCTIONS = (torch.unsqueeze, torch.reshape, operator.getitem)


def works_on_edges(recording: fx.GraphModule) -> bool:
    """Whether calls with features or weights read what forward makes of the edges."""
    kinds = kinds_of(recording)
    works = [c for c, kind in kinds.items() if kind is Kind.EDGES and not is_input(c, EDGES)]
    return any(kinds[user] is Kind.OTHER for call in works for user in call.users)


def separate(
    recording: fx.GraphModule,
    values: Mapping[fx.Node, Any],
    n: int,
    random_calls: Collection[fx.Node],
) -> EdgeWork:
    """Take the work on edges out of a recording.

    ``values``: of every call on a sample with ``n`` vertices of one type; ``random_calls``: calls
    that draw random numbers there. The values of vertices that the recording then has are those of
    the sample.

    Raises:
        InputError: Work that does not run chunk by chunk.
    """
    kinds, values = kinds_of(recording), dict(values)
    program = ProgramWriter(recording, kinds, values, n, random_calls)
    return _Separator(recording, kinds, values, n, program).run()


class _Separator(EdgeValues):
    def __init__(
        self,
        recording: fx.GraphModule,
        kinds: dict[fx.Node, Kind],
        values: dict[fx.Node, Any],
        n: int,
        program: ProgramWriter,
    ) -> None:
        """``kinds`` and ``values``: shared with ``program``; new calls are added to both."""
        super().__init__(recording, kinds, values, n)
        self.program = program
        self._given = next(c for c in recording.graph.nodes if is_input(c, EDGES))
        self._start = next(c for c in recording.graph.nodes if c.op != "placeholder")
        self._sets: dict[tuple[Any, Any], tuple[int, fx.Node]] = {}
        self._data: dict[tuple[int, fx.Node], fx.Node] = {}
        self._vertex_values: dict[fx.Node, fx.Node] = {}
        self._messages: dict[tuple[int, fx.Node], fx.Node] = {}

    def run(self) -> EdgeWork:
        """Change the recording; returns the program of its edges."""
        for call in list(self.recording.graph.nodes):
            if call.op not in ("output", "placeholder") and self.kinds[call] is Kind.OTHER:
                self._visit(call)
            elif is_input(call, FEATURES):
                self.of_rows.add(call)
        graph = self.recording.graph
        graph.eliminate_dead_code()
        for call in reversed(list(graph.nodes)):
            # torch.fx keeps calls that draw random numbers.
            is_work = self.kinds.get(call) is not Kind.OTHER and call.op != "output"
            if not call.users and (call.op == "placeholder" or is_work):
                graph.erase_node(call)
        self.recording.recompile()
        outputs = (
            [edges for edges, _ in self._sets],
            [weight for _, weight in self._sets],
            {str(made.target): value for (_, value), made in self._data.items()},
            {str(m.target): value for value, m in self._vertex_values.items()},
        )
        sets = {str(made.target): number for (number, _), made in self._data.items()}
        program = self.program.finish(outputs)
        return EdgeWork(program, sets, self.program.is_random)

    def _visit(self, call: fx.Node) -> None:
        """Change a call that depends on features or weights, if it works on edges."""
        if any(source in self.of_rows for source in call.all_input_nodes):
            self.of_rows.add(call)
        edges = self._edges_of(call)
        on_edges = [s for s in call.all_input_nodes if s in self.messages or self.is_long(s)]
        if call.target is aggregate:
            self._change_aggregation(call)
        elif self._multiplies_by_matrix(call):
            self._change_product(call)
        elif self._runs_on_blocks(call) and edges is not None:
            if isinstance(self.module_of(call), EdgeUpdate):
                self.messages.add(call)
            elif any(s in self.messages and s in self.of_rows for s in on_edges):
                self._make_fragment(call)
            else:
                self._change_convolution(call, edges)
        elif self.selects(call):
            self.change_selection(call)
        elif self.joins(call):
            self.change_joining(call)
        elif on_edges:
            value = self.values[call]
            if isinstance(value, Tensor) and value.shape[:1] == (self.n,):
                self._make_fragment(call)
            else:
                self.messages.add(call)
        else:
            for source in call.all_input_nodes:
                if self.kinds[source] is Kind.EDGES:
                    call.replace_input_with(source, self.vertex_value(source, call))

    def _runs_on_blocks(self, call: fx.Node) -> bool:
        return isinstance(self.module_of(call), MessagePassing | EdgeModule)

    def module_of(self, call: fx.Node) -> nn.Module | None:
        """The module that is called."""
        if call.op != "call_module":
            return None
        return self.recording.get_submodule(str(call.target))

    def _edges_of(self, call: fx.Node) -> fx.Node | None:
        """The [2, E] value, or the matrix, that a call reads."""
        sources = call.all_input_nodes
        return next((s for s in sources if self.are_ends(s) or self._is_matrix(s)), None)

    def _is_matrix(self, call: fx.Node) -> bool:
        """Whether a value made of the edges is a sparse matrix."""
        value = self.values.get(call)
        is_sparse = isinstance(value, Tensor) and value.layout is not torch.strided
        return is_sparse and self.kinds[call] is Kind.EDGES

    def _set(self, edges: Any, weight: fx.Node | None = None) -> tuple[int, fx.Node]:
        """Number and input of a set; ``edges``: [2, E], or a pair, of the program."""
        key = edges, weight
        if key not in self._sets:
            number = len(self._sets)
            with self.recording.graph.inserting_before(self._start):
                made = self.recording.graph.placeholder(input_name(EDGES, number))
            self._sets[key] = number, made
        return self._sets[key]

    def _data_of(self, number: int, call: fx.Node) -> fx.Node:
        """The recording's input with a value for each edge of a set."""
        key = number, self.program.copy(call)
        if key not in self._data:
            with self.recording.graph.inserting_before(self._start):
                name = input_name(EDGE_VALUES, len(self._data))
                self._data[key] = self.recording.graph.placeholder(name)
        return self._data[key]

    def vertex_value(self, source: fx.Node, call: fx.Node) -> fx.Node:
        """A buffer of the recording with a value for each vertex, or with one value."""
        value, copied = self.values[source], self.program.copy(source)
        if isinstance(value, int | float):
            value, copied = torch.tensor(value), self.program.number(copied)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            refuse(f"{name_of(call)} reads {type(value).__name__} of the edges", call=call)
        if value.shape == (self.n, self.n):
            refuse(f"{name_of(source)} makes a matrix of all pairs of vertices", call=source)
        return self._buffer(copied, value)

    def _buffer(self, copied: fx.Node, value: Tensor) -> fx.Node:
        """The rows of a buffer of the recording, or the buffer itself if it has no dimensions."""
        if copied not in self._vertex_values:
            name = f"vertex_value_{len(self._vertex_values)}"
            self.recording.register_buffer(name, value)
            with self.recording.graph.inserting_before(self._start):
                self._vertex_values[copied] = self.recording.graph.get_attr(name)
        made = self._vertex_values[copied]
        if value.dim() == 0:
            return made
        known = [user for user in made.users if user.target is of_vertices]
        if known:
            return known[0]
        with self.recording.graph.inserting_after(made):
            return self.recording.graph.call_function(of_vertices, (made,), {"vertex_type": ""})

    def _change_aggregation(self, call: fx.Node) -> None:
        settings: dict[str, Any] = dict(call.kwargs)
        structure = str(settings["structure"])
        if is_of_all(call):
            return
        if RELATION in structure:
            refuse("RGCNConv together with work on edges in forward")
        edges, weight = settings.pop("edges", None), settings.pop("edge_weight", None)
        edges = self._given if edges is None else edges
        if self._is_matrix(edges):
            structure = structure.removesuffix(WEIGHTED) + WEIGHTED
            number, _ = self._set(*self.program.matrix(edges))
        else:
            values = None if weight is None else self.program.copy(weight)
            if weight is None and structure.endswith(WEIGHTED):
                values = self.program.input("edge_weight")
            number, _ = self._set(self.program.copy(edges), values)
        settings["structure"] = f"{structure}{RELATION}{number}"
        call.kwargs = settings

    def _multiplies_by_matrix(self, call: fx.Node) -> bool:
        """Whether a call is ``A @ x`` for a sparse matrix A [N, N] made of the edges."""
        product = product_of(call)
        return product is not None and self._is_matrix(product[0])

    def _change_product(self, call: fx.Node) -> None:
        product = product_of(call)
        assert product is not None
        matrix, rows, reduction = product
        number, _ = self._set(*self.program.matrix(matrix))
        settings: dict[str, Any] = {
            "structure": f"{reduction}{WEIGHTED}{RELATION}{number}",
            "observed_by": "",
        }
        with self.recording.graph.inserting_before(call):
            new = self.recording.graph.call_function(aggregate, (rows,), settings)
        new.stack_trace = call.stack_trace
        call.replace_all_uses_with(new)
        self._take_place(call, new)

    def _change_convolution(self, call: fx.Node, edges: fx.Node) -> None:
        if sum(map(self.are_ends, call.all_input_nodes)) > 1:
            refuse_conv(
                f"{name_of(call)} reads several sets of edges",
                "propagate over each set by itself",
                call,
                type(self.module_of(call)),
            )
        is_matrix = self._is_matrix(edges)
        ends = self.program.matrix(edges)[0] if is_matrix else self.program.copy(edges)
        number, made = self._set(ends)
        for source in call.all_input_nodes:
            if source is edges:
                call.replace_input_with(source, made)
            elif self.is_long(source):
                call.replace_input_with(source, self._data_of(number, source))
            elif source in self.messages:
                call.replace_input_with(source, self._message_of(number, source))
            elif self.kinds[source] is Kind.EDGES:
                call.replace_input_with(source, self.vertex_value(source, call))

    def _message_of(self, number: int, message: fx.Node) -> fx.Node:
        """A copy of a value of edges, made of their data and weights, that reads a set's data.

        A copy, because other calls may read the value with other sets of edges.
        """
        key = number, message
        if key not in self._messages:
            if message.target is drop and any(of is message for _, of in self._messages):
                refuse("dropout of values of edges is read with two lists of edges", call=message)
            chosen = {
                source: self._message_of(number, source)
                if source in self.messages
                else self._data_of(number, source)
                if self.is_long(source)
                else source
                for source in message.all_input_nodes
            }
            with self.recording.graph.inserting_before(message):
                self._messages[key] = self.recording.graph.node_copy(message, chosen.__getitem__)
        return self._messages[key]

    def _make_fragment(self, call: fx.Node) -> None:
        writer = _FragmentWriter(self, call)
        calls = writer.write()
        number, made = self._set(writer.ends())
        rows = [
            self.vertex_value(row, call) if self.kinds[row] is Kind.EDGES else row
            for row in writer.rows
        ]
        if not rows:
            zeros = torch.zeros(self.n, 1, dtype=torch.float64)
            rows = [self._buffer(self.program.zeros(), zeros)]  # a block is made of rows
        data = [self._data_of(number, value) for value in writer.data]
        name = f"edge_work_{sum(1 for _ in self.recording.children())}"
        self.recording.add_module(name, EdgeFragment(calls))
        with self.recording.graph.inserting_before(call):
            new = self.recording.graph.call_module(name, (made, *rows, *data))
        new.stack_trace = call.stack_trace
        call.replace_all_uses_with(new)
        self._take_place(call, new)

    def _take_place(self, call: fx.Node, new: fx.Node) -> None:
        self.values[new], self.kinds[new] = self.values[call], Kind.OTHER
        self.of_rows.add(new)


class _FragmentWriter:
    """Copies the calls between rows of vertices and a call that leads back to rows."""

    def __init__(self, of: _Separator, end: fx.Node) -> None:
        self._of, self._end = of, end
        self._graph = fx.Graph()
        self._edges = self._graph.placeholder("edge_index")
        self._count = self._graph.placeholder("num_rows")
        self._like = self._graph.placeholder("like")
        self._copies: dict[fx.Node, fx.Node] = {}
        self._modules: dict[str, Any] = {}
        self.rows: list[fx.Node] = []
        self.data: list[fx.Node] = []
        self._inputs: dict[fx.Node, fx.Node] = {}
        self._indices: dict[fx.Node, fx.Node] = {}
        """Local numbers of the ends of the edges, by the program's call."""
        self._whole: fx.Node | None = None
        """The program's [2, E] value, if the calls read one."""

    def write(self) -> fx.GraphModule:
        """The fragment's calls, of the arguments of ``EdgeFragment``."""
        result = self._copy(self._end)
        before = self._like
        if not self.rows:
            with self._graph.inserting_after(before):
                before = self._graph.placeholder("zeros")
        for number, source in enumerate((*self.rows, *self.data)):
            with self._graph.inserting_after(before):
                before = self._graph.placeholder(f"value_{number}")
            self._inputs[source].replace_all_uses_with(before)
            self._graph.erase_node(self._inputs[source])
        _, target = self._pair()
        for index, made in self._indices.items():
            made.args = (self._edges, 1 if index is target else 0)
        self._graph.output(result)
        return fx.GraphModule(self._modules, self._graph)

    def ends(self) -> Any:
        """The set's edges: a value [2, E] of the program, or its sources and targets."""
        source, target = self._pair()
        if self._whole is not None:
            return self._whole
        whole = source.args[0] if source.args else None
        parts = isinstance(whole, fx.Node) and (
            self._of.program.part(whole, 0),
            self._of.program.part(whole, 1),
        )
        return whole if parts == (source, target) else (source, target)

    def _pair(self) -> tuple[fx.Node, fx.Node]:
        """The program's calls that give the sources and the targets."""
        found = list(self._indices)
        if self._whole is not None:
            pair = self._of.program.part(self._whole, 0), self._of.program.part(self._whole, 1)
            if not set(found) <= set(pair):
                self._refuse("reads several sets of edges")
            return pair
        targets = [self._of.program.copy(index) for index in self._target_indices(self._end)]
        if len(set(targets)) != 1:
            self._refuse("makes rows of values of edges and names no vertices for them")
        sources = [index for index in found if index is not targets[0]]
        sources = sources or [self._other_end(targets[0])]
        if len(sources) != 1:
            self._refuse("reads rows of more than two ends of an edge")
        return sources[0], targets[0]

    def _other_end(self, target: fx.Node) -> fx.Node:
        """The program's sources of edges with these targets, if they are part of a [2, E] value."""
        is_part = target.target is operator.getitem
        whole, part = cast(tuple[Any, Any], target.args) if is_part else (None, None)
        if not isinstance(whole, fx.Node) or part not in (0, 1):
            return target
        return self._of.program.part(whole, 1 - part)

    def _refuse(self, what: str) -> None:
        refuse(f"{name_of(self._end)} {what}", "put this into a MessagePassing", self._end)

    def _target_indices(self, call: fx.Node) -> Iterator[fx.Node]:
        """The indices of vertices among a call's inputs, behind changes of their shape."""
        for source in call.all_input_nodes:
            if self._is_index(source):
                yield source
            elif self._is_whole_number(source) and _is_shaping(source):
                yield from self._target_indices(source)

    def _is_whole_number(self, call: fx.Node) -> bool:
        value = self._of.values[call]
        return isinstance(value, Tensor) and value.dtype == torch.int64

    def _is_index(self, call: fx.Node) -> bool:
        """Whether a value [E] numbers vertices."""
        if self._of.kinds[call] is not Kind.EDGES or not self._is_whole_number(call):
            return False
        whole = call.args[0] if call.target is operator.getitem else None
        is_part = isinstance(whole, fx.Node) and self._of.are_ends(whole)
        return bool(self._of.values[call].dim() == 1 and (is_part or not _is_shaping(call)))

    def _copy(self, call: fx.Node) -> fx.Node:
        if call not in self._copies:
            self._copies[call] = self._make(call)
        return self._copies[call]

    def _make(self, call: fx.Node) -> fx.Node:
        of, kind = self._of, self._of.kinds[call]
        if of.are_ends(call):
            whole = of.program.copy(call)
            if self._whole not in (None, whole):
                self._refuse("reads several sets of edges")
            self._whole = whole
            return self._edges
        if self._is_index(call):
            index = of.program.copy(call)
            if index not in self._indices:
                self._indices[index] = self._graph.call_function(operator.getitem)
            return self._indices[index]
        is_row = kind is Kind.OTHER and call in of.of_rows and call not in of.messages
        if call is not self._end and is_row and not reads_shape(call):
            return self._input(call, self.rows)
        is_shaped_index = self._is_whole_number(call) and _is_shaping(call)
        if of.is_long(call) and not is_shaped_index:
            return self._input(call, self.data)
        if kind is Kind.EDGES and isinstance(of.values[call], Tensor) and not is_shaped_index:
            return self._input(call, self.rows)
        return self._copy_call(call)

    def _input(self, call: fx.Node, where: list[fx.Node]) -> fx.Node:
        where.append(call)
        self._inputs[call] = self._graph.placeholder(f"given_{call.name}")
        return self._inputs[call]

    def _copy_call(self, call: fx.Node) -> fx.Node:
        module = self._of.module_of(call)
        if call.op == "get_attr":
            self._modules[str(call.target)] = attribute(self._of.recording, str(call.target))
            return self._graph.get_attr(str(call.target))
        if module is not None:
            self._modules[str(call.target)] = module
        args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), self._argument)
        if call.target is drop:
            settings = {"p": kwargs["probability"], "training": True}
            return self._graph.call_function(F.dropout, args[:1], settings)
        return self._graph.create_node(call.op, call.target, args, kwargs)

    def _argument(self, source: fx.Node) -> Any:
        """The value that a copy reads in place of ``source``."""
        value = self._of.values[source]
        reads_rows = reads_shape(source) and self._of.kinds[source.all_input_nodes[0]] is Kind.OTHER
        if not reads_rows:
            return self._copy(source)
        if isinstance(value, torch.dtype | torch.device):
            name = "dtype" if isinstance(value, torch.dtype) else "device"
            return self._graph.call_function(getattr, (self._like, name))
        if isinstance(value, torch.Size):
            return tuple(self._count if size == self._of.n else size for size in value)
        if isinstance(value, int):
            return self._count if value == self._of.n else value
        return self._copy(source)


def _is_shaping(call: fx.Node) -> bool:
    return call.target in (*_SHAPING, *_SHAPING_FUNCTIONS)
