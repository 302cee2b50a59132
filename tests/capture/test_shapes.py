"""What forward asks about shapes is answered while it is recorded."""

import pytest
import torch
from helpers import small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.capture import capture
from gnnpipe.errors import InputError


class Asking(nn.Module):
    """Calls ``question`` on rows behind a norm, and doubles them if the answer is yes."""

    def __init__(self, question):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm1d(8, affine=False), pyg.GCNConv(7, 8)
        self.out, self.question = nn.Linear(8, 3), question

    def forward(self, x, edge_index):
        x = self.norm(self.conv(x, edge_index))
        if self.question(x, edge_index):
            x = 2 * x
        return self.out(x)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda x, e: x.dim() == 2, True),
        (lambda x, e: x.dim() != 2, False),
        (lambda x, e: x.size(-1) > 8, False),
        (lambda x, e: x.shape[1] == 8, True),
        (lambda x, e: 1 + x.ndim + e.dim() == 5, True),
        (lambda x, e: x.size(dim=1) == x.shape[-1], True),
        (lambda x, e: (x * 2)[e[0]].size(1) == 8, True),
    ],
)
def test_dimensions_and_columns_decide(question, answer):
    graph, model = small_graph(), Asking(question)
    recording = capture(model, graph).recording
    doubled = [op for op in recording.ops if op.args[:1] == (2,)]
    assert bool(doubled) == answer
    assert model.training
    assert int(model.norm.num_batches_tracked) == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(8))


@pytest.mark.parametrize(
    "question",
    [
        lambda x, e: x.size(0) > 100,
        lambda x, e: e.shape[1] == 0,
        lambda x, e: e[:, e[0] > 5].size(1) == 0,
        lambda x, e: x[e[0, e[1] > 5]].size(0) > 5,
        lambda x, e: x.shape == (2708, 8),
        lambda x, e: x.mean() > 0,
        lambda x, e: x.numel() > 5,
        lambda x, e: x.dtype == torch.float64,
    ],
)
def test_values_and_numbers_of_vertices_do_not(question):
    with pytest.raises(InputError, match=r"cannot be traced: .*control flow"):
        capture(Asking(question), small_graph())
