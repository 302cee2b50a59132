"""One chunk walked in blocks of rows: the same run as with all rows at once."""

import copy

import pytest
import torch
from helpers import small_graph
from torch import nn
from torch_geometric.nn import GATv2Conv

from gnnpipe import TrainConfig, Trainer
from gnnpipe.train import row_blocks


def config(**settings):
    given = {"layers": 3, "hidden": 16, "dropout": 0.5, "epochs": 3, "out": "off", "quiet": True}
    return TrainConfig(cache_dir="off", **(given | settings))


def cut(monkeypatch):
    """Six blocks: of 200 rows of 16 numbers, or of the messages of all edges."""
    monkeypatch.setattr(row_blocks, "KEPT_BYTES", 0)
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 34 * 16 * 8)
    monkeypatch.setattr(row_blocks, "MESSAGE_BYTES", graph().num_edges * 16 * 8 // 6 + 128)


def graph():
    return small_graph(n=200, features=20)


class WithMessages(nn.Module):
    """Attention that makes them: its scores are of both ends at once."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(20, 16)
        self.first = GATv2Conv(16, 8, heads=2)
        self.second = GATv2Conv(16, 3, heads=1)

    def forward(self, x, edge_index):
        return self.second(self.first(self.encode(x), edge_index).relu(), edge_index)


@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn", "gat", "with messages"])
def test_blocks_give_the_same(model, monkeypatch):
    # Without messages an edge has a number for each of four heads.
    count = 2 if model == "gat" else 6
    is_ours = model != "with messages"
    settings = config(dtype="float64", **({"model": model} if is_ours else {}))
    torch.manual_seed(0)
    mine = None if is_ours else WithMessages().double()

    def trainer_of(**given):
        return Trainer(settings, graph=graph(), model=copy.deepcopy(mine), **given)

    whole = trainer_of().fit()
    cut(monkeypatch)
    trainer = trainer_of()
    blocks = trainer.fit()
    assert trainer.plan.chunks == count
    assert blocks.exact
    assert blocks.chunks == 1
    for a, b in zip(whole.history, blocks.history, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-11)
    assert blocks.test_acc == whole.test_acc
    # The plan of such a run is one for such a run.
    again = trainer_of(plan=trainer.plan).fit()
    assert [row.loss for row in again.history] == [row.loss for row in blocks.history]


def test_stale_walks_are_left_as_they_are(monkeypatch):
    cut(monkeypatch)
    trainer = Trainer(config(model="gcn", chunks=2), graph=graph())
    trainer.fit()
    assert trainer.plan.chunks == 2
