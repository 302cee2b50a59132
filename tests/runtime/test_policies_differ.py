"""Weight policies on real graphs, where a mode that is secretly synchronous would be seen.

GCN, 4 stages of one layer, K = 8, one step a chunk at a constant learning rate of 0.01, which is
too large: training oscillates. Accuracies at single epochs say little then, so the losses of the
last quarter of the epochs are compared.
"""

from itertools import pairwise

import numpy as np
import pymetis
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from async_reference import AsyncReference, Chunk, RefStage, one_f_one_b
from helpers import SHARED

from gnnpipe.data.load import load_graph

CHUNKS, WIDTH, LAYERS = 8, 64, 4


class Sparse:
    """A sparse matrix [R, C] whose products with dense ones have a gradient."""

    def __init__(self, matrix):
        self.parts, self.turned = _csr(matrix), _csr(matrix.T)
        self.shape = matrix.shape

    def __matmul__(self, x):
        return _Product.apply(x, self)


def _csr(matrix):
    matrix = sp.csr_array(matrix, dtype=np.float32)
    matrix.sort_indices()
    return tuple(torch.from_numpy(a) for a in (matrix.indices, matrix.indptr, matrix.data))


def _bags(parts, x):
    indices, offsets, values = parts
    return F.embedding_bag(
        indices, x, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix):
        ctx.matrix = matrix
        return _bags(matrix.parts, x)

    @staticmethod
    def backward(ctx, grad):
        return _bags(ctx.matrix.turned, grad.contiguous()), None


class Problem:
    """A graph, its normalised matrix and its chunks."""

    def __init__(self, name, split):
        graph = load_graph(
            str(SHARED / f"{name}.npz"), split=split, symmetrize=True, remove_self_loops=True
        )
        n = graph.num_vertices
        adjacency = sp.csr_array(
            (np.ones(len(graph.indices), np.float32), graph.indices, graph.indptr), shape=(n, n)
        )
        with_loops = adjacency + sp.eye_array(n, format="csr")
        root = sp.diags_array(1 / np.sqrt(with_loops.sum(1)))
        self.matrix = sp.csr_array(root @ with_loops @ root)
        x = graph.x if isinstance(graph.x, np.ndarray) else graph.x.toarray()
        self.x, self.y = torch.from_numpy(x).float(), torch.from_numpy(graph.y)
        self.train = torch.from_numpy(graph.train_mask)
        self.classes = graph.num_classes
        xadj = pymetis.CSRAdjacency(graph.indptr, graph.indices)
        part = np.array(pymetis.part_graph(CHUNKS, xadj)[1])
        self.chunks = [self._chunk(np.flatnonzero(part == c)) for c in range(CHUNKS)]

    def _chunk(self, rows):
        own = self.matrix[rows]
        is_inside = np.zeros(self.matrix.shape[0], bool)
        is_inside[rows] = True
        outside = own @ sp.diags_array((~is_inside).astype(np.float32))
        places = torch.from_numpy(rows)
        train = self.train[places].nonzero()[:, 0]
        data = {"x": self.x[places], "y": self.y[places], "train": train}
        return Chunk(places, {"gcn": Sparse(own[:, rows])}, {"gcn": Sparse(outside)}, data)


def layer(number):
    def function(values, weights, one):
        data, name = one.chunk.data, f"h{number}"
        if number == 0:
            z = one.aggregate("gcn", name, data["x"] @ weights["w"])
        else:
            z = one.aggregate("gcn", name, values["h"]) @ weights["w"]
        z = z + weights["b"]
        if number < LAYERS - 1:
            h = F.layer_norm(z, (WIDTH,), weights["scale"], weights["shift"]).relu()
            drawn = torch.Generator().manual_seed(LAYERS * one.number + number)
            return {"h": h * (torch.rand(h.shape, generator=drawn) < 0.5) * 2}
        train = data["train"]
        if not len(train):
            return {"loss": (z * 0).sum()}
        return {"loss": F.cross_entropy(z[train], data["y"][train])}

    return function


def stages(problem):
    torch.manual_seed(0)
    widths = [problem.x.shape[1], *[WIDTH] * (LAYERS - 1), problem.classes]
    found = []
    for number, (a, b) in enumerate(pairwise(widths)):
        weights = {"w": torch.nn.init.xavier_uniform_(torch.empty(a, b)), "b": torch.zeros(b)}
        if number < LAYERS - 1:
            weights |= {"scale": torch.ones(b), "shift": torch.zeros(b)}
        found.append(RefStage(layer(number), weights, {"h": number - 1} if number else {}))
    return found


def tail_loss(problem, policy, epochs, depths=(3, 2, 1, 0)):
    """Mean loss of the last quarter of the epochs; no flush before the end."""
    reference = AsyncReference(
        stages(problem), problem.chunks, policy, lambda w: torch.optim.Adam(w, lr=0.01)
    )
    random = np.random.default_rng(0)
    walk = [(e, int(c)) for e in range(epochs) for c in random.permutation(CHUNKS)]
    reference.run(one_f_one_b(depths, len(walk)), walk)
    return float(np.mean([reference.losses[p] for p in range(3 * len(walk) // 4, len(walk))]))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the graphs of ../shared/data")
def test_prediction_keeps_in_training_what_no_correction_loses():
    """Over three seeds predict gave 0.78 to 1.02, latest 1.23 to 1.82."""
    problem = Problem("amazon_photo", "10/20/70")
    assert tail_loss(problem, "predict", 100) + 0.15 < tail_loss(problem, "latest", 100)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the graphs of ../shared/data")
def test_stages_that_are_apart_fail_on_squirrel_at_this_rate():
    """1.55 with version gaps, 1.28 without; accuracies at a flush were 0.28 and 0.37."""
    problem = Problem("squirrel", "60/20/20")
    together = tail_loss(problem, "predict", 60, depths=(0, 0, 0, 0))
    assert tail_loss(problem, "predict", 60) > together + 0.1
