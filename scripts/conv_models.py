"""A small model around each convolution of torch_geometric, and graphs for them.

Where PyG has a default for an argument of a convolution, the default is taken, except where the
default needs a library. Functions of pyg-lib that a convolution cannot do without are replaced by
functions of a few lines, if pyg-lib is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch_geometric.typing
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import conv as convs
from torch_geometric.nn.conv import spline_conv

from gnnpipe.graph.graph import Graph

WITHOUT_PYG_LIB = "pyg-lib's function was replaced by one of a few lines"
IN, WIDTH, CLASSES, DIM, TYPES, VERTICES = 7, 8, 3, 2, 3, 40
RELATIONS = (("a", "to", "b"), ("b", "from", "a"), ("b", "near", "b"))


class Host(nn.Module):
    """A convolution between two linear layers."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.encode, self.place = nn.Linear(IN, WIDTH), nn.Linear(IN, 3)
        self.conv, self.decode = conv, nn.LazyLinear(CLASSES)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        h = self.encode(x).relu()
        return self.decode(self.convolved(x, h, edge_index, edge_attr, edge_type))

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        """The convolution's result from features x and hidden rows h."""
        return self.conv(h, edge_index)


class Twice(Host):
    """Hidden rows are given twice: as rows and as the first rows."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, h, edge_index)


class Placed(Host):
    """Positions of vertices are computed from their features."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, self.place(x), edge_index)


class Attributed(Host):
    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, edge_index, edge_attr)


class Typed(Host):
    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, edge_index, edge_type)


class Layered(Host):
    """The convolution reads two layers of hidden rows [N, 2, F]."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(torch.stack([h, h.tanh()], dim=1), edge_index)


class WithNormals(Host):
    """Positions and normals are columns of the features."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, x[:, :3], x[:, 3:6], edge_index)


class OfTypes(Host):
    """Types of the vertices are made of a column of the features."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, edge_index, (x[:, 0] > 0).long(), edge_type, edge_attr)


class Signed(Host):
    """An attribute's sign divides the edges."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        is_positive = edge_attr[:, 0] > 0
        return self.conv(h, edge_index[:, is_positive], edge_index[:, ~is_positive])


class Hyper(Host):
    """Edges lead from vertices to hyperedges, of which there are at most as many."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, edge_index, num_edges=x.size(0))


class Mesh(Host):
    """Each vertex has four edges, whose order is their attribute."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        order = (edge_index[0] + edge_attr[:, 0] / 4).argsort()
        return self.conv(h, edge_index[:, order])


class Coloured(Host):
    """Hidden rows are embeddings of the colours that the convolution finds."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__(conv)
        self.embed = nn.Embedding(2 * VERTICES, WIDTH)

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return h + self.embed(self.conv((x[:, 0] > 0).long(), edge_index))


class Neighbourless(Host):
    """The convolution finds neighbours by itself."""

    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h)


class OfPoints(Host):
    def convolved(self, x: Any, h: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        return self.conv(h, x[:, :3])


class OwnConv(convs.MessagePassing):
    """A convolution of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """[N, WIDTH]."""
        found: Tensor = self.propagate(edge_index, x=x)
        return found

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        """[E, WIDTH]."""
        found: Tensor = self.lin(torch.cat([x_i, x_j], dim=1)).tanh()
        return found


class TypedHost(nn.Module):
    """A convolution over two types of vertices."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.encode = nn.ModuleDict({name: nn.Linear(IN, WIDTH) for name in "ab"})
        self.conv, self.decode = conv, nn.Linear(WIDTH, CLASSES)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        h = {name: self.encode[name](x) for name, x in x_dict.items()}
        return self.decode(self.conv(h, edge_index_dict)["b"])


HOSTS: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("GCN2Conv", "FAConv"), Twice),
    **dict.fromkeys(("PointNetConv", "PointTransformerConv", "PointGNNConv"), Placed),
    **dict.fromkeys(("GINEConv", "GMMConv", "NNConv", "PDNConv", "SplineConv"), Attributed),
    **dict.fromkeys(("RGCNConv", "FastRGCNConv", "RGATConv"), Typed),
    **dict.fromkeys(("HeteroConv", "HANConv", "HGTConv"), TypedHost),
    **dict.fromkeys(("DynamicEdgeConv", "GravNetConv"), Neighbourless),
    "DNAConv": Layered,
    "PPFConv": WithNormals,
    "HEATConv": OfTypes,
    "SignedConv": Signed,
    "HypergraphConv": Hyper,
    "MeshCNNConv": Mesh,
    "WLConv": Coloured,
    "XConv": OfPoints,
}
"""Models around convolutions that take more than rows and edges."""


def linear(inside: int, outside: int = WIDTH) -> nn.Module:
    return nn.Linear(inside, outside)


META = (["a", "b"], list(RELATIONS))
DEGREES = torch.tensor([1, 5, 9, 4, 2])
MAKE: dict[str, Callable[[Any], nn.Module]] = {
    "MessagePassing": lambda c: OwnConv(),
    "SimpleConv": lambda c: c(),
    "ChebConv": lambda c: c(WIDTH, WIDTH, K=3),
    "GatedGraphConv": lambda c: c(WIDTH, num_layers=2),
    "AGNNConv": lambda c: c(),
    "GINConv": lambda c: c(linear(WIDTH)),
    "SSGConv": lambda c: c(WIDTH, WIDTH, alpha=0.1),
    "APPNP": lambda c: c(K=2, alpha=0.1),
    "DNAConv": lambda c: c(WIDTH),
    "PointNetConv": lambda c: c(linear(WIDTH + 3), linear(WIDTH)),
    "CGConv": lambda c: c(WIDTH),
    "EdgeConv": lambda c: c(linear(2 * WIDTH)),
    "PNAConv": lambda c: c(
        WIDTH, WIDTH, aggregators=["mean", "std"], scalers=["amplification"], deg=DEGREES
    ),
    "GCN2Conv": lambda c: c(WIDTH, alpha=0.1),
    "WLConv": lambda c: c(),
    "WLConvContinuous": lambda c: c(),
    "FAConv": lambda c: c(WIDTH),
    "EGConv": lambda c: c(WIDTH, WIDTH),
    "LGConv": lambda c: c(),
    "PointGNNConv": lambda c: c(linear(WIDTH, 3), linear(WIDTH + 3), linear(WIDTH)),
    "GPSConv": lambda c: c(WIDTH, None),
    "AntiSymmetricConv": lambda c: c(WIDTH),
    "GINEConv": lambda c: c(linear(WIDTH), edge_dim=DIM),
    "GMMConv": lambda c: c(WIDTH, WIDTH, dim=DIM, kernel_size=2),
    "NNConv": lambda c: c(WIDTH, WIDTH, linear(DIM, WIDTH * WIDTH)),
    "PDNConv": lambda c: c(WIDTH, WIDTH, edge_dim=DIM, hidden_channels=WIDTH),
    "RGCNConv": lambda c: c(WIDTH, WIDTH, TYPES),
    "FastRGCNConv": lambda c: c(WIDTH, WIDTH, TYPES),
    "RGATConv": lambda c: c(WIDTH, WIDTH, TYPES),
    "DirGNNConv": lambda c: c(convs.SAGEConv(WIDTH, WIDTH)),
    "PPFConv": lambda c: c(linear(WIDTH + 4), linear(WIDTH)),
    "HEATConv": lambda c: c(WIDTH, WIDTH, 2, TYPES, 4, DIM, 4),
    "SignedConv": lambda c: c(WIDTH, WIDTH, first_aggr=True),
    "SplineConv": lambda c: c(WIDTH, WIDTH, dim=DIM, kernel_size=3),
    "DynamicEdgeConv": lambda c: c(linear(2 * WIDTH), k=3),
    "GravNetConv": lambda c: c(WIDTH, WIDTH, 2, WIDTH, k=3),
    "XConv": lambda c: c(WIDTH, WIDTH, dim=3, kernel_size=3),
    "HeteroConv": lambda c: c({r: convs.SAGEConv((WIDTH, WIDTH), WIDTH) for r in RELATIONS}),
    "HANConv": lambda c: c(WIDTH, WIDTH, META),
    "HGTConv": lambda c: c(WIDTH, WIDTH, META),
}
"""Convolutions that are not made of the widths of their rows alone."""


def make_model(name: str) -> tuple[nn.Module, Graph]:
    """The model around a convolution of torch_geometric, with the same weights each time.

    With the graph on which it is trained.
    """
    replace_pyg_lib()
    torch.manual_seed(0)
    conv = MAKE.get(name, lambda c: c(WIDTH, WIDTH))(getattr(convs, name))
    model, data = HOSTS.get(name, Host)(conv), make_data(name)
    with torch.no_grad():
        model.eval()(*inputs_of(data, torch.float32))  # lazy layers take their widths
    return model.train(), Graph.from_pyg(data, target="b" if isinstance(data, HeteroData) else None)


def inputs_of(data: Data | HeteroData, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of a model's forward."""
    if isinstance(data, HeteroData):
        return {k: x.to(dtype) for k, x in data.x_dict.items()}, data.edge_index_dict
    return data.x.to(dtype), data.edge_index, data.edge_attr.to(dtype), data.edge_type


def make_data(name: str) -> Data | HeteroData:
    """The graph on which the model around a convolution is trained, as PyG has it."""
    rng = np.random.default_rng(0)
    if HOSTS.get(name) is TypedHost:
        return _typed_data(rng)
    if name == "MeshCNNConv":
        source = np.repeat(np.arange(VERTICES), 4)
        target = (source + np.tile([5, 15, 25, 35], VERTICES)) % VERTICES
    else:
        dense = rng.random((VERTICES, VERTICES)) < 0.1
        np.fill_diagonal(dense, False)
        dense[0] = dense[:, 0] = False
        source, target = np.nonzero(dense)
    low = 0.0 if name in ("SplineConv", "GMMConv") else -1.0
    edge_attr = rng.uniform(low, 1, (len(source), DIM)).astype(np.float32)
    if name == "MeshCNNConv":
        edge_attr[:, 0] = np.argsort(rng.random((VERTICES, 4))).flatten()
    return Data(
        **_vertices(rng),
        edge_index=torch.from_numpy(np.stack([source, target])),
        edge_attr=torch.from_numpy(edge_attr),
        edge_type=torch.from_numpy(rng.integers(0, TYPES, len(source))),
    )


def _vertices(rng: np.random.Generator, count: int = VERTICES) -> dict[str, Tensor]:
    """Features, labels and masks."""
    x = rng.standard_normal((count, IN)).astype(np.float32)
    part = rng.permutation(count) % 3
    masks = {f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))}
    found = {"x": x, "y": rng.integers(0, CLASSES, count), **masks}
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _typed_data(rng: np.random.Generator) -> HeteroData:
    data, counts = HeteroData(), {"a": VERTICES // 2, "b": VERTICES}
    data["b"].update(_vertices(rng))
    data["a"].x = _vertices(rng, counts["a"])["x"]
    for source, name, target in RELATIONS:
        dense = rng.random((counts[source], counts[target])) < 0.1
        data[source, name, target].edge_index = torch.from_numpy(np.stack(np.nonzero(dense)))
    return data


def _nearest(
    x: Tensor, y: Tensor, ptr_x: Any, ptr_y: Any, k: int, cosine: bool, num_workers: int
) -> Tensor:
    """[2, len(y) k], numbers in y and in x of the k nearest rows."""
    found = torch.cdist(y, x).topk(k, largest=False).indices
    return torch.stack([torch.arange(len(y)).repeat_interleave(k), found.flatten()])


def _spline_basis(place: Tensor, sizes: Tensor, is_open: Tensor, degree: int) -> Any:
    """Values [E, 2^D] and numbers [E, 2^D] of linear B-splines over open cubes [0, 1]^D."""
    scaled = place * (sizes - is_open)
    corners = torch.cartesian_prod(*[torch.arange(2)] * place.shape[1])
    low = scaled.floor()
    share = (scaled - low)[:, None]
    values = torch.where(corners.bool(), share, 1 - share).prod(-1)
    numbers = (low[:, None].long() + corners) % sizes
    strides = torch.cat([sizes.new_ones(1), sizes.cumprod(0)[:-1]])
    return values, (numbers * strides).sum(-1)


def _spline_weighting(x: Tensor, weight: Tensor, basis: Tensor, index: Tensor) -> Tensor:
    return torch.einsum("ei,es,esio->eo", x, basis, weight[index])


def replace_pyg_lib() -> None:
    """Put functions of a few lines in the place of pyg-lib's, unless pyg-lib is there."""
    if not torch_geometric.typing.WITH_KNN:
        torch.ops.pyg.knn = _nearest
        torch_geometric.typing.WITH_KNN = True
    if spline_conv.spline_basis is None:
        spline_conv.spline_basis = _spline_basis
        spline_conv.spline_weighting = _spline_weighting
