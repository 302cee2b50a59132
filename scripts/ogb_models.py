"""Architectures of OGB's leaderboards in plain PyG, each made from the flags of scripts/ogbn_*.py.

Formulas are those of the papers; where a published program does something else, the page
docs/leaderboard.md says so.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg

from gnnpipe import Graph

NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": lambda width: nn.Identity()}


def perceptron(width_in: int, width: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, width), nn.ReLU(), nn.Linear(width, width_out))


def attention(kind: type, a: int, b: int, is_last: bool, args: Namespace) -> nn.Module:
    """An attention of ``args.heads`` heads: joined to width ``b``, in the last layer averaged."""
    width = b if is_last else b // args.heads
    more = {"dropout": args.attn_dropout, "concat": not is_last}
    return kind(a, width, heads=args.heads, **more)


CONVS = {
    "gcn": lambda a, b, last, args: pyg.GCNConv(a, b),
    "sage": lambda a, b, last, args: pyg.SAGEConv(a, b),
    "gat": partial(attention, pyg.GATConv),
    "gatv2": partial(attention, pyg.GATv2Conv),
    "gin": lambda a, b, last, args: pyg.GINConv(perceptron(a, args.hidden_channels, b)),
    "tag": lambda a, b, last, args: pyg.TAGConv(a, b, K=args.hops),
    "arma": lambda a, b, last, args: pyg.ARMAConv(a, b),
}


class Stack(nn.Module):
    """Convolutions with norm, ReLU and dropout between them.

    The switches are those of "Classic GNNs are Strong Baselines" (arXiv 2406.08993): ``residual``
    adds a linear map of each layer's input, ``jk`` joins the outputs of all layers, and ``head``
    ends with a linear map in place of a convolution.
    """

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.has_head = args.head or args.jk != "none"
        widths = [num_features, *[hidden] * (args.num_layers - 1)]
        widths.append(hidden if self.has_head else num_outputs)
        pairs = list(pairwise(widths))
        last = [i == len(pairs) - 1 and not self.has_head for i in range(len(pairs))]
        conv = CONVS[args.model]
        self.convs = nn.ModuleList(
            conv(a, b, end, args) for (a, b), end in zip(pairs, last, strict=True)
        )
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in pairs) if args.residual else None
        self.norms = nn.ModuleList(
            NORMS[args.norm](b) for _, b in pairs[: None if self.has_head else -1]
        )
        if self.has_head:
            joined = hidden * (args.num_layers if args.jk == "cat" else 1)
            self.head = nn.Linear(joined, num_outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.args.input_dropout, self.training)
        kept = []
        for i, conv in enumerate(self.convs):
            h = conv(x, edge_index)
            if self.lins is not None:
                h = h + self.lins[i](x)
            if i == len(self.norms):
                return h
            x = F.dropout(self.norms[i](h).relu(), self.args.dropout, self.training)
            kept.append(x)
        if self.args.jk == "cat":
            x = torch.cat(kept, dim=-1)
        elif self.args.jk == "sum":
            x = sum(kept[1:], kept[0])
        elif self.args.jk == "max":
            x = torch.stack(kept).max(dim=0).values
        return self.head(x)


class Mlp(nn.Module):
    """A perceptron with a norm, ReLU and dropout after each layer but the last; no edges."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        widths = [num_features, *[hidden] * (args.num_layers - 1), num_outputs]
        self.lins = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.norms = nn.ModuleList(NORMS[args.norm](hidden) for _ in self.lins[1:])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for lin, norm in zip(self.lins[:-1], self.norms, strict=True):
            x = F.dropout(norm(lin(x)).relu(), self.args.dropout, self.training)
        return self.lins[-1](x)


class GCNII(nn.Module):
    """H' = relu(((1 - a) P H + a H0)((1 - b) I + b W)), b = log(theta / layer + 1): 2007.02133."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_outputs)
        self.convs = nn.ModuleList(
            pyg.GCN2Conv(hidden, args.alpha, args.theta, i + 1, shared_weights=False)
            for i in range(args.num_layers)
        )
        self.norms = nn.ModuleList(NORMS[args.norm](hidden) for _ in self.convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = first = self.encode(x).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(x, self.args.dropout, self.training)
            x = norm(conv(x, first, edge_index)).relu()
        return self.decode(F.dropout(x, self.args.dropout, self.training))


class DeeperGCN(nn.Module):
    """Layers h + conv(dropout(relu(norm(h)))) of GENConv or GCNConv: arXiv 2006.07739, "res+"."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_outputs)
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(
                block_conv(hidden, args), NORMS[args.norm](hidden), nn.ReLU(), "res+", args.dropout
            )
            for _ in range(args.num_layers)
        )
        self.norm = NORMS[args.norm](hidden)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x, more = self.encode(x), () if edge_attr is None else (edge_attr,)
        x = self.layers[0].conv(x, edge_index, *more)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, *more)
        x = F.dropout(self.norm(x).relu(), self.args.dropout, self.training)
        return self.decode(x)


def block_conv(width: int, args: Namespace) -> nn.Module:
    """The convolution inside a block of width ``width``."""
    if args.conv == "gen":
        more = {"num_layers": args.mlp_layers, "norm": args.norm, "edge_dim": args.edge_dim}
        return pyg.GENConv(width, width, args.aggr, t=args.t, learn_t=args.learn_t, **more)
    if args.conv == "gat":
        return pyg.GATConv(width, width // args.heads, args.heads, dropout=args.attn_dropout)
    return {"gcn": pyg.GCNConv, "sage": pyg.SAGEConv}[args.conv](width, width)


class RevBlock(nn.Module):
    """norm, ReLU, dropout and a convolution, on one group of channels."""

    def __init__(self, width: int, args: Namespace) -> None:
        super().__init__()
        self.norm, self.conv = NORMS[args.norm](width), block_conv(width, args)
        self.dropout = args.dropout

    def forward(self, x: Tensor, edge_index: Tensor, *more: Tensor) -> Tensor:
        x = F.dropout(self.norm(x).relu(), self.dropout, self.training)
        return self.conv(x, edge_index, *more)


class RevGNN(nn.Module):
    """Reversible blocks over groups of channels: arXiv 2106.07476.

    The blocks are not reversed in backward, which would draw other dropout masks; ``--recompute``
    saves memory in its place.
    """

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_outputs)
        self.norm = NORMS[args.norm](hidden)
        self.blocks = nn.ModuleList(
            pyg.GroupAddRev(
                RevBlock(hidden // args.groups, args), num_groups=args.groups, disable=True
            )
            for _ in range(args.num_layers)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        x, more = self.encode(x), () if edge_attr is None else (edge_attr,)
        for block in self.blocks:
            x = block(x, edge_index, *more)
        x = F.dropout(self.norm(x).relu(), self.args.dropout, self.training)
        return self.decode(x)


class Propagated(nn.Module):
    """A perceptron, then hops of the normalised adjacency P over its logits Z.

    appnp: Z <- (1 - a) P Z + a Z0 (arXiv 1810.05997). dagnn: the sum of sigmoid(s P^k Z) P^k Z over
    the hops k (arXiv 2007.09296).
    """

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        self.mlp, self.args = Mlp(num_features, num_outputs, args), args
        self.is_gated = args.model == "dagnn"
        if self.is_gated:
            self.hops = nn.ModuleList(pyg.APPNP(1, 0.0) for _ in range(args.hops))
            self.gate = nn.Linear(num_outputs, 1)
        else:
            self.hops = pyg.APPNP(args.hops, args.alpha)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.mlp(x, edge_index)
        if not self.is_gated:
            return self.hops(x, edge_index)
        found = self.gate(x).sigmoid() * x
        for hop in self.hops:
            x = hop(x, edge_index)
            found = found + self.gate(x).sigmoid() * x
        return found


class SGC(nn.Module):
    """P^K X, then a perceptron as in OGB's example (one layer: SGC of arXiv 1902.07153)."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        self.hops, self.mlp = pyg.APPNP(args.hops, 0.0), Mlp(num_features, num_outputs, args)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.mlp(self.hops(x, edge_index), edge_index)


class Sign(nn.Module):
    """A linear map of each P^k X, joined and mapped to logits: arXiv 2004.11198."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.hops = nn.ModuleList(pyg.APPNP(1, 0.0) for _ in range(args.hops))
        self.lins = nn.ModuleList(nn.Linear(num_features, hidden) for _ in range(args.hops + 1))
        self.act, self.decode = nn.PReLU(), nn.Linear((args.hops + 1) * hidden, num_outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found = [self.lins[0](x)]
        for hop, lin in zip(self.hops, self.lins[1:], strict=True):
            x = hop(x, edge_index)
            found.append(lin(x))
        h = F.dropout(self.act(torch.cat(found, dim=-1)), self.args.dropout, self.training)
        return self.decode(h)


class UniMP(nn.Module):
    """Dot-product attention over neighbours with a gated residual: arXiv 2009.03509, equation 6.

    The labels that are inputs stand in the last columns of the features (``--label_rate``).
    """

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        each = {"heads": args.heads, "beta": True, "dropout": args.attn_dropout}
        widths = [num_features, *[hidden] * (args.num_layers - 1)]
        self.convs = nn.ModuleList(
            pyg.TransformerConv(a, hidden // args.heads, **each) for a in widths[:-1]
        )
        self.convs.append(pyg.TransformerConv(widths[-1], num_outputs, concat=False, **each))
        self.norms = nn.ModuleList(NORMS[args.norm](hidden) for _ in widths[1:])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), self.args.dropout, self.training)
        return self.convs[-1](x, edge_index)


class EGC(nn.Module):
    """Convolutions whose weights are mixed for each vertex: arXiv 2104.01481, with a residual."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_outputs)
        each = {"aggregators": ["symnorm"], "num_heads": args.heads, "num_bases": args.bases}
        self.convs = nn.ModuleList(
            pyg.EGConv(hidden, hidden, **each) for _ in range(args.num_layers)
        )
        self.norms = nn.ModuleList(NORMS[args.norm](hidden) for _ in self.convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = norm(conv(x, edge_index)).relu()
            x = x + F.dropout(h, self.args.dropout, self.training)
        return self.decode(x)


class SGFormer(nn.Module):
    """One layer of linear attention over all vertices beside a GCN: arXiv 2306.10759.

    With Q and K divided by their Frobenius norms: (V + Q (K' V) / N) / (1 + Q (K' 1) / N), averaged
    with the layer's input.
    """

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.encode, self.norm = nn.Linear(num_features, hidden), nn.LayerNorm(hidden)
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.norm_out = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        widths = [num_features, *[hidden] * args.num_layers]
        self.convs = nn.ModuleList(map(pyg.GCNConv, widths[:-1], widths[1:]))
        self.norms = nn.ModuleList(NORMS[args.norm](hidden) for _ in self.convs)
        self.decode = nn.Linear(hidden, num_outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h, n = self.norm(self.encode(x)).relu(), x.size(0)
        query, key, value = self.query(h), self.key(h), self.value(h)
        query, key = query / torch.norm(query), key / torch.norm(key)
        mixed = value + query @ (key.t() @ value) / n
        degree = 1 + (query * key.sum(0)).sum(-1, keepdim=True) / n
        h = self.norm_out((mixed / degree + h) / 2).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, edge_index)).relu(), self.args.dropout, self.training)
        return self.decode((1 - self.args.alpha) * h + self.args.alpha * x)


class Polynormer(nn.Module):
    """Polynomials of features: local by GAT, then global by linear attention: arXiv 2403.01232.

    Local: H <- (1 - b) norm(relu(W H) * (conv(H) + W' H)) + b (conv(H) + W' H). Global, on the sum
    of the local layers: norm(Q (K' V) / Q (K' 1)) * (W H + b), with sigmoid(Q) and sigmoid(K).
    """

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_outputs)

        def each(make: Callable[[], nn.Module]) -> nn.ModuleList:
            return nn.ModuleList(make() for _ in range(args.num_layers))

        self.convs = each(lambda: attention(pyg.GATConv, hidden, hidden, False, args))
        self.lins, self.gates = (each(lambda: nn.Linear(hidden, hidden)) for _ in range(2))
        self.norms = each(lambda: nn.LayerNorm(hidden))
        self.mix = nn.ParameterList(torch.zeros(hidden) for _ in range(args.num_layers + 1))
        self.query, self.key, self.value, self.last_gate = (
            nn.Linear(hidden, hidden) for _ in range(4)
        )
        self.norm_in, self.norm_out = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, total = F.dropout(self.encode(x), self.args.input_dropout, self.training), 0
        for i, conv in enumerate(self.convs):
            gate, mix = self.gates[i](x).relu(), self.mix[i].sigmoid()
            h = F.dropout(
                (conv(x, edge_index) + self.lins[i](x)).relu(), self.args.dropout, self.training
            )
            x = (1 - mix) * self.norms[i](gate * h) + mix * h
            total = total + x
        h = self.norm_in(total)
        query, key, value = self.query(h).sigmoid(), self.key(h).sigmoid(), self.value(h)
        mixed = query @ (key.t() @ value) / (query * key.sum(0)).sum(-1, keepdim=True)
        h = self.norm_out(mixed) * (self.last_gate(h) + self.mix[-1].sigmoid())
        return self.decode(F.dropout(h.relu(), self.args.dropout, self.training))


class Performer(nn.Module):
    """Attention over all vertices as sums: phi(Q) (phi(K)' V) / phi(Q) (phi(K)' 1).

    phi(x) = relu(x R) + 0.001 with a fixed random R, the ReLU kernel of arXiv 2009.14794.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        directions = torch.linalg.qr(torch.randn(width, width)).Q
        self.register_buffer("directions", directions / width**0.25)

    def forward(self, x: Tensor) -> Tensor:
        query = (self.query(x) @ self.directions).relu() + 1e-3
        key = (self.key(x) @ self.directions).relu() + 1e-3
        mixed = query @ (key.t() @ self.value(x))
        return self.out(mixed / (query * key.sum(0)).sum(-1, keepdim=True))


class GPS(nn.Module):
    """A convolution beside an attention over all vertices in each layer: arXiv 2205.12454."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden, self.args = args.hidden_channels, args
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_outputs)

        def each(make: Callable[[], nn.Module]) -> nn.ModuleList:
            return nn.ModuleList(make() for _ in range(args.num_layers))

        self.convs = each(lambda: pyg.GINConv(perceptron(hidden, hidden, hidden)))
        self.attentions = each(lambda: Performer(hidden))
        self.mlps = each(lambda: perceptron(hidden, 2 * hidden, hidden))
        self.norms = nn.ModuleList(each(lambda: NORMS[args.norm](hidden)) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, norms = self.encode(x), self.norms
        for i, conv in enumerate(self.convs):
            local = norms[0][i](x + self.drop(conv(x, edge_index)))
            wide = norms[1][i](x + self.drop(self.attentions[i](x)))
            x = local + wide
            x = norms[2][i](x + self.drop(self.mlps[i](x)))
        return self.decode(x)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.args.dropout, self.training)


class GPSConvs(nn.Module):
    """PyG's GPSConv with the attention of Performer."""

    def __init__(self, num_features: int, num_outputs: int, args: Namespace) -> None:
        super().__init__()
        hidden = args.hidden_channels
        self.encode, self.decode = nn.Linear(num_features, hidden), nn.Linear(hidden, num_outputs)
        each = {"heads": args.heads, "dropout": args.dropout, "attn_type": "performer"}
        self.layers = nn.ModuleList(
            pyg.GPSConv(hidden, pyg.GINConv(perceptron(hidden, hidden, hidden)), **each)
            for _ in range(args.num_layers)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.decode(x)


MODELS = {
    **dict.fromkeys(("gcn", "sage", "gat", "gatv2", "gin", "tag", "arma"), Stack),
    **{"mlp": Mlp, "gcnii": GCNII, "deepergcn": DeeperGCN, "revgnn": RevGNN, "sgc": SGC},
    **{"appnp": Propagated, "dagnn": Propagated, "sign": Sign, "unimp": UniMP, "egc": EGC},
    **{"sgformer": SGFormer, "polynormer": Polynormer, "gps": GPS, "gpsconv": GPSConvs},
}
"""Models by the value of ``--model``."""


def make_model(graph: Graph, args: Namespace, num_labels: int = 0) -> nn.Module:
    """The model that ``args.model`` names, for a graph with ``num_labels`` more features."""
    edge_dim = graph.edge_attr.shape[1] if args.edge_features else None
    more = Namespace(**vars(args), edge_dim=edge_dim)
    return MODELS[args.model](graph.num_features + num_labels, graph.num_classes, more)
