"""Models of the reference in plain PyTorch and PyG, on all vertices at once.

The built-in models are written a second time from their formulas, with the same names of weights.
A user's PyG model is called as it is. Stale rows are not part of a model, so ``Pass.read`` returns
the rows that an aggregation reads.

Shapes: N vertices, E edges, C classes.
"""

from __future__ import annotations

import inspect
import math
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
from torch_geometric.nn import GAE, GATConv

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


class _Aggregate:
    """Aggregations over the whole graph with fixed weights."""

    def __init__(self, graph: WholeGraph) -> None:
        source, target = graph.edge_index
        n, dtype = graph.num_vertices, graph.features.dtype
        self.degree = torch.zeros(n, dtype=dtype).index_add(
            0, target, torch.ones_like(target).to(dtype)
        )
        self.edges = graph.edge_index
        others, loops = graph.edge_index[:, source != target], torch.arange(n)
        self.edges_with_loops = torch.cat([others, torch.stack([loops, loops])], dim=1)
        read, reading = self.edges_with_loops
        root = torch.bincount(reading, minlength=n).to(dtype).rsqrt()
        self.gcn_weights = (root[read] * root[reading])[:, None]

    def gcn(self, x: Tensor) -> Tensor:
        """``D^-1/2 (A + I) D^-1/2 x`` with D the row sums of A + I."""
        source, target = self.edges_with_loops
        return torch.zeros_like(x).index_add(0, target, x[source] * self.gcn_weights)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the neighbours; 0 for a vertex without any."""
        source, target = self.edges
        return (
            torch.zeros_like(x).index_add(0, target, x[source]) / self.degree.clamp(min=1)[:, None]
        )


Values = dict[str, Tensor]


class PlainLayer(nn.Module):
    """A built-in layer; ``spec`` has the fields of ``LayerSpec``."""

    kind: str

    def __init__(self, index: int, spec: Mapping[str, Any]) -> None:
        super().__init__()
        self.index, self.name = index, f"{self.kind}{index}"
        self.is_first, self.is_last = index == 0, index == spec["num_layers"] - 1
        self.spec, self.dropout = spec, float(spec["dropout"])
        self.hidden: int = spec["hidden"]
        self.width: int = spec["num_classes"] if self.is_last else self.hidden

    def encoder(self, bias: bool = False) -> nn.Linear:
        """Returns a linear map of the features."""
        return nn.Linear(self.spec["num_features"], self.hidden, bias=bias)

    def linear(self, width: int, bias: bool = False) -> nn.Linear:
        """Returns a linear map from the hidden width."""
        return nn.Linear(self.hidden, width, bias=bias)

    @abstractmethod
    def forward(self, values: Values, over: _Aggregate, now: Pass) -> Values:
        """Computes the layer's values from the previous layer's; the first reads ``features``."""


class GCN(PlainLayer):
    """``dropout(relu(norm(A x W + b)))``; the last layer ends with ``A x W + b``."""

    kind = "gcn"

    def __init__(self, index: int, spec: Mapping[str, Any]) -> None:
        super().__init__(index, spec)
        if self.is_first:
            self.encode = self.encoder()
        if not self.is_first or self.is_last:
            self.lin = self.linear(self.width)
        self.bias = nn.Parameter(torch.zeros(self.width))
        if not self.is_last:
            self.norm = nn.LayerNorm(self.width)

    def forward(self, values: Values, over: _Aggregate, now: Pass) -> Values:
        """See ``PlainLayer``."""
        x = self.encode(values["features"]) if self.is_first else values["x"]
        x = over.gcn(now.read(self.name, x, ""))
        x = (self.lin(x) if not self.is_first or self.is_last else x) + self.bias
        if not self.is_last:
            x = now.dropout(self.norm(x).relu(), self.dropout, self.index + 1)
        return {"x": x}


class SAGE(PlainLayer):
    """``dropout(relu(norm(mean(x) W_l + x W_r + b)))``; the last layer has only the sum."""

    kind = "sage"

    def __init__(self, index: int, spec: Mapping[str, Any]) -> None:
        super().__init__(index, spec)
        if self.is_first:
            self.encode, self.encode_self = self.encoder(), self.encoder()
        if not self.is_first or self.is_last:
            self.lin, self.lin_self = self.linear(self.width), self.linear(self.width)
        self.bias = nn.Parameter(torch.zeros(self.width))
        if not self.is_last:
            self.norm = nn.LayerNorm(self.width)

    def forward(self, values: Values, over: _Aggregate, now: Pass) -> Values:
        """See ``PlainLayer``."""
        pushed = own = values["features" if self.is_first else "x"]
        if self.is_first:
            pushed, own = self.encode(pushed), self.encode_self(own)
        x = over.mean(now.read(self.name, pushed, ""))
        if not self.is_first or self.is_last:
            x, own = self.lin(x), self.lin_self(own)
        x = x + own + self.bias
        if not self.is_last:
            x = now.dropout(self.norm(x).relu(), self.dropout, self.index + 1)
        return {"x": x}


class GCNII(PlainLayer):
    """``dropout(relu(norm((1 - beta) m + beta m W)))``.

    ``m = (1 - alpha) A x + alpha h0`` with ``beta = log(theta / (index + 1) + 1)`` and
    ``h0 = relu(encode(features))``; the first x is ``dropout(h0)``.
    """

    kind = "gcnii"

    def __init__(self, index: int, spec: Mapping[str, Any]) -> None:
        super().__init__(index, spec)
        if self.is_first:
            self.encode = self.encoder(bias=True)
        self.lin, self.norm = self.linear(self.hidden), nn.LayerNorm(self.hidden)
        if self.is_last:
            self.decode = self.linear(self.width, bias=True)

    def forward(self, values: Values, over: _Aggregate, now: Pass) -> Values:
        """See ``PlainLayer``."""
        if self.is_first:
            h0 = self.encode(values["features"]).relu()
            values = {"x": now.dropout(h0, self.dropout, 0), "h0": h0}
        alpha, beta = self.spec["alpha"], math.log(self.spec["theta"] / (self.index + 1) + 1)
        m = (1 - alpha) * over.gcn(now.read(self.name, values["x"], "")) + alpha * values["h0"]
        x = self.norm((1 - beta) * m + beta * self.lin(m)).relu()
        x = now.dropout(x, self.dropout, self.index + 1)
        return {"x": self.decode(x)} if self.is_last else {"x": x, "h0": values["h0"]}


class ResGCN(PlainLayer):
    """``x + A dropout(relu(norm(x))) W + b``; the last layer ends with norm, ReLU and decoder."""

    kind = "resgcn"

    def __init__(self, index: int, spec: Mapping[str, Any]) -> None:
        super().__init__(index, spec)
        if self.is_first:
            self.encode = self.encoder(bias=True)
        self.norm, self.lin = nn.LayerNorm(self.hidden), self.linear(self.hidden)
        self.bias = nn.Parameter(torch.zeros(self.hidden))
        if self.is_last:
            self.norm_out = nn.LayerNorm(self.hidden)
            self.decode = self.linear(self.width, bias=True)

    def forward(self, values: Values, over: _Aggregate, now: Pass) -> Values:
        """See ``PlainLayer``."""
        x = self.encode(values["features"]) if self.is_first else values["x"]
        site = self.spec["num_layers"] + 1 + self.index
        pushed = now.dropout(self.norm(x).relu(), self.dropout, site)
        x = x + self.lin(over.gcn(now.read(self.name, pushed, ""))) + self.bias
        if not self.is_last:
            return {"x": x}
        return {
            "x": self.decode(now.dropout(self.norm_out(x).relu(), self.dropout, self.index + 1))
        }


class GAT(PlainLayer):
    """``dropout(elu(GATConv(x W)))``, with a loop at every vertex; the last layer also decodes."""

    kind = "gat"

    def __init__(self, index: int, spec: Mapping[str, Any]) -> None:
        super().__init__(index, spec)
        if self.is_first:
            self.encode = self.encoder()
        else:
            self.lin = self.linear(self.hidden)
        heads = spec["heads"]
        self.conv = GATConv(self.hidden, self.hidden // heads, heads, add_self_loops=False)
        self.conv.lin = nn.Identity()
        if self.is_last:
            self.decode = self.linear(self.width, bias=True)

    def forward(self, values: Values, over: _Aggregate, now: Pass) -> Values:
        """See ``PlainLayer``."""
        x = self.encode(values["features"]) if self.is_first else self.lin(values["x"])
        x = self.conv((now.read(self.name, x, ""), x), over.edges_with_loops)
        x = now.dropout(F.elu(x), self.dropout, self.index + 1)
        return {"x": self.decode(x) if self.is_last else x}


LAYERS: dict[str, type[PlainLayer]] = {kind.kind: kind for kind in (GCN, SAGE, GCNII, ResGCN, GAT)}


class PlainModel(WholeModel):
    """A stack of built-in layers with the kinds and weights of the run's model."""

    def __init__(
        self,
        graph: WholeGraph,
        kinds: Sequence[str],
        spec: Mapping[str, Any],
        weights: Mapping[str, Tensor],
    ) -> None:
        """``kinds``: the kind of every layer; ``weights`` by name."""
        self._layers = [LAYERS[kind](i, spec) for i, kind in enumerate(kinds)]
        self.module = nn.ModuleDict({"layers": nn.ModuleList(self._layers)})
        self.module.to(graph.features.dtype).load_state_dict(weights)
        self._graph, self._over = graph, _Aggregate(graph)

    def outputs(self, now: Pass) -> Tensor:
        """See ``WholeModel``."""
        values: Values = {"features": self._graph.features}
        for layer in self._layers:
            values = layer(values, self._over, now)
        rows = values["x"]
        if self._graph.pairs is None:
            return rows
        return score_pairs(self._graph.pairs, rows, now.read("pair_scores", rows, "pairs"))


class UserModel(WholeModel):
    """A user's PyG model, called as a user calls it, for passes without stale rows.

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
