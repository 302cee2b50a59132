"""Saved ``Data`` and ``HeteroData``, and the data.pt of PyG's datasets; unsafe ones are refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from bad_files import Evil

from gnnpipe.data.load import load_graph
from tests.data.refuse import refused
from tests.data.test_hetero_data import data as hetero_data
from tests.data.test_pyg import data

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates what PyG's import uses
    from torch_geometric.data import Data, InMemoryDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")


def saved(folder, content, name="mine.pt", **options):
    torch.save(content, folder / name, **options)
    return folder / name


def check(g):
    """``data()`` of test_pyg, by hand."""
    assert g.edge_index.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert g.x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert g.y.tolist() == [0, 1, 1, 0]
    assert np.flatnonzero(g.train_mask).tolist() == [0, 3]


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_data(tmp_path, is_zip):
    path = saved(tmp_path, data(), _use_new_zipfile_serialization=is_zip)
    g = load_graph(str(path))
    check(g)
    assert g.name == "mine"
    check(load_graph(str(saved(tmp_path, data().to_dict(), "b.pth"))))


def test_attributes_that_are_arrays_or_sparse(tmp_path):
    more = {"x": np.arange(8.0).reshape(4, 2), "year": np.float64(3), "names": ["a", "b"]}
    check(load_graph(str(saved(tmp_path, data(**more)))))
    adj_t = torch.zeros(4, 4)
    adj_t[[1, 2, 3], [0, 1, 2]] = 1
    for matrix in (adj_t.to_sparse_csr(), adj_t.to_sparse_coo()):
        check(load_graph(str(saved(tmp_path, data(edge_index=None, adj_t=matrix)))))


def test_a_hetero_data(tmp_path):
    found = hetero_data()
    g = load_graph(str(saved(tmp_path, found)))
    assert g.types.names == tuple(found.node_types)
    assert g.num_edges == sum(found[kind].num_edges for kind in found.edge_types)


class Mine(InMemoryDataset):
    """A dataset of the user's own, as PyG's documentation writes one."""

    processed_file_names = "data.pt"

    def __init__(self, root, graphs):
        self.graphs = graphs
        super().__init__(str(root))

    def process(self):
        self.save(self.graphs, self.processed_paths[0])


@pytest.mark.filterwarnings("ignore")
def test_the_file_of_a_dataset(tmp_path, capsys):
    Mine(tmp_path / "mine", [data()])
    for path in (tmp_path / "mine", tmp_path / "mine" / "processed" / "data.pt"):
        g = load_graph(str(path))
        check(g)
        assert g.name == "mine"
    Mine(tmp_path / "types", [hetero_data()])
    assert load_graph(str(tmp_path / "types")).types is not None
    Mine(tmp_path / "several", [data()] * 3)
    refused("data.pt': 3 graphs; try: a dataset of one graph", tmp_path / "several")
    # PyG before 2.4
    check(load_graph(str(saved(tmp_path, (data(), None)))))
    slices = {"x": torch.tensor([0, 4]), "edge_index": torch.tensor([0, 3])}
    check(load_graph(str(saved(tmp_path, (data().to_dict(), slices, Data)))))


def test_reading_leaves_the_classes_that_torch_allows(tmp_path):
    before = set(map(str, torch.serialization.get_safe_globals()))
    load_graph(str(saved(tmp_path, data())))
    assert set(map(str, torch.serialization.get_safe_globals())) == before


def test_a_file_that_may_run_code(tmp_path):
    evil = tmp_path / "evil"
    for content in (data(names=Evil(evil)), Evil(evil), (Evil(evil), None, Data)):
        for is_zip in (True, False):
            path = saved(tmp_path, content, _use_new_zipfile_serialization=is_zip)
            refused(r"mine.pt': not read, because it holds \w+.mkdir, which is not data", path)
    assert not evil.exists()
    refused("it holds .*Mlp, which is not data", saved(tmp_path, Mlp()))


class Mlp(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.nn.Linear(2, 2).state_dict(), "holds a OrderedDict with weight, bias, not a graph"),
        (torch.zeros(3), "holds a Tensor, not a graph; try: torch.save"),
        (data(y=None), "dataset 'mine': no labels y; try"),
        (data(x=None), "dataset 'mine': no features x"),
        ((1, 2, 3, 4), "several objects"),
    ],
    ids=range(5),
)
def test_what_is_no_graph(tmp_path, content, message):
    refused(message, saved(tmp_path, content))


def test_files_that_cannot_be_read(tmp_path):
    path = saved(tmp_path, data())
    path.write_bytes(path.read_bytes()[:-300])
    refused("not a readable .pt file", path)
    path.write_bytes(b"no pickle")
    refused("not a readable .pt file", path)
    path.write_bytes(b"")
    refused("not a readable .pt file", path)
    refused("none.pt': no such file", tmp_path / "none.pt")
