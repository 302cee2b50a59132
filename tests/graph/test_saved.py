"""``Graph.save`` and ``Graph.load``: every field comes back, mapped; damaged files are refused."""

from __future__ import annotations

import warnings
import zipfile
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers import quick_config
from hetero_models import hetero_data

from gnnpipe import Graph, Trainer
from gnnpipe.data.load import load_graph
from gnnpipe.errors import InputError
from gnnpipe.graph.types import AdjacencyForm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates what PyG's import uses
    from torch_geometric.data import Data


def homogeneous(**changes):
    rng = np.random.default_rng(0)
    n, e = 40, 300
    part = torch.arange(n) % 3
    given = {
        "edge_index": torch.from_numpy(rng.integers(0, n, (2, e))),
        "x": torch.from_numpy(rng.standard_normal((n, 5), np.float32)),
        "y": torch.arange(n) % 4,
        "train_mask": part == 0,
        "val_mask": part == 1,
        "test_mask": part == 2,
        "edge_weight": torch.from_numpy(rng.random(e, np.float32)),
        "edge_attr": torch.from_numpy(rng.random((e, 2), np.float32)),
        "edge_type": torch.from_numpy(rng.integers(0, 3, e)),
    }
    return Data(**{k: v for k, v in (given | changes).items() if v is not None})


def same(a, b):
    """Whether two values are equal in every field, array and type."""
    if is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)
        )
    if sp.issparse(a):
        return a.shape == b.shape and all(
            same(getattr(a, k), getattr(b, k)) for k in ("data", "indices", "indptr")
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


def with_relation_data():
    data = hetero_data()
    count = data["author", "writes", "paper"].num_edges
    data["author", "writes", "paper"].edge_attr = torch.rand(count, 3)
    data["author", "writes", "paper"].edge_weight = torch.rand(count)
    return data


def csr_data():
    return homogeneous(x=torch.eye(40).to_sparse_csr())


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Graph.from_pyg(homogeneous(), name="möbius"),
        lambda: Graph.from_pyg(csr_data()),
        lambda: Graph.from_pyg(homogeneous(y=torch.rand(40, 2)), task="regression"),
        lambda: Graph.from_pyg(homogeneous(y=(torch.rand(40, 6) > 0.5).long())),
        lambda: Graph.from_pyg(homogeneous(y=None), num_classes=7),
        lambda: Graph.from_pyg(homogeneous(y=None)),
        lambda: Graph.from_pyg(hetero_data()),
        lambda: Graph.from_pyg(with_relation_data()),
        lambda: load_graph("karate", task="links"),
        lambda: replace(load_graph("karate"), adjacency=AdjacencyForm.CSR),
    ],
    ids=[
        "dense",
        "csr",
        "regression",
        "several",
        "no-labels",
        "bare",
        "hetero",
        "relation-data",
        "links",
        "adj_t",
    ],
)
def test_every_field_comes_back(tmp_path, make):
    graph = make()
    graph.save(tmp_path / "mine.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.npz"]
    again = Graph.load(tmp_path / "mine.npz")
    assert same(graph, again)
    again.save(tmp_path / "mine.npz")  # over the file that is mapped
    assert same(graph, Graph.load(str(tmp_path / "mine.npz")))


def test_arrays_are_mapped_and_aligned(tmp_path):
    graph = Graph.from_pyg(homogeneous())
    graph.save(tmp_path / "mine.npz")
    again = Graph.load(tmp_path / "mine.npz")
    for array in (again.x, again.indices, again.indptr, again.edge_attr, again.train_mask):
        assert isinstance(array.base, np.memmap)
        assert array.ctypes.data % 64 == 0
    again.x[:] = 0  # in memory alone
    assert same(graph, Graph.load(tmp_path / "mine.npz"))
    with np.load(tmp_path / "mine.npz", allow_pickle=False) as packed:
        assert np.array_equal(packed["x"], graph.x)
    with zipfile.ZipFile(tmp_path / "mine.npz") as packed:
        assert packed.testzip() is None


def test_a_run_on_a_saved_graph(tmp_path):
    graph = Graph.from_pyg(homogeneous(edge_weight=None, edge_attr=None, edge_type=None))
    path = tmp_path / "mine.npz"
    graph.save(path)
    config = quick_config(epochs=2)
    losses = [
        [row.loss for row in Trainer(run, graph=given).fit().history]
        for run, given in (
            (config, graph),
            (config, Graph.load(path)),
            (quick_config(epochs=2, dataset=str(path)), None),
        )
    ]
    assert losses[0] == losses[1] == losses[2]


def test_as_a_dataset(tmp_path):
    path = tmp_path / "mine.npz"
    for made in (homogeneous(), with_relation_data(), homogeneous(y=torch.rand(40, 2))):
        task = "regression" if made.get("y", torch.ones(1)).is_floating_point() else ""
        graph = Graph.from_pyg(made, task=task or "classification", name="mine")
        graph.save(path)
        assert same(graph, load_graph(str(path)))
    graph = Graph.from_pyg(homogeneous())
    graph.save(path)
    assert load_graph(str(path), split="50/25/25").train_mask.sum() == 20
    assert load_graph(str(path), symmetrize=True).num_edges > graph.num_edges
    assert load_graph(str(path), task="links").pairs is not None


def test_as_a_dataset_refused(tmp_path):
    path = tmp_path / "mine.npz"
    Graph.from_pyg(hetero_data()).save(path)
    with pytest.raises(InputError, match="symmetrize has no meaning"):
        load_graph(str(path), symmetrize=True)
    Graph.from_pyg(homogeneous(y=None)).save(path)
    with pytest.raises(InputError, match="no labels y"):
        load_graph(str(path))
    load_graph("karate", task="links").save(path)
    with pytest.raises(InputError, match="holds pairs of vertices; try Trainer"):
        load_graph(str(path), task="links")


def test_files_that_cannot_be_written(tmp_path):
    graph = load_graph("karate")
    with pytest.raises(InputError, match=r"does not end in \.npz; try: '.*mine\.npz'"):
        graph.save(tmp_path / "mine.graph")
    with pytest.raises(InputError, match=r"no/mine\.npz': cannot be written \(No such file"):
        graph.save(tmp_path / "no" / "mine.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gnnpipe_graph": 9}, "format 9, and this version of gnnpipe reads 1"),
        ({"gnnpipe_graph": None}, "no key 'gnnpipe_graph'"),
        ({"y": None}, "'y'"),
        ({"x": np.zeros((39, 5), np.float32)}, "x does not fit"),
        ({"x": np.zeros((40, 5))}, "x does not fit"),
        ({"y": np.full(40, 4)}, "y does not fit"),
        ({"indptr": np.arange(41)}, "indptr does not fit"),
        ({"indices": np.full(300, 40)}, "indices does not fit"),
        ({"indices": np.arange(300)[::-1] % 40}, "indices does not fit"),
        ({"val_mask": np.zeros(40)}, "val_mask does not fit"),
        ({"edge_weight": np.zeros(299, np.float32)}, "edge_weight does not fit"),
        ({"edge_type": np.full(300, -1)}, "edge_type does not fit"),
        ({"adjacency": "odd"}, "'odd' is not a valid AdjacencyForm"),
    ],
)
def test_damaged_files(tmp_path, changes, message):
    path = tmp_path / "mine.npz"
    Graph.from_pyg(homogeneous()).save(path)
    with np.load(path) as packed:
        arrays = dict(packed) | changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(InputError, match=f"not a file that Graph.save wrote .*{message}") as told:
        Graph.load(path)
    assert "\n" not in str(told.value)


def test_files_of_another_kind(tmp_path):
    path = tmp_path / "mine.npz"
    load_graph("karate").save(path)
    for content in (path.read_bytes()[:-100], b"", b"PK"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a file that Graph"):
            Graph.load(path)
    with pytest.raises(InputError, match="no such file"):
        Graph.load(tmp_path / "none.npz")
