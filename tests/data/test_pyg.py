"""PyG's ``Data`` in all its forms, and PyG's datasets from their own raw files."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers import quick_config

from gnnpipe import Graph, Trainer
from gnnpipe.data.load import load_graph
from gnnpipe.data.pyg_datasets import PYG_FAMILIES, find_pyg
from gnnpipe.errors import InputError
from gnnpipe.graph.adjacency import adjacency_tensor
from gnnpipe.graph.types import AdjacencyForm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates what PyG's import uses
    from torch_geometric.data import Data, InMemoryDataset
    from torch_geometric.datasets import Coauthor, KarateClub
    from torch_geometric.utils import to_undirected

pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")

EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])


def data(**changes):
    attributes = {
        "edge_index": EDGES,
        "x": torch.arange(8.0).view(4, 2),
        "y": torch.tensor([0, 1, 1, 0]),
        "train_mask": torch.tensor([True, False, False, True]),
        "val_mask": torch.tensor([False, True, False, False]),
        "test_mask": torch.tensor([False, False, True, False]),
    }
    return Data(**{k: v for k, v in (attributes | changes).items() if v is not None})


def test_from_pyg():
    g = Graph.from_pyg(data())
    assert g.name == "pyg"
    assert g.edge_index.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert g.x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert np.flatnonzero(g.train_mask).tolist() == [0, 3]
    assert Graph.from_pyg(data(), symmetrize=True).num_edges == 6


def test_symmetrize_keeps_each_edge_once_as_to_undirected_does():
    parallel = torch.tensor([[0, 0, 2, 1, 3], [1, 1, 3, 0, 3]])
    g = Graph.from_pyg(data(edge_index=parallel), symmetrize=True)
    assert sorted(g.edge_index.T.tolist()) == sorted(to_undirected(parallel).T.tolist())


def test_values_of_the_adjacency_matrix_are_edge_weights():
    dense = torch.zeros(4, 4)
    dense[EDGES[1], EDGES[0]] = torch.arange(1.0, 1 + EDGES.shape[1])
    for matrix, form in (
        (dense.to_sparse_csr(), AdjacencyForm.CSR),
        (dense.to_sparse_csc(), AdjacencyForm.CSC),
        (dense.to_sparse_coo(), AdjacencyForm.COO),
    ):
        g = Graph.from_pyg(data(edge_index=None, adj_t=matrix))
        source, target = g.edge_index
        assert g.edge_weight.tolist() == dense[target, source].tolist()
        assert g.adjacency is form
        again = adjacency_tensor(
            form,
            torch.from_numpy(g.edge_index),
            torch.from_numpy(g.edge_weight),
            (4, 4),
            dense.dtype,
        )
        assert again.layout is matrix.layout
        assert torch.equal(again.to_dense(), dense)
    ones = (dense > 0).float().to_sparse_csr()
    assert Graph.from_pyg(data(edge_index=None, adj_t=ones)).edge_weight is None
    with pytest.raises(InputError, match="edge_weight beside adj_t"):
        Graph.from_pyg(
            data(edge_index=None, adj_t=dense.to_sparse_csr(), edge_weight=torch.rand(3))
        )


def test_masks_as_whole_numbers():
    g = Graph.from_pyg(data(train_mask=data().train_mask.long(), val_mask=torch.tensor([1])))
    assert np.flatnonzero(g.train_mask).tolist() == [0, 3]
    assert np.flatnonzero(g.val_mask).tolist() == [1]
    with pytest.raises(InputError, match="train_mask, taken as indices, names vertex 3 2 times"):
        Graph.from_pyg(data(train_mask=torch.tensor([3, 3])))


class SparseTensor:
    """What is used of torch_sparse's class, which is not installed everywhere."""

    def __init__(self, rows):
        self.rows = sp.csr_array(rows)

    def csr(self):
        return torch.from_numpy(self.rows.indptr), torch.from_numpy(self.rows.indices), None

    def sizes(self):
        return list(self.rows.shape)


class OneGraph(InMemoryDataset):
    """A dataset of graphs in memory, as PyG's own are."""

    def __init__(self, *graphs):
        super().__init__()
        self.data, self.slices = self.collate(list(graphs))


class OneGraphOfOgb(OneGraph):
    """A dataset that keeps its split apart, as OGB's do."""

    def get_idx_split(self):
        return {key: torch.tensor([i]) for i, key in enumerate(("train", "valid", "test"))}


def parts(g):
    return [np.flatnonzero(mask).tolist() for mask in (g.train_mask, g.val_mask, g.test_mask)]


def test_a_dataset_of_one_graph():
    assert parts(Graph.from_pyg(OneGraph(data()))) == [[0, 3], [1], [2]]
    bare = data(train_mask=None, val_mask=None, test_mask=None)
    for graph in (bare, data()):
        assert parts(Graph.from_pyg(OneGraphOfOgb(graph))) == [[0], [1], [2]]
    chosen = Graph.from_pyg(OneGraphOfOgb(bare), split="50/25/25")
    assert list(map(len, parts(chosen))) == [2, 1, 1]
    with pytest.raises(InputError, match=r"a dataset of 2 graphs; try: one of them"):
        Graph.from_pyg(OneGraph(data(), data()))


@pytest.mark.parametrize("val", ["valid", "val"])
def test_splits_as_indices(val):
    given = {"train": torch.tensor([0, 3]), val: torch.tensor([2]), "test": torch.tensor([1])}
    assert parts(Graph.from_pyg(data(), split_idx=given)) == [[0, 3], [2], [1]]
    bare = data(train_mask=None, val_mask=None, test_mask=None)
    for key, index in given.items():
        bare[f"{key}_idx"] = index
    assert parts(Graph.from_pyg(bare)) == [[0, 3], [2], [1]]
    bare[f"{val}_idx"] = None
    with pytest.raises(InputError, match="no val_mask"):
        Graph.from_pyg(bare)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split_idx": [0, 1]}, "split_idx is a list; try: {'train'"),
        ({"split_idx": {"train": [0], "val": [1]}}, "split_idx has no 'test'"),
        ({"split_idx": {"train": [0], "val": [9], "test": [1]}}, r"val_mask\[0\] = 9 is out"),
        ({"split_idx": {}, "split": "60/20/20"}, "split '60/20/20' and split_idx: both"),
        ({"split_idx": {}, "task": "links"}, "split_idx, which splits vertices"),
    ],
)
def test_splits_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Graph.from_pyg(data(), **arguments)


@pytest.mark.parametrize("count", [10**12, 10**30, "5", 0, -1, 2.5, True, [2, 2], float("nan")])
def test_num_classes_is_one_whole_number(count):
    for graph in (data(), data(y=None)):
        with pytest.raises(InputError, match=r"dataset 'pyg': num_classes = .* is not one whole"):
            Graph.from_pyg(graph, num_classes=count)
    assert Graph.from_pyg(data(), num_classes=np.int64(5)).num_classes == 5


def test_the_trainer_takes_a_dataset():
    rng = np.random.default_rng(0)
    graph = data(
        edge_index=torch.from_numpy(rng.integers(0, 4, (2, 9))),
        train_mask=None,
        val_mask=None,
        test_mask=None,
    )
    config = quick_config(epochs=2)
    losses = [
        [one.loss for one in Trainer(config, graph=given).fit().history]
        for given in (
            OneGraphOfOgb(graph),
            Graph.from_pyg(graph, split_idx=OneGraphOfOgb(graph).get_idx_split()),
        )
    ]
    assert losses[0] == losses[1]
    with pytest.raises(InputError, match="no split"):
        Trainer(config, graph=graph).fit()
    with pytest.raises(InputError, match="--split: no effect on a graph that is passed in"):
        Trainer(quick_config(split="60/20/20"), graph=OneGraph(graph))
    with pytest.raises(InputError, match="graph: is a dict, not a gnn"):
        Trainer(config, graph={})


@pytest.mark.parametrize("form", ["csr", "coo", "csc", "SparseTensor"])
def test_adj_t_is_by_target(form):
    dense = torch.zeros(4, 4)
    dense[EDGES[1], EDGES[0]] = 1
    adj_t = {
        "csr": dense.to_sparse_csr,
        "coo": dense.to_sparse_coo,
        "csc": dense.to_sparse_csc,
        "SparseTensor": lambda: SparseTensor(dense.numpy()),
    }[form]()
    g = Graph.from_pyg(data(edge_index=None, adj_t=adj_t))
    assert g.edge_index.tolist() == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize("form", ["csr", "coo", "SparseTensor", "dense", "bfloat16", "grad"])
def test_x_in_each_form(form):
    dense = torch.tensor([[0.0, 1], [1, 0], [0, 0], [1, 1]])
    x = {
        "csr": dense.to_sparse_csr,
        "coo": dense.to_sparse_coo,
        "SparseTensor": lambda: SparseTensor(dense.numpy()),
        "dense": lambda: dense,
        "bfloat16": dense.bfloat16,
        "grad": dense.clone().requires_grad_,
    }[form]()
    g = Graph.from_pyg(data(x=x))
    assert sp.issparse(g.x) == (form in ("csr", "coo", "SparseTensor"))
    assert (g.x.toarray() if sp.issparse(g.x) else g.x).tolist() == dense.tolist()


def test_masks_as_columns_and_as_indices():
    many = torch.stack([data().train_mask, data().val_mask], dim=1)
    with pytest.warns(UserWarning, match="the masks hold 2 splits, and --seed 0 takes number 0"):
        g = Graph.from_pyg(data(train_mask=many, test_mask=torch.tensor([2]), y=data().y[:, None]))
    assert np.flatnonzero(g.train_mask).tolist() == [0, 3]
    assert np.flatnonzero(g.test_mask).tolist() == [2]
    assert g.y.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": None}, "neither edge_index nor adj_t"),
        ({"x": None}, "no features x"),
        ({"y": torch.full((4, 3), 2.0)}, r"y\[0, 0\] = 2 is out of range; try: 0, 1, or -1"),
        ({"val_mask": None}, "no val_mask; try: --split 60/20/20"),
        ({"edge_index": EDGES + 2}, r"edge_index\[:, 2\] = \[4, 5\] names vertex 5"),
        ({"x": torch.full((4, 1), torch.nan)}, r"x\[0, 0\] = nan"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(InputError, match=f"dataset 'pyg': .*{message}"):
        Graph.from_pyg(data(**changes))


def test_karate_is_that_of_pyg():
    ours, theirs = load_graph("karate"), KarateClub()[0]
    assert set(map(tuple, ours.edge_index.T)) == set(map(tuple, theirs.edge_index.T.numpy()))
    assert ours.num_edges == theirs.num_edges
    assert ours.y.tolist() == theirs.y.tolist()
    # It has a train_mask alone, so a split must be asked for.
    with pytest.raises(InputError, match="no val_mask"):
        Graph.from_pyg(theirs)
    assert Graph.from_pyg(theirs, split="60/20/20").train_mask.sum() == 20


# --- datasets by name ---------------------------------------------------------------------------


def test_names_are_found_in_any_case():
    assert find_pyg("PubMed") == ("planetoid", "PubMed")
    assert find_pyg("Planetoid:pubmed") == ("planetoid", "PubMed")
    assert find_pyg("WikipediaNetwork:Squirrel") == ("wikipedia", "squirrel")
    assert find_pyg("physics") == ("coauthor", "Physics")
    assert find_pyg("nothing") is None


def test_families_are_classes_of_pyg():
    import torch_geometric.datasets

    for family in PYG_FAMILIES.values():
        assert hasattr(torch_geometric.datasets, family.cls)


def raw_coauthor(folder, n=40, features=50):
    """A tiny file in the raw format of PyG's Coauthor."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    adjacency = sp.random_array((n, n), density=0.1, format="csr", rng=rng)
    x = sp.random_array((n, features), density=0.05, format="csr", rng=rng)
    arrays = {"labels": np.arange(n) % 3}
    for prefix, m in (("adj", adjacency), ("attr", x)):
        arrays |= {f"{prefix}_data": m.data, f"{prefix}_indices": m.indices}
        arrays |= {f"{prefix}_indptr": m.indptr, f"{prefix}_shape": m.shape}
    np.savez(folder / "ms_academic_cs.npz", **arrays)


def test_coauthor_from_raw_files(tmp_path):
    raw_coauthor(tmp_path / "coauthor" / "CS" / "raw")
    for _ in range(2):  # the second time from what PyG has made of them
        g = load_graph("coauthor:CS", data_dir=str(tmp_path))
        assert g.name == "coauthor:CS"
        assert (g.num_vertices, g.num_features, g.num_classes) == (40, 50, 3)
        assert sp.issparse(g.x)  # bags of words stay sparse
        assert [int(m.sum()) for m in (g.train_mask, g.val_mask, g.test_mask)] == [24, 8, 8]
    other = load_graph("coauthor:CS", data_dir=str(tmp_path), split="50/25/25", seed=3)
    assert other.train_mask.sum() == 20


def test_damaged_raw_files(tmp_path):
    raw = tmp_path / "coauthor" / "CS" / "raw"
    raw.mkdir(parents=True)
    (raw / "ms_academic_cs.npz").write_bytes(b"no")
    with pytest.raises(InputError, match=r"cannot be read .* remove them"):
        load_graph("coauthor:CS", data_dir=str(tmp_path))
    assert [p.name for p in (tmp_path / "coauthor" / "CS").iterdir()] == ["raw"]


def test_absent_without_network(tmp_path, monkeypatch):
    def offline(self):
        (self_raw := tmp_path / "data" / "coauthor" / "CS" / "raw" / "half").touch()
        assert self_raw.exists()
        raise OSError("no network")

    monkeypatch.setattr(Coauthor, "download", offline)
    with pytest.raises(InputError, match="not in --data-dir") as caught:
        load_graph("coauthor:cs", data_dir=str(tmp_path / "data"))
    assert "coauthor/CS/raw': ms_academic_cs.npz" in str(caught.value)
    assert "no network" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_download_through_pyg(tmp_path, monkeypatch):
    def fetched(self):
        raw = tmp_path / "coauthor" / "CS" / "raw"
        raw.rmdir()
        raw_coauthor(raw)

    monkeypatch.setattr(Coauthor, "download", fetched)
    assert load_graph("coauthor:CS", data_dir=str(tmp_path)).num_vertices == 40


def test_several_labels_at_once():
    y = torch.tensor([[1.0, 0, torch.nan], [0, 1, 0], [1, 1, 1], [-1, 0, 0]])
    g = Graph.from_pyg(data(y=y))
    assert g.is_multi_label
    assert g.num_classes == 3
    assert g.y.dtype == np.int8
    assert g.y.tolist() == [[1, 0, -1], [0, 1, 0], [1, 1, 1], [-1, 0, 0]]
    y[3] = torch.nan
    with pytest.raises(InputError, match=r"train_mask: 1 of its vertices have no label.* 3"):
        Graph.from_pyg(data(y=y))
    g = Graph.from_pyg(data(y=y), split="40/30/30")
    assert not (g.train_mask | g.val_mask | g.test_mask)[3]


def raw_ppi(folder, sizes):
    """Tiny files in the raw format of PyG's PPI: in each part as many graphs as it has sizes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, counts in sizes.items():
        n = sum(counts)
        of_graph = np.repeat(np.arange(len(counts)) + 1, counts)
        ends = [(i, i + 1) for i in range(n - 1) if of_graph[i] == of_graph[i + 1]]
        links = [{"source": a, "target": b} for a, b in ends]
        graph = {
            "directed": False,
            "multigraph": False,
            "graph": {},
            "links": links,
            "nodes": [{"id": i} for i in range(n)],
        }
        (folder / f"{part}_graph.json").write_text(json.dumps(graph))
        np.save(folder / f"{part}_feats.npy", rng.random((n, 5)))
        np.save(folder / f"{part}_labels.npy", rng.integers(0, 2, (n, 4)).astype(float))
        np.save(folder / f"{part}_graph_id.npy", of_graph)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_ppi_is_one_graph_of_all_its_graphs(tmp_path):
    raw_ppi(tmp_path / "ppi" / "raw", {"train": [4, 3], "valid": [3], "test": [5]})
    g = load_graph("ppi", data_dir=str(tmp_path))
    assert (g.num_vertices, g.num_classes, g.is_multi_label) == (15, 4, True)
    assert g.num_edges == 2 * (3 + 2 + 2 + 4)
    parts = [np.flatnonzero(m).tolist() for m in (g.train_mask, g.val_mask, g.test_mask)]
    assert parts == [list(range(7)), [7, 8, 9], list(range(10, 15))]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_classes": [1, [2]]}, r"num_classes = '\[1, \[2\]\]' is not one whole"),
        ({"seed": -5}, "seed -5; try: a whole number from 0"),
        ({"seed": "a"}, "seed 'a'; try"),
        ({"seed": None}, "seed None; try"),
        ({"symmetrize": "yes"}, "symmetrize 'yes'; try: True or False"),
    ],
)
def test_wrong_arguments(wrong, words):
    with pytest.raises(InputError, match=f"dataset 'pyg': {words}"):
        Graph.from_pyg(data(), **wrong)
