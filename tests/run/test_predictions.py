"""Predictions of a run are written to one file by all ranks, for its own graph and for others."""

import errno
import os
import pickle

import numpy as np
import pytest
import torch
from helpers import run_ranks, small_graph
from torch_geometric.nn import GCNConv

from gnnpipe import InputError, TrainConfig, Trainer
from gnnpipe.cli.main import main
from gnnpipe.models import MODELS
from gnnpipe.runtime.comm.world import World

NET = """
import torch
from torch_geometric import nn as pyg

class Net(torch.nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.first, self.last = pyg.SAGEConv(width, 16), pyg.GCNConv(16, classes)
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, x, edge_index):
        return self.last(self.norm(self.first(x, edge_index)).relu(), edge_index)

def make(graph):
    return Net(graph.num_features, graph.num_classes)
"""


def npz(path, graph, *fields):
    arrays = {"edge_index": graph.edge_index, "x": graph.x}
    np.savez(path, **arrays, **{name: getattr(graph, name) for name in fields})
    return str(path)


@pytest.fixture(scope="module", params=["float64", "float32"])
def trained(request, tmp_path_factory):
    """A folder with a run in it, and two graphs: the run's, and one without labels."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "net.py").write_text(NET)
    fields = ("y", "train_mask", "val_mask", "test_mask")
    config = TrainConfig(
        dataset=npz(folder / "own.npz", small_graph(), *fields),
        model=f"{folder / 'net.py'}:make",
        dtype=request.param,
        epochs=3,
        cache_dir="off",
        out=str(folder / "run"),
        quiet=True,
        predict=False,
        patience=3,
        eval_every=1,
    )
    npz(folder / "other.npz", small_graph(n=90, seed=4))
    Trainer(config).fit()
    return folder


def plain(folder, graph):
    """Rows of the layers of the run's model in plain PyG; '' are the logits."""
    scope = {}
    exec(NET, scope)
    weights = torch.load(folder / "run" / "model.pt", weights_only=True)
    dtype = next(iter(weights.values())).dtype
    model = scope["Net"](7, 3).to(dtype).eval()
    model.load_state_dict(weights)
    x, edges = torch.from_numpy(graph.x).to(dtype), torch.from_numpy(graph.edge_index)
    with torch.no_grad():
        first = model.first(x, edges)
        return {"first": first, "norm": model.norm(first), "": model(x, edges)}


def assert_are_rows(file, folder, graph, layer=""):
    found, truth = np.load(file), plain(folder, graph)[layer].numpy()
    assert found.dtype == truth.dtype
    tolerance = 1e-9 if found.dtype == np.float64 else 1e-5
    np.testing.assert_allclose(found, truth, rtol=tolerance, atol=tolerance)


def test_one_rank_writes_the_logits_of_plain_pyg(trained, tmp_path, capsys):
    file = tmp_path / "own.npy"
    assert main(["predict", str(trained / "run"), "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 60 rows of 3\n"
    assert_are_rows(file, trained, small_graph())
    own = Trainer.load(trained / "run", quiet=True).predict().numpy()
    np.testing.assert_array_equal(np.load(file), own)


def test_another_graph_needs_no_labels(trained, tmp_path, capsys):
    file, other = tmp_path / "other.npy", str(trained / "other.npz")
    flags = ["--dataset", other, "--out", str(file), "--chunks", "4", "--quiet"]
    assert main(["predict", str(trained / "run"), *flags]) == 0
    assert capsys.readouterr().out == ""
    assert_are_rows(file, trained, small_graph(n=90, seed=4))


def predict_on_ranks(folder, name, *flags):
    """Run the command on this rank; return its exit code and the bytes of its largest message."""
    sizes = [0]
    for method in ("gather", "collect", "share"):
        plain_method = getattr(World, method)

        def counted(self, thing, plain_method=plain_method):
            # The partition is shared by number of vertex, before anything is computed.
            if type(thing).__name__ != "Chunking":
                sizes.append(len(pickle.dumps(thing)))
            return plain_method(self, thing)

        setattr(World, method, counted)
    wide = ["--dataset", str(folder / "wide.npz")]
    code = main(["predict", str(folder / "run"), *wide, "--out", str(folder / name), *flags])
    return code, max(sizes)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 1)], ids=str)
def test_ranks_write_their_own_rows(trained, shape):
    graph = small_graph(n=2500, seed=5)
    npz(trained / "wide.npz", graph)
    stages, shards, chunks = map(str, shape)
    name = f"ranks-{stages}-{shards}.npy"
    flags = ["--stages", stages, "--shards", shards, "--chunks", chunks]
    for code, largest_bytes in run_ranks(predict_on_ranks, 2, trained, name, *flags):
        assert code == 0
        # Half of the rows would be 2500 * 3 * 4 / 2 = 15000 bytes.
        assert largest_bytes < 12000
    assert_are_rows(trained / name, trained, graph)


def not_seen(folder):
    """Predict on two ranks, of which one does not see the files of the other."""
    from pathlib import Path

    if os.environ["RANK"] == "1":
        exists = Path.exists
        Path.exists = lambda self: not self.name.endswith(".partial") and exists(self)
    return main(["predict", str(folder / "run"), "--shards", "2", "--out", str(folder / "no.npy")])


def test_a_disk_that_ranks_do_not_share_is_refused(trained):
    assert run_ranks(not_seen, 2, trained) == [2, 2]
    assert not list(trained.glob("no.npy*"))


def test_nothing_is_overwritten_or_left_behind(trained, tmp_path, monkeypatch, capsys):
    def refused(name, *flags):
        assert main(["predict", str(trained / "run"), "--out", str(tmp_path / name), *flags]) == 2
        return capsys.readouterr().err

    (tmp_path / "there.npy").write_text("mine")
    assert "there.npy': exists already; give a new name" in refused("there.npy")
    assert (tmp_path / "there.npy").read_text() == "mine"
    assert "is not a folder; create it" in refused("no/new.npy")
    assert "give a name that ends in .npy" in refused("new.csv")
    assert "--layers: not a flag of `gnnpipe predict`" in refused("new.npy", "--layers", "3")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert "cannot be written (No space left on device); free some space" in refused("new.npy")

    def interrupted(*_):
        assert len(list(tmp_path.glob("new.npy.*.partial"))) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("gnnpipe.train.evaluate.results_by_chunk", interrupted)
    assert main(["predict", str(trained / "run"), "--out", str(tmp_path / "new.npy")]) == 130
    assert [file.name for file in tmp_path.iterdir()] == ["there.npy"]


def test_features_of_another_width_are_named(trained, tmp_path, capsys):
    other = npz(tmp_path / "other.npz", small_graph(features=9))
    flags = ["--dataset", other, "--out", str(tmp_path / "new.npy")]
    assert main(["predict", str(trained / "run"), *flags]) == 2
    error = capsys.readouterr().err
    assert "its weights do not fit" in error
    assert "as many features and classes as the run's" in error


def test_parts_from_python_are_named(tmp_path, capsys):
    config = {"epochs": 1, "cache_dir": "off", "quiet": True, "predict": False}
    Trainer(TrainConfig(out=str(tmp_path / "run"), **config), graph=small_graph()).fit()
    command = ["predict", str(tmp_path / "run"), "--out", str(tmp_path / "new.npy")]
    assert main(command) == 2
    assert "its graph was passed in from Python" in capsys.readouterr().err
    assert main([*command, "--dataset", npz(tmp_path / "other.npz", small_graph())]) == 0
    assert np.load(tmp_path / "new.npy").shape == (60, 3)


def test_a_model_of_links_writes_the_final_rows_of_its_own_graph(tmp_path, capsys):
    dataset = "synthetic:planted:n=400,features=4"
    config = {"epochs": 1, "cache_dir": "off", "quiet": True, "predict": False, "task": "links"}
    Trainer(TrainConfig(out=str(tmp_path / "run"), dataset=dataset, **config)).fit()
    command = ["predict", str(tmp_path / "run"), "--out", str(tmp_path / "rows.npy")]
    assert main([*command, "--layer", "convs.0"]) == 2
    assert "predicts links, and its predictions are hidden rows" in capsys.readouterr().err
    assert main([*command, "--dataset", "karate"]) == 2
    assert "predicts links, for which another graph is passed in" in capsys.readouterr().err
    assert main(command) == 0
    rows = Trainer.load(tmp_path / "run").predict().numpy()
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), rows)
    assert rows.shape[0] == 400


@pytest.mark.parametrize("layer", ["first", "norm"])
def test_hidden_rows_are_those_of_the_layer_in_plain_pyg(trained, tmp_path, layer):
    file, other = tmp_path / "rows.npy", str(trained / "other.npz")
    command = ["predict", str(trained / "run"), "--layer", layer, "--out"]
    assert main([*command, str(file)]) == 0
    assert_are_rows(file, trained, small_graph(), layer)
    file.unlink()
    assert main([*command, str(file), "--dataset", other, "--chunks", "4"]) == 0
    assert_are_rows(file, trained, small_graph(n=90, seed=4), layer)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 1)], ids=str)
def test_hidden_rows_on_ranks(trained, shape):
    graph = small_graph(n=90, seed=5)
    npz(trained / "wide.npz", graph)
    stages, shards, chunks = map(str, shape)
    name = f"hidden-{stages}-{shards}.npy"
    flags = ["--stages", stages, "--shards", shards, "--chunks", chunks, "--layer", "norm"]
    assert [code for code, _ in run_ranks(predict_on_ranks, 2, trained, name, *flags)] == [0, 0]
    assert_are_rows(trained / name, trained, graph, "norm")


def run_of(folder, **settings):
    """Settings of a short run."""
    return TrainConfig(
        epochs=2, cache_dir="off", quiet=True, predict=False, out=str(folder / "run"), **settings
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_hidden_rows_of_built_in_models(tmp_path, name):
    graph = small_graph()
    config = run_of(tmp_path, model=name, layers=3, hidden=8, dtype="float64", chunks=2)
    Trainer(config, graph=graph).fit()
    logits = Trainer.load(tmp_path / "run", graph).predict()
    end = "convs.2" if name in ("gcn", "sage") else "decode"
    last = Trainer.load(tmp_path / "run", graph, layer=end).predict()
    torch.testing.assert_close(last, logits, rtol=1e-9, atol=1e-12)
    first = Trainer.load(tmp_path / "run", graph, layer="convs.0").predict()
    assert first.shape == (60, 8)
    weights = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    if name == "gcn":
        x, edges = torch.from_numpy(graph.x).double(), torch.from_numpy(graph.edge_index)
        conv = GCNConv(7, 8).double()
        conv.load_state_dict({k: weights[f"convs.0.{k}"] for k in ("lin.weight", "bias")})
        with torch.no_grad():
            truth = conv(x, edges)
        torch.testing.assert_close(first, truth, rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match=r"--layer 'convs.3': .* no such layer; did you mean"):
        Trainer.load(tmp_path / "run", graph, layer="convs.3")


class Attention(torch.nn.Module):
    """Cannot be recorded."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix = GCNConv(7, 8), torch.nn.Linear(8, 5)
        self.last, self.unused = GCNConv(5, 3), torch.nn.Linear(2, 2)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return self.last(self.mix((x @ x.t()).softmax(dim=1) @ x).relu(), edge_index)


def test_hidden_rows_of_a_model_that_runs_as_it_is(tmp_path):
    graph, model = small_graph(), Attention()
    Trainer(run_of(tmp_path), graph=graph, model=model).fit()
    again = Attention()
    names = list(again.state_dict())
    found = Trainer.load(tmp_path / "run", graph, again, layer="mix").predict()
    x, edges = torch.from_numpy(graph.x), torch.from_numpy(graph.edge_index)
    with torch.no_grad():
        h = model.eval().conv(x, edges)
        torch.testing.assert_close(found, model.mix((h @ h.t()).softmax(dim=1) @ h))
        torch.testing.assert_close(again.eval()(x, edges), model(x, edges))
    assert list(again.state_dict()) == names
    with pytest.raises(InputError, match="--layer 'unused': forward does not call this layer"):
        Trainer.load(tmp_path / "run", graph, again, layer="unused").predict()
