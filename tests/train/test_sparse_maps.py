"""Maps of sparse features are stored by column while a run trains, and by row before and after."""

import copy

import pytest
import torch
from helpers import quick_config, small_graph
from torch.nn.utils import parameters_to_vector
from torch_geometric.nn import GraphSAGE

from gnnpipe import Callback, Trainer, info

EXACT = {"schedule": "fill-drain"}
BY_CHUNK = {"schedule": "async", "chunks": 3}


class Strides(Callback):
    """Of the first map of features, at the end of each epoch."""

    def __init__(self):
        self.found = []

    def on_epoch_end(self, trainer, row):
        self.found.append(trainer.model.convs[0].lin_r.weight.stride())


def made():
    torch.manual_seed(0)
    return GraphSAGE(7, 8, 2, 3)


def test_nothing_but_training_stores_by_column():
    model, graph = made(), small_graph(sparse=True)
    info(quick_config(), graph, model)
    trainer = Trainer(quick_config(), graph=graph, model=model)
    trainer.predict()
    assert all(weight.is_contiguous() for weight in model.parameters())


@pytest.mark.parametrize("settings", [EXACT, BY_CHUNK], ids=["exact", "by chunk"])
def test_weights_are_stored_by_row_again(settings, tmp_path):
    model, strides = made(), Strides()
    config = quick_config(out=str(tmp_path / "run"), epochs=2, **settings)
    Trainer(config, graph=small_graph(sparse=True), model=model, callbacks=[strides]).fit()
    assert strides.found == [(1, 8)] * 2
    assert all(weight.is_contiguous() for weight in model.parameters())
    assert len(parameters_to_vector(model.parameters())) == sum(
        map(torch.numel, model.parameters())
    )
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert all(tensor.is_contiguous() for tensor in saved.values())


@pytest.mark.parametrize("settings", [EXACT, BY_CHUNK], ids=["exact", "by chunk"])
def test_a_second_fit_goes_on_to_the_bit(settings):
    graph, whole = small_graph(sparse=True), made()
    parts = copy.deepcopy(whole)
    once = Trainer(quick_config(epochs=4, **settings), graph=graph, model=whole).fit()
    trainer = Trainer(quick_config(epochs=4, **settings), graph=graph, model=parts)
    trainer.fit(2)
    twice = trainer.fit(2)
    assert [row.loss for row in twice.history] == [row.loss for row in once.history]
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)
