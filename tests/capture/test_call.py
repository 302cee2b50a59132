"""Models whose forward takes one PyG Data, or features alone, equal plain PyG."""

from dataclasses import replace

import pytest
import torch
from helpers import plain_pyg_losses, pyg_data, small_graph
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MLP, GATConv, GCNConv, HeteroConv, SAGEConv
from torch_geometric.transforms import ToSparseTensor

from gnnpipe import Graph, InputError, TrainConfig, Trainer, verify
from gnnpipe.capture.call import Arguments, arguments_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:There exist node types"),
]


class OfData(torch.nn.Module):
    """As in PyG's introduction: forward takes the whole object."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.first, self.second = GCNConv(inputs, 8), GATConv(8, classes, edge_dim=2)

    def forward(self, data):
        x = self.first(data.x, data.edge_index).relu() / data.num_nodes
        return self.second(x, data.edge_index, data.edge_attr)


class Reads(torch.nn.Module):
    """Reads vertex data by name, and from a function."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.table = torch.nn.Embedding(5, 4)
        self.conv = GCNConv(inputs + 4 + 3, classes)

    def forward(self, data):
        kind = self.table(data.z) * data["is_old"][:, None]
        return self.conv(torch.cat([data.x, kind, placed(data)], 1), data.edge_index)


def placed(data):
    """Positions; there is one graph, so all of ``data.batch`` is 0."""
    return data.pos - data.centre[data.batch] if data.batch is None else data.pos * data.mass


class ReadsAsItIs(Reads):
    def forward(self, data):
        if float(data.x.detach().sum()) > 1e9:
            return data.x
        return super().forward(data)


class OfMatrix(torch.nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.conv = SAGEConv(inputs, classes)

    def forward(self, data):
        return self.conv(data.x, data.adj_t)


class OfTypes(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first = HeteroConv(
            {
                ("paper", "to", "paper"): SAGEConv((-1, -1), 8),
                ("author", "writes", "paper"): SAGEConv((-1, -1), 8),
            }
        )
        self.last = torch.nn.Linear(8, classes)

    def forward(self, data):
        rows = self.first(data.x_dict, data.edge_index_dict)
        return self.last(rows["paper"].relu())


class CountsRows(torch.nn.Module):
    """One type has no features: its rows are ones."""

    def __init__(self, classes):
        super().__init__()
        self.conv = SAGEConv((3, 5), classes)

    def forward(self, data):
        rows = torch.ones(data["author"].num_nodes, 3, dtype=data["paper"].x.dtype)
        return self.conv((rows, data["paper"].x), data["author", "writes", "paper"].edge_index)


class AsItIs(OfData):
    def forward(self, data):
        if float(data.x.detach().sum()) > 1e9:
            return self.second(data.x, data.edge_index)
        return super().forward(data)


def data_with_attributes():
    torch.manual_seed(0)
    data = pyg_data(small_graph())
    data.edge_attr = torch.rand(data.num_edges, 2)
    return data


def hetero_data():
    torch.manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(40, 5), torch.randn(20, 3)
    data["paper"].y = torch.arange(40) % 3
    data["paper"].train_mask = torch.arange(40) < 25
    data["paper"].val_mask = torch.arange(40) // 5 == 5
    data["paper"].test_mask = torch.arange(40) >= 30
    data["paper", "to", "paper"].edge_index = torch.randint(0, 40, (2, 120))
    both = torch.stack([torch.randint(0, 20, (80,)), torch.randint(0, 40, (80,))])
    data["author", "writes", "paper"].edge_index = both
    return data


def losses(data, model, chunks=1, **settings):
    config = TrainConfig(
        epochs=3, lr=0.01, out="off", quiet=True, chunks=chunks, dtype="float64", **settings
    )
    if chunks > 1:
        config = replace(config, staleness="exact")
    graph = data if isinstance(data, Graph) else Graph.from_pyg(data)
    trainer = Trainer(config, graph=graph, model=model)
    return [row.loss for row in trainer.fit().history]


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", [OfData, OfMatrix])
def test_one_data(kind, chunks):
    data = data_with_attributes()
    if kind is OfMatrix:
        data.edge_attr = None
        data = ToSparseTensor(layout=torch.sparse_csr)(data)
    torch.manual_seed(1)
    model = kind(data.num_features, int(data.y.max()) + 1).double()
    plain = kind(data.num_features, int(data.y.max()) + 1).double()
    plain.load_state_dict(model.state_dict())
    given = data.clone()
    given.x = given.x.double()
    if kind is OfData:
        given.edge_attr = given.edge_attr.double()
    else:
        given.adj_t = given.adj_t.to(torch.float64)
    expected = plain_pyg_losses(plain, given, (given,), 3)
    assert losses(data, model, chunks) == pytest.approx(expected, rel=1e-9)


def data_of_vertices(sparse=False):
    torch.manual_seed(2)
    data = pyg_data(small_graph())
    n = data.num_nodes
    data.z, data.is_old = torch.randint(0, 5, (n,)), torch.rand(n) > 0.5
    data.pos, data.mass = torch.randn(n, 3), torch.rand(n, 1)
    data.batch = torch.zeros(n, dtype=torch.long)
    data.node_year = torch.full((n, 1), 1 << 30)  # Not read, and too large for float32.
    data.edge_mark = torch.rand(n)
    if sparse:
        data.x = (data.x * (torch.rand(data.x.shape) < 0.3)).to_sparse_csr()
    return data


@pytest.mark.parametrize(("kind", "chunks"), [(Reads, 1), (Reads, 4), (ReadsAsItIs, 1)])
@pytest.mark.parametrize("form", ["dense", "saved", "sparse"])
def test_data_of_vertices(kind, chunks, form, tmp_path):
    data = data_of_vertices(form == "sparse")
    model, plain = (kind(7, 3).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    given = data.clone()
    given.x = given.x.to_dense().double()
    given.pos, given.mass = given.pos.double(), given.mass.double()
    expected = plain_pyg_losses(plain, given, (given,), 3)
    graph = Graph.from_pyg(data)
    if form == "saved":
        graph.save(tmp_path / "graph.npz")
        graph = Graph.load(tmp_path / "graph.npz")
    assert losses(graph, model, chunks) == pytest.approx(expected, rel=1e-9)
    if form == "dense" and kind is Reads:
        run = TrainConfig(
            chunks=chunks, staleness="exact", quiet=True, out="off", epochs=2, dtype="float64"
        )
        assert verify(run, graph=graph, model=kind(7, 3)).is_equal


def test_vertex_data_that_features_cannot_hold():
    for name, value, words in (
        ("z", 1 << 25, r"z\[4\] = 33554432, which forward reads; give whole numbers up to 16"),
        ("pos", float("nan"), r"pos\[4, 0\] = nan, which forward reads; give finite numbers"),
    ):
        data = data_of_vertices()
        data[name][4] = value
        with pytest.raises(InputError, match=words):
            losses(data, Reads(7, 3))


@pytest.mark.parametrize("chunks", [1, 4])
def test_several_types(chunks):
    data, model = hetero_data(), OfTypes(3).double()
    given = data.clone()
    for name in ("paper", "author"):
        given[name].x = given[name].x.double()
    with torch.no_grad():
        model(given)
    plain = OfTypes(3).double()
    plain.load_state_dict(model.state_dict())
    expected = plain_pyg_losses(plain, data["paper"], (given,), 3)
    assert losses(data, model, chunks) == pytest.approx(expected, rel=1e-9)


def test_a_type_without_features_has_its_number_of_vertices():
    data = hetero_data()
    del data["author"].x
    data["author"].num_nodes = 20
    model, plain = CountsRows(3).double(), CountsRows(3).double()
    plain.load_state_dict(model.state_dict())
    given = data.clone()
    given["paper"].x = given["paper"].x.double()
    expected = plain_pyg_losses(plain, data["paper"], (given,), 3)
    assert losses(data, model) == pytest.approx(expected, rel=1e-12)


def test_a_model_that_runs_as_it_is():
    data = data_with_attributes()
    model, plain = (AsItIs(data.num_features, 3).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    given = data.clone()
    given.x, given.edge_attr = given.x.double(), given.edge_attr.double()
    expected = plain_pyg_losses(plain, given, (given,), 3)
    assert losses(data, model) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chunks", [1, 4])
def test_features_alone(chunks):
    data = data_with_attributes()
    data.edge_attr = None
    torch.manual_seed(1)
    model = MLP([data.num_features, 8, 3], norm=None).double()
    plain = MLP([data.num_features, 8, 3], norm=None).double()
    plain.load_state_dict(model.state_dict())
    expected = plain_pyg_losses(plain, data, (data.x.double(),), 3)
    assert losses(data, model, chunks) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (Data, Arguments.DATA),
        ("HeteroData", Arguments.DATA),
        ("torch_geometric.data.Data", Arguments.DATA),
        (torch.Tensor, Arguments.FEATURES),
        ("torch.Tensor", Arguments.FEATURES),
    ],
)
def test_an_annotation_decides_before_a_name(annotation, kind):
    model = torch.nn.Module()
    model.forward = lambda inputs: inputs
    model.forward.__annotations__ = {"inputs": annotation}
    assert arguments_of(model, "forward") is kind


def test_verify_calls_them_too():
    config = TrainConfig(
        chunks=3, staleness="exact", quiet=True, out="off", epochs=2, dtype="float64"
    )
    for model in (OfData(7, 3), MLP([7, 8, 3], norm=None)):
        data = data_with_attributes()
        if isinstance(model, MLP):
            data.edge_attr = None
        assert verify(config, graph=Graph.from_pyg(data), model=model).is_equal


def test_what_a_data_lacks_is_named():
    class Needs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(7, 3)

        def forward(self, data):
            return self.conv(data.x, data.edge_index) + data.offsets

    data = data_with_attributes()
    data.edge_attr = None
    with pytest.raises(InputError, match="offsets"):
        losses(data, Needs())


def test_features_of_another_width_are_named():
    data = data_with_attributes()
    data.edge_attr = None
    with pytest.raises(InputError, match=r"takes 9 features, but graph 'pyg' has 7"):
        losses(data, SAGEConv(9, 3))


@pytest.mark.parametrize("width", [1, 2])
def test_edge_features_of_another_width_are_named(width):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GATConv(7, 3, edge_dim=4)

        def forward(self, x, edge_index, edge_attr):
            return self.conv(x, edge_index, edge_attr)

    data = data_with_attributes()
    if width == 1:
        data.edge_attr = data.edge_attr[:, 0]  # [E], as PyG allows
    named = rf"4 numbers for each edge, but edge_attr of graph 'pyg' has {width}; .* \(edge_dim"
    with pytest.raises(InputError, match=named):
        losses(data, Net())


def test_features_where_a_data_is_meant_are_named():
    class Unnamed(OfData):
        def forward(self, d):
            return super().forward(d)

    data = data_with_attributes()
    data.edge_attr = None
    with pytest.raises(InputError, match=r"gets the features alone .*call its argument data"):
        losses(data, Unnamed(7, 3))
