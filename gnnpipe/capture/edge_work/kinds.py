"""Finds the calls of a recording that depend on the edges alone."""

from __future__ import annotations

import operator
from enum import Enum, auto

from torch import Tensor, fx, nn

from gnnpipe.capture.fx_names import EDGES, attribute, is_input, refuse
from gnnpipe.capture.markers import by_mode, drop, with_items
from gnnpipe.graph.graph import EDGE_DATA


class Kind(Enum):
    """Everything that a call's value may depend on."""

    OTHER = auto()
    """Features, weights or random numbers."""
    CONSTANT = auto()
    """Constants, numbers of rows and number types alone."""
    EDGE_DATA = auto()
    """Edge data, but not on which vertices an edge joins."""
    EDGES = auto()
    """The edges."""


_OF_EDGES = (Kind.EDGE_DATA, Kind.EDGES)


def kinds_of(recording: fx.GraphModule) -> dict[fx.Node, Kind]:
    """The kind of every call of a recording of a graph with one vertex type."""
    found: dict[fx.Node, Kind] = {}
    for call in recording.graph.nodes:
        found[call] = _kind(call, found, recording)
    return found


def is_of_edges_alone(call: fx.Node) -> bool:
    """Whether a recorded value depends on the edges, and on no features or weights."""
    read = _read_of_graph(call)
    return read is not None and any(is_input(one, EDGES) for one in read)


def is_of_graph_alone(call: fx.Node) -> bool:
    """Whether a recorded value depends on the edges and their data alone, or is constant."""
    return _read_of_graph(call) is not None


def _read_of_graph(call: fx.Node) -> set[fx.Node] | None:
    """A call and all calls that it depends on; None if one of them reads features or weights."""
    seen, waiting = {call}, [call]
    while waiting:
        one = waiting.pop()
        if reads_shape(one):
            continue
        if not is_input(one, EDGES, *EDGE_DATA) and not _is_plain(one):
            return None
        new = set(one.all_input_nodes) - seen
        seen |= new
        waiting += new
    return seen


def refuse_positions(recording: fx.GraphModule) -> None:
    """Raises ``InputError`` if forward selects edges by their position in the list of edges."""
    kinds = kinds_of(recording)
    for call in recording.graph.nodes:
        if call.target is not operator.getitem or kinds.get(call.args[0]) not in _OF_EDGES:
            continue
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        # Of [2, E] the second index counts edges, of [E, ...] the first one.
        counted = index[-1] if kinds[call.args[0]] is Kind.EDGES else index[0]
        is_end = len(index) == 1 and isinstance(counted, slice) and counted.stop in (1, 2)
        if isinstance(counted, slice) and counted != slice(None) and not is_end:
            hint = "mark them by a column of edge_attr, and select them by a mask"
            refuse("forward selects edges by their position in edge_index", hint, call)


def reads_shape(call: fx.Node) -> bool:
    """Whether a call reads the shape, number type or device of a tensor, but no number in it."""
    if call.op == "call_method":
        return call.target in ("size", "dim", "numel") or str(call.target).startswith("new_")
    is_getattr = call.op == "call_function" and call.target is getattr
    return is_getattr and call.args[1] in ("shape", "dtype", "device", "ndim")


def _kind(call: fx.Node, found: dict[fx.Node, Kind], recording: fx.GraphModule) -> Kind:
    if is_input(call, EDGES):
        return Kind.EDGES
    if is_input(call, *EDGE_DATA):
        return Kind.EDGE_DATA
    if call.op == "get_attr":
        value = attribute(recording, str(call.target))
        is_constant = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        is_made_in_forward = is_constant and not str(call.target).startswith("model.")
        return Kind.CONSTANT if is_made_in_forward else Kind.OTHER
    if not _is_plain(call):
        return Kind.OTHER
    sources = {found[source] for source in call.all_input_nodes}
    if reads_shape(call):
        sources -= {Kind.OTHER}
    if Kind.OTHER in sources:
        return Kind.OTHER
    if call.target is drop and Kind.EDGE_DATA in sources:
        return Kind.EDGES  # drawn with the edges
    return max(sources, key=lambda kind: kind.value, default=Kind.CONSTANT)


def _is_plain(call: fx.Node) -> bool:
    """Whether a call is a function or method of its arguments, and of random numbers, alone."""
    if call.op == "call_method":
        return True
    module = getattr(call.target, "__module__", "") or ""
    is_marker = module.startswith("gnnpipe.") and call.target not in (with_items, by_mode, drop)
    return call.op == "call_function" and not is_marker
