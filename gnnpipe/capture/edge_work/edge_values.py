"""Selects and concatenates values of edges that depend on features or weights.

Such values cannot be part of the program that makes the edges. The data and the ends of edges that
the values are made of can, so a selection is applied to these. A concatenation becomes a choice
among values that are selected for all edges of the result.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor, fx

from gnnpipe.capture.edge_work.kinds import Kind
from gnnpipe.capture.fx_names import name_of, refuse
from gnnpipe.capture.markers import mixed

_JOINING = (torch.cat, torch.concat, torch.concatenate)
"""Functions that concatenate; torch has three names of one."""


class EdgeValues:
    """The calls of a recording, and which of their values belong to edges."""

    def __init__(
        self,
        recording: fx.GraphModule,
        kinds: dict[fx.Node, Kind],
        values: dict[fx.Node, Any],
        n: int,
    ) -> None:
        """``values``: of every call on a sample with ``n`` vertices; new calls are added to both
        dicts.
        """
        self.recording, self.kinds, self.values, self.n = recording, kinds, values, n
        self.messages: set[fx.Node] = set()
        """Calls with features or weights whose values belong to edges."""
        self.of_rows: set[fx.Node] = set()
        """Calls that depend on rows of vertices."""

    def are_ends(self, call: fx.Node) -> bool:
        """Whether a value made of the edges is [2, E]: sources and targets."""
        value = self.values.get(call)
        return (
            self.kinds[call] is Kind.EDGES
            and isinstance(value, Tensor)
            and value.dim() == 2
            and len(value) == 2
            and not value.is_floating_point()
        )

    def is_long(self, call: fx.Node) -> bool:
        """Whether a value made of edges or of their data has a row for each edge, or is [2, E]."""
        if self.kinds[call] not in (Kind.EDGES, Kind.EDGE_DATA):
            return False
        value = self.values[call]
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) != self.n

    def selects(self, call: fx.Node) -> bool:
        """Whether a call selects learned values by an index or a mask made of the edges."""
        if call.target is not operator.getitem or call.args[0] not in self.messages:
            return False
        return isinstance(call.args[1], fx.Node) and self.is_long(call.args[1])

    def change_selection(self, call: fx.Node) -> None:
        """Replace a selection by calls on selected ends and data of edges."""
        value, index = cast(tuple[fx.Node, fx.Node], call.args)
        call.replace_all_uses_with(self._selected(value, index, call, {}))

    def joins(self, call: fx.Node) -> bool:
        """Whether a call concatenates learned values of edges, and values of the edges alone."""
        parts: Any = call.args[0] if call.args else None
        if call.target not in _JOINING or not isinstance(parts, list | tuple):
            return False  # or the parts are a recorded tuple, as of ``chunk``
        dimension: Any = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
        learned = [part for part in parts if part in self.messages]
        others = [part for part in parts if part not in self.messages]
        is_first = dimension % self.values[call].dim() == 0
        return (
            is_first
            and bool(learned)
            and not any(self.kinds[part] is Kind.OTHER for part in others)
        )

    def change_joining(self, call: fx.Node) -> None:
        """Replace a concatenation by a choice among values that are selected for all its edges."""
        parts = cast(list[fx.Node], call.args[0])
        sizes = [self._count(part, call) for part in parts]
        found: fx.Node | None = None
        for place, part in enumerate(parts):
            numbers, flags = [], []
            for i, size in enumerate(sizes):
                make = torch.arange if i == place else torch.zeros
                numbers.append(self._add(call, make, size, dtype=torch.int64))
                flags.append(self._add(call, torch.full, (size,), i == place))
            index, is_part = (self._add(call, torch.cat, given) for given in (numbers, flags))
            if part in self.messages:
                chosen = self._selected(part, index, call, {})
            else:
                chosen = self._add(call, operator.getitem, part, index)
            found = chosen if found is None else self._mixed(found, chosen, is_part, call)
        assert found is not None
        call.replace_all_uses_with(found)

    def _selected(
        self, value: fx.Node, index: fx.Node, before: fx.Node, made: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        """The value ``value[index]`` of edges, computed from selected ends and data of edges.

        New calls are inserted before ``before``; ``made``: by the value that was selected from.
        """
        if value in made:
            return made[value]
        is_message = value in self.messages
        if not is_message and not self.is_long(value):
            return value
        if not is_message:
            key = (slice(None), index) if self.are_ends(value) else index
            made[value] = self._add(before, operator.getitem, value, key)
            return made[value]
        chosen = {s: self._selected(s, index, before, made) for s in value.all_input_nodes}
        with self.recording.graph.inserting_before(before):
            made[value] = new = self.recording.graph.node_copy(value, chosen.__getitem__)
        try:
            rows = _at(self.values[value], self.values[index])
        except IndexError:
            hint = "select by an index or a mask made of the edges"
            refuse(f"{name_of(value)} changes the number of edges", hint, value)
        self._note_message(new, rows, value in self.of_rows)
        return new

    def _mixed(
        self, first: fx.Node, second: fx.Node, is_second: fx.Node, before: fx.Node
    ) -> fx.Node:
        """Insert the choice among two values of the same edges."""
        given = first, second, is_second
        with self.recording.graph.inserting_before(before):
            new = self.recording.graph.call_function(mixed, given)
        is_of_rows = not self.of_rows.isdisjoint((first, second))
        self._note_message(new, mixed(*(self.values[one] for one in given)), is_of_rows)
        return new

    def _note_message(self, new: fx.Node, value: Any, is_of_rows: bool) -> None:
        """Note the value of a new call that belongs to edges and depends on features or weights."""
        self.values[new], self.kinds[new] = value, Kind.OTHER
        self.messages.add(new)
        if is_of_rows:
            self.of_rows.add(new)

    def _add(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of a function, or of a method by name, that depends on the edges alone."""
        op = "call_method" if isinstance(target, str) else "call_function"
        with self.recording.graph.inserting_before(before):
            new = self.recording.graph.create_node(op, target, args, kwargs)
        given: Any = fx.node.map_arg(args, self.values.__getitem__)
        function = getattr(Tensor, target) if isinstance(target, str) else target
        self.values[new], self.kinds[new] = function(*given, **kwargs), Kind.EDGES
        return new

    def _count(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """The number of edges that a value has rows for, as a call that depends on edges alone."""
        while value in self.messages:
            sources = value.all_input_nodes
            value = next(s for s in sources if s in self.messages or self.is_long(s))
        return self._add(before, "size", value, int(self.are_ends(value)))


def _at(value: Any, index: Any) -> Any:
    """The rows ``index`` of a tensor, or of each tensor in a tuple or list."""
    if isinstance(value, tuple | list):
        return type(value)(_at(one, index) for one in value)
    return value[index] if isinstance(value, Tensor) else value
