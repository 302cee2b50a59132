"""How every convolution of torch_geometric runs here: docs/reference/convolutions.md.

python scripts/conv_table.py            # write the page
python scripts/conv_table.py --check    # exit code 1 if the page is not what would be written

Each convolution is put into a small model between two linear layers and captured, which compares
it with plain PyG; what cannot be captured is listed with the reason that a user would be given.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric
from torch import nn
from torch_geometric.nn import conv as convs

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark_files import write_page  # noqa: E402

from gnnpipe.capture import capture  # noqa: E402
from gnnpipe.errors import InputError  # noqa: E402
from gnnpipe.graph.graph import Graph  # noqa: E402
from gnnpipe.graph.types import VertexTypes  # noqa: E402
from gnnpipe.models.gat_attention import is_additive  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "convolutions.md"
WIDTH, DIM, TYPES = 8, 2, 3
NEEDS = {
    **dict.fromkeys(("GINEConv", "GMMConv", "NNConv", "PDNConv"), "edge_attr"),
    **dict.fromkeys(("RGCNConv", "FastRGCNConv", "RGATConv"), "edge_type"),
}
"""Convolutions that cannot do without what edges carry."""
GRAPH = Graph(
    "edges",
    np.array([0, 1, 1]),
    np.ones(1, np.int32),
    np.zeros((2, 7), np.float32),
    np.zeros(2, np.int64),
    *[np.ones(2, bool)] * 3,
    1,
    edge_attr=np.zeros((1, DIM), np.float32),
    edge_type=np.array([TYPES - 1]),
)
"""What kinds of numbers its vertices and edges carry is all that matters."""
RELATIONS = (("a", "to", "b"), ("b", "from", "a"), ("b", "near", "b"))
TYPED = replace(
    GRAPH,
    edge_attr=None,
    edge_type=np.array([0]),
    types=VertexTypes(
        ("a", "b"),
        np.array([0, 0]),
        np.array([0, 1]),
        {"a": np.zeros((2, 7), np.float32), "b": np.zeros((0, 7), np.float32)},
        RELATIONS,
        "b",
    ),
)
OF_TYPES: dict[str, Callable[[], nn.Module]] = {
    "HeteroConv": lambda: convs.HeteroConv(
        {r: convs.SAGEConv((WIDTH, WIDTH), WIDTH) for r in RELATIONS}
    ),
    "HANConv": lambda: convs.HANConv(WIDTH, WIDTH, (["a", "b"], list(RELATIONS)), heads=2),
    "HGTConv": lambda: convs.HGTConv(WIDTH, WIDTH, (["a", "b"], list(RELATIONS)), heads=2),
}
"""Convolutions over several types of vertices."""

NOT_ASKED = {
    "MessagePassing": "the base class: a subclass of your own runs unchanged",
    "CuGraphSAGEConv": "needs the cugraph library and its own graph format",
    "CuGraphGATConv": "needs the cugraph library and its own graph format",
    "CuGraphRGCNConv": "needs the cugraph library and its own graph format",
    "FusedGATConv": "needs the dgNN library and its own graph format; use GATConv, which computes "
    "the same",
    "GravNetConv": "builds its graph from the features of all vertices",
    "DynamicEdgeConv": "builds its graph from the features of all vertices",
    "XConv": "builds its graph from the positions of all vertices",
    "PANConv": "needs torch_sparse, and works on powers of the whole adjacency",
    "HypergraphConv": "takes a hypergraph",
    "SignedConv": "takes two edge lists",
    "HEATConv": "needs one `x` of all types, and the type of every vertex",
    "WLConv": "counts colours of vertices; nothing to train",
    "SplineConv": "needs the pyg-lib library",
    "PPFConv": "takes positions and normals; pass them as features and split them in `forward`",
    "MeshCNNConv": "takes a mesh: its vertices are edges with four neighbours in a fixed order",
}
"""Convolutions that are not tried, and why."""


def linear(inside: int, outside: int = WIDTH) -> nn.Module:
    return nn.Linear(inside, outside)


DEGREES = torch.tensor([1, 5, 9, 4, 2])
MAKE: dict[str, Callable[[Any], nn.Module]] = {
    "SimpleConv": lambda c: c("mean"),
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
    "PointTransformerConv": lambda c: c(WIDTH, WIDTH),
    "PNAConv": lambda c: c(
        WIDTH, WIDTH, aggregators=["mean", "std"], scalers=["amplification"], deg=DEGREES
    ),
    "GENConv": lambda c: c(WIDTH, WIDTH, norm="layer"),
    "GCN2Conv": lambda c: c(WIDTH, alpha=0.1),
    "WLConvContinuous": lambda c: c(),
    "FAConv": lambda c: c(WIDTH),
    "EGConv": lambda c: c(WIDTH, WIDTH, num_heads=2),
    "LGConv": lambda c: c(),
    "PointGNNConv": lambda c: c(linear(WIDTH, 3), linear(WIDTH + 3), linear(WIDTH)),
    "GPSConv": lambda c: c(WIDTH, None, heads=2),
    "AntiSymmetricConv": lambda c: c(WIDTH),
    "GINEConv": lambda c: c(linear(WIDTH), edge_dim=DIM),
    "GMMConv": lambda c: c(WIDTH, WIDTH, dim=DIM, kernel_size=2),
    "NNConv": lambda c: c(WIDTH, WIDTH, linear(DIM, WIDTH * WIDTH)),
    "PDNConv": lambda c: c(WIDTH, WIDTH, edge_dim=DIM, hidden_channels=WIDTH),
    "RGCNConv": lambda c: c(WIDTH, WIDTH, TYPES),
    "FastRGCNConv": lambda c: c(WIDTH, WIDTH, TYPES),
    "RGATConv": lambda c: c(WIDTH, WIDTH, TYPES),
    "DirGNNConv": lambda c: c(convs.SAGEConv(WIDTH, WIDTH)),
}


class Host(nn.Module):
    """A convolution between two linear layers."""

    def __init__(self, name: str, conv: nn.Module) -> None:
        super().__init__()
        self.name, self.conv = name, conv
        self.encode, self.place = nn.Linear(7, WIDTH), nn.Linear(7, 3)
        self.decode = nn.LazyLinear(3)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any, edge_type: Any) -> Any:
        h = self.encode(x).relu()
        if self.name in ("GCN2Conv", "FAConv"):
            h = self.conv(h, h, edge_index)
        elif self.name in ("PointNetConv", "PointTransformerConv", "PointGNNConv"):
            h = self.conv(h, self.place(x), edge_index)
        elif self.name in NEEDS:
            carried = edge_attr if NEEDS[self.name] == "edge_attr" else edge_type
            h = self.conv(h, edge_index, carried)
        elif self.name == "DNAConv":
            h = self.conv(torch.stack([h, h.tanh()], dim=1), edge_index)
        else:
            h = self.conv(h, edge_index)
        return self.decode(h)


class TypedHost(nn.Module):
    """A convolution over two types of vertices."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.encode = nn.ModuleDict({name: nn.Linear(7, WIDTH) for name in "ab"})
        self.conv, self.decode = conv, nn.Linear(WIDTH, 3)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        h = {name: self.encode[name](x) for name, x in x_dict.items()}
        return self.decode(self.conv(h, edge_index_dict)["b"])


def row(name: str) -> tuple[str, str]:
    """How a convolution runs, and what there is to say of it."""
    if name in NOT_ASKED:
        return "does not apply", NOT_ASKED[name]
    kind = getattr(convs, name)
    torch.manual_seed(0)
    try:
        if name in OF_TYPES:
            found = capture(TypedHost(OF_TYPES[name]()), TYPED).recording
        else:
            model = Host(name, MAKE.get(name, lambda c: c(WIDTH, WIDTH))(kind))
            found = capture(model, GRAPH).recording
    except InputError as error:
        return "not recorded", str(error).removeprefix("model: ").split(" (/")[0].split(". It may")[
            0
        ]
    forms = {found.facts[op].form for op in found.ops} - {None}
    many = sum(map(found.aggregates, found.ops))
    hops = "1 aggregation" if many == 1 else f"{many} aggregations"
    if name in OF_TYPES:
        how = "lowered, each relation by its own convolution"
        if name != "HeteroConv":
            how = "relation by relation, each attention on blocks"
        return how, f"{hops} for {len(RELATIONS)} relations"
    if not forms:
        return "lowered", hops
    form = forms.pop()
    words = {"pair": "called on a pair", "square": "called on the whole block"}[form]
    modules = found.model.modules()
    is_known = form == "pair" and any(map(is_additive, modules))
    return "without messages" if is_known else "unchanged", f"{hops}, {words}"


def page() -> str:
    """The whole page."""
    version = ".".join(torch_geometric.__version__.split(".")[:2])
    lines = [
        "# How each PyG convolution runs",
        "",
        f"This page says for every convolution of torch_geometric {version} whether gnnpipe runs "
        "it, and how. Each convolution was put into a small model, which was compared with plain "
        "PyG. `scripts/conv_table.py` writes the page.",
        "",
        "- *lowered*: becomes row-wise work and sparse products with a fixed matrix. For some "
        "arguments such a convolution runs unchanged instead.",
        "- *unchanged*: PyG's own module runs on a block: the rows of a chunk and their "
        "neighbours. *Called on a pair*: its input is the pair (rows of the block, rows of the "
        "chunk), as for bipartite graphs. *Called on the whole block*: it takes no pair, so it "
        "computes all rows of the block, and those of the chunk are kept.",
        "- *without messages*: runs on a block, by a "
        "[kernel of gnnpipe](../adr/0024-attention-without-messages.md) that makes no tensor with "
        "a row for each edge.",
        "- *not recorded*: would give other results when it is computed chunk by chunk. A model "
        "with it runs as it is on one rank in one chunk, as in plain PyG, and is refused "
        "otherwise. The note is the message.",
        "- *does not apply*: needs another kind of input, or a library.",
        "- *n aggregations*: how often the convolution aggregates neighbours.",
        "",
        "Arguments matter: `SAGEConv` with `max` aggregation runs unchanged. With an LSTM it is "
        "not recorded, because PyG pads sequences to the largest degree.",
        "",
        "| convolution | how | notes |",
        "|---|---|---|",
    ]
    for name in sorted(convs.__all__):
        how, note = row(name)
        lines.append(f"| {name} | {how} | {note} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    warnings.simplefilter("ignore")
    return write_page(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
