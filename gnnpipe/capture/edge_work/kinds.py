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


_SELECTIONS = ("chunk", "index_select", "narrow", "select", "split", "tensor_split")
"""Functions and methods that select by position along a dimension ``dim``."""

_RANDOM = ("bernoulli", "multinomial", "rand", "rand_like", "randint", "randn", "randperm")
"""Functions that draw; edges at random positions are random edges in every order."""


def refuse_positions(recording: fx.GraphModule) -> None:
    """Raises ``InputError`` if forward selects edges by their position in the list of edges."""
    kinds = kinds_of(recording)
    for call in recording.graph.nodes:
        of = call.args[0] if call.args else None
        if not isinstance(of, fx.Node) or kinds[of] not in _OF_EDGES:
            continue
        if not any(one.op == "placeholder" for one in _sources(of)):
            continue  # numbers as many as the edges, which are no edges
        name = _name(call)
        if call.target is operator.getitem:
            is_found = _is_by_position(_index_of_edges(of, call.args[1], kinds[of]))
        elif name in _SELECTIONS and _counts_edges(of, _dimension(call, name), kinds[of]):
            index = call.kwargs.get("index", call.args[-1])
            is_found = name != "index_select" or _is_by_position(index)
        else:
            is_found = False
        if is_found:
            hint = "mark them by a column of edge_attr, and select them by a mask"
            refuse("forward selects edges by their position in edge_index", hint, call)


def _index_of_edges(of: fx.Node, index: object, kind: Kind) -> object:
    """The part of an index that counts edges: in [2, E] the second, in [E, ...] the first."""
    parts = index if isinstance(index, tuple) else (index,)
    if kind is Kind.EDGE_DATA:
        found = parts[0]
    elif len(parts) > 1:
        found = parts[-1]
    else:
        is_row = isinstance(index, int) or (isinstance(index, slice) and index.stop in (1, 2))
        is_of_rows = not _is_row(of) and (is_row or _is_list(of))
        found = slice(None) if is_of_rows else index
    # A number may also choose a column, or an element of a tuple.
    is_known = is_input(of, *EDGE_DATA) or _is_list(of) or _is_row(of)
    return slice(None) if isinstance(found, int) and not is_known else found


def _dimension(call: fx.Node, name: str) -> object:
    """The argument ``dim`` of one of the ``_SELECTIONS``."""
    place = 1 if name in ("index_select", "narrow", "select") else 2
    return call.kwargs.get("dim", call.args[place] if len(call.args) > place else 0)


def _counts_edges(of: fx.Node, dimension: object, kind: Kind) -> bool:
    """Whether a dimension of a value of edges is that of the edges."""
    is_list = kind is Kind.EDGES and _is_list(of)
    if is_list:
        return dimension in (1, -1)
    # Of edge data [E, D], dimension 1 are the columns; the last dimension may be that of [E].
    return dimension in ((0, 1, -1) if kind is Kind.EDGES else (0, -1))


def _is_list(call: fx.Node) -> bool:
    """Whether a value is known to be a list of edges [2, E]."""
    while call.target is operator.getitem:
        of, index = call.args
        if not (isinstance(of, fx.Node) and isinstance(index, tuple) and index[0] == slice(None)):
            return False
        call = of
    return is_input(call, EDGES)


def _is_row(call: fx.Node) -> bool:
    """Whether a value is known to be the sources or the targets of a list of edges, [E]."""
    if call.target is not operator.getitem:
        return False
    of, index = call.args
    return isinstance(of, fx.Node) and isinstance(index, int) and _is_list(of)


def _is_by_position(index: object) -> bool:
    """Whether an index is the same for every list of so many edges."""
    if isinstance(index, fx.Node):
        return not any(one.op == "placeholder" or _name(one) in _RANDOM for one in _sources(index))
    return isinstance(index, int | list | slice) and index != slice(None)


def _sources(call: fx.Node) -> set[fx.Node]:
    """A call and all calls whose values it depends on, not only their shapes."""
    seen, waiting = {call}, [call]
    while waiting:
        one = waiting.pop()
        new = set() if reads_shape(one) else set(one.all_input_nodes) - seen
        seen |= new
        waiting += new
    return seen


def _name(call: fx.Node) -> str:
    """Name of the function or method that is called."""
    return str(getattr(call.target, "__name__", call.target))


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
