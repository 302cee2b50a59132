"""Models as users of PyG write them, and what a careful user adds by hand to make them fast.

``MODELS`` makes the modules; ``even_out`` gives one of them, without changing its losses, a matrix
product with a kept transpose in place of messages where PyG can use one, and products of sparse
features with the first linear maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg

from gnnpipe import Graph

LAYERS, WIDTH, NARROW, HEADS, EDGE_WIDTH, DROPOUT = 3, 128, 64, 4, 8, 0.5


class Convs(nn.Module):
    """OGB's GCN and SAGE, and GIN: convolutions, each but the last with BatchNorm and ReLU."""

    def __init__(self, conv: Callable[[int, int], nn.Module], features: int, classes: int) -> None:
        super().__init__()
        widths = [features, *[WIDTH] * (LAYERS - 1), classes]
        self.convs = nn.ModuleList(conv(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.convs[1:])

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            x = F.dropout(F.relu(norm(conv(x, edge_index))), DROPOUT, self.training)
        return self.convs[-1](x, edge_index)


class Classic(nn.Module):
    """A "classic GNN" (arXiv 2406.08993): GCN with a linear residual, BatchNorm, and a head."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        pairs = list(pairwise([features, *[WIDTH] * LAYERS]))
        self.convs = nn.ModuleList(pyg.GCNConv(a, b, cached=True) for a, b in pairs)
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in pairs)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        for conv, lin, norm in zip(self.convs, self.lins, self.norms, strict=True):
            x = F.relu(norm(conv(x, edge_index) + lin(x)))
            x = F.dropout(x, DROPOUT, self.training)
        return self.head(x)


class Encoded(nn.Module):
    """An encoder, convolutions with LayerNorm and a residual, and a head."""

    def __init__(self, conv: Callable[[], nn.Module], width: int, features: int, classes: int):
        super().__init__()
        self.encode, self.head = nn.Linear(features, width), nn.Linear(width, classes)
        self.convs = nn.ModuleList(conv() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(LAYERS))

    def forward(self, x: Any, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
        x, more = self.encode(x), () if edge_attr is None else (edge_attr,)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = F.relu(norm(conv(x, edge_index, *more)))
            x = x + F.dropout(h, DROPOUT, self.training)
        return self.head(x)


class Deeper(nn.Module):
    """DeeperGCN (arXiv 2006.07739): blocks "res+" of GENConv with a learned softmax."""

    def __init__(self, features: int, classes: int, edge_dim: int | None = None) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(features, NARROW), nn.Linear(NARROW, classes)
        given = {"aggr": "softmax", "learn_t": True, "norm": "layer", "edge_dim": edge_dim}
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(
                pyg.GENConv(NARROW, NARROW, **given),
                nn.LayerNorm(NARROW),
                nn.ReLU(),
                "res+",
                DROPOUT,
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: Any, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
        more = () if edge_attr is None else (edge_attr,)
        x = self.layers[0].conv(self.encode(x), edge_index, *more)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, *more)
        x = F.relu(self.layers[0].norm(x))
        return self.head(F.dropout(x, DROPOUT, self.training))


def _gin(a: int, b: int) -> nn.Module:
    inner = nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b))
    return pyg.GINConv(inner)


def _pna(graph: Graph) -> Callable[[], nn.Module]:
    deg = torch.from_numpy(np.bincount(graph.degrees))
    scalers = ["identity", "amplification", "attenuation"]
    return lambda: pyg.PNAConv(NARROW, NARROW, ["mean", "min", "max", "std"], scalers, deg)


def _gatv2() -> nn.Module:
    each = WIDTH // HEADS
    return pyg.GATv2Conv(WIDTH, each, HEADS, edge_dim=EDGE_WIDTH, add_self_loops=False)


MODELS: dict[str, Callable[[Graph], nn.Module]] = {
    "gcn": lambda g: Convs(lambda a, b: pyg.GCNConv(a, b, cached=True), *_sizes(g)),
    "sage": lambda g: Convs(pyg.SAGEConv, *_sizes(g)),
    "classic": lambda g: Classic(*_sizes(g)),
    "gin": lambda g: Convs(_gin, *_sizes(g)),
    "gatv2 with edge features": lambda g: Encoded(_gatv2, WIDTH, *_sizes(g)),
    "deepergcn": lambda g: Deeper(*_sizes(g)),
    "deepergcn with edge features": lambda g: Deeper(*_sizes(g), EDGE_WIDTH),
    "pna": lambda g: Encoded(_pna(g), NARROW, *_sizes(g)),
}


def make_model(graph: Graph, *, name: str) -> nn.Module:
    """One of ``MODELS``, for ``--model scripts/users_models.py:make_model --model-args``."""
    return MODELS[name](graph)


def _sizes(graph: Graph) -> tuple[int, int]:
    return graph.num_features, graph.num_classes


def with_edge_features(graph: Graph) -> Graph:
    """The graph with random edge features."""
    drawn = np.random.default_rng(0).standard_normal((graph.num_edges, EDGE_WIDTH))
    return graph.with_edge_data({"edge_attr": drawn.astype(np.float32)})


class _Product(torch.autograd.Function):
    """``matrix @ rows``, with the transposed matrix for backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        return matrix @ rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed @ grads[0], None, None


def even_out(model: nn.Module, graph: Graph) -> Any:
    """Make a model fast by hand; returns the adjacency to call it with."""
    if not isinstance(graph.x, np.ndarray):
        _multiply_sparse_features(model, _tensors(graph.x))
    convs = [m for m in model.modules() if isinstance(m, pyg.MessagePassing)]
    if not all(isinstance(m, pyg.GCNConv | pyg.SAGEConv | pyg.GINConv) for m in convs):
        return torch.from_numpy(graph.edge_index)
    n, is_gcn = graph.num_vertices, isinstance(convs[0], pyg.GCNConv)
    graph = graph.without_self_loops() if is_gcn else graph
    a = sp.csr_array((np.ones(graph.num_edges, np.float32), graph.indices, graph.indptr), (n, n))
    if isinstance(convs[0], pyg.SAGEConv):
        a = sp.diags_array(1 / np.maximum(a.sum(1), 1)) @ a
    elif is_gcn:
        a = a + sp.eye_array(n, dtype=np.float32)
        root = sp.diags_array(1 / np.sqrt(a.sum(1)))
        a = root @ a @ root
    both = _tensors(a)
    for conv in convs:
        conv.normalize = False
        is_pair = not isinstance(conv, pyg.GCNConv)
        conv.message_and_aggregate = (
            (lambda _, x: _Product.apply(x[0], *both))
            if is_pair
            else (lambda _, x: _Product.apply(x, *both))
        )
    if not isinstance(graph.x, np.ndarray):
        _map_first(convs[0], both)
    return both[0]


def _tensors(matrix: Any) -> tuple[Tensor, Tensor]:
    """A matrix and its transpose."""

    def tensor(of: Any) -> Tensor:
        of = sp.csr_array(of, dtype=np.float32)
        parts = (of.indptr.astype(np.int64), of.indices.astype(np.int64), of.data)
        return torch.sparse_csr_tensor(*map(torch.from_numpy, parts), size=of.shape)

    return tensor(matrix), tensor(sp.csr_array(matrix).T)


def _first_linears(model: nn.Module) -> Iterator[Any]:
    """The linear maps of the features."""
    if hasattr(model, "encode"):
        yield model.encode
        return
    conv = model.convs[0]
    if isinstance(conv, pyg.GINConv):
        yield conv.nn[0]
    elif isinstance(conv, pyg.SAGEConv):
        yield from (conv.lin_l, conv.lin_r)
    else:
        yield conv.lin
    if isinstance(model, Classic):
        yield model.lins[0]


def _multiply_sparse_features(model: nn.Module, features: tuple[Tensor, Tensor]) -> None:
    for linear in _first_linears(model):

        def forward(_: Tensor, own: Any = linear) -> Tensor:
            made = _Product.apply(own.weight.t(), *features)
            return made if own.bias is None else made + own.bias

        linear.forward = forward


def _map_first(conv: Any, both: tuple[Tensor, Tensor]) -> None:
    """Let the first convolution aggregate the mapped features in place of the wide ones."""
    if isinstance(conv, pyg.SAGEConv):
        # The bias of the left map is added once behind the mean, whose weights add up to 1 or 0.
        def sage(*_: Any) -> Tensor:
            left = conv.lin_l(None)
            bias = conv.lin_l.bias
            return _Product.apply(left - bias, *both) + bias + conv.lin_r(None)

        conv.forward = sage
    elif isinstance(conv, pyg.GINConv):

        def gin(*_: Any) -> Tensor:
            first, *rest = conv.nn
            made = first(None) - first.bias
            made = _Product.apply(made, *both) + (1 + conv.eps) * made + first.bias
            return nn.Sequential(*rest)(made)

        conv.forward = gin
