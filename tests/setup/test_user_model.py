"""A model named on the command line is the model that a script would pass in."""

import sys

import pytest
import torch
from helpers import run_ranks
from resume_runs import config, table
from torch_geometric.nn import GraphSAGE

from gnnpipe import TrainConfig, Trainer, info
from gnnpipe.cli.main import main
from gnnpipe.data.load import load_graph
from gnnpipe.errors import InputError
from gnnpipe.run.resume import resumed_config

TEXT = """
import helper_of_net
from torch import nn
from torch_geometric.nn import GraphSAGE


def make_model(graph, config):
    return helper_of_net.sage(graph, config.hidden, config.layers)


class Net(GraphSAGE):
    def __init__(self, graph):
        super().__init__(graph.num_features, 8, 2, graph.num_classes)


def with_width(graph, *, width, aggr="mean"):
    return GraphSAGE(graph.num_features, width, 2, graph.num_classes, aggr=aggr)


def with_anything(graph, *, width=4, **more):
    return GraphSAGE(graph.num_features, width, 2, graph.num_classes, **more)


def fails(graph):
    return [].missing


number = 3


def returns_nothing():
    return None
"""
HELPER = """
from torch_geometric.nn import GraphSAGE


def sage(graph, hidden, layers):
    return GraphSAGE(graph.num_features, hidden, layers, graph.num_classes)
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    """The folder of net.py, which is forgotten afterwards."""
    (tmp_path / "net.py").write_text(TEXT)
    (tmp_path / "helper_of_net.py").write_text(HELPER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("net", "helper_of_net"):
        sys.modules.pop(name, None)


def settings(name, out, **more):
    given = {"model": name, "dataset": "karate", "layers": 3, "dropout": 0.0, "chunks": 2}
    return config(out, **given | more)


UNREAD = {name: getattr(TrainConfig, name) for name in ("layers", "hidden", "dropout")}
"""Defaults, for functions that do not take the config."""


@pytest.mark.parametrize("where", ["net.py:make_model", "net:make_model"])
def test_it_trains_as_if_it_was_passed_in(net, where):
    if where.startswith("net:"):
        sys.path.insert(0, str(net))
    Trainer(settings(where, net / "named")).fit()
    graph, run = load_graph("karate"), settings("gcn", net / "passed")
    torch.manual_seed(run.seed)
    model = GraphSAGE(graph.num_features, run.hidden, run.layers, graph.num_classes)
    Trainer(run, graph, model).fit()
    assert table(net / "named") == table(net / "passed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:--profile .*the fit of")  # too small to be timed well
def test_a_class_and_the_other_commands(net, capsys):
    words = ["--model", f"{net}/net.py:Net", "--dataset", "karate"]
    assert main(["info", *words, "--stages", "2", "--chunks", "4"]) == 0
    assert "model Net: " in capsys.readouterr().out
    assert main(["verify", *words, "--chunks", "2", "--epochs", "2"]) == 0
    assert main(["profile", *words, "--save", str(net / "profile.json")]) == 0
    assert main(["simulate", *words, "--profile", str(net / "profile.json")]) == 0
    capsys.readouterr()
    assert main(["train", *words, "--epochs", "2", "--no-predict"]) == 0
    (run,) = (net / "runs").iterdir()
    assert run.name.startswith("karate-net-py-Net-")


def test_a_run_is_resumed_by_the_name(net):
    whole, out = net / "whole", net / "stopped"
    Trainer(settings("net.py:make_model", whole, checkpoint_every=2)).fit()
    Trainer(settings("net.py:make_model", out, checkpoint_every=2, epochs=4)).fit()
    Trainer(resumed_config(out, {"epochs": 9}), resume=out).fit()
    assert table(out) == table(whole)


def losses_on_ranks(path, stages, shards):
    run = settings(path, "off", stages=stages, shards=shards, dtype="float64")
    return [row.loss for row in Trainer(run).fit().history]


@pytest.mark.parametrize(("stages", "shards"), [(2, 1), (1, 2)])
def test_every_rank_makes_it(net, stages, shards):
    path = f"{net}/net.py:make_model"
    wanted = losses_on_ranks(path, 1, 1)
    for found in run_ranks(losses_on_ranks, 2, path, stages, shards):
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("net.py:make_modl", "net.py has no 'make_modl'; did you mean 'make_model'"),
        ("nut.py:make_model", "there is no file nut.py; give a path from /"),
        ("no_such.net:make", "there is no module 'no_such.net' .the module 'no_such' is missing"),
        ("net.py:number", "names a value of type int; name a function of graph and config"),
        ("./net:make_model", "'./net' is no module; give FILE.py:NAME"),
        (":make_model", "'' is no module; give FILE.py:NAME"),
        ("net.py:returns_nothing", "returned an object of type NoneType, not a torch.nn.Module"),
    ],
)
def test_a_wrong_name(net, name, words):
    with pytest.raises(InputError, match=words):
        info(settings(name, "off", **UNREAD))


@pytest.mark.parametrize("name", ["with_width", "with_anything"])
def test_arguments_of_the_model(net, name):
    given = settings(f"net.py:{name}", "off", model_args="width=5, aggr='max'", **UNREAD)
    trainer = Trainer(given)
    assert trainer.plan.chunks == 2
    conv = trainer.model.convs[0]
    assert (conv.out_channels, type(conv.aggr_module).__name__) == (5, "MaxAggregation")


def test_settings_that_the_function_cannot_read(net):
    words = "--layers 3, --hidden 8, --dropout 0.0: no effect, as net.py:with_width does not take"
    with pytest.warns(UserWarning, match=words):
        info(settings("net.py:with_width", "off", model_args="width=5"))
    info(settings("net.py:with_width", "off", model_args="width=5", **UNREAD))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("widht=5", "net.py:with_width has no argument 'widht'; did you mean 'width'"),
        ("graph=5", "cannot be called with the arguments graph and config .*missing a"),
        ("", "--model '.*net.py:with_width': .* cannot be called .*missing a required .*'width'"),
        ("width=[", "'width=\\['.*; try keyword arguments"),
        (
            "width=f()",
            r"f\(\) is no number, text, list or other literal; text needs quotes: width='f",
        ),
    ],
)
def test_wrong_arguments_of_the_model(net, args, words):
    with pytest.raises(InputError, match=words):
        info(settings("net.py:with_width", "off", model_args=args))


def test_an_error_of_the_users_code_is_raised_as_it_is(net):
    with pytest.raises(AttributeError, match="missing"):
        info(settings("net.py:fails", "off", **UNREAD))
    (net / "other.py").write_text("import no_such_package")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_package"):
            info(settings("other.py:make_model", "off"))


def test_a_file_named_as_a_module_that_is_there(net):
    (net / "json.py").write_text((net / "net.py").read_text())
    assert "model GraphSAGE" in str(info(settings("json.py:make_model", "off")))
    assert "dumps" in vars(sys.modules["json"])


def test_a_resume_from_another_folder(net, monkeypatch):
    out, elsewhere = net / "run", net / "elsewhere"
    elsewhere.mkdir()
    Trainer(settings("net.py:make_model", out, checkpoint_every=2, epochs=2)).fit()
    monkeypatch.chdir(elsewhere)
    Trainer(resumed_config(out, {"epochs": 4}), resume=out).fit()
    assert resumed_config(out, {"model": "../net.py:make_model"})
    assert len(table(out)) == 4
