"""Training with PyG's loaders, and full batch, for ``time_to_accuracy.py``.

GCN and SAGE with the layers of gnnpipe's own models. To give each peer the best form it can have,
products with an adjacency are torch CSR products whose transposed matrix is kept, sparse features
are multiplied as sparse matrices, a sampled batch computes in each layer only the rows that the
next layer reads, and in GCN a sampled neighbour counts for those that were not sampled. PyG's
loaders draw the batches. With several ranks each has its own part of the training vertices (or of
the clusters), and gradients are averaged after each batch in one message, as DDP does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gnnpipe.graph.chunking import make_chunking, renumber
from gnnpipe.graph.graph import Graph
from gnnpipe.heap import held_heap
from gnnpipe.runtime.comm.world import World

HIDDEN, DROPOUT = 64, 0.5

Setting = dict[str, Any]
Csr = tuple[Tensor, Tensor, Tensor, tuple[int, int]]
"""indptr, indices, values and shape: plain tensors, which a loader's process can send."""


def csr_parts(matrix: Any) -> Csr:
    """Returns the parts of a scipy matrix."""
    matrix = sp.csr_array(matrix)
    arrays = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64)
    parts = [torch.from_numpy(a) for a in (*arrays, matrix.data.astype(np.float32))]
    return parts[0], parts[1], parts[2], matrix.shape


def csr_tensor(parts: Csr) -> Tensor:
    """Returns torch's CSR tensor."""
    return torch.sparse_csr_tensor(*parts[:3], size=parts[3], check_invariants=False)


class Product(torch.autograd.Function):
    """``matrix @ rows`` with the transposed matrix for backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        return matrix @ rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.transposed @ grads[0], None, None


@dataclass
class Block:
    """What one layer reads: ``matrix @ h``, plus ``own`` times the first rows of h where given."""

    matrix: Csr
    transposed: Csr
    own: Tensor | None = None
    """[rows of the matrix, 1]"""

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return csr_tensor(self.matrix), csr_tensor(self.transposed)

    def __call__(self, h: Tensor) -> Tensor:
        made = Product.apply(h, *self.tensors)
        return made if self.own is None else torch.addcmul(made, self.own, h[: len(self.own)])

    @property
    def num_rows(self) -> int:
        return self.matrix[3][0]


@dataclass
class Batch:
    """Blocks by layer, features (dense, or CSR and its transposed), and rows with a loss."""

    blocks: list[Block]
    x: Tensor | Block
    loss_rows: Tensor
    labels: Tensor


def block_of(matrix: Any, own: Any = None) -> Block:
    """Returns the block of a scipy matrix."""
    column = None if own is None else torch.from_numpy(own.astype(np.float32))[:, None]
    return Block(csr_parts(matrix), csr_parts(matrix.T), column)


@dataclass
class Problem:
    """A graph in the form that the peers read; rows in the order of METIS."""

    model: str
    layers: int
    adjacency: Any
    """[N, N] scipy CSR of ones, a row for each reader."""
    x: Any
    y: Tensor
    masks: dict[str, Tensor]
    classes: int

    @classmethod
    def of(cls, graph: Graph, model: str, layers: int) -> Problem:
        graph = renumber(
            graph, make_chunking(graph, chunks=1, shards=1, partitioner="metis", seed=0)
        )
        n = graph.num_vertices
        ones = np.ones(graph.num_edges, np.float32)
        adjacency = sp.csr_array((ones, graph.indices, graph.indptr), (n, n))
        masks = {"train": graph.train_mask, "val": graph.val_mask, "test": graph.test_mask}
        return cls(
            model,
            layers,
            adjacency,
            graph.x if isinstance(graph.x, np.ndarray) else sp.csr_array(graph.x),
            torch.from_numpy(graph.y).long(),
            {k: torch.from_numpy(v).nonzero().flatten() for k, v in masks.items()},
            graph.num_classes,
        )

    def features(self, vertices: Any = None) -> Tensor | Block:
        """Returns the features of some vertices, of all without an argument."""
        x = self.x if vertices is None else self.x[vertices]
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else block_of(x)

    @cached_property
    def degrees(self) -> Any:
        """[N], with the loop that GCN adds."""
        return self.adjacency.sum(1) + 1

    def whole(self) -> Batch:
        """Returns the batch of all vertices."""
        block = block_of(self.normalised(self.adjacency))
        rows = self.masks["train"]
        return Batch([block] * self.layers, self.features(), rows, self.y[rows])

    def normalised(self, a: Any) -> Any:
        """Returns the operator of the model on a graph with adjacency ``a``."""
        if self.model == "sage":
            return sp.diags_array(1 / np.maximum(a.sum(1), 1)) @ a
        a = a + sp.eye_array(a.shape[0], dtype=np.float32)
        root = sp.diags_array(1 / np.sqrt(a.sum(1)))
        return root @ a @ root

    def sampled(self, data: Any) -> Batch:
        """Returns the batch that NeighborLoader has drawn, each layer no larger than need be.

        Edges come sorted by reader, and vertices hop by hop, so the matrix of each layer is the
        upper left part of the first layer's.
        """
        vertices, (source, reader) = data.n_id.numpy(), data.edge_index.numpy()
        sizes, ends = hops(source, reader, int(data.batch_size), self.layers)
        counts = np.bincount(reader, minlength=sizes[-2])
        value, own = self._sampled_weights(vertices, source, reader, counts)
        indptr = np.concatenate([[0], np.cumsum(counts)])
        blocks = []
        for (out, wide), end in zip(pairwise(sizes), ends, strict=True):
            parts = value[:end], source[:end], indptr[: out + 1]
            matrix = sp.csr_array(parts, (out, wide))
            blocks.append(block_of(matrix, None if own is None else own[:out]))
        seeds = torch.from_numpy(vertices[: sizes[0]])
        x = self.features(vertices)
        return Batch(blocks[::-1], x, torch.arange(sizes[0]), self.y[seeds])

    def _sampled_weights(self, vertices: Any, source: Any, reader: Any, counts: Any) -> Any:
        """Returns weights of edges, unbiased for the whole graph's product, and of own rows."""
        if self.model == "sage":
            return 1 / np.maximum(counts, 1)[reader], None
        degrees = self.degrees[vertices]
        scale = (degrees[: len(counts)] - 1) / np.maximum(counts, 1)
        root = 1 / np.sqrt(degrees)
        return scale[reader] * root[reader] * root[source], root[: len(counts)] ** 2

    def clustered(self, data: Any) -> Batch:
        """Returns the batch of some clusters and the edges among these, normalised by itself."""
        vertices, (source, reader) = data.n_id.numpy(), data.edge_index.numpy()
        n = len(vertices)
        a = sp.csr_array((np.ones(len(source), np.float32), (reader, source)), (n, n))
        block = block_of(self.normalised(a))
        rows = data.train.nonzero().flatten()
        labels = self.y[data.n_id[rows]]
        return Batch([block] * self.layers, self.features(vertices), rows, labels)


def hops(source: Any, reader: Any, seeds: int, layers: int) -> tuple[list[int], list[int]]:
    """Returns the numbers of vertices [L + 1] and edges [L] of a sample up to each hop."""
    sizes, ends = [seeds], []
    for _ in range(layers):
        end = int(np.searchsorted(reader, sizes[-1]))
        ends.append(end)
        sizes.append(max(sizes[-1], int(source[:end].max(initial=-1)) + 1))
    return sizes, ends


class Net(nn.Module):
    """GCN or SAGE: product, bias, LayerNorm, ReLU and dropout; the last layer has no norm.

    The first layer multiplies with its weight before the product, later ones after it, as
    gnnpipe's do.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        widths = [problem.x.shape[1], *[HIDDEN] * (problem.layers - 1), problem.classes]
        self.is_sage = problem.model == "sage"
        self.lins, self.own = nn.ModuleList(), nn.ModuleList()
        for i in range(problem.layers):
            self.lins.append(nn.Linear(widths[i], widths[i + 1], bias=False))
            if self.is_sage:
                self.own.append(nn.Linear(widths[i], widths[i + 1], bias=False))
        for lin in (*self.lins, *self.own):
            nn.init.xavier_uniform_(lin.weight)
        self.biases = nn.ParameterList(torch.zeros(wide) for wide in widths[1:])
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for wide in widths[1:-1])

    def forward(self, x: Tensor | Block, blocks: Sequence[Block]) -> Tensor:
        h = self._first(x, blocks[0])
        for i, block in enumerate(blocks[1:], start=1):
            h = F.dropout(torch.relu(self.norms[i - 1](h)), DROPOUT, self.training)
            received = self.lins[i](block(h)) + self.biases[i]
            h = received + self.own[i](h[: len(received)]) if self.is_sage else received
        return h

    def _first(self, x: Tensor | Block, block: Block) -> Tensor:
        weights = [self.lins[0].weight, *([self.own[0].weight] if self.is_sage else [])]
        weight = torch.cat(weights) if self.is_sage else weights[0]
        made = x(weight.t()) if isinstance(x, Block) else F.linear(x, weight)
        wide = len(self.biases[0])
        received = block(made[:, :wide]) + self.biases[0]
        return received + made[: len(received), wide:] if self.is_sage else received


class Curve:
    """Scores over training time, and whether the run may end.

    A run ends when it reaches the target, after ``limit_s`` seconds of training, or when the
    validation accuracy has not become better for ``patience`` epochs (0: never).
    """

    def __init__(self, target: float | None, limit_s: float = math.inf, patience: int = 0) -> None:
        self.target, self.limit_s, self.patience = target, limit_s, patience
        self.seconds: list[float] = []
        self.epochs: list[float] = []
        self.val: list[float] = []
        self.test: list[float] = []

    def add(self, seconds: float, epochs: float, val: float, test: float) -> bool:
        """Adds an evaluation; returns whether the run ends."""
        self.seconds.append(round(seconds, 4))
        self.epochs.append(round(epochs, 4))
        self.val.append(round(val, 6))
        self.test.append(round(test, 6))
        best = self.epochs[max(range(len(self.val)), key=self.val.__getitem__)]
        is_stale = bool(self.patience) and epochs - best >= self.patience
        is_there = self.target is not None and val >= self.target
        return is_there or is_stale or seconds >= self.limit_s

    @property
    def reached(self) -> int | None:
        """Index of the first evaluation at the target; ``None``: not reached."""
        if self.target is None:
            return None
        return next((i for i, v in enumerate(self.val) if v >= self.target), None)


class Batches:
    """The batches of an epoch: ``len`` of them, in a new order each time."""

    def __init__(self, make: Callable[[], Iterable[Batch]], length: int) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._make())


def neighbor_batches(problem: Problem, setting: Setting, world: World) -> Batches:
    """Returns the batches of PyG's NeighborLoader; each rank has its part of the vertices."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    reader, source = problem.adjacency.tocoo().coords
    edges = torch.from_numpy(np.stack([source, reader]).astype(np.int64))
    seeds = problem.masks["train"]
    each = len(seeds) // world.world_size
    loader = NeighborLoader(
        Data(edge_index=edges, num_nodes=len(problem.y)),
        num_neighbors=setting["fan_out"],
        input_nodes=seeds[world.rank :: world.world_size][:each],
        batch_size=setting["batch"],
        shuffle=True,
        num_workers=setting["workers"],
        persistent_workers=setting["workers"] > 0,
        filter_per_worker=True,
        transform=problem.sampled,
    )
    return Batches(lambda: loader, len(loader))


def cluster_batches(problem: Problem, setting: Setting, world: World) -> Batches:
    """Returns the batches of PyG's ClusterLoader; each rank has its part of the clusters.

    Batches of one cluster are the same in every epoch, so they are made once.
    """
    import pymetis
    from torch_geometric.data import Data
    from torch_geometric.loader import ClusterData, ClusterLoader

    class Clusters(ClusterData):
        """METIS by pymetis, in place of torch_sparse's or pyg_lib's."""

        def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
            pattern = sp.csr_array(problem.adjacency - sp.diags_array(problem.adjacency.diagonal()))
            pattern.eliminate_zeros()
            lists = pymetis.CSRAdjacency(pattern.indptr, pattern.indices)
            parts = pymetis.part_graph(self.num_parts, adjacency=lists)[1]
            return torch.tensor(parts)

    class Loader(ClusterLoader):
        def _collate(self, batch: Any) -> Any:
            return problem.clustered(super()._collate(batch))

    n = len(problem.y)
    reader, source = problem.adjacency.tocoo().coords
    edges = torch.from_numpy(np.stack([source, reader]).astype(np.int64))
    train = torch.zeros(n, dtype=torch.bool)
    train[problem.masks["train"]] = True
    data = Data(edge_index=edges, n_id=torch.arange(n), train=train, num_nodes=n)
    clusters = Clusters(data, num_parts=setting["parts"], log=False)
    own = range(world.rank, setting["parts"], world.world_size)
    per_batch = setting["per_batch"]
    if per_batch == 1:
        made = list(Loader(clusters, batch_size=1, sampler=list(own)))
        return Batches(lambda: (made[i] for i in torch.randperm(len(made))), len(made))
    sampler = torch.utils.data.SubsetRandomSampler(list(own))
    loader = Loader(clusters, batch_size=per_batch, sampler=sampler)
    return Batches(lambda: loader, len(loader))


def whole_batches(problem: Problem, setting: Setting, world: World) -> Batches:
    """Returns one batch: the whole graph."""
    del setting
    assert world.world_size == 1, "PyG has no full batch on several ranks"
    whole = [problem.whole()]
    return Batches(lambda: whole, 1)


KINDS = {"full": whole_batches, "neighbor": neighbor_batches, "cluster": cluster_batches}


class Run:
    """A training run of a peer."""

    def __init__(self, problem: Problem, setting: Setting, world: World, seed: int) -> None:
        start = time.perf_counter()
        self.problem, self.setting, self.world = problem, setting, world
        torch.manual_seed(seed)
        self.net = Net(problem)
        torch.manual_seed(1000 * seed + world.rank)
        self.batches = KINDS[setting["kind"]](problem, setting, world)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=setting["lr"], fused=True)
        self.scheduler = None
        if setting["schedule"] == "cosine":
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
                self.optimizer, setting["epochs"]
            )
        self.set_up_s = time.perf_counter() - start
        self.whole = problem.whole() if world.rank == 0 else None

    @property
    def bytes_per_epoch(self) -> int:
        """Bytes that all ranks send: gradients, summed in a ring."""
        size = sum(p.numel() for p in self.net.parameters()) * 4
        return 2 * (self.world.world_size - 1) * size * len(self.batches)

    def step(self, batch: Batch) -> None:
        """Trains on a batch."""
        self.optimizer.zero_grad()
        logits = self.net(batch.x, batch.blocks)
        if len(batch.loss_rows):
            loss = F.cross_entropy(logits[batch.loss_rows], batch.labels)
        else:
            loss = logits.sum() * 0  # a cluster without training vertices
        loss.backward()
        if self.world.world_size > 1:
            self._average()
        self.optimizer.step()

    def _average(self) -> None:
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= self.world.world_size
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    @torch.no_grad()
    def scores(self) -> tuple[float, float]:
        """Returns validation and test accuracy on the whole graph."""
        assert self.whole is not None
        self.net.eval()
        found = self.net(self.whole.x, self.whole.blocks).argmax(1) == self.problem.y
        self.net.train()
        val, test = (float(found[self.problem.masks[k]].float().mean()) for k in ("val", "test"))
        return val, test

    def fit(self, curve: Curve) -> None:
        """Trains until the curve ends, or for all epochs."""
        clock = _Clock()
        with held_heap():
            for epoch in range(self.setting["epochs"]):
                if self._fit_epoch(epoch, curve, clock):
                    return

    def _fit_epoch(self, epoch: int, curve: Curve, clock: _Clock) -> bool:
        """Trains an epoch; returns whether the run ends."""
        clock.start()
        iterator = iter(self.batches)
        for number in range(1, len(self.batches) + 1):
            self.step(next(iterator))
            is_last = number == len(self.batches)
            if is_last and self.scheduler is not None:
                self.scheduler.step()
            clock.stop()
            if self.world.share(is_last or clock.is_due):
                begin, is_over = time.perf_counter(), False
                if self.world.rank == 0:
                    scores = self.scores()
                    is_over = curve.add(clock.seconds, epoch + number / len(self.batches), *scores)
                clock.evaluated(time.perf_counter() - begin)
                if self.world.share(is_over):
                    return True
            clock.start()
        clock.stop()
        return False


class _Clock:
    """Time of training. An evaluation is due when training took twice the time of the last one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._next, self._begin = math.inf, 0.0

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._begin

    def evaluated(self, time_s: float) -> None:
        self._next = self.seconds + 2 * time_s

    @property
    def is_due(self) -> bool:
        return self.seconds >= self._next
