"""A finished run is loaded for predictions."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import pyg_data, small_graph
from torch_geometric import nn as pyg

from gnnpipe import Callback, Graph, TrainConfig, Trainer, resumed_config
from gnnpipe.errors import InputError
from gnnpipe.models import MODELS
from gnnpipe.tasks.scoring import Scores


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


def test_a_run_whose_rows_travel_by_columns_is_loaded_on_one_rank(tmp_path):
    trainer = Trainer(config(tmp_path, dataset="karate"))
    trainer.fit()
    file = tmp_path / "run" / "config.toml"
    two = file.read_text().replace("shards = 1", "shards = 2")
    file.write_text(two.replace('row_way = "halo"', 'row_way = "columns"'))
    assert torch.equal(Trainer.load(tmp_path / "run").predict(), trainer.predict())


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
    as_given = Trainer.load(tmp_path / "run", graph=data, model=again).predict()
    assert torch.equal(as_given, found)
    with pytest.raises(InputError, match="graph: is a dict"):
        Trainer.load(tmp_path / "run", graph={}, model=again)
    with pytest.raises(InputError, match="pass it again"):
        Trainer.load(tmp_path / "run", graph=small_graph())
    with pytest.raises(InputError, match="pass it again"):
        Trainer.load(tmp_path / "run", model=again)
    with pytest.raises(InputError, match="its weights do not fit"):
        Trainer.load(tmp_path / "run", graph=small_graph(), model=pyg.GraphSAGE(7, 9, 2, 3))


def interrupted(tmp_path, **settings):
    """A run with checkpoints that has lost its last files, and its model after each epoch."""
    weights = []

    class Keep(Callback):
        def on_epoch_end(self, trainer, row):
            weights.append({k: v.clone() for k, v in trainer.model.state_dict().items()})

    torch.manual_seed(0)
    model = Net()
    run = config(tmp_path, checkpoint_every=1, eval_every=1, **settings)
    Trainer(run, graph=small_graph(), model=model, callbacks=[Keep()]).fit()
    for name in ("model.pt", "result.json"):
        (tmp_path / "run" / name).unlink()
    return weights


class Net(torch.nn.Module):
    """With buffers that a checkpoint holds, and one that no op reads."""

    def __init__(self):
        super().__init__()
        self.first, self.last = pyg.SAGEConv(7, 8), pyg.SAGEConv(8, 3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("unread", torch.ones(2))

    def forward(self, x, edge_index):
        return self.last(self.norm(self.first(x, edge_index)).relu(), edge_index)


def test_a_run_that_has_not_ended_gives_its_newest_checkpoint(tmp_path):
    weights = interrupted(tmp_path)
    with pytest.warns(UserWarning, match=r"has not ended; its weights are those of epoch-000003"):
        loaded = Trainer.load(tmp_path / "run", graph=small_graph(), model=Net())
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, weights[-1][name]), name


def test_a_run_that_was_resumed_after_its_end_gives_its_newest_checkpoint(tmp_path):
    run = config(tmp_path, dataset="karate", checkpoint_every=1)
    Trainer(run).fit()
    ended = {name: (tmp_path / "run" / name).read_bytes() for name in ("model.pt", "result.json")}
    longer = Trainer(resumed_config(run.out, {"epochs": 5}), resume=run.out)
    longer.fit()
    for name, content in ended.items():
        (tmp_path / "run" / name).write_bytes(content)  # as if it had been interrupted
    with pytest.warns(UserWarning, match=r"its weights are those of epoch-000005"):
        loaded = Trainer.load(run.out)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, longer.model.state_dict()[name]), name


def test_settings_of_training_cannot_differ(tmp_path):
    with pytest.raises(InputError, match=r"epochs cannot differ from the run's; what can: dataset"):
        Trainer.load(tmp_path, epochs=3)


def test_a_run_that_has_not_ended_gives_its_best_epoch_if_it_keeps_that(tmp_path, monkeypatch):
    values = iter([0.5, 0.9, 0.1])

    def fake(rank_runtime, mesh):
        return Scores(*[next(values)] * 6)

    monkeypatch.setattr("gnnpipe.train.loop.evaluate", fake)
    weights = interrupted(tmp_path, keep_weights="best")
    with pytest.warns(UserWarning, match="of the best epoch up to epoch-000003"):
        loaded = Trainer.load(tmp_path / "run", graph=small_graph(), model=Net())
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, weights[1][name]), name


def test_runs_without_usable_weights_are_named(tmp_path):
    with pytest.raises(InputError, match=r"^run .*: contains no run"):
        Trainer.load(tmp_path)
    Trainer(config(tmp_path), graph=small_graph(), model=pyg.GCN(7, 8, 2, 3)).fit()
    parts = {"graph": small_graph(), "model": pyg.GCN(7, 8, 2, 3)}
    file = tmp_path / "run" / "model.pt"
    whole = file.read_bytes()
    other = io.BytesIO()
    torch.save([1, 2], other)
    for damaged in (b"", whole[: len(whole) // 2], whole[:-9], b"no zip", other.getvalue()):
        file.write_bytes(damaged)
        with pytest.raises(
            InputError, match=r"run/model\.pt: is damaged.*remove it to use"
        ) as found:
            Trainer.load(tmp_path / "run", **parts)
        assert "\n" not in str(found.value)
    file.unlink()
    with pytest.raises(InputError, match=r"has not ended, .*no model\.pt.*no complete checkpoint"):
        Trainer.load(tmp_path / "run", **parts)


UNLABELLED = ("y", "train_mask", "val_mask", "test_mask")


def unlabelled():
    data = pyg_data(small_graph(n=90, seed=4))
    for field in UNLABELLED:
        del data[field]
    return Graph.from_pyg(data)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("layers", [1, 3])
def test_the_run_knows_the_number_of_classes(tmp_path, model, layers):
    graph = replace(small_graph(classes=5), name="labelled")
    np.savez(
        tmp_path / "graph.npz",
        **{"edge_index": graph.edge_index, "x": graph.x, "y": graph.y, "num_classes": 6},
        **{name: getattr(graph, name) for name in UNLABELLED[1:]},
    )
    run = config(tmp_path, dataset=str(tmp_path / "graph.npz"), model=model, layers=layers)
    Trainer(run).fit()
    assert Trainer.load(tmp_path / "run", graph=unlabelled()).predict().shape == (90, 6)
    few = Graph.from_pyg(pyg_data(small_graph(classes=2)))
    assert Trainer.load(tmp_path / "run", graph=few).predict().shape == (60, 6)


def test_a_model_made_by_a_file_gets_the_number_of_classes(tmp_path):
    (tmp_path / "own_net.py").write_text(
        "from torch_geometric.nn import GraphSAGE\n"
        "def make(graph):\n"
        "    return GraphSAGE(graph.num_features, 8, 2, graph.num_classes)\n"
    )
    model = f"{tmp_path / 'own_net.py'}:make"
    Trainer(config(tmp_path, model=model), graph=small_graph(classes=4)).fit()
    assert Trainer.load(tmp_path / "run", graph=unlabelled()).predict().shape == (90, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"patience": 2, "eval_every": 1},
        {"keep_weights": "best", "eval_every": 1},
        {"lr_schedule": "plateau", "lr_patience": 1, "eval_every": 1},
        {"metric": "f1-macro"},
        {"metric": "rocauc"},
        {"metric": "rmse"},
    ],
    ids=str,
)
def test_settings_of_validation_do_not_prevent_a_prediction(tmp_path, settings):
    graph = small_graph()
    if settings.get("metric") == "rocauc":
        y = np.random.default_rng(0).integers(0, 2, (60, 3)).astype(np.int8)
        graph = replace(graph, y=y)
    if settings.get("metric") == "rmse":
        y = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
        graph = replace(graph, y=y)
    Trainer(config(tmp_path, **settings), graph=graph).fit()
    assert Trainer.load(tmp_path / "run", graph=unlabelled()).predict().shape == (90, 3)


def test_settings_that_read_the_runs_own_dataset_do_not_matter(tmp_path):
    Trainer(config(tmp_path, dataset="karate", split="60/20/20")).fit()
    graph = Graph.from_pyg(pyg_data(small_graph()))
    with pytest.raises(InputError, match="its weights do not fit"):
        Trainer.load(tmp_path / "run", graph=graph).predict()
