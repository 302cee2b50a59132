"""Steps by chunk against a reference of dense matrices in one process: tables, losses and weights.

The reference follows the passes of all stages one after another: forward of pass p pushes its rows
and aggregates over the table, backward sends gradients to the rows of its own chunk alone. With
``--schedule async`` stage s computes forward before the steps of the last S - 1 - s passes, and
backward with the newest weights. Nothing is shared with the runtime but the cut into chunks, the
order of the chunks and the first weights.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import quick_config, run_ranks, small_graph
from torch_geometric.nn import GCNConv, SAGEConv

from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epochs

LR = 0.02


class Net(torch.nn.Module):
    """Four aggregations, and the input of the first one once more before the last one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(7, 6)
        self.a, self.b = GCNConv(6, 6), GCNConv(6, 6)
        self.c, self.d = SAGEConv(6, 6), SAGEConv(6, 3)

    def forward(self, x, edge_index):
        h = self.first(x)
        x = self.a(h, edge_index).tanh()
        x = self.b(x, edge_index).tanh()
        x = self.c(x, edge_index).tanh()
        return self.d(x + h, edge_index)


def matrices(graph):
    """PyG's matrices of GCNConv and of the mean of SAGEConv, dense, written here once more."""
    n = graph.num_vertices
    a = torch.zeros(n, n, dtype=torch.float64)
    source, target = (torch.from_numpy(np.asarray(e)).long() for e in graph.edge_index)
    a[target, source] = 1.0
    looped = a + torch.eye(n, dtype=torch.float64)
    root = looped.sum(1).rsqrt()
    mean = a / a.sum(1).clamp(min=1)[:, None]
    return root[:, None] * looped * root, mean


class Reference:
    """The layers of ``Net``, with one history table each."""

    def __init__(self, graph, state, chunk_of, stage_of, steps_every):
        """``stage_of``: by name of a weight."""
        self.weights = {k: v.double().clone().requires_grad_() for k, v in state.items()}
        self.gcn, self.mean = matrices(graph)
        self.x, self.y = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.y).long()
        self.train = torch.from_numpy(graph.train_mask)
        self.chunk_of, self.stage_of, self.every = chunk_of, stage_of, steps_every
        self.chunks = int(chunk_of.max()) + 1
        n = graph.num_vertices
        self.tables = [torch.zeros(n, 6, dtype=torch.float64) for _ in range(4)]
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=LR)
        self.versions = [self._copy()]
        self.older = {}

    def _copy(self):
        return {k: v.detach().clone() for k, v in self.weights.items()}

    def _times(self, x, name):
        return Product.apply(x, self.weights[name], self.older[name])

    def _plus(self, x, name):
        return Sum.apply(x, self.weights[name], self.older[name])

    def _loss(self, chunk):
        """Loss of the chunk, as its share of the mean; each layer pushes before it aggregates."""
        mine = self.chunk_of == chunk
        h = self._plus(self._times(self.x[mine], "first.weight"), "first.bias")
        x = self._gcn(0, mine, h, "a").tanh()
        x = self._gcn(1, mine, x, "b").tanh()
        found = self._times(self._read(2, self.mean, mine, x), "c.lin_l.weight")
        x = (self._plus(found, "c.lin_l.bias") + self._times(x, "c.lin_r.weight")).tanh()
        found = self._times(self._read(3, self.mean, mine, x + h), "d.lin_l.weight")
        logits = self._plus(found, "d.lin_l.bias")
        logits = logits + self._times(x + h, "d.lin_r.weight")
        rows = self.train[mine]
        loss = F.cross_entropy(logits[rows], self.y[mine][rows], reduction="sum")
        return loss / self.train.sum()

    def _read(self, layer, matrix, mine, rows):
        table = self.tables[layer]
        table[mine] = rows.detach()
        others = table.clone()
        others[mine] = 0.0
        return matrix[mine][:, mine] @ rows + matrix[mine] @ others

    def _gcn(self, layer, mine, x, name):
        found = self._times(self._read(layer, self.gcn, mine, x), f"{name}.lin.weight")
        return self._plus(found, f"{name}.bias")

    def run(self, order, gap):
        """Trains over the passes of ``order`` up to a flush; returns the loss of each.

        ``gap(stage, p)``: steps between forward and backward of a pass.
        """
        losses, first = [], len(self.versions) - 1
        for p, chunk in enumerate(order):
            done = first + p // self.every
            self.older = {
                name: self.versions[done - gap(self.stage_of[name], p)][name]
                for name in self.weights
            }
            loss = self._loss(chunk)
            start = p - p % self.every
            together = torch.isin(self.chunk_of, torch.tensor(order[start : start + self.every]))
            (loss * self.train.sum() / self.train[together].sum().clamp(min=1)).backward()
            losses.append(loss.item())
            if (p + 1) % self.every == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.versions.append(self._copy())
        return losses


class Product(torch.autograd.Function):
    """x @ older.T in forward; backward multiplies by the weights as they are then."""

    @staticmethod
    def forward(ctx, x, real, older):
        ctx.save_for_backward(x, real)
        return x @ older.t()

    @staticmethod
    def backward(ctx, grad):
        x, real = ctx.saved_tensors
        return grad @ real, grad.t() @ x, None


class Sum(torch.autograd.Function):
    """x + older in forward; the gradient goes to the weights as they are then."""

    @staticmethod
    def forward(ctx, x, real, older):
        return x + older

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(0), None


def difference(stages, shards, chunks, schedule, every=None, epochs=(2, 2), plan=None):
    """Largest difference of losses and weights; runs on every rank."""
    graph = small_graph(40, directed=True)
    mesh = Mesh.join(stages, shards)
    config = quick_config(
        stages=stages,
        shards=shards,
        chunks=chunks,
        schedule=schedule,
        steps_every=every,
        weights="latest" if schedule == "async" else "predict",
        lr=LR,
        eval_every=epochs[0],
        epochs=sum(epochs),
    )
    net = Net()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    prepared = prepare(config, mesh, graph, net)
    runtime = build_rank(prepared, mesh)
    chunk_of = torch.empty(graph.num_vertices, dtype=torch.int64)
    rows = torch.from_numpy(prepared.chunking.chunk_of_row().astype(np.int64))
    chunk_of[torch.from_numpy(prepared.chunking.perm)] = rows
    owners = {
        name: number
        for number, stage in enumerate(prepared.plan.stages)
        for name, _ in prepared.model.stage_module(stage.ops).named_parameters()
    }
    steps = every or (1 if schedule == "async" else chunks)
    reference = Reference(graph, state, chunk_of, owners, steps)
    found, epoch = [], 0
    for count in epochs:
        spans = [count] if schedule == "async" else [1] * count
        for span in spans:
            orders = [prepared.chunk_order(epoch + e) for e in range(span)]
            order = [c for one in orders for c in one]
            program = prepared.program_over(span)
            losses = train_epochs(runtime, mesh, program, order, epoch)
            behind = stages - 1

            def gap(stage, p, behind=behind):
                if schedule == "1f1b":
                    return 0
                # Forward of pass p comes when backward of pass p - 1 - distance has ended.
                before = max(p - (behind - stage), 0)
                return p // steps - before // steps

            truth = reference.run(order, gap)
            for e, loss in enumerate(losses):
                found.append(abs(loss - sum(truth[e * chunks : (e + 1) * chunks])))
            epoch += span
    parts = {
        k: v.detach().clone() for k, v in runtime.executor.stage.stage_module.named_parameters()
    }
    for part in mesh.gather(parts):
        for name, value in part.items():
            found.append(float((value - reference.weights[name].detach()).abs().max()))
    assert runtime.executor.has_stepped
    return max(found)


CASES = [("1f1b", None), ("1f1b", 2), ("async", None), ("async", 3)]


@pytest.mark.parametrize(("schedule", "every"), CASES)
def test_one_rank(schedule, every):
    assert difference(1, 1, 6, schedule, every) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "every"), CASES)
@pytest.mark.parametrize(("stages", "shards"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_ranks(stages, shards, schedule, every):
    found = run_ranks(difference, stages * shards, stages, shards, 6, schedule, every)
    assert max(found) < 1e-9
