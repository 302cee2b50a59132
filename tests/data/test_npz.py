"""Graphs from .npz files; and each way of failing, with its message."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from gnnpipe.data.load import load_graph
from tests.data.refuse import refused

SHARED = Path(__file__).parents[3] / "shared" / "data"

TOY = {
    "edge_index": np.array([[0, 1, 2], [1, 2, 3]], np.int32),
    "x": np.eye(4, dtype=np.float16),
    "y": np.array([0, 1, 1, -1]),
    "train_mask": np.array([1, 0, 0, 0], bool),
    "val_mask": np.array([0, 1, 0, 0], bool),
    "test_mask": np.array([0, 0, 1, 0], bool),
}
CSR = {"x_data": [1.0, 2], "x_indices": [0, 2], "x_indptr": [0, 1, 1, 2, 2], "x_shape": [4, 3]}


def save(path, *without, **changes):
    arrays = {k: v for k, v in (TOY | changes).items() if k not in without}
    np.savez(path, **arrays)
    return path


def test_npz_dense(tmp_path):
    g = load_graph(str(save(tmp_path / "toy.npz")))
    assert (g.name, g.num_vertices, g.num_edges, g.num_classes) == ("toy", 4, 3, 2)
    assert g.edge_index.tolist() == TOY["edge_index"].tolist()
    assert g.test_mask.tolist() == TOY["test_mask"].tolist()
    both = load_graph(str(tmp_path / "toy.npz"), symmetrize=True)
    assert both.num_edges == 6
    twice = np.concatenate([TOY["edge_index"]] * 2, axis=1)
    save(tmp_path / "toy.npz", edge_index=twice)
    assert load_graph(str(tmp_path / "toy.npz"), symmetrize=True).num_edges == 6


def test_npz_sparse_and_num_classes(tmp_path):
    g = load_graph(str(save(tmp_path / "toy.npz", "x", num_classes=5, **CSR)))
    assert isinstance(g.x, sp.csr_array)
    assert g.x.toarray().tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 2], [0, 0, 0]]
    assert g.num_classes == 5


@pytest.mark.parametrize("axis", [0, 1])
def test_of_several_splits_every_seed_has_its_own(axis, tmp_path):
    parts = ("train", "val", "test")
    turned = {p: [np.roll(TOY[f"{p}_mask"], k) for k in range(3)] for p in parts}
    masks = {f"{p}_masks": np.stack(turned[p], axis) for p in parts}
    masks["y"] = np.array([0, 1, 1, 0])
    path = save(tmp_path / "toy.npz", *(f"{p}_mask" for p in parts), **masks)
    for seed in (0, 1, 2, 4):
        told = f"the masks hold 3 splits, and --seed {seed} takes number {seed % 3}"
        with pytest.warns(UserWarning, match=told):
            g = load_graph(str(path), seed=seed)
        for part in parts:
            assert getattr(g, f"{part}_mask").tolist() == turned[part][seed % 3].tolist()


@pytest.mark.parametrize(
    ("without", "changes", "message"),
    [
        (["y"], {}, "no key 'y'; known: .*, x. Training needs edge_index, .* the masks.$"),
        (["edge_index"], {"edges": 1}, r"no key 'edge_index'; did you mean 'edges'\? Training"),
        (["x"], {}, "no features, neither key 'x' nor 'x_data'; .* the identity as CSR"),
        (["x"], {"x_data": [1.0]}, "no key 'x_indices'; sparse features need all of"),
        (["x"], CSR | {"x_data": ["a", "b"]}, "x_data is of type <U1; try real numbers"),
        (["x"], CSR | {"x_data": [1j, 2]}, "x_data is of type complex128"),
        (["x"], CSR | {"x_indices": [0.5, 2]}, "x_indices is of type float64; try whole numbers"),
        (["x"], CSR | {"x_shape": "a"}, "are no CSR matrix"),
        ([], {"x": np.full((4, 1), "a")}, "x is of type <U1"),
        ([], {"x": np.zeros((4, 1), "m8[s]")}, "x is of type timedelta64"),
        (["x"], CSR | {"x_indices": [0, 3]}, "are no CSR matrix"),
        (["x"], CSR | {"x_indptr": [0, 2, 1, 2, 2]}, "are no CSR matrix"),
        (["x"], CSR | {"x_shape": [5, 3]}, "are no CSR matrix"),
        (["train_mask", "val_mask", "test_mask"], {}, "no split .* try: --split 60/20/20"),
        (["val_mask"], {}, "no val_mask; try: --split"),
        ([], {"y": np.array([{}] * 4, object)}, "not a readable .npz file .*allow_pickle"),
        ([], {"x": np.full((4, 1), np.nan)}, r"dataset 'toy': x\[0, 0\] = nan"),
    ],
)
def test_npz_refused(tmp_path, without, changes, message):
    refused(message, save(tmp_path / "toy.npz", *without, **changes))


@pytest.mark.parametrize(
    "count", ["abc", [4, 4], [], np.nan, np.inf, 10**12, 10**6 + 1, 4.7, -3, 0, True, 2j]
)
def test_npz_num_classes_is_one_whole_number(tmp_path, count):
    path = save(tmp_path / "toy.npz", num_classes=count)
    refused(r"num_classes = .* is not one whole number in 1..1000000; try: the largest", path)


def test_npz_num_classes_has_room_for_the_labels(tmp_path):
    refused(
        r"y\[1\] = 1 is out of range; try: classes 0..0 \(num_classes is 1\)",
        save(tmp_path / "toy.npz", num_classes=1),
    )
    for count in (3.0, [3], np.uint8(3)):
        g = load_graph(str(save(tmp_path / "toy.npz", num_classes=count)))
        assert (g.num_classes, type(g.num_classes)) == (3, int)


def test_edges_are_removed_on_request(tmp_path):
    path = str(save(tmp_path / "toy.npz", edge_index=[[0, 1, 1, 2], [1, 2, 2, 2]]))
    assert load_graph(path).num_edges == 4
    assert load_graph(path, coalesce=True).num_edges == 3
    assert load_graph(path, remove_self_loops=True).num_edges == 3
    assert load_graph(path, coalesce=True, remove_self_loops=True).num_edges == 2


def test_npz_that_is_none(tmp_path):
    path = tmp_path / "toy.npz"
    path.write_bytes(b"not a zip")
    refused("not a readable .npz file", path)
    save(path)
    path.write_bytes(path.read_bytes()[:-300])
    refused("not a readable .npz file", path)
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    refused("a single array, not an .npz file", path)
    refused("is a folder without a graph; .*edges.csv", f"{tmp_path}/")


shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared graphs are not here")


@shared
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.npz")), ids=lambda p: p.stem)
def test_shared_graphs(path):
    meta = json.loads(path.with_name(f"{path.stem}.meta.json").read_text())
    if not meta.get("classes"):
        refused("no key 'y'", path)
        return
    g = load_graph(str(path))
    assert (g.num_vertices, g.num_classes, g.num_features) == (
        meta["N"],
        meta["classes"],
        meta["F"],
    )
    assert g.num_edges == meta["E"]
    assert (len(g.self_loops), len(g.parallel_edges)) == (meta["self_loops"], meta["duplicates"])
    sizes = [int(m.sum()) for m in (g.train_mask, g.val_mask, g.test_mask)]
    assert sizes == meta["split_sizes"]


@shared
def test_squirrel_symmetrized_is_as_in_the_literature():
    g = load_graph(str(SHARED / "squirrel.npz"), symmetrize=True)
    assert len(g.self_loops) == 140
    assert g.num_edges == 2 * 198_353 + 140
