"""Each way in, on tiny files in the foreign layout; and each way of failing, with its message."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from gnnpipe.errors import InputError
from gnnpipe.graph import ogb
from gnnpipe.graph.fetch import FetchError, data_root, fetch_zip, tidied
from gnnpipe.graph.load import dataset_names, load_graph
from gnnpipe.graph.synthetic import parse_synthetic

SHARED = Path(__file__).parents[3] / "shared" / "data"


def refused(message, dataset, **arguments):
    with pytest.raises(InputError, match=message) as caught:
        load_graph(str(dataset), **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- names --------------------------------------------------------------------------------------


def test_every_name_has_a_line_of_help():
    lines = dataset_names()
    assert all(len(line.split("  ", 1)) == 2 for line in lines)
    for word in ("debian", "karate", "synthetic:rmat", "ogbn-papers100M", "coauthor:CS|Physics"):
        assert any(line.startswith(word) for line in lines)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("debina", "unknown dataset; did you mean 'debian'"),
        ("zzz", "unknown dataset; known: debian, karate, synthetic, ogbn-arxiv"),
        ("ogbn-arxive", "did you mean 'ogbn-arxiv'"),
        ("planetoid", "did you mean 'planetoid:Cora'"),
        ("planetoid:Coro", "planetoid has no 'coro'; did you mean 'Cora'"),
        ("flickr:big", "flickr has no 'big'; use 'flickr'"),
        ("yelp", "several labels each, which is not supported"),
        ("none.npz", "'none.npz': no such file"),
        ("./folder/none", "'folder/none': no such file"),
    ],
)
def test_unknown_names(dataset, message):
    refused(message, dataset)


def test_reading_does_not_import_pyg():
    code = (
        "import sys; from gnnpipe.graph.load import load_graph; load_graph('karate');"
        "assert 'torch' not in sys.modules and 'torch_geometric' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_split_by_percentages_follows_the_seed():
    a, b, c = (load_graph("karate", split="50/25/25", seed=s) for s in (0, 0, 1))
    assert a.train_mask.tolist() == b.train_mask.tolist() != c.train_mask.tolist()
    assert [int(m.sum()) for m in (a.train_mask, a.val_mask, a.test_mask)] == [17, 9, 8]


# --- npz ----------------------------------------------------------------------------------------

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


def test_npz_sparse_and_num_classes(tmp_path):
    g = load_graph(str(save(tmp_path / "toy.npz", "x", num_classes=5, **CSR)))
    assert isinstance(g.x, sp.csr_array)
    assert g.x.toarray().tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 2], [0, 0, 0]]
    assert g.num_classes == 5


def test_npz_takes_the_first_of_several_splits(tmp_path):
    masks = {f"{part}_masks": np.stack([TOY[f"{part}_mask"]] * 3) for part in ("train", "val")}
    path = save(tmp_path / "toy.npz", "train_mask", "val_mask", **masks)
    assert load_graph(str(path)).train_mask.tolist() == TOY["train_mask"].tolist()


@pytest.mark.parametrize(
    ("without", "changes", "message"),
    [
        (["y"], {}, "no key 'y'"),
        (["edge_index"], {"edges": 1}, "no key 'edge_index'; did you mean 'edges'"),
        (["x"], {}, "no features, neither key 'x' nor 'x_data'; .* the identity as CSR"),
        (["x"], {"x_data": [1.0]}, "no key 'x_indices'; sparse features need all of"),
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
    refused("not a readable .npz file", f"{tmp_path}/")


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
    assert g.num_edges == meta["E"] - meta["self_loops"] - meta["duplicates"]
    sizes = [int(m.sum()) for m in (g.train_mask, g.val_mask, g.test_mask)]
    assert sizes == meta["split_sizes"]


@shared
def test_squirrel_symmetrized_is_as_in_the_literature():
    g = load_graph(str(SHARED / "squirrel.npz"), symmetrize=True)
    assert g.num_edges == 2 * 198_353


# --- OGB ----------------------------------------------------------------------------------------


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, np.atleast_1d(row))) + "\n" for row in rows)


def ogb_folder(folder, scheme="time", binary=False):
    """Five vertices in OGB's layout; the first label column is -1/NaN for the last vertex."""
    edges = [(0, 1), (1, 2), (3, 2), (3, 4)]
    x = np.arange(10.0).reshape(5, 2) / 8
    for part, vertices in {"train": [0, 1], "valid": [2], "test": [3]}.items():
        write_csv(folder / "split" / scheme / f"{part}.csv.gz", vertices)
    raw = folder / "raw"
    if binary:
        raw.mkdir()
        label = np.array([[0], [1], [171], [3], [np.nan]], np.float32)
        np.savez_compressed(
            raw / "data.npz", edge_index=np.array(edges).T, node_feat=x.astype(np.float32),
            node_year=np.zeros((5, 1), int), num_nodes_list=[5], num_edges_list=[4],
        )  # fmt: skip
        np.savez_compressed(raw / "node-label.npz", node_label=label)
        return folder
    write_csv(raw / "edge.csv.gz", edges)
    write_csv(raw / "node-feat.csv.gz", x)
    write_csv(raw / "node-label.csv.gz", [0, 1, 39, 3, 4])
    write_csv(raw / "num-node-list.csv.gz", [5])
    write_csv(raw / "num-edge-list.csv.gz", [4])
    return folder


@pytest.mark.parametrize("folder", ["ogbn_arxiv", "ogbn_arxiv_pyg", "arxiv"])
def test_ogb_csv(tmp_path, folder):
    ogb_folder(tmp_path / folder)
    g = load_graph("ogbn-arxiv", data_dir=str(tmp_path))
    assert g.edge_index.tolist() == [[0, 1, 3, 3], [1, 2, 2, 4]]
    assert g.x.tolist() == (np.arange(10.0).reshape(5, 2) / 8).tolist()
    assert g.y.tolist() == [0, 1, 39, 3, 4]
    assert g.num_classes == 40
    assert np.flatnonzero(g.train_mask).tolist() == [0, 1]
    assert np.flatnonzero(g.val_mask).tolist() == [2]
    assert np.flatnonzero(g.test_mask).tolist() == [3]
    assert load_graph("ogbn-arxiv", data_dir=str(tmp_path), symmetrize=True).num_edges == 8


def test_ogb_products_holds_each_edge_once(tmp_path):
    ogb_folder(tmp_path / "ogbn_products", scheme="sales_ranking")
    assert load_graph("ogbn-products", data_dir=str(tmp_path)).num_edges == 8


@pytest.mark.parametrize("mapped", [False, True])
def test_ogb_binary(tmp_path, monkeypatch, mapped):
    if mapped:
        monkeypatch.setattr(ogb, "MAPPED_BYTES", 0)
    folder = ogb_folder(tmp_path / "ogbn_papers100M", binary=True)
    for _ in range(2):
        g = load_graph("ogbn-papers100M", data_dir=str(tmp_path))
        assert g.num_edges == 4
        assert g.num_classes == 172
        assert g.y.tolist() == [0, 1, 171, 3, -1]
        assert g.x[4].tolist() == [1.0, 1.125]
        assert [p.name for p in folder.glob("gnnpipe/*")] == ["node_feat.npy"] * mapped


def test_ogb_damaged(tmp_path):
    folder = ogb_folder(tmp_path / "ogbn_arxiv")
    arguments = {"dataset": "ogbn-arxiv", "data_dir": str(tmp_path)}
    (folder / "split" / "time" / "valid.csv.gz").unlink()
    refused("valid.csv.gz': no such file", **arguments)
    assert load_graph(**arguments, split="60/20/20").train_mask.sum() == 3
    write_csv(folder / "split" / "time" / "valid.csv.gz", [9])
    refused(r"val_mask\[0\] = 9 is out of range", **arguments)
    write_csv(folder / "split" / "time" / "valid.csv.gz", [])
    assert not load_graph(**arguments).val_mask.any()
    write_csv(folder / "raw" / "num-node-list.csv.gz", [6])
    refused("y has 5 labels for 6 vertices", **arguments)
    write_csv(folder / "raw" / "node-label.csv.gz", [0, 1, 40, 3, 4])
    refused(r"y\[2\] = 40 is out of range; try: classes 0..39", **arguments)
    write_csv(folder / "raw" / "edge.csv.gz", ["0,1", "1,a"])
    refused("edge.csv.gz': cannot be read", **arguments)
    (folder / "raw" / "edge.csv.gz").write_bytes(b"no gzip")
    refused("edge.csv.gz': cannot be read", **arguments)
    (folder / "split" / "time").rename(folder / "split" / "other")
    (folder / "split" / "third").mkdir()
    refused("time': no such folder", **arguments)


# --- downloads ----------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(tmp_path):
    """A folder served over HTTP, and its address."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_ogb_download(tmp_path, mirror, monkeypatch, capsys):
    folder, url = mirror
    source = ogb_folder(tmp_path / "made" / "arxiv")
    with zipfile.ZipFile(folder / "arxiv.zip", "w") as archive:
        for path in source.rglob("*"):
            archive.write(path, path.relative_to(source.parent))
    monkeypatch.setattr(ogb, "URL", url)
    g = load_graph("ogbn-arxiv", data_dir=str(tmp_path / "data"))
    assert g.num_edges == 4
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["ogbn_arxiv"]
    assert "downloading http://127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../evil.txt": ""}, "unsafe entry '../evil.txt'"),
        ({"/evil.txt": ""}, "unsafe entry '/evil.txt'"),
        ({"arxiv/..\\..\\evil.txt": ""}, "unsafe entry"),
        ({"other/raw/edge.csv.gz": ""}, "holds no folder 'arxiv'"),
        (None, "is not a sound zip archive"),
    ],
    ids=["up", "root", "backslash", "other", "broken"],
)
def test_bad_archives_leave_nothing(tmp_path, mirror, members, message):
    folder, url = mirror
    if members is None:
        (folder / "arxiv.zip").write_bytes(b"PK and then nothing")
    else:
        with zipfile.ZipFile(folder / "arxiv.zip", "w") as archive:
            for name, text in members.items():
                archive.writestr(name, text)
    target = tmp_path / "data" / "deep" / "ogbn_arxiv"
    with pytest.raises(FetchError, match=message):
        fetch_zip(url + "arxiv.zip", target, "arxiv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mirror"]


def test_link_in_archive_is_refused(tmp_path, mirror):
    folder, url = mirror
    link = zipfile.ZipInfo("arxiv/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(folder / "arxiv.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(FetchError, match="unsafe entry 'arxiv/link'"):
        fetch_zip(url + "arxiv.zip", tmp_path / "data" / "ogbn_arxiv", "arxiv")


def test_archive_larger_than_the_disk_is_refused(tmp_path, mirror, monkeypatch):
    folder, url = mirror
    (folder / "arxiv.zip").write_bytes(b"x" * 1000)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("gnnpipe.graph.fetch.shutil.disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"has 0\.0 GB free"):
        fetch_zip(url + "arxiv.zip", tmp_path / "data" / "ogbn_arxiv", "arxiv")


def test_ogb_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr(ogb, "URL", "http://127.0.0.1:9/")
    text = refused("not in --data-dir", "ogbn-products", data_dir=str(tmp_path / "data"))
    for part in ("products.zip (1.4 GB)", "data/ogbn_products'", "raw/ and split/", "refused"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_tidied_keeps_what_was_there(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "kept").touch()
    with contextlib.suppress(KeyError), tidied(tmp_path):
        (tmp_path / "old" / "new" / "deep").mkdir(parents=True)
        (tmp_path / "old" / "new" / "file").touch()
        raise KeyError
    assert [p.name for p in sorted(tmp_path.rglob("*"))] == ["old", "kept"]


def test_data_root_is_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert data_root("") == Path("/home/someone/.cache/gnnpipe/datasets")
    assert data_root("there") == Path("there")


# --- synthetic ----------------------------------------------------------------------------------


def homophily(g):
    source, target = g.edge_index
    return (g.y[source] == g.y[target]).mean()


@pytest.mark.parametrize(("degree", "wanted"), [(6, 0.9), (20, 0.5), (10, 0.0), (10, 1.0)])
def test_planted_has_the_asked_degree_and_homophily(degree, wanted):
    g = load_graph(f"synthetic:planted:n=4000,degree={degree},classes=5,homophily={wanted}")
    assert g.num_edges == 4000 * degree
    assert homophily(g) == pytest.approx(wanted, abs=0.02)
    assert (g.num_vertices, g.num_classes, g.num_features) == (4000, 5, 64)
    assert np.bincount(g.y).tolist() == [800] * 5
    assert g.train_mask.sum() == 2400


def test_rmat_has_the_asked_degree_and_hubs():
    g = load_graph("synthetic:rmat:n=5000,degree=12,features=16,classes=4")
    assert g.num_edges == 5000 * 12
    assert g.degrees.max() > 40 * 12
    assert np.bincount(g.y, minlength=4).min() > 300
    assert g.x.shape == (5000, 16)


@pytest.mark.parametrize("kind", ["planted", "rmat"])
def test_synthetic_is_seeded_and_undirected(kind):
    a, b, c = (load_graph(f"synthetic:{kind}:n=1000,seed={s}") for s in (1, 1, 2))
    for field in ("indptr", "indices", "x", "y", "train_mask"):
        assert np.array_equal(getattr(a, field), getattr(b, field))
    assert not np.array_equal(a.indices, c.indices)
    pairs = set(map(tuple, a.edge_index.T.tolist()))
    assert {(t, s) for s, t in pairs} == pairs


@pytest.mark.parametrize("kind", ["planted", "rmat"])
def test_neighbours_help_to_learn_the_labels(kind):
    g = load_graph(f"synthetic:{kind}:n=5000,features=32,classes=4")
    a = sp.csr_array((np.ones(g.num_edges), g.indices, g.indptr), shape=(5000, 5000))
    mean = a @ g.x / np.maximum(g.degrees, 1)[:, None]

    def accuracy(x):
        ones = np.hstack([x, np.ones((5000, 1))])
        w = np.linalg.lstsq(ones[g.train_mask], np.eye(4)[g.y[g.train_mask]], rcond=None)[0]
        return ((ones[g.test_mask] @ w).argmax(axis=1) == g.y[g.test_mask]).mean()

    alone, together = accuracy(g.x), accuracy(np.hstack([g.x, mean]))
    assert 0.4 < alone < 0.8
    assert together > alone + 0.1


def test_synthetic_numbers_may_be_written_as_powers():
    assert parse_synthetic("synthetic:planted:n=3e6, noise=2").n == 3_000_000


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("plant", "unknown generator 'plant'; did you mean 'planted'"),
        ("", "unknown generator ''"),
        ("rmat:homophily=1", "unknown key 'homophily'; known: classes"),
        ("planted:nodes=5", "unknown key 'nodes'"),
        ("planted:n", "'n' is not key=value; try n=1000"),
        ("planted:n=many", "n=many is not a whole number"),
        ("planted:n=10.5", "n=10.5 is not a whole number"),
        ("planted:degree=nan", "degree=nan is not a number"),
        ("planted:n=1", "n=1 is not in 2.."),
        ("planted:n=-5", "n=-5 is not in"),
        ("planted:classes=1", "classes=1 is not in 2.."),
        ("planted:features=0", "features=0 is not in 1.."),
        ("planted:homophily=1.5", "homophily=1.5 is not in 0..1"),
        ("planted:noise=-1", "noise=-1.0 is not in"),
        ("rmat:seed=-1", "seed=-1 is not in"),
        ("planted:n=100,degree=60", "does not fit into classes of 12 vertices; .* up to 7.8"),
        ("rmat:n=100,degree=60", "too dense for R-MAT on 100 vertices; try a degree up to 12"),
    ],
)
def test_synthetic_refused(rest, message):
    refused(message, f"synthetic:{rest}")
