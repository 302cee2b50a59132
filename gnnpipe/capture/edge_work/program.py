"""The part of a recording that depends on the edges alone, computed once on the whole graph."""

from __future__ import annotations

import operator
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch_geometric import seed_everything

from gnnpipe.capture.call_order import RECORDED_PLACE
from gnnpipe.capture.edge_work.kinds import Kind, reads_shape
from gnnpipe.capture.fx_names import EDGES, attribute, is_input, refuse
from gnnpipe.capture.markers import by_mode, drop
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import EDGE_DATA, Graph

NUM_VERTICES, DTYPE, DEVICE, LIKE = "num_vertices", "dtype", "device", "like"
IS_TRAINING = "is_training"
"""Inputs of the program beside the edges and their data; ``LIKE``: an empty tensor."""


class ProgramWriter:
    """Copies calls of a recording into a program; equal calls are copied once."""

    def __init__(
        self,
        recording: fx.GraphModule,
        kinds: Mapping[fx.Node, Kind],
        values: Mapping[fx.Node, Any],
        num_vertices: int,
        random_calls: Collection[fx.Node],
    ) -> None:
        """``values``: of all calls on a sample with ``num_vertices`` vertices.

        ``random_calls``: calls that draw random numbers there.
        """
        self._recording, self._kinds, self._values = recording, kinds, values
        self._n, self._random_calls = num_vertices, random_calls
        self._random_copies: set[fx.Node] = set()
        self._graph = fx.Graph()
        self._inputs: dict[str, fx.Node] = {}
        self._made: dict[str, fx.Node] = {}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._constants = nn.Module()
        # In the order of forward, so that random numbers are those of plain PyG.
        for call in sorted(recording.graph.nodes, key=lambda call: call.meta[RECORDED_PLACE]):
            if kinds[call] is Kind.EDGES and (call in random_calls or call.target is drop):
                self.copy(call)

    def input(self, name: str) -> fx.Node:
        """The input of this name."""
        if name not in self._inputs:
            with self._graph.inserting_before(None):  # at the beginning
                self._inputs[name] = self._graph.placeholder(name)
        return self._inputs[name]

    def copy(self, call: fx.Node) -> fx.Node:
        """The copy of a call that depends on the edges alone, with its sources."""
        if call not in self._copies:
            self._copies[call] = self._copy(call)
        return self._copies[call]

    def part(self, edges: fx.Node, index: int) -> fx.Node:
        """The sources (0) or targets (1) of a copied [2, E] value."""
        return self._add("call_function", operator.getitem, (edges, index), {})

    def matrix(self, call: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The edges [2, E] and the values [E] of a sparse matrix [N, N] made of the edges."""
        made = self.copy(call)
        parts = _ends_of_matrix, _values_of_matrix
        ends, values = (self._add("call_function", part, (made,), {}) for part in parts)
        return ends, values

    def zeros(self) -> fx.Node:
        """A zero for each vertex [N, 1]."""
        settings = {"dtype": self.input(DTYPE), "device": self.input(DEVICE)}
        shape = self.input(NUM_VERTICES), 1
        return self._add("call_function", torch.zeros, (shape,), settings)

    def number(self, made: fx.Node) -> fx.Node:
        """A copied number as a tensor without dimensions."""
        return self._add("call_function", torch.tensor, (made,), {})

    def finish(self, outputs: Any) -> fx.GraphModule:
        """The program that returns ``outputs``, copied calls in containers."""
        self._graph.output(outputs)
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._constants, self._graph)

    @property
    def is_random(self) -> bool:
        """Whether the finished program gives other edges each time, or in evaluation."""
        copies = self._random_copies.intersection(self._graph.nodes)
        return IS_TRAINING in self._inputs or bool(copies)

    def _copy(self, call: fx.Node) -> fx.Node:
        if is_input(call, EDGES, *EDGE_DATA):
            return self.input(str(call.target))
        if call.op == "get_attr":
            setattr(self._constants, str(call.target), attribute(self._recording, str(call.target)))
            return self._add("get_attr", call.target, (), {})
        args, kwargs = fx.node.map_arg((call.args, dict(call.kwargs)), self._argument)
        if call.target is by_mode:
            return self._add("call_function", _choose, (self.input(IS_TRAINING), *args), {})
        if call.target is drop:
            kwargs = {"p": kwargs["probability"], "training": self.input(IS_TRAINING)}
            return self._graph.call_function(F.dropout, args, kwargs)
        if call in self._random_calls:
            made = self._graph.create_node(call.op, call.target, args, kwargs)
            self._random_copies.add(made)
            return made
        return self._add(call.op, call.target, args, kwargs)

    def _argument(self, source: fx.Node) -> Any:
        """Another copy, an input or a constant, which a copy reads in place of ``source``."""
        value = self._values[source]
        is_shape = reads_shape(source) and self._kinds[source.all_input_nodes[0]] is Kind.OTHER
        if self._kinds[source] is Kind.OTHER:
            return self.input(LIKE)
        if not is_shape:
            return self.copy(source)
        if isinstance(value, torch.dtype | torch.device):
            return self.input(DTYPE if isinstance(value, torch.dtype) else DEVICE)
        if isinstance(value, torch.Size):
            return tuple(self._number(size) for size in value)
        return self._number(value) if isinstance(value, int) else self.copy(source)

    def _number(self, value: int) -> Any:
        return self.input(NUM_VERTICES) if value == self._n else value

    def _add(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        key = f"{op} {target} {id(target)} {args} {kwargs}"
        if key not in self._made:
            self._made[key] = self._graph.create_node(op, target, args, kwargs)
        return self._made[key]


def _choose(is_training: bool, training: Any, evaluation: Any) -> Any:
    return training if is_training else evaluation


def _ends_of_matrix(matrix: Tensor) -> Tensor:
    """Columns (sources) and rows (targets) of the entries; parallel edges stay apart."""
    if matrix.layout is torch.sparse_coo:
        return matrix._indices().flip(0)
    is_csr = matrix.layout is torch.sparse_csr
    offsets = matrix.crow_indices() if is_csr else matrix.ccol_indices()
    inner = matrix.col_indices() if is_csr else matrix.row_indices()
    outer = torch.repeat_interleave(offsets.diff())
    return torch.stack([inner, outer] if is_csr else [outer, inner])


def _values_of_matrix(matrix: Tensor) -> Tensor:
    return matrix._values() if matrix.layout is torch.sparse_coo else matrix.values()


@contextmanager
def random_numbers_of(seed: int, epoch: int) -> Iterator[None]:
    """Context with the random numbers that make the edges of an epoch (from 0; -1: evaluation)."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            seed_everything((seed * 1_000_003 + epoch) % 2**32)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@dataclass(frozen=True, eq=False)
class EdgeSets:
    """Sets of edges made by a model's forward, with values of the edges and of the vertices."""

    ends: Sequence[Tensor]
    """By set [2, E] int64, ascending by target, then by source."""
    weights: Sequence[Tensor | None]
    """By set [E], if aggregations multiply by them."""
    data: Mapping[str, tuple[int, Tensor]]
    """By name: the set and a value for each of its edges, [E, ...]."""
    of_vertices: Mapping[str, Tensor]
    """By name of the recording's buffer: a value for each vertex, [N, ...], or one value [...]."""


@dataclass(frozen=True, eq=False)
class EdgeWork:
    """The work on edges that a model's forward does, without features and weights."""

    program: fx.GraphModule
    """Returns ends, weights, data and values of vertices as in ``EdgeSets``; ends may be pairs."""
    data_sets: Mapping[str, int]
    """The set of each value of edges, by its name."""
    is_random: bool
    """The edges differ between the epochs, or between training and evaluation."""
    values: Collection[str] = ()
    """Fields of ``Graph`` with the values of ``adj_t``, which the program reads as a matrix."""

    @property
    def edge_inputs(self) -> frozenset[str]:
        """Fields of ``Graph`` with edge data that the program reads."""
        return frozenset(self._names & set(EDGE_DATA)).union(self.values)

    @property
    def _names(self) -> set[str]:
        return {str(n.target) for n in self.program.graph.nodes if n.op == "placeholder"}

    def sets(
        self,
        edges: Tensor,
        edge_data: Mapping[str, Tensor],
        count: int,
        dtype: torch.dtype,
        is_training: bool,
    ) -> EdgeSets:
        """Run the program on a graph, with the current random numbers.

        Args:
            edges: Ends [2, E] int64 of the graph's edges, or the matrix ``adj_t`` [N, N].
            edge_data: Edge data by field of ``Graph``.
            count: Number N of vertices.
            dtype: Number type of features and weights.
            is_training: False for the edges of evaluation.

        Raises:
            InputError: The program fails, or makes edges to vertices that do not exist.
        """
        device = edges.device
        inputs = {
            EDGES: edges,
            **edge_data,
            NUM_VERTICES: count,
            DTYPE: dtype,
            DEVICE: device,
            LIKE: torch.empty(0, dtype=dtype, device=device),
            IS_TRAINING: is_training,
        }
        try:
            with torch.no_grad():
                # Not by a call of the module, for which fx prints the traceback of an error.
                found = self.program.forward(**{name: inputs[name] for name in self._names})
        except Exception as error:
            refuse(f"work on the edges in forward fails on this graph: {str(error).strip()}")
        ends, weights, data, of_vertices = found
        pairs = [torch.stack(tuple(one)) if isinstance(one, tuple) else one for one in ends]
        for one in pairs:
            _check_ends(one, count)
        for name, value in data.items():
            _check_length(value, pairs[self.data_sets[name]])
        orders = [torch.from_numpy(_order(one[0].numpy(), one[1].numpy(), count)) for one in pairs]
        return EdgeSets(
            [one[:, order] for one, order in zip(pairs, orders, strict=True)],
            [w if w is None else w[o] for w, o in zip(weights, orders, strict=True)],
            {k: (s := self.data_sets[k], v[orders[s]]) for k, v in data.items()},
            of_vertices,
        )


def _order(
    source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.intp]:
    """The order by target, then source; equal edges stay in their order.

    One key, whose stable sort takes linear time for edges that are in order. Those that a mask
    leaves are, and the edges are drawn in every epoch.
    """
    return np.argsort(target * count + source, kind="stable")


def _check_ends(ends: Tensor, count: int) -> None:
    is_known = ends.dim() == 2 and len(ends) == 2 and not ends.is_floating_point()
    if not is_known or (ends.numel() and not 0 <= int(ends.min()) <= int(ends.max()) < count):
        raise InputError(
            f"model: forward makes edges {list(ends.shape)} to vertices outside of 0 to {count - 1}"
        )


def _check_length(value: Tensor, ends: Tensor) -> None:
    if len(value) != ends.shape[1]:
        refuse(
            f"forward reads values of {len(value):,} edges with a list of {ends.shape[1]:,} edges",
            "select learned values by a mask or an index made of the edges; join them by torch.cat",
        )


def graph_of_sets(graph: Graph, sets: EdgeSets) -> Graph:
    """The graph whose edges are those of all sets; ``edge_type`` is the number of the set."""
    n = graph.num_vertices
    sizes = [ends.shape[1] for ends in sets.ends]
    source, target = torch.cat(list(sets.ends), dim=1).numpy()
    number = np.repeat(np.arange(len(sizes)), sizes)
    order = _order(source, target, n)
    starts = np.cumsum([0, *sizes])

    def joined(values: Mapping[int, Tensor]) -> npt.NDArray[Any]:
        """Values of all edges, zero in sets that have none."""
        one = next(iter(values.values())).numpy()
        found = np.zeros((starts[-1], *one.shape[1:]), dtype=one.dtype)
        for place, value in values.items():
            found[starts[place] : starts[place + 1]] = value.numpy()
        return found[order]

    weights = {d: w for d, w in enumerate(sets.weights) if w is not None}
    return replace(
        graph,
        indptr=np.concatenate([[0], np.cumsum(np.bincount(target, minlength=n))]).astype(np.int64),
        indices=source[order].astype(graph.indices.dtype),
        edge_weight=joined(weights) if weights else None,
        edge_attr=None,
        edge_type=number[order],
        edge_order=None,
        derived={name: joined({place: value}) for name, (place, value) in sets.data.items()},
    )
