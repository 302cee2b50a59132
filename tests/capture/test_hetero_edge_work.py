"""Work on the edges between types of vertices runs as it is, to the numbers of plain PyG."""

import copy

import hetero_models
import pytest
import torch
from helpers import plain_pyg_losses, quick_config
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import add_self_loops, degree, dropout_edge, scatter, softmax

from gnnpipe import Graph, Trainer
from gnnpipe.errors import InputError
from gnnpipe.run.summary import head_lines

CITES, WRITES, BACK = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
)
HIDDEN, EPOCHS = hetero_models.HIDDEN, 5


class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        widths = hetero_models.WIDTHS
        self.encoders = nn.ModuleDict({t: nn.Linear(w, HIDDEN) for t, w in widths.items()})
        pair = (HIDDEN, HIDDEN)
        kinds = {CITES: pyg.SAGEConv(HIDDEN, HIDDEN), WRITES: pyg.SAGEConv(pair, HIDDEN)}
        kinds[BACK] = pyg.GraphConv(pair, HIDDEN)
        self.convs = nn.ModuleList(pyg.HeteroConv(copy.deepcopy(kinds)) for _ in range(2))
        self.out = nn.Linear(HIDDEN, hetero_models.OUT)

    def encoded(self, x_dict):
        return {t: self.encoders[t](x).relu() for t, x in x_dict.items()}


class DropEdges(Encoded):
    def forward(self, x_dict, edge_index_dict):
        h = self.encoded(x_dict)
        for conv in self.convs:
            kept = {
                r: dropout_edge(edges, p=0.4, training=self.training)[0]
                for r, edges in edge_index_dict.items()
            }
            h = {t: x.relu() for t, x in conv(h, kept).items()}
        return self.out(h["paper"])


class Degrees(Encoded):
    """Weights of edges made of the degrees of both ends, and self-loops of one relation."""

    def forward(self, x_dict, edge_index_dict):
        h = self.encoded(x_dict)
        row, col = edge_index_dict[WRITES]
        dtype = h["paper"].dtype
        out = degree(row, h["author"].size(0), dtype=dtype).clamp(min=1)
        into = degree(col, h["paper"].size(0), dtype=dtype).clamp(min=1)
        h["paper"] = h["paper"] / into.sqrt().view(-1, 1)
        h["author"] = h["author"] * torch.log1p(out).view(-1, 1)
        edges = dict(edge_index_dict)
        edges[CITES] = add_self_loops(edges[CITES], num_nodes=h["paper"].size(0))[0]
        h = {t: x.relu() for t, x in self.convs[0](h, edges).items()}
        return self.out(h["paper"])


class ByHand(Encoded):
    """Attention of papers over their authors, with ``softmax`` and ``scatter``."""

    def forward(self, x_dict, edge_index_dict):
        h = self.encoded(x_dict)
        row, col = edge_index_dict[WRITES]
        n = h["paper"].size(0)
        score = softmax((h["author"][row] * h["paper"][col]).sum(-1), col, num_nodes=n)
        found = scatter(score.view(-1, 1) * h["author"][row], col, dim=0, dim_size=n, reduce="sum")
        return self.out(h["paper"] + found)


MODELS = [DropEdges, Degrees, ByHand]


@pytest.mark.parametrize("kind", MODELS)
def test_runs_as_it_is_to_the_numbers_of_plain_pyg(kind):
    data = hetero_models.hetero_data(subjects=False)
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    trainer = Trainer(quick_config(epochs=EPOCHS), graph=Graph.from_pyg(data), model=model)
    found = [row.loss for row in trainer.fit().history]
    logits = trainer.predict()
    x = {k: v.double() for k, v in data.x_dict.items()}
    torch.manual_seed(5)
    edges = data.edge_index_dict
    losses = plain_pyg_losses(plain, data["paper"], (x, edges), EPOCHS)
    assert found == pytest.approx(losses, rel=1e-9)
    assert torch.allclose(logits, plain.eval()(x, edges), 1e-9, 1e-12)
    assert "runs as it is" in "".join(head_lines(trainer._setup()[1]))


@pytest.mark.parametrize("kind", MODELS)
def test_several_chunks_are_refused_by_name(kind):
    data = hetero_models.hetero_data(subjects=False)
    with pytest.raises(InputError, match=r"^model: .*test_hetero_edge_work.py, line \d+") as fault:
        Trainer(quick_config(chunks=2), graph=Graph.from_pyg(data), model=kind()).fit()
    assert "\n" not in str(fault.value)
