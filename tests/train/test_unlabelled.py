"""Graphs without labels or without a split are predicted for, and refused in training."""

import pytest
import torch
from helpers import pyg_data, quick_config, small_graph
from torch_geometric import nn as pyg

from gnnpipe import Graph, Trainer
from gnnpipe.errors import InputError

IN, OUT = 7, 3


def without(*fields):
    data = pyg_data(small_graph(seed=3))
    for field in fields:
        del data[field]
    return data


UNLABELLED = ("y", "train_mask", "val_mask", "test_mask")


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("fields", [UNLABELLED, ("y",), UNLABELLED[1:]], ids=["bare", "y", "split"])
def test_predictions_are_those_of_plain_pyg(fields, chunks):
    torch.manual_seed(0)
    model = pyg.GraphSAGE(IN, 8, 2, OUT)
    Trainer(quick_config(chunks=chunks), graph=small_graph(), model=model).fit()
    data = without(*fields)
    graph = Graph.from_pyg(data)
    found = Trainer(quick_config(chunks=chunks), graph=graph, model=model).predict()
    with torch.no_grad():
        truth = model.eval()(data.x.double(), data.edge_index)
    assert torch.allclose(found, truth, 1e-9, 1e-12)


def test_a_model_that_runs_as_it_is_predicts_too():
    class Softmax(pyg.GraphSAGE):
        def forward(self, x, edge_index):
            x = super().forward(x, edge_index)
            return (x @ x.t()).softmax(dim=1) @ x

    data, model = without(*UNLABELLED), Softmax(IN, 8, 2, 5)
    found = Trainer(quick_config(), graph=Graph.from_pyg(data), model=model).predict()
    with torch.no_grad():
        truth = model.eval()(data.x.double(), data.edge_index)
    assert torch.allclose(found, truth, 1e-9, 1e-12)


def test_a_built_in_model_needs_the_number_of_classes():
    data = without(*UNLABELLED)
    with pytest.raises(InputError, match=r"no labels, so the width.*num_classes="):
        Trainer(quick_config(), graph=Graph.from_pyg(data)).predict()
    found = Trainer(quick_config(), graph=Graph.from_pyg(data, num_classes=4)).predict()
    assert found.shape == (60, 4)


@pytest.mark.parametrize(
    ("fields", "call", "words"),
    [
        (("y",), "fit", r"'pyg': no y, which fit\(\) needs; try data\.y"),
        (UNLABELLED, "evaluate", r"'pyg': no y, which evaluate\(\) needs"),
        (UNLABELLED[1:], "fit", r"no split .*, which fit\(\) needs; .*split='60/20/20'"),
    ],
)
def test_training_needs_labels_and_a_split(fields, call, words):
    trainer = Trainer(
        quick_config(), graph=Graph.from_pyg(without(*fields)), model=pyg.GCN(IN, 8, 2, OUT)
    )
    with pytest.raises(InputError, match=words):
        getattr(trainer, call)()


def test_classes_without_a_vertex():
    data, model = without(), pyg.GCN(IN, 8, 2, 5)
    with pytest.raises(InputError, match=r"gives 5 numbers.*3 classes; .*num_classes=5"):
        Trainer(quick_config(), graph=Graph.from_pyg(data), model=model).fit()
    graph = Graph.from_pyg(data, num_classes=5)
    assert Trainer(quick_config(), graph=graph, model=model).fit().loss > 0
    with pytest.raises(InputError, match=r"num_classes is 2"):
        Graph.from_pyg(data, num_classes=2)
    with pytest.raises(InputError, match="num_classes 5 has no meaning for regression"):
        Graph.from_pyg(data, num_classes=5, task="regression")
