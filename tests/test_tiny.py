"""The tour: one epoch of the smallest run, worked out by hand. Read this test first.

A path of six vertices in two chunks, and a model of two layers that are as simple as layers can be:

    chunk 0       chunk 1          layer 1:  h   = A (w1 x)
    0 - 1 - 2  -  3 - 4 - 5        layer 2:  out = A (w2 h)

A sums over the neighbours, features are x = 1 2 3 4 5 6, both weights begin at 1. The only edge
between the chunks is 2 - 3: vertex 2 reads vertex 3, and vertex 3 reads vertex 2.

Each layer has a history table [6, 1] of the rows that it aggregates (here w1 x and w2 h). The
program of an epoch on one stage is

    0F0 0F1 0B1 0B0 0STEP          (stage, F or B, position of the chunk)

A chunk pushes its rows into the table and aggregates over the whole table. So chunk 0 reads the row
of vertex 3 before chunk 1 has pushed it (stale: from the epoch before, 0 in the first), and chunk 1
reads the row of vertex 2 after chunk 0 has pushed it (live). Backward walks the chunks in reverse:
when chunk 0 is reached, chunk 1 has left the gradient of vertex 2's row in the gradient table.
"""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_geometric.data import Data

from gnnpipe import Graph, TrainConfig, Trainer
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepare import prepare


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.SimpleConv(aggr="sum")
        self.w1, self.w2 = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for lin in (self.w1, self.w2):
            nn.init.ones_(lin.weight)

    def forward(self, x, edge_index):
        h = self.conv(self.w1(x), edge_index)
        return self.conv(self.w2(h), edge_index)


def path():
    """The path; all vertices train, and y is what makes the first loss a third."""
    ends = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 5], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4]])
    x, y = torch.arange(1.0, 7.0)[:, None], torch.tensor([[3.0, 4, 4, 11, 13, 10]]).T
    train = torch.ones(6, dtype=torch.bool)
    none = ~train
    data = Data(x=x, edge_index=ends, y=y, train_mask=train, val_mask=none, test_mask=none)
    graph = Graph.from_pyg(data, task="regression")
    # Sparse, because A x of dense features would be computed once, and layer 1 would push nothing.
    return replace(graph, x=sp.csr_array(graph.x))


def config(**changes):
    settings = {
        "chunks": 2,
        "partitioner": "range",
        "staleness": "none",
        "lr": 0.1,
        "weight_decay": 0.0,
        "dtype": "float64",
        "epochs": 2,
        "eval_every": 0,
        "out": "off",
        "cache_dir": "off",
        "quiet": True,
    }
    return TrainConfig(**settings | changes)


def losses(**changes):
    trainer = Trainer(config(**changes), graph=path(), model=TwoLayers())
    return [row.loss for row in trainer.fit().history]


def test_two_epochs_of_two_chunks():
    # Epoch 1, forward. Tables begin at 0.
    #   chunk 0: pushes w1 x = 1 2 3     h = 2, 1 + 3, 2 + 0 (stale)     = 2 4 2
    #            pushes h = 2 4 2        out = 4, 2 + 2, 4 + 0 (stale)   = 4 4 4, times w2
    #   chunk 1: pushes w1 x = 4 5 6     h = 3 (live) + 5, 4 + 6, 5      = 8 10 5
    #            pushes h = 8 10 5       out = 2 (live) + 10, 8 + 5, 10  = 12 13 10, times w2
    # w1 x is pushed because x holds the features; w2 comes behind its sum.
    # The targets are 3 4 4 11 13 10: two vertices are off by 1, the mean square is 2 / 6.
    first = 2 / 6
    # Backward. The gradient of out is 2 / 6 at vertices 0 and 3, and 0 elsewhere.
    #   chunk 1: out[3] = w2 (row 2 + row 4 of table 2) = w2 (2 + 10): dw2 = 12 / 3 = 4
    #            row 4 is its own, row 2 waits for chunk 0
    #            h[4] = row 3 + row 5 of table 1: dw1 = (4 + 6) / 3 = 10/3
    #   chunk 0: out[0] = w2 row 1 = 4 w2: dw2 = 4/3
    #            chunk 1 has left 1/3 for row 2
    #            h[1] = row 0 + row 2, h[2] = row 1 (row 3 was stale: a constant)
    #            dw1 = (1 + 3 + 2) / 3 = 2
    # Both gradients are 16/3. Adam's first step has the size of the learning rate: w1 = w2 = 0.9.
    #
    # Epoch 2. Stale rows are those of epoch 1.
    #   chunk 0: pushes 0.9 1.8 2.7      h = 1.8, 3.6, 1.8 + 4 (stale)
    #            pushes 1.8 3.6 5.8      out = 0.9 (3.6, 1.8 + 5.8, 3.6 + 8 (stale))
    #   chunk 1: pushes 3.6 4.5 5.4      h = 2.7 (live) + 4.5, 9, 4.5
    #            pushes 7.2 9 4.5        out = 0.9 (5.8 (live) + 9, 7.2 + 4.5, 9)
    off = np.array([3.24 - 3, 6.84 - 4, 10.44 - 4, 13.32 - 11, 10.53 - 13, 8.1 - 10])
    assert losses() == pytest.approx([first, np.mean(off**2)], rel=1e-6)


def test_gradients_of_the_first_epoch():
    model, found = TwoLayers(), []
    hook = register_optimizer_step_pre_hook(
        lambda *_: found.append([weight.grad.item() for weight in model.parameters()])
    )
    Trainer(config(epochs=1), graph=path(), model=model).fit()
    hook.remove()
    assert found == [pytest.approx([16 / 3, 16 / 3])]


@pytest.mark.parametrize("changes", [{"staleness": "exact"}, {"chunks": 1}])
def test_without_stale_rows_it_is_full_graph_training(changes):
    # h = 2 4 6 8 10 5 and out = 4 8 12 16 13 10, off by 1 4 8 5 0 0.
    assert losses(epochs=1, **changes) == pytest.approx([(1 + 16 + 64 + 25) / 6])


def test_two_stages_make_a_triangle():
    # One layer per stage. Stage 1 works on chunk 0 while stage 0 works on chunk 1: the pipeline
    # fills, turns and drains.
    #
    #   time      0    1    2    3    4    5
    #   stage 0   F0   F1             B1   B0
    #   stage 1        F0   F1   B1   B0
    prepared = prepare(config(stages=2), World.alone(), path(), TwoLayers())
    assert prepared.program.text().splitlines() == [
        "stage 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B1<1 0RECV_B0<1 0B1 0B0 0STEP",
        "stage 1: 1RECV_F0<0 1RECV_F1<0 1F0 1F1 1B1 1SEND_B1>0 1B0 1SEND_B0>0 1STEP",
    ]
    # Each chunk sends h forward and its gradient back: 2 (S - 1) N H numbers of 8 bytes.
    assert prepared.volume.total == 2 * 1 * 6 * 1 * 8
