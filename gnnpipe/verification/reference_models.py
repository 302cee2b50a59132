"""The model of the reference in plain PyTorch and PyG, on all vertices at once.

A PyG model is called as it is. Stale rows are not part of a model, so ``Pass.read`` returns the
rows that an aggregation reads.

Shapes: N vertices, E edges, C classes.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric import seed_everything
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAE

from gnnpipe.verification.reference_dropout import drop
from gnnpipe.verification.reference_graph import WholeGraph

Read = Callable[[str, Tensor, str], Tensor]
"""Maps an aggregation's name, the rows [N_t, F] that all vertices of a type push, and the type (''
if there is only one) to the rows [N_t, F] that are aggregated."""


@dataclass(frozen=True)
class Pass:
    """One pass of a model over all vertices."""

    read: Read
    """Returns the rows that are aggregated."""
    is_current: Callable[[str], Tensor]
    """[N_t], the vertices of a type whose current rows are aggregated."""
    seed: int
    epoch: int
    is_probe: bool
    """Probe vertices pass: no dropout, and all rows come from the tables."""

    def dropout(self, x: Tensor, probability: float, site: int) -> Tensor:
        """Applies the dropout of one site of the model to rows x [N, ...]."""
        if self.is_probe or probability == 0.0:
            return x
        return drop(x, probability, self.seed, self.epoch, site)


class WholeModel(ABC):
    """A model that runs on all vertices at once."""

    module: nn.Module
    """Holds the weights, with the names of the run's model."""
    means: frozenset[str] = frozenset()
    """Names of aggregations that are a mean over all vertices or edges."""

    @abstractmethod
    def outputs(self, now: Pass) -> Tensor:
        """Returns logits [N, C] of all (target type's) vertices, or scores [P, 1] of all pairs."""


def score_pairs(ends: Tensor, rows: Tensor, read: Tensor) -> Tensor:
    """Inner products [P, 1] of the targets' rows and the ``read`` rows of the sources."""
    source, target = ends
    return (read[source] * rows[target]).sum(1, keepdim=True)


class UserModel(WholeModel):
    """A PyG model, called as a user calls it, for passes without stale rows.

    Torch's default number type is set to that of the features during the call: some convolutions of
    PyG (``ClusterGCNConv``) compute degrees in the default type.
    """

    def __init__(
        self, module: nn.Module, graph: WholeGraph, target: str, sites: Sequence[int]
    ) -> None:
        """``target``: the vertex type with labels; ``sites``: the dropout sites in call order."""
        self.module, self._graph, self._target, self._sites = module, graph, target, sites
        self._dtype = next(iter(graph.x.values())).dtype

    def outputs(self, now: Pass) -> Tensor:
        """See ``WholeModel``; draws the random edges of the epoch."""
        with _random_numbers(now.seed, now.epoch):
            return self._outputs(_UserDropout(now, self._sites))

    def dropouts(self) -> list[float]:
        """Returns the nonzero dropout probabilities in call order."""
        seen = _UserDropout(None, ())
        with torch.no_grad():
            self._outputs(seen)
        return seen.probabilities

    def _outputs(self, dropout: TorchFunctionMode) -> Tensor:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with dropout:
                return self._called()
        finally:
            torch.set_default_dtype(dtype)

    def _called(self) -> Tensor:
        graph, module = self._graph, self.module
        encode = getattr(module, "encode", None) if graph.pairs is not None else None
        call: Callable[..., Any] = encode if inspect.ismethod(encode) else module
        # PyG's GAE passes all arguments on to its encoder.
        named: Any = module.encoder if isinstance(module, GAE) else call
        named = inspect.signature(named.forward if isinstance(named, nn.Module) else named)
        first, *others = named.parameters.values()
        # Edge data that a model demands and does not use is not read.
        unused = [p.name for p in others[1:] if p.default is p.empty and "edge" in p.name]
        data: dict[str, Any] = dict.fromkeys(unused)
        data |= {name: v for name, v in graph.edge_data.items() if name in named.parameters}
        has_edges = first.kind is first.VAR_POSITIONAL or any(
            p.default is p.empty or "edge" in p.name or "adj" in p.name for p in others[:1]
        )
        if not has_edges:
            note = getattr(first.annotation, "__name__", str(first.annotation))
            kind = note.rpartition(".")[2]
            is_data = first.name in ("data", "batch", "graph", "g") and kind != "Tensor"
            is_data = is_data or kind in ("Data", "HeteroData")
            rows = call(self._data() if is_data else graph.features)
        elif "" in graph.x:
            rows = call(graph.features, self._edges(data), **data)
        else:
            by_relation = {
                name: dict(graph.relation_data.get(name.removesuffix("_dict"), {}))
                for name in named.parameters
                if name.removesuffix("_dict") in graph.relation_data
            }
            rows = call(dict(graph.x), self._matrices(), **by_relation)
        rows = rows[self._target] if isinstance(rows, Mapping) else rows
        found: Tensor = rows
        if graph.pairs is None:
            return found
        if inspect.ismethod(decode := getattr(module, "decode", None)):
            scores: Tensor = decode(found, graph.pairs)
            return scores.reshape(-1, 1)
        return score_pairs(graph.pairs, found, found)

    def _data(self) -> Data | HeteroData:
        """Returns the graph as one PyG object."""
        graph = self._graph
        if "" in graph.x:
            fields, x = dict(graph.edge_data), graph.features
            edges = self._edges(fields)
            for part in graph.columns.values():
                values = x[:, part.start : part.stop]
                values = values.squeeze(1) if part.is_vector else values
                fields[part.name] = values.type(getattr(torch, part.dtype or str(x.dtype)[6:]))
            x = x[:, max((part.stop for part in graph.columns.values()), default=0) :]
            name = "edge_index" if graph.adjacency == "edge_index" else "adj_t"
            return Data(x=x, num_nodes=len(graph.features), **{name: edges}, **fields)
        data = HeteroData()
        for kind, count in graph.counts.items():
            data[kind].num_nodes = count
            if kind in graph.x:
                data[kind].x = graph.x[kind]
        name = "edge_index" if graph.adjacency == "edge_index" else "adj_t"
        for relation, edges in self._matrices().items():
            data[relation][name] = edges
        for kind, by_relation in graph.relation_data.items():
            if name == "edge_index" or kind != "edge_weight":
                for relation, values in by_relation.items():
                    data[relation][kind] = values
        return data

    def _edges(self, data: dict[str, Tensor]) -> Any:
        """Returns the edges in the form in which they were given; takes the weights of a matrix."""
        graph = self._graph
        if graph.adjacency != "edge_index":
            data.pop("edge_weight", None)
        size = graph.num_vertices, graph.num_vertices
        return self._form(graph.edge_index, graph.edge_data.get("edge_weight"), size)

    def _matrices(self) -> dict[tuple[str, str, str], Any]:
        """Returns the edges of each relation in the form in which they were given."""
        graph = self._graph
        weights = graph.relation_data.get("edge_weight", {})
        found = {}
        for relation, edges in graph.edges.items():
            size = graph.counts[relation[2]], graph.counts[relation[0]]
            found[relation] = self._form(edges, weights.get(relation), size)
        return found

    def _form(self, edges: Tensor, weight: Tensor | None, size: tuple[int, int]) -> Any:
        """Returns edges [2, E] in the form in which they were given; ``size``: of the matrix."""
        form = self._graph.adjacency
        if form == "edge_index":
            return edges
        source, target = edges
        if form == "SparseTensor":
            from torch_sparse import SparseTensor

            return SparseTensor(row=target, col=source, value=weight, sparse_sizes=size)
        values = torch.ones(len(source), dtype=self._dtype) if weight is None else weight
        if form == "torch.sparse_csr":
            ends = torch.bincount(target, minlength=size[0]).cumsum(0)
            return torch.sparse_csr_tensor(F.pad(ends, (1, 0)), source, values, size)
        matrix = torch.sparse_coo_tensor(torch.stack([target, source]), values, size)
        return matrix.to_sparse_csc() if form == "torch.sparse_csc" else matrix


@contextmanager
def _random_numbers(seed: int, epoch: int) -> Iterator[None]:
    """Context with the random numbers from which forward draws the edges of a training epoch."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_everything((seed * 1_000_003 + epoch) % 2**32)
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


class _UserDropout(TorchFunctionMode):
    """Replaces ``F.dropout`` by the dropout of a pass; random numbers are drawn in float32."""

    def __init__(self, now: Pass | None, sites: Sequence[int]) -> None:
        """``now``: ``None`` to record the probabilities without dropping."""
        super().__init__()
        self._now, self._sites = now, sites
        self.probabilities: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercepts ``F.dropout`` and the functions that draw."""
        if func in (torch.rand, torch.randn):
            # Another default type would draw other numbers from the same seed.
            return func(*args, **{"dtype": torch.float32} | (kwargs or {}))
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(F.dropout).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        x, probability = given.arguments["input"], float(given.arguments["p"])
        if not (given.arguments["training"] and probability):
            return x
        self.probabilities.append(probability)
        if self._now is None:
            return x
        return self._now.dropout(x, probability, self._sites[len(self.probabilities) - 1])
