"""One contender of ``single_speed.py``: builds its model, then trains an epoch for each line read.

python scripts/peers.py CONTENDER DATASET MODEL LAYERS WIDTH

A process of its own, so that DGL can run in an environment of its own and nobody's memory is in
anybody's way. It answers ``ready``, then for each ``go`` the seconds of one epoch (forward, loss,
backward, Adam; dropout 0.5), and at the end of its input its peak memory in MiB.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
SHARED = ROOT.parent / "shared" / "data"
OWN = ("ours", "exact", "floor")
DROPOUT, HEADS, CLASSES = 0.5, 4, 16
LIMIT = 18 << 30
"""Bytes of address space: a contender that wants more is told so, and the others go on."""

from gnnpipe.heap import held_heap  # noqa: E402

Epoch = Callable[[], None]


def load(dataset: str) -> Any:
    """Symmetrised; 128 random features and 16 random classes where a graph has none."""
    import numpy as np
    import torch
    from torch_geometric.data import Data

    from gnnpipe import Graph
    from gnnpipe.data.load import load_graph

    if ":" in dataset or dataset == "debian":
        return load_graph(dataset)
    path = SHARED / f"{dataset}.npz"
    with np.load(path, allow_pickle=False) as data:
        bare = "y" not in data or dataset in ("cnr_2000", "ego_twitter")
        edges = torch.from_numpy(data["edge_index"].astype(np.int64))
    if not bare:
        return load_graph(str(path), split="60/20/20", symmetrize=True)
    n = int(edges.max()) + 1
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(n, generator=draw) < 0.6
    data = Data(
        x=torch.randn(n, 128, generator=draw),
        edge_index=edges,
        y=torch.randint(CLASSES, (n,), generator=draw),
        train_mask=mask,
        val_mask=~mask,
        test_mask=~mask,
    )
    return Graph.from_pyg(data, name=dataset, symmetrize=True)


def ours(
    graph: Any,
    model: str,
    layers: int,
    width: int,
    chunks: int = 1,
    matmul: str = "same",
    staleness: str = "auto",
) -> tuple[Epoch, Any]:
    """An epoch as ``Trainer`` runs it, and what it runs on."""
    from gnnpipe import TrainConfig
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.build import build_rank
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.train.evaluate import train_epoch

    config = TrainConfig(
        model=model,
        layers=layers,
        hidden=width,
        dropout=DROPOUT,
        lr=0.001,
        chunks=chunks,
        matmul_dtype=matmul,
        staleness=staleness,
        out="off",
        quiet=True,
    )
    mesh = Mesh.join(1, 1)
    prepared = prepare(config, mesh, graph)
    rank_runtime = build_rank(prepared, mesh)
    count = iter(range(10**9))

    def epoch() -> None:
        number = next(count)
        order = prepared.chunk_order(number)
        train_epoch(rank_runtime, mesh, prepared.program_of(number), order, number)

    return epoch, rank_runtime


def floor(graph: Any, model: str, layers: int, width: int) -> Epoch:
    """Our epoch without its aggregations, plus the reads of every neighbour's row they need."""
    import torch

    from gnnpipe.runtime.history.linear import LinearHistory

    epoch, rank_runtime = ours(graph, model, layers, width)
    histories = list(rank_runtime.executor.stage.histories.values())
    assert all(isinstance(history, LinearHistory) for history in histories), "no floor for this one"

    def read(self: Any, chunk: int) -> Any:
        """As many rows as it would be, in training the last layer's fewer ones."""
        start, (first, last) = self.rows(chunk)[0], self.into(chunk)
        found = self.table[start : start + last - first]
        # Written to memory of its own, as a product is: layers write over what they receive.
        return self._shared_rows[chunk].copy_(found) if self._is_shared else found.clone()

    def pull(self: Any, chunk: int) -> Any:
        few = len(self._grads) < self.layout.num_own
        return (self.table if few else self._grads)[slice(*self.rows(chunk))]

    LinearHistory.read, LinearHistory.pull = read, pull
    rows = torch.randn(graph.num_vertices, histories[0].table.shape[-1] or width)
    passing = torch.empty(4096, rows.shape[1])  # stays in the cache
    both_ways = [(h.operator.forward, h.operator.transposed) for h in histories]
    parts = [torch.split(m.indices, 4096) for ways in both_ways for m in ways]

    def both() -> None:
        epoch()
        for way in parts:
            for part in way:
                torch.index_select(rows, 0, part, out=passing[: len(part)])

    return both


def plain(graph: Any, forward: Callable[[Any], Any], parameters: Any) -> Epoch:
    """An epoch of a model that is called with all features at once."""
    import torch
    import torch.nn.functional as F

    dense = graph.x.toarray() if hasattr(graph.x, "toarray") else graph.x
    here = torch.get_default_device()
    x, y, mask = (torch.from_numpy(a).to(here) for a in (dense, graph.y, graph.train_mask))
    x, y = x.float(), y.long()
    train = mask.nonzero().flatten()  # to read by a mask, a GPU would wait for their number
    forward(x)  # lazy parts are made
    optimizer = torch.optim.Adam(parameters(), lr=0.001, capturable=here.type == "cuda")

    def epoch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(x)[train], y[train]).backward()
        optimizer.step()

    return epoch


def with_pyg(graph: Any, model: str, layers: int, width: int, form: str) -> Epoch:
    """PyG's convolutions with the norms, activations and dropout of our models."""
    import torch
    from torch_geometric import nn as pyg
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    edges = torch.from_numpy(graph.edge_index).to(torch.get_default_device())
    n = graph.num_vertices
    weighted = model in ("gcn", "gcnii")
    adjacency: Any = edges
    weights: tuple[Any, ...] = ()
    if form == "edge_index":
        cached = weighted  # as PyG advises for one fixed graph
    else:
        cached = False
        weight = torch.ones(edges.shape[1])
        if weighted:
            edges, weight = gcn_norm(edges, None, n, add_self_loops=True)
        if form == "EdgeIndex":
            from torch_geometric import EdgeIndex

            adjacency, order = EdgeIndex(edges, sparse_size=(n, n)).sort_by("col")
            adjacency = adjacency.fill_cache_()
            weights = (weight[order],) if weighted else ()
        elif form == "csr":
            adjacency = torch.sparse_coo_tensor(edges.flip(0), weight, (n, n)).to_sparse_csr()
        else:
            from torch_sparse import SparseTensor

            adjacency = SparseTensor(
                row=edges[1], col=edges[0], value=weight if weighted else None, sparse_sizes=(n, n)
            )
    normal = {"normalize": form == "edge_index", "cached": cached} if weighted else {}

    def conv(i: int, wide: int, out: int) -> Any:
        if model == "gcn":
            return pyg.GCNConv(wide, out, **normal)
        if model == "sage":
            return pyg.SAGEConv(wide, out)
        if model == "gcnii":
            return pyg.GCN2Conv(width, 0.1, 0.5, i + 1, **normal)
        return pyg.GATConv(wide, width // HEADS, heads=HEADS, add_self_loops=form == "edge_index")

    return _stack(
        graph,
        model,
        layers,
        width,
        conv,
        lambda c, x, first: (
            c(x, first, adjacency, *weights) if model == "gcnii" else c(x, adjacency, *weights)
        ),
    )


STEPS = ("transpose", "features", "order", "even")
"""What PyG is given beyond a torch CSR matrix; each step has those before it."""


def with_pyg_evened(graph: Any, model: str, layers: int, width: int, steps: int) -> Epoch:
    """PyG on a torch CSR matrix with some of ``STEPS``: what a careful user can do by hand.

    1 a transposed matrix that is kept for backward (as torch_sparse's SparseTensor keeps it; here
    by an autograd function, since torch_sparse does not compile everywhere); 2 sparse features,
    multiplied by the first Linear before anything else; 3 the order of the vertices that gnnpipe
    makes. (4, the heap, is set in ``main``.)
    """
    import numpy as np
    import scipy.sparse as sp
    import torch
    from torch_geometric import nn as pyg

    from gnnpipe.graph.chunking import make_chunking, renumber

    if steps >= 3:
        graph = renumber(
            graph, make_chunking(graph, chunks=1, shards=1, partitioner="metis", seed=0)
        )
    n, here = graph.num_vertices, torch.get_default_device()
    a = sp.csr_array((np.ones(graph.num_edges, np.float32), graph.indices, graph.indptr), (n, n))
    if model == "sage":
        a = sp.diags_array(1 / np.maximum(a.sum(1), 1)) @ a
    else:
        a = a + sp.eye_array(n, dtype=np.float32)
        root = sp.diags_array(1 / np.sqrt(a.sum(1)))
        a = root @ a @ root

    def tensor(matrix: Any) -> Any:
        matrix = sp.csr_array(matrix, dtype=np.float32)
        parts = (matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64), matrix.data)
        given = (torch.from_numpy(part).to(here) for part in parts)
        return torch.sparse_csr_tensor(*given, size=matrix.shape)

    class Product(torch.autograd.Function):
        """``matrix @ rows`` with the transposed matrix for backward."""

        @staticmethod
        def forward(ctx: Any, rows: Any, matrix: Any, transposed: Any) -> Any:
            ctx.transposed = transposed
            return matrix @ rows

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return ctx.transposed @ grads[0], None, None

    both = tensor(a), tensor(a.T)
    sparse = steps >= 2 and not isinstance(graph.x, np.ndarray)
    features = (tensor(graph.x), tensor(graph.x.T)) if sparse else None

    def linear(lin: Any) -> Any:
        """The first Linear on the sparse features."""
        made = Product.apply(lin.weight.t(), *features)
        return made if lin.bias is None else made + lin.bias

    def conv(i: int, wide: int, out: int) -> Any:
        if model == "gcn":
            made = pyg.GCNConv(wide, out, normalize=False)
            made.message_and_aggregate = lambda _, x: Product.apply(x, *both)
            if sparse and i == 0:
                made.lin.forward = lambda _: linear(made.lin)
        elif model == "gcnii":
            made = pyg.GCN2Conv(width, 0.1, 0.5, i + 1, normalize=False)
            made.message_and_aggregate = lambda _, x: Product.apply(x, *both)
        else:
            made = pyg.SAGEConv(wide, out, aggr="sum")
            made.message_and_aggregate = lambda _, x: Product.apply(x[0], *both)
            if sparse and i == 0:
                made.forward = lambda *_: (
                    Product.apply(linear(made.lin_l), *both) + linear(made.lin_r)
                )
        return made

    def call(c: Any, x: Any, first: Any) -> Any:
        return c(x, first, both[0]) if model == "gcnii" else c(x, both[0])

    return _stack(graph, model, layers, width, conv, call, linear if sparse else None)


def with_dgl(graph: Any, model: str, layers: int, width: int) -> Epoch:
    """DGL's modules; loops are added once, as DGL advises."""
    import dgl
    import torch
    from dgl import nn as dnn

    edges = torch.from_numpy(graph.edge_index)
    g = dgl.graph(
        (edges[0].int(), edges[1].int()), num_nodes=graph.num_vertices, idtype=torch.int32
    )
    if model != "sage":
        g = dgl.add_self_loop(g)
    g = g.formats(["coo", "csr", "csc"])

    def conv(i: int, wide: int, out: int) -> Any:
        if model == "gcn":
            return dnn.GraphConv(wide, out)
        if model == "sage":
            return dnn.SAGEConv(wide, out, "mean")
        if model == "gcnii":
            return dnn.GCN2Conv(width, i + 1, alpha=0.1, lambda_=0.5, project_initial_features=True)
        return dnn.GATConv(wide, width // HEADS, HEADS)

    def call(c: Any, x: Any, first: Any) -> Any:
        found = c(g, x, first) if model == "gcnii" else c(g, x)
        return found.flatten(1) if model == "gat" else found

    return _stack(graph, model, layers, width, conv, call)


def _stack(
    graph: Any,
    model: str,
    layers: int,
    width: int,
    conv: Callable[[int, int, int], Any],
    call: Callable[[Any, Any, Any], Any],
    encoded: Callable[[Any], Any] | None = None,
) -> Epoch:
    """Layers as ours: GCN and SAGE end in classes, GCNII and GAT decode.

    ``encoded``: what an encoder makes of the features, instead of calling it with them.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    classes, features = graph.num_classes, graph.num_features
    coded = model == "gcnii"
    decoded = model in ("gcnii", "gat")
    convs, norms = nn.ModuleList(), nn.ModuleList()
    for i in range(layers):
        wide = width if i or coded else features
        convs.append(conv(i, wide, width if i < layers - 1 or decoded else classes))
        norms.append(nn.LayerNorm(width))
    whole = nn.ModuleList([convs, norms])
    if coded:
        whole.append(encode := nn.Linear(features, width))
    if decoded:
        whole.append(decode := nn.Linear(width, classes))

    def forward(x: Any) -> Any:
        if coded:
            x = torch.relu(encoded(encode) if encoded else encode(x))
        first = x
        for i, one in enumerate(convs):
            if i or coded:
                x = F.dropout(x, DROPOUT, True)
            x = call(one, x, first)
            if i < layers - 1 or decoded:
                x = F.elu(x) if model == "gat" else torch.relu(norms[i](x))
        return decode(F.dropout(x, DROPOUT, True)) if decoded else x

    return plain(graph, forward, whole.parameters)


def build(contender: str, dataset: str, model: str, layers: int, width: int) -> Epoch:
    graph = load(dataset)
    name, _, form = contender.partition(":")
    if name in ("ours", "exact"):
        staleness = "exact" if name == "exact" else "auto"
        return ours(graph, model, layers, width, int(form or 1), staleness=staleness)[0]
    if name == "floor":
        return floor(graph, model, layers, width)
    if form in STEPS:
        return with_pyg_evened(graph, model, layers, width, STEPS.index(form) + 1)
    if name == "pyg":
        return with_pyg(graph, model, layers, width, form)
    return with_dgl(graph, model, layers, width)


def main() -> None:
    warnings.simplefilter("ignore")
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    contender, dataset, model, layers, width = sys.argv[1:]
    try:
        import torch

        torch.set_num_threads(1)
        if contender.startswith(OWN) or contender == "pyg:even":
            held = held_heap()  # as ``Trainer.fit`` does; nothing where the caller has set it
            held.__enter__()
        epoch = build(contender, dataset, model, int(layers), int(width))
        print("ready", file=answers, flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            epoch()
            print(time.perf_counter() - start, file=answers, flush=True)
    except (MemoryError, RuntimeError, ImportError) as error:
        text = str(error)
        short = "out of memory" if "alloc" in text or not text else text.splitlines()[0][:80]
        print("failed", short, file=answers, flush=True)
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(peak, file=answers, flush=True)


if __name__ == "__main__":
    main()
