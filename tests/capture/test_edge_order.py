"""Models that read edges by their position in the list get the list as it was given."""

import numpy as np
import pytest
import torch
from helpers import plain_pyg_losses, pyg_data, quick_config, small_graph
from hetero_models import hetero_data
from torch_geometric.nn import GCNConv, NNConv, SAGEConv

from gnnpipe import Graph, InputError, Trainer

IN, OUT, EPOCHS = 7, 3, 3


class Sliced(torch.nn.Module):
    """Two convolutions over the first and the other edges of the list."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(IN, 8), GCNConv(8, OUT)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index[:, :100]).relu()
        return self.second(x, edge_index[:, 100:])


class SlicedData(torch.nn.Module):
    """Attributes are read by position, too."""

    def __init__(self):
        super().__init__()
        self.conv = NNConv(IN, OUT, torch.nn.Linear(2, IN * OUT))

    def forward(self, x, edge_index, edge_attr):
        if float(x.detach()[0, 0]) > 1e9:
            return x
        return self.conv(x, edge_index[:, 50:], edge_attr[50:])


def shuffled():
    """A graph whose list of edges has no order."""
    data = pyg_data(small_graph())
    torch.manual_seed(0)
    data.edge_index = data.edge_index[:, torch.randperm(data.num_edges)]
    data.edge_attr = torch.rand(data.num_edges, 2)
    return data


def losses(graph, model, **settings):
    config = quick_config(epochs=EPOCHS, dtype="float64", lr=0.01, **settings)
    return [row.loss for row in Trainer(config, graph=graph, model=model).fit().history]


@pytest.mark.filterwarnings("ignore:graph .* does not use its edge_attr")
@pytest.mark.parametrize("kind", [Sliced, SlicedData])
@pytest.mark.parametrize("is_saved", [False, True])
def test_the_list_is_that_of_plain_pyg(kind, is_saved, tmp_path):
    data = shuffled()
    torch.manual_seed(1)
    model, plain = kind().double(), kind().double()
    plain.load_state_dict(model.state_dict())
    arguments = [data.x.double(), data.edge_index, data.edge_attr.double()]
    arguments = arguments[: 2 + (kind is SlicedData)]
    expected = plain_pyg_losses(plain, data, arguments, EPOCHS)
    graph = Graph.from_pyg(data)
    if is_saved:
        graph.save(tmp_path / "graph.npz")
        graph = Graph.load(tmp_path / "graph.npz")
    assert losses(graph, model) == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore:graph .* does not use its edge_attr")
def test_a_slice_is_refused_in_chunks():
    with pytest.raises(InputError, match=r"by their position.*edge_index\[:, :100\]"):
        losses(Graph.from_pyg(shuffled()), Sliced(), chunks=2)


def test_the_order_is_kept_only_where_it_differs():
    data = shuffled()
    graph = Graph.from_pyg(data)
    assert graph.edge_order is not None
    assert np.array_equal(data.edge_index.numpy()[:, graph.edge_order], graph.edge_index)
    kept = graph.with_edges(np.arange(graph.num_edges) % 2 == 0)
    assert np.array_equal(kept.edge_order, graph.edge_order[::2])
    data.edge_index = torch.from_numpy(graph.edge_index)
    assert Graph.from_pyg(data).edge_order is None
    assert Graph.from_pyg(shuffled(), symmetrize=True).edge_order is None


CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


class SlicedRelations(torch.nn.Module):
    """Each relation's edges, and the attributes of one, are read by position."""

    def __init__(self):
        super().__init__()
        self.cites = NNConv(7, OUT, torch.nn.Linear(2, 7 * OUT))
        self.writes = SAGEConv((5, 7), OUT)

    def forward(self, x_dict, edge_index_dict, edge_attr_dict):
        cites, writes = edge_index_dict[CITES][:, 40:], edge_index_dict[WRITES][:, :30]
        rows = self.cites(x_dict["paper"], cites, edge_attr_dict[CITES][40:])
        return rows + self.writes((x_dict["author"], x_dict["paper"]), writes)


@pytest.mark.filterwarnings("ignore:graph .* does not use its edge_attr")
@pytest.mark.parametrize("is_saved", [False, True])
def test_the_lists_of_relations_are_those_of_plain_pyg(is_saved, tmp_path):
    data = hetero_data()
    torch.manual_seed(0)
    for store in data.edge_stores:
        store.edge_index = store.edge_index[:, torch.randperm(store.num_edges)]
        store.edge_attr = torch.rand(store.num_edges, 2)
    torch.manual_seed(1)
    model, plain = (SlicedRelations().double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    given = [
        {name: x.double() for name, x in data.x_dict.items()},
        data.edge_index_dict,
        {relation: values.double() for relation, values in data.edge_attr_dict.items()},
    ]
    expected = plain_pyg_losses(plain, data["paper"], given, EPOCHS)
    graph = Graph.from_pyg(data)
    settings = {}
    if is_saved:
        graph.save(tmp_path / "graph.npz")
        graph, settings = None, {"dataset": str(tmp_path / "graph.npz")}
    assert losses(graph, model, **settings) == pytest.approx(expected, rel=1e-12)
    if not is_saved:
        with pytest.raises(InputError, match=r"by their position.*\[:, 40:\]"):
            losses(graph, SlicedRelations(), chunks=2)


FIRST = 100
WAYS = {
    "index_select": lambda edges: edges.index_select(1, torch.arange(FIRST)),
    "function": lambda edges: torch.index_select(edges, dim=-1, index=torch.arange(FIRST)),
    "split": lambda edges: edges.split([FIRST, edges.size(1) - FIRST], dim=1)[0],
    "chunk": lambda edges: torch.chunk(edges, 3, 1)[0],
    "tensor_split": lambda edges: edges.tensor_split((FIRST,), dim=1)[0],
    "narrow": lambda edges: edges.narrow(1, 0, FIRST),
    "list": lambda edges: edges[:, list(range(FIRST))],
    "numbers": lambda edges: edges[:, torch.arange(edges.size(1) // 2)],
    "mask": lambda edges: edges[:, torch.arange(edges.size(1)) < FIRST],
    "rows": lambda edges: torch.stack([row.chunk(3)[0] for row in edges.chunk(2)]),
    "one edge": lambda edges: torch.cat([edges, edges[:, 5].unsqueeze(1)], 1),
    "one number": lambda edges: torch.cat(
        [edges, torch.stack([edges[0][5], edges[1][5]])[:, None]], 1
    ),
    "one row": lambda edges: torch.stack([edges[0].split(FIRST)[0], edges[1][:FIRST]]),
}


class Selects(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.second, self.way = GCNConv(IN, 8), GCNConv(8, OUT), way

    def forward(self, x, edge_index):
        x = self.first(x, self.way(edge_index)).relu()
        return self.second(x, edge_index)


@pytest.mark.filterwarnings("ignore:graph .* does not use its edge_attr")
@pytest.mark.parametrize("way", WAYS)
def test_a_selection_by_position_is_that_of_plain_pyg(way):
    data = shuffled()
    torch.manual_seed(1)
    model, plain = (Selects(WAYS[way]).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    expected = plain_pyg_losses(plain, data, (data.x.double(), data.edge_index), EPOCHS)
    assert losses(Graph.from_pyg(data), model) == pytest.approx(expected, rel=1e-12)


OTHER_WAYS = {
    "rows": lambda edges: torch.stack(edges.split(1)).squeeze(1),
    "columns": lambda edges: torch.stack(
        [torch.stack([edges[0], edges[1]], 1)[:, i] for i in (0, 1)]
    ),
    "by the edges": lambda edges: edges.index_select(1, (edges[0] > edges[1]).nonzero()[:, 0]),
    "sorted": lambda edges: edges[:, edges[1].argsort(stable=True)],
    "at random": lambda edges: edges[:, torch.randperm(edges.size(1))[: edges.size(1) // 2]],
}


@pytest.mark.filterwarnings("ignore:graph .* does not use its edge_attr")
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_selections_are_recorded(way):
    model = Selects(OTHER_WAYS[way])
    assert len(losses(Graph.from_pyg(shuffled()), model, chunks=2, staleness="exact")) == EPOCHS
