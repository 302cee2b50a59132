"""A user's module keeps its attributes, and may have results of an earlier forward in them."""

import numpy as np
import pytest
import torch
from helpers import quick_config, small_graph
from recorded import plain_losses
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import degree

from gnnpipe import Trainer
from gnnpipe.capture import capture


class Stores(nn.Module):
    """Keeps rows in an attribute, in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.a, self.b = pyg.GCNConv(7, 8), pyg.GCNConv(8, 3)
        self.rows, self.all_rows, self.by_name = None, [], {}

    def forward(self, x, edge_index):
        self.rows = self.a(x, edge_index).relu()
        self.all_rows.append(self.rows)
        self.by_name["rows"] = self.rows
        return self.b(self.rows, edge_index)


class Caches(Stores):
    """Computes norms in its first call and keeps them."""

    def forward(self, x, edge_index):
        if self.rows is None:
            self.rows = degree(edge_index[1], x.size(0)).clamp(min=1).rsqrt()[:, None]
        return self.b(self.a(x * self.rows, edge_index).relu(), edge_index)


@pytest.mark.parametrize("kind", [Stores, Caches])
def test_stored_values_do_not_reach_the_model_or_its_other_recording(kind):
    torch.manual_seed(0)
    model, graph = kind(), small_graph()
    truth = plain_losses(model, graph, 3)
    capture(model, graph)
    assert (model.rows, model.all_rows, model.by_name) == (None, [], {})
    run = quick_config(epochs=3, chunks=4, staleness="exact", require_capture=True)
    found = Trainer(run, graph=graph, model=model).fit()
    np.testing.assert_allclose([r.loss for r in found.history], truth, rtol=1e-8)


@pytest.mark.parametrize("settings", [{"chunks": 4}, {"chunks": 4, "staleness": "exact"}])
def test_a_model_may_hold_results_of_an_earlier_forward(settings):
    torch.manual_seed(0)
    model, graph = Stores(), small_graph()
    model(torch.from_numpy(graph.x), torch.from_numpy(graph.edge_index))
    before = model.rows
    assert before.grad_fn is not None
    run = quick_config(epochs=2, require_capture=True, **settings)
    assert Trainer(run, graph=graph, model=model).fit().loss > 0
    assert model.rows is before
    assert len(model.all_rows) == 1
