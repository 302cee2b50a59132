"""Errors of a stack of layers that does not fit together."""

import dataclasses

import pytest
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.models.gat import GATLayer
from gnnpipe.models.gcn import GCNLayer
from gnnpipe.models.gcnii import GCNIILayer
from gnnpipe.models.layer import MODELS, LayerSpec
from gnnpipe.models.layer_stack import GNN

SPEC = LayerSpec(num_features=7, num_classes=3, num_layers=2, hidden=8, heads=2)

WRONG = {
    "no layers": lambda: [],
    "layer 0 of 2 has index 1 of 2": lambda: [GCNLayer(1, SPEC), GCNLayer(0, SPEC)],
    "layer 0 of 1 has index 0 of 2": lambda: [GCNLayer(0, SPEC)],
    "layer 0 is a Linear": lambda: [nn.Linear(3, 3), GCNLayer(1, SPEC)],
    "layer 1, GCNIILayer, reads h0, which GCNLayer": lambda: [
        GCNLayer(0, SPEC),
        GCNIILayer(1, SPEC),
    ],
    "heads 3: does not divide hidden 8": lambda: [
        GATLayer(i, LayerSpec(7, 3, 2, hidden=8, heads=3)) for i in range(2)
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_the_error_names_the_layer(message):
    with pytest.raises(InputError, match=message):
        GNN(WRONG[message]())


def test_kinds_mix():
    assert len(GNN([GCNIILayer(0, SPEC), GCNLayer(1, SPEC)]).stack()) == 2


def test_settings_of_a_model_are_fields_of_config_and_spec():
    fields = {f.name for f in dataclasses.fields(LayerSpec)}
    settings = {f.name for f in dataclasses.fields(TrainConfig)}
    for name in MODELS:
        assert {*MODELS[name].reads_settings} <= fields & settings, name


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="model 'gcn' is registered already"):
        MODELS.add("gcn", MODELS["gcn"])
