"""One chunk walked in blocks of rows: the same run as with all rows at once."""

import pytest
from helpers import small_graph

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


@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn", "gat"])
def test_blocks_give_the_same(model, monkeypatch):
    settings = config(model=model, dtype="float64")
    whole = Trainer(settings, graph=graph()).fit()
    cut(monkeypatch)
    trainer = Trainer(settings, graph=graph())
    blocks = trainer.fit()
    assert trainer.plan.chunks == 6
    assert blocks.exact
    assert blocks.chunks == 1
    for a, b in zip(whole.history, blocks.history, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-11)
    assert blocks.test_acc == whole.test_acc
    # The plan of such a run is one for such a run.
    again = Trainer(settings, graph=graph(), plan=trainer.plan).fit()
    assert [row.loss for row in again.history] == [row.loss for row in blocks.history]


def test_stale_walks_are_left_as_they_are(monkeypatch):
    cut(monkeypatch)
    trainer = Trainer(config(model="gcn", chunks=2), graph=graph())
    trainer.fit()
    assert trainer.plan.chunks == 2
