"""Set-up of a recorded model takes time linear in its number of layers."""

import sys

import pytest
import torch
from helpers import quick_config, small_graph
from torch_geometric import nn as pyg

from gnnpipe import Trainer


def python_calls(make_model, layers):
    """Function calls of one run of one epoch: a measure of work that no other process changes."""
    torch.manual_seed(0)
    trainer = Trainer(quick_config(epochs=1), graph=small_graph(), model=make_model(layers))
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        trainer.fit()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
@pytest.mark.parametrize(
    "make_model",
    [
        lambda layers: pyg.GCN(7, 8, layers, 3),
        lambda layers: pyg.GAT(7, 8, layers, 3, norm="batch", act=torch.nn.ReLU(inplace=True)),
    ],
    ids=["rules", "whole convolutions and norms"],
)
def test_twice_the_layers_are_twice_the_calls(make_model):
    python_calls(make_model, 2)
    few, some, many = (python_calls(make_model, layers) for layers in (3, 7, 11))
    assert many - some < 1.03 * (some - few)
