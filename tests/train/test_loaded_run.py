"""A finished run is loaded for predictions."""

import pytest
import torch
from helpers import pyg_data, small_graph
from torch_geometric import nn as pyg

from gnnpipe import Graph, TrainConfig, Trainer
from gnnpipe.errors import InputError


def config(tmp_path, **settings):
    return TrainConfig(
        epochs=3, out=str(tmp_path / "run"), cache_dir="off", quiet=True, predict=False, **settings
    )


def test_a_built_in_model_and_its_dataset(tmp_path):
    trainer = Trainer(config(tmp_path, dataset="karate", chunks=2, checkpoint_every=1))
    result = trainer.fit()
    loaded = Trainer.load(tmp_path / "run")
    assert torch.allclose(loaded.predict(), trainer.predict(), 1e-5, 1e-6)
    assert loaded.evaluate().test_acc == pytest.approx(result.test_acc)
    assert loaded.plan.num_ranks == 1


def test_own_parts_are_passed_again_and_other_graphs_fit(tmp_path):
    torch.manual_seed(0)
    model = pyg.GraphSAGE(7, 8, 2, 3)
    Trainer(config(tmp_path), graph=small_graph(), model=model).fit()
    again, data = pyg.GraphSAGE(7, 8, 2, 3), pyg_data(small_graph(n=90, seed=4))
    del data.y, data.train_mask, data.val_mask, data.test_mask
    found = Trainer.load(tmp_path / "run", graph=Graph.from_pyg(data), model=again).predict()
    with torch.no_grad():
        truth = model.eval()(data.x, data.edge_index)
    assert torch.allclose(found, truth, 1e-5, 1e-6)
    with pytest.raises(InputError, match="pass it again"):
        Trainer.load(tmp_path / "run", graph=small_graph())
    with pytest.raises(InputError, match="pass it again"):
        Trainer.load(tmp_path / "run", model=again)
    with pytest.raises(InputError, match="its weights do not fit"):
        Trainer.load(tmp_path / "run", graph=small_graph(), model=pyg.GraphSAGE(7, 9, 2, 3))


def test_a_run_that_has_not_ended_is_named(tmp_path):
    with pytest.raises(InputError, match="contains no run"):
        Trainer.load(tmp_path)
    Trainer(config(tmp_path), graph=small_graph(), model=pyg.GCN(7, 8, 2, 3)).fit()
    (tmp_path / "run" / "model.pt").unlink()
    with pytest.raises(InputError, match=r"has no model\.pt.*gnnpipe train --resume"):
        Trainer.load(tmp_path / "run", graph=small_graph(), model=pyg.GCN(7, 8, 2, 3))


def test_settings_that_read_the_runs_own_dataset_do_not_matter(tmp_path):
    Trainer(config(tmp_path, dataset="karate", split="60/20/20")).fit()
    graph = Graph.from_pyg(pyg_data(small_graph()))
    with pytest.raises(InputError, match="its weights do not fit"):
        Trainer.load(tmp_path / "run", graph=graph).predict()
