"""Makes the small random graph, and the perturbed weights, with which a recording is tried out."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gnnpipe.capture.call import called
from gnnpipe.capture.edge_work.program import EdgeSets, graph_of_sets
from gnnpipe.capture.fx_names import (
    EDGES,
    FEATURES,
    by_argument,
    fields_of,
    first_line,
    input_name,
    refuse,
)
from gnnpipe.graph.adjacency import adjacency_tensor
from gnnpipe.graph.graph import Features, Graph
from gnnpipe.graph.types import VertexTypes, relation_of


@dataclass(frozen=True, eq=False)
class Sample:
    """A graph whose numbers of vertices n differ from all widths of the model.

    So rows can be distinguished from columns. Keys are vertex types, '' if there is only one.
    """

    x: Mapping[str, Tensor]
    """Features [n, F] float64 of the types that have features."""
    edges: Mapping[str, Tensor]
    """Edges [2, E] by input of the recording, sorted by target, then source; ids within types."""
    ends: Mapping[str, tuple[str, str]]
    """Vertex types of sources and targets, by input."""
    graph: Graph
    """The same edges as one graph, given in the same form as the graph of the run."""
    edge_data: Mapping[str, Tensor]
    """Edge data [E, ...] by field of ``Graph``, float64 or int64."""
    names: Sequence[str]
    """Arguments of the model that get edge data."""
    edge_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Values [E, ...] of edges that forward makes, by input."""
    edges_of_value: Mapping[str, str] = field(default_factory=dict)
    """The input of edges to which each of the ``edge_values`` belongs, and data of relations."""
    vertex_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Values [n, ...] of vertices, or values [...], that forward makes of the edges."""

    def with_sets(self, sets: EdgeSets) -> Sample:
        """The sample with the edges that forward makes from it."""
        names = [input_name(EDGES, number) for number in range(len(sets.ends))]
        return replace(
            self,
            edges={**self.edges, **dict(zip(names, sets.ends, strict=True))},
            ends={**self.ends, **dict.fromkeys(names, ("", ""))},
            graph=graph_of_sets(self.graph, sets),
            edge_values={name: value for name, (_, value) in sets.data.items()},
            edges_of_value={name: names[place] for name, (place, _) in sets.data.items()},
            vertex_values=sets.of_vertices,
        )

    def call(self, model: nn.Module, method: str, dtype: torch.dtype) -> Any:
        """The result of the method in plain PyG, in ``dtype``; ``InputError`` if it fails."""
        # A copy, because PyG's reversible blocks free the memory of their input.
        x = {t: rows.to(dtype, copy=True) for t, rows in self.x.items()}
        data = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.edge_data.items()}
        carried = by_argument(self.names, self.graph, data)
        names = {r: input_name(EDGES, i) for i, r in enumerate(self.graph.relations)}
        given: Any = (x, {relation: self.form(name, dtype) for relation, name in names.items()})
        if self.graph.types is None:
            given = (x[""], self.form(EDGES, dtype))
        try:
            return called(model, method, self.graph)(*given, **carried)
        except Exception as error:
            refuse(f"fails on a sample in plain PyG: {first_line(error)}")

    def form(self, name: str, dtype: torch.dtype) -> Any:
        """Edges of an input, in the form in which the run's graph was given."""
        source, target = self.ends[name]
        size = self.counts[source], self.counts[target]
        weight = self.edge_data.get(name.replace(EDGES, "edge_weight"))
        return adjacency_tensor(self.graph.adjacency, self.edges[name], weight, size, dtype)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Arguments of the recording, by name."""
        types = self.graph.types
        if types is None:
            return {FEATURES: self.x[""], **self.edges, **self.edge_data, **self.edge_values}
        names = {t: input_name(FEATURES, i) for i, t in enumerate(types.names)}
        return {names[t]: x for t, x in self.x.items()} | {**self.edges, **self.edge_data}

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of vertices n."""
        return self.graph.vertex_counts

    def num_edges(self, name: str = EDGES) -> int:
        """Number of edges of an input."""
        return self.edges[name].shape[1]

    def halves(self, vertex_type: str) -> tuple[slice, slice]:
        """Two parts of the vertices, of different sizes."""
        n = self.counts[vertex_type]
        return slice(0, n // 2), slice(n // 2, n)

    def edge_halves(self, name: str = EDGES) -> tuple[slice, slice]:
        """Edges of an input into each half of the target vertices."""
        split = int((self.edges[name][1] < self.counts[self.ends[name][1]] // 2).sum())
        return slice(0, split), slice(split, self.num_edges(name))


def make_sample(model: nn.Module, of: Graph, names: Sequence[str] = ()) -> Sample:
    """A sample with the same types and numbers of features as the graph ``of``.

    ``names``: arguments of the model that get edge data; the sample has such data, and a weight of
    every edge if the matrix of ``of`` has values.
    Directed; in every relation vertex 1 has nearly all others as neighbours, and vertex 2 is a
    neighbour of nearly all others. There are self-loops and parallel edges if ``of`` has any.
    Vertex 0 is isolated, unless every vertex of ``of`` has neighbours.
    """
    rng = np.random.default_rng(0)
    read = fields_of(names, of)
    of = of.reduced_to({*read, *of.weight_fields} if of.has_weighted_adjacency else read)
    types = of.types
    features = {"": of.x} if types is None else types.features
    counts = _counts(model, tuple(of.row_types), {int(x.shape[1]) for x in features.values()})
    ends = {EDGES: ("", "")}
    if types is not None:
        ends = {input_name(EDGES, i): (s, t) for i, (s, _, t) in enumerate(types.relations)}
    edges = {
        name: _random_edges(counts[source], counts[target], source == target, of, rng)
        for name, (source, target) in ends.items()
    }
    rows = {t: torch.from_numpy(_features(x, counts[t], rng)) for t, x in features.items()}
    graph = _joined(counts, ends, edges)
    edges_of_value: dict[str, str] = {}
    if types is None:
        data = {k: _like(v, graph.num_edges, rng) for k, v in of.edge_data.items()}
        graph = graph.with_edge_data(data)
    else:
        edges_of_value = {k: input_name(EDGES, relation_of(k) or 0) for k in of.derived}
        counted = {k: edges[name].shape[1] for k, name in edges_of_value.items()}
        data = {k: _like(of.derived[k], count, rng) for k, count in counted.items()}
        sampled = VertexTypes.in_order(counts, {}, types.relations, types.target)
        graph = replace(graph, types=sampled, derived=data)
    graph = replace(graph, adjacency=of.adjacency, vertex_columns=of.vertex_columns)
    found = {k: torch.from_numpy(v) for k, v in data.items()}
    carried = {k: v.double() if v.is_floating_point() else v for k, v in found.items()}
    tensors = {name: torch.from_numpy(v) for name, v in edges.items()}
    return Sample(rows, tensors, ends, graph, carried, names, edges_of_value=edges_of_value)


def _counts(model: nn.Module, types: tuple[str, ...], widths: set[int]) -> dict[str, int]:
    """A number of vertices for each type; neither it nor its halves are a width of the model."""
    known = (p.shape for p in model.parameters() if not nn.parameter.is_lazy(p))
    taken = set(widths).union(*known)
    found = {}
    for name in types:
        n = next(n for n in itertools.count(23, 2) if not taken & {n, n // 2, n - n // 2})
        taken |= {n, n // 2, n - n // 2}
        found[name] = n
    return found


def _random_edges(
    num_source: int, num_target: int, is_square: bool, of: Graph, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    dense = rng.random((num_target, num_source)) < 4 / num_source
    dense[1, 2:] = True
    dense[3:, 2] = True
    if is_square:
        np.fill_diagonal(dense, rng.random(num_source) < 0.3 if len(of.self_loops) else False)
    dense[0] = dense[:, 0] = False
    if of.types is None and of.degrees.all():
        dense[0, 2] = dense[2, 3] = dense[3, 0] = True
    times = dense.astype(np.int64)
    if len(of.parallel_edges):
        times[rng.random(dense.shape) < 0.2] *= 2
    target, source = np.nonzero(dense)
    return np.repeat(np.stack([source, target]), times[dense], axis=1)


def _joined(
    counts: Mapping[str, int],
    ends: Mapping[str, tuple[str, str]],
    edges: Mapping[str, npt.NDArray[np.int64]],
) -> Graph:
    """One graph of all vertex types and relations."""
    n = sum(counts.values())
    first = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))
    source = np.concatenate([edges[k][0] + first[s] for k, (s, _) in ends.items()])
    target = np.concatenate([edges[k][1] + first[t] for k, (_, t) in ends.items()])
    kind = np.repeat(np.arange(len(ends)), [edges[k].shape[1] for k in ends])
    order = np.lexsort((source, target))
    mask = np.ones(n, dtype=bool)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=n))])
    return Graph(
        "sample",
        indptr.astype(np.int64),
        source[order].astype(np.int32),
        np.zeros((n, 1), dtype=np.float32),
        np.zeros(n, dtype=np.int64),
        mask,
        mask,
        mask,
        1,
        edge_type=kind[order],
    )


def _features(x: Features, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Random rows within the range of each column; whole numbers in columns of categories.

    So a logarithm, a square root or an embedding of categories gets numbers of its domain. Not the
    graph's own numbers: equal numbers in many rows would hide a call that mixes rows.
    """
    some = x[:_LOOKED_AT]
    rows = np.asarray(some if isinstance(some, np.ndarray) else some.toarray(), dtype=np.float64)
    if not len(rows):
        return rng.standard_normal((count, x.shape[1]))
    return _within_range(rows, count, rng)


def _within_range(
    rows: npt.NDArray[np.float64], count: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Random rows [count, F] within the range of each column of ``rows``."""
    low, high = rows.min(axis=0), rows.max(axis=0)
    is_whole = (rows == np.floor(rows)).all(axis=0) & (np.abs(rows).max(axis=0) < 2**53)
    is_category = is_whole & (high - low > 1)
    is_constant = low == high
    high = np.where(is_constant & (low == 0), 1.0, high)
    found = rng.uniform(np.where(is_constant, low / 2, low), high, (count, len(low)))
    for column in np.flatnonzero(is_category):
        found[:, column] = rng.integers(int(low[column]), int(high[column]) + 1, count)
    return found


_LOOKED_AT = 128
"""Rows of the graph from which the range of a column is determined."""


def _like(values: npt.NDArray[Any], count: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Random edge data of the same kind: numbers of the same range, and positive weights.

    A norm takes the root of a sum of weights.
    """
    if values.dtype.kind in "iu":
        low, high = values.min(axis=0, initial=0), values.max(axis=0, initial=0)
        return rng.integers(low, high + 1, (count, *values.shape[1:]))
    if not len(values) or values.ndim == 1:
        return rng.uniform(0.5, 1.5, (count, *values.shape[1:])).astype(np.float32)
    rows = values[:_LOOKED_AT].reshape(min(len(values), _LOOKED_AT), -1).astype(np.float64)
    found = _within_range(rows, count, rng).reshape(count, *values.shape[1:])
    return found.astype(np.float32)


_BY = 0.1
"""Far above rounding, and small enough that positive weights mostly stay positive."""


def names_of_weights(owner: nn.Module, module: nn.Module) -> dict[str, str]:
    """Names in ``owner`` by path in ``module``, for the weights that both share."""
    names = {id(p): name for name, p in owner.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {path: names[id(p)] for path, p in every if id(p) in names}


@torch.no_grad()
def perturb_weights(module: nn.Module, names: Mapping[str, str]) -> None:
    """Add small random numbers to every weight, seeded by the weight's name.

    ``names``: names by path in the module, so that a model and its recording stay equal.
    """
    for path, weight in module.named_parameters():
        if path in names and weight.is_floating_point():
            generator = torch.Generator().manual_seed(zlib.crc32(names[path].encode()))
            noise = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
            weight.add_(_BY * noise.to(weight.dtype))
