"""PyG's HeteroData: what is read, how it is numbered, what is refused."""

import numpy as np
import pytest
import torch
from helpers import quick_config
from hetero_models import hetero_data, to_hetero
from torch_geometric.data import HeteroData

from gnnpipe import Graph, Trainer
from gnnpipe.errors import InputError
from gnnpipe.graph.chunking import make_chunking, renumber
from gnnpipe.graph.layout import restrict, shard_layout
from gnnpipe.graph.operators import of_relation


def data():
    found = HeteroData()
    found["a"].x = torch.arange(12.0).view(6, 2)
    found["b"].x = torch.arange(12.0).view(4, 3)
    found["c"].num_nodes = 2
    found["a", "to", "b"].edge_index = torch.tensor([[0, 1, 5, 5], [0, 0, 3, 3]])
    found["b", "near", "b"].edge_index = torch.tensor([[0, 1, 2], [1, 1, 0]])
    found["c", "of", "a"].edge_index = torch.tensor([[1], [4]])
    found["b"].y = torch.tensor([0, 2, 1, -1])
    for i, field in enumerate(("train_mask", "val_mask", "test_mask")):
        found["b"][field] = torch.arange(4) == i
    return found


def test_types_stand_one_after_the_other():
    g = Graph.from_pyg(data())
    assert g.types.names == ("a", "b", "c")
    assert g.vertex_counts == {"a": 6, "b": 4, "c": 2}
    assert g.types.relations == (("a", "to", "b"), ("b", "near", "b"), ("c", "of", "a"))
    assert g.types.target == "b"
    triples = sorted(zip(*g.edge_index.tolist(), g.edge_type.tolist(), strict=True))
    assert triples == [
        *((0, 6, 0), (1, 6, 0), (5, 9, 0), (5, 9, 0), (6, 7, 1), (7, 7, 1), (8, 6, 1), (11, 4, 2))
    ]
    assert g.y.tolist() == [-1] * 6 + [0, 2, 1, -1] + [-1] * 2
    assert np.flatnonzero(g.train_mask).tolist() == [6]
    assert g.num_classes == 3
    assert "3 relations (6 a with 2 features; 4 b with 3 features; 2 c with no features)" in repr(g)


@pytest.mark.filterwarnings("ignore:graph 'pyg'")
@pytest.mark.parametrize(("chunks", "shards"), [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_renumbering_and_layouts(chunks, shards):
    g = Graph.from_pyg(data())
    chunking = make_chunking(
        g, chunks=chunks, shards=shards, partitioner="random", seed=1, cache_dir="off"
    )
    moved = renumber(g, chunking)
    for name, x in g.types.features.items():
        original = moved.types.number[moved.row_types[name]]
        assert (moved.types.features[name] == x[original]).all()
    owned = {name: [] for name in g.types.names}
    for shard in range(shards):
        whole = shard_layout(moved, chunking, shard)
        for name, chosen in moved.row_types.items():
            part = restrict(whole, chosen)
            owned[name] += part.own.tolist()
            assert chosen[part.own].all()
            assert chosen[part.halo].all()
            assert part.own_ptr[-1] == len(part.own)
            assert part.halo_ptr[-1] == len(part.halo) == part.receive_counts.sum()
            for c, rows in enumerate(part.send_rows):
                assert part.send_counts[c].sum() == len(rows)
                assert ((rows >= part.own_ptr[c]) & (rows < part.own_ptr[c + 1])).all()
    for name, chosen in moved.row_types.items():
        assert sorted(owned[name]) == np.flatnonzero(chosen).tolist()


def without_labels(found):
    del found["b"].y


def wide_edge(found):
    found["a", "to", "b"].edge_index[1, 2] = 4


def two_targets(found):
    found["a"].y = torch.zeros(6, dtype=torch.long)


def no_count(found):
    del found["c"].num_nodes


def few_labels(found):
    found["b"].y = torch.tensor([0, 1])


def no_edges(found):
    del found["c", "of", "a"].edge_index


def with_edge_data():
    """Weights of one relation, attributes of two."""
    found = data()
    found["a", "to", "b"].edge_weight = torch.tensor([0.5, 1.5, 2.5, 3.5])
    found["a", "to", "b"].edge_attr = torch.arange(8.0).view(4, 2)
    found["b", "near", "b"].edge_attr = torch.tensor([7.0, 8.0, 9.0])
    return found


def values_by_edge(g):
    """The relations' data by name, as sets of (source, target, value)."""
    found = {}
    for name, values in g.derived.items():
        ends = g.edge_index[:, g.edge_type == int(name[-1])]
        if g.types is not None:
            ends = g.types.number[ends]
        found[name] = sorted(zip(*ends.tolist(), values.tolist(), strict=True))
    return found


@pytest.mark.parametrize("moves", [False, True])
def test_edge_data_goes_along_with_its_edges(moves):
    g = Graph.from_pyg(with_edge_data())
    if moves:
        settings = {"partitioner": "random", "seed": 1, "cache_dir": "off"}
        g = renumber(g, make_chunking(g, chunks=3, shards=1, **settings))
    assert values_by_edge(g) == {
        "edge_weight__0": [(0, 0, 0.5), (1, 0, 1.5), (5, 3, 2.5), (5, 3, 3.5)],
        "edge_attr__0": [(0, 0, [0, 1]), (1, 0, [2, 3]), (5, 3, [4, 5]), (5, 3, [6, 7])],
        "edge_attr__1": [(0, 1, 7), (1, 1, 8), (2, 0, 9)],
    }
    one = of_relation(g, "edges@0")
    assert set(one.edge_data) == {"edge_weight", "edge_attr"}
    assert sorted(one.edge_weight.tolist()) == [0.5, 1.5, 2.5, 3.5]
    assert set(g.without_self_loops().derived["edge_attr__1"].tolist()) == {7, 9}
    assert set(g.reduced_to({"edge_attr__1"}).edge_data) == {"edge_attr__1", "edge_type"}


def short_attributes(found):
    found["a", "to", "b"].edge_attr = torch.zeros(3, 2)


def endless_weights(found):
    found["b", "near", "b"].edge_weight = torch.tensor([1.0, torch.inf, 0.0])


def attributes_beside_adj_t(found):
    store = found["b", "near", "b"]
    store.edge_attr = torch.zeros(3)
    store.adj_t = torch.sparse_coo_tensor(store.edge_index.flip(0), torch.ones(3), (4, 4))
    del store.edge_index


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_labels, "no type of vertices has y"),
        (wide_edge, r"edge_index\[1, 2\] = 4, but its target type has 4 vertices"),
        (two_targets, "a, b have y; try: target='a'"),
        (no_count, "the number of 'c' vertices is not known"),
        (few_labels, r"b\.y has 2 labels for 4 vertices"),
        (no_edges, "c, of, a.: neither edge_index nor adj_t"),
        (short_attributes, r"a, to, b.: edge_attr has shape \[3, 2\] for 4 edges"),
        (endless_weights, r"b, near, b.: edge_weight\[1\] = inf"),
        (attributes_beside_adj_t, "b, near, b.: edge_attr beside adj_t"),
    ],
)
def test_what_is_missing_is_named(fault, message):
    found = data()
    fault(found)
    with pytest.raises(InputError, match=message):
        Graph.from_pyg(found)


@pytest.mark.filterwarnings("ignore:graph 'pyg'")
def test_the_target_can_be_chosen():
    found = data()
    two_targets(found)
    g = Graph.from_pyg(found, target="a", split="50/0/50")
    assert g.types.target == "a"
    assert g.train_mask[6:].sum() == 0
    with pytest.raises(InputError, match="target 'c' has no y"):
        Graph.from_pyg(found, target="c")
    with pytest.raises(InputError, match="ToUndirected"):
        Graph.from_pyg(found, target="a", split="50/0/50", symmetrize=True)
    with pytest.raises(InputError, match="target 'a' has no meaning for one type"):
        Graph.from_pyg(found.to_homogeneous(), target="a")


def test_the_split_may_be_indices():
    """OGB keeps the split of a heterogeneous graph by type."""
    found = data()
    for field in ("train_mask", "val_mask", "test_mask"):
        del found["b"][field]
    split = {"train": {"b": torch.tensor([2])}, "valid": {"b": [0]}, "test": {"b": [1]}}
    given = Graph.from_pyg(found, split_idx=split)
    for part, index in split.items():
        found["b"][f"{part}_idx"] = torch.as_tensor(index["b"])
    for g in (given, Graph.from_pyg(found)):
        masks = (g.train_mask, g.val_mask, g.test_mask)
        assert [np.flatnonzero(mask).tolist() for mask in masks] == [[8], [6], [7]]


def test_a_graph_to_predict_for_needs_no_labels():
    found = data()
    del found["b"].y
    for field in ("train_mask", "val_mask", "test_mask"):
        del found["b"][field]
    g = Graph.from_pyg(found, target="b", num_classes=3)
    assert (g.target, g.num_classes, g.num_vertices) == ("b", 3, 12)
    assert (g.y == -1).all()
    assert (g.train_mask == g.types.is_of("b")).all()
    with pytest.raises(InputError, match=r"no type of vertices has y; .* or target='a', to train"):
        Graph.from_pyg(found)
    with pytest.raises(InputError, match="target 'z' has no y"):
        Graph.from_pyg(found, target="z")


def test_a_prediction_without_labels_is_that_with_labels():
    full = hetero_data(subjects=False)
    bare = full.clone()
    for field in ("y", "train_mask", "val_mask", "test_mask"):
        del bare["paper"][field]
    config = quick_config(epochs=1)
    trained = Trainer(config, graph=full, model=to_hetero())
    trained.fit()
    graph = Graph.from_pyg(bare, target="paper")
    again = Trainer(config, graph=graph, model=trained.model)
    assert torch.equal(again.predict(), trained.predict())
