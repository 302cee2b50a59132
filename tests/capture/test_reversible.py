"""Reversible blocks train to the numbers of plain PyG, and what they keep until backward."""

import gc

import pytest
import torch
from helpers import plain_pyg_losses, pyg_data, quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from gnnpipe import Trainer
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.stage import Stage

IN, HIDDEN, OUT = 7, 8, 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), pyg.GCNConv(width, width)

    def forward(self, x, edge_index):
        return self.conv(self.norm(x).relu(), edge_index)


class Coupled(InvertibleModule):
    """A reversible block of one's own: additive coupling of two halves."""

    def __init__(self, width):
        super().__init__()
        self.f, self.g = Block(width // 2), Block(width // 2)

    def _forward(self, x, edge_index):
        one, two = torch.chunk(x, 2, dim=-1)
        one = one + self.f(two, edge_index)
        return torch.cat([one, two + self.g(one, edge_index)], dim=-1)

    def _inverse(self, y, edge_index):
        one, two = torch.chunk(y, 2, dim=-1)
        two = two - self.g(one, edge_index)
        return torch.cat([one - self.f(two, edge_index), two], dim=-1)


def grouped(width):
    return pyg.GroupAddRev(Block(width // 2), num_groups=2)


class Net(nn.Module):
    """Blocks that free their inputs in plain PyG."""

    def __init__(self, block=grouped, depth=3, width=HIDDEN):
        super().__init__()
        self.first, self.last = nn.Linear(IN, width), nn.Linear(width, OUT)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))

    def forward(self, x, edge_index):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, edge_index)
        return self.last(x.relu())


BLOCKS = [grouped, Coupled]


def made(block):
    torch.manual_seed(0)
    return Net(block).double()


def plain(block):
    data = pyg_data(small_graph())
    return plain_pyg_losses(made(block), data, (data.x.double(), data.edge_index), 4)


def config(**settings):
    return quick_config(epochs=4, staleness="exact", require_capture=True, **settings)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("block", BLOCKS)
def test_equals_plain_pyg(block, chunks):
    trainer = Trainer(config(chunks=chunks), graph=small_graph(), model=made(block))
    losses = [row.loss for row in trainer.fit().history]
    assert losses == pytest.approx(plain(block), rel=1e-9)


def on_ranks(shapes):
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for block in BLOCKS:
            run = config(stages=stages, shards=shards, chunks=chunks)
            trainer = Trainer(run, graph=small_graph(), model=made(block), world=mesh)
            found.append([row.loss for row in trainer.fit().history])
    return found


@pytest.mark.slow
def test_ranks_equal_plain_pyg():
    shapes = ((2, 1, 4), (1, 2, 1))
    truth = [plain(block) for block in BLOCKS] * len(shapes)
    for found in run_ranks(on_ranks, 2, shapes):
        for losses, expected in zip(found, truth, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9)


def numbers_per_row(n):
    """Numbers for each of n rows in all tensors that are alive."""
    gc.collect()
    alive = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.dim() == 2 and len(one) == n:
            storage = one.untyped_storage()
            alive[storage.data_ptr()] = storage.nbytes() / 4
    return sum(alive.values()) / n


def visible():
    """Context in which the tensors that autograd saves are Python's objects."""
    return torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)


def kept_in_gnnpipe(depth, recompute, monkeypatch):
    """Numbers per row that are alive between forward and backward."""
    found, seed_loss = [], Stage.seed_loss

    def counting(self, chunk, scale):
        found.append(numbers_per_row(61))
        seed_loss(self, chunk, scale)

    with monkeypatch.context() as patch, visible():
        patch.setattr(Stage, "seed_loss", counting)
        run = config(recompute=recompute, dtype="float32", eval_every=0)
        Trainer(run, graph=small_graph(61), model=Net(grouped, depth, 16)).fit()
    return found[-1]


def kept_in_plain_pyg(depth):
    data, model = pyg_data(small_graph(61)), Net(grouped, depth, 16)
    with visible():
        logits = model(data.x, data.edge_index)
    found = numbers_per_row(61)
    logits.sum().backward()
    return found


@pytest.mark.slow
def test_numbers_that_a_block_keeps(monkeypatch):
    """As in docs/how-to/reduce-memory.md; by block of width H and row."""
    of_plain = [kept_in_plain_pyg(depth) for depth in (2, 4)]
    assert of_plain[0] == of_plain[1]

    def by_width(recompute):
        few, many = (kept_in_gnnpipe(depth, recompute, monkeypatch) for depth in (2, 4))
        return (many - few) / 2 / 16

    assert by_width(True) <= 2.5
    assert by_width(False) <= 3.75
