"""The built-in models: their settings, names and errors."""

import dataclasses
import inspect
from pathlib import Path

import pytest
from helpers import quick_config, small_graph

import gnnpipe.models
from gnnpipe import Trainer
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.models import GAT, MODELS
from gnnpipe.perf.profile import op_kind
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare


@pytest.mark.parametrize("name", sorted(MODELS))
def test_arguments_of_a_model(name):
    """Those after the shared ones are for ``--model-args``, and have a default."""
    parameters = inspect.signature(MODELS[name]).parameters
    names = list(parameters)
    assert names[:5] == ["num_features", "num_classes", "layers", "hidden", "dropout"]
    assert all(parameters[one].default is not inspect.Parameter.empty for one in names[5:])
    assert not {*names[5:]} & {f.name for f in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_is_a_short_file(name):
    """A user reads it as an example of a model of their own."""
    file = Path(gnnpipe.models.__file__).with_name(f"{name}.py")
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 80


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="model 'gcn' is registered already"):
        MODELS.add("gcn", MODELS["gcn"])


def test_heads_divide_the_width():
    with pytest.raises(InputError, match="heads 3 does not divide hidden 8; try hidden 9"):
        GAT(7, 3, layers=2, hidden=8, dropout=0.0, heads=3)


@pytest.mark.parametrize("features", [7, 9])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_profile_of_three_layers_knows_the_ops_of_more(name, features):
    def kinds(layers):
        config = quick_config(model=name, layers=layers, hidden=8)
        graph = small_graph(features=features)
        prepared = prepare(config, Mesh.alone(), graph)
        return {op_kind(op) for op in prepared.model_graph.ops}

    assert kinds(3) == kinds(4) == kinds(6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_same_module_passed_in_trains_alike(name, layers):
    config = quick_config(model=name, layers=layers, hidden=8, dropout=0.5, epochs=2)
    named = Trainer(config, small_graph())
    module = Trainer(config, small_graph()).model
    passed = Trainer(dataclasses.replace(config, model="gcn"), small_graph(), model=module)
    assert [row.loss for row in passed.fit().history] == [row.loss for row in named.fit().history]
