"""OGB's layout on disk, and how an archive of it gets there: whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from gnnpipe.data import ogb
from gnnpipe.data.download import FetchError, data_root, fetch_zip, tidied
from gnnpipe.data.load import load_graph
from tests.data.refuse import refused


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
            raw / "data.npz",
            edge_index=np.array(edges).T,
            node_feat=x.astype(np.float32),
            node_year=np.zeros((5, 1), int),
            num_nodes_list=[5],
            num_edges_list=[4],
        )
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


def test_ogb_proteins_has_labels_and_edge_features(tmp_path):
    folder = ogb_folder(tmp_path / "ogbn_proteins", scheme="species")
    (folder / "raw" / "node-feat.csv.gz").unlink()
    given = [[0.25, 1], [0.5, 0], [0.75, 0.5], [1, 0.25]]
    write_csv(folder / "raw" / "edge-feat.csv.gz", given)
    labels = np.arange(5 * 112).reshape(5, 112) % 3 % 2
    write_csv(folder / "raw" / "node-label.csv.gz", labels)
    g = load_graph("ogbn-proteins", data_dir=str(tmp_path))
    # Edges 0-1, 1-2, 3-2 and 3-4, each in both directions.
    means = [[0.25, 1], [0.375, 0.5], [0.625, 0.25], [0.875, 0.375], [1, 0.25]]
    np.testing.assert_allclose(g.x, means)
    assert g.num_edges == 8
    by_edge = dict(zip(map(tuple, g.edge_index.T.tolist()), g.edge_attr.tolist(), strict=True))
    assert by_edge[2, 3] == by_edge[3, 2] == [0.75, 0.5]
    assert g.y.tolist() == labels.tolist()
    assert g.num_classes == 112


@pytest.mark.parametrize("folder", ["ogbn_arxiv", "ogbn_arxiv_pyg", "arxiv", "my-Arxiv"])
def test_a_folder_by_its_path(tmp_path, monkeypatch, folder):
    ogb_folder(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / folder, f"{tmp_path / folder}/", folder):
        g = load_graph(str(path))
        assert (g.name, g.num_classes, g.num_edges) == ("ogbn-arxiv", 40, 4)
        assert g.y.tolist() == [0, 1, 39, 3, 4]
        assert [np.flatnonzero(m).tolist() for m in (g.train_mask, g.val_mask, g.test_mask)] == [
            [0, 1],
            [2],
            [3],
        ]


def test_a_folder_of_any_name(tmp_path, monkeypatch):
    """The number of vertices tells OGB's data sets; others have the classes of their labels."""
    folder = ogb_folder(tmp_path / "mine", scheme="random")
    write_csv(folder / "raw" / "node-label.csv.gz", [0, 1, 2, 1, 2])
    g = load_graph(str(folder))
    assert (g.name, g.num_classes, g.num_edges) == ("mine", 3, 4)
    assert np.flatnonzero(g.train_mask).tolist() == [0, 1]
    facts = replace(ogb.OGB_DATASETS["ogbn-products"], num_vertices=5)
    monkeypatch.setitem(ogb.OGB_DATASETS, "ogbn-products", facts)
    g = load_graph(str(folder))
    assert (g.name, g.num_classes, g.num_edges) == ("ogbn-products", 47, 8)


def test_folders_that_cannot_be_read(tmp_path):
    folder = ogb_folder(tmp_path / "mine", scheme="random")
    (folder / "split" / "other").mkdir()
    refused("no folder '.*mine/split/<scheme>' but other, random; keep one", folder)
    (folder / "raw" / "edge.csv.gz").unlink()
    refused("no file '.*edge.csv.gz'; unpack", folder, split="60/20/20")
    write_csv(folder / "raw" / "num-node-dict.csv.gz", [3])
    refused("mine': has several types of vertices", folder)


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
    refused("no file '.*valid.csv.gz'", **arguments)
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
    refused("cannot read '.*edge.csv.gz'", **arguments)
    (folder / "raw" / "edge.csv.gz").write_bytes(b"no gzip")
    refused("cannot read '.*edge.csv.gz'", **arguments)
    (folder / "split" / "time").rename(folder / "split" / "other")
    (folder / "split" / "third").mkdir()
    refused("no folder '.*time'", **arguments)


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
    monkeypatch.setattr("gnnpipe.data.download.shutil.disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"has 0\.0 GB free"):
        fetch_zip(url + "arxiv.zip", tmp_path / "data" / "ogbn_arxiv", "arxiv")


def test_a_download_that_breaks_off_leaves_nothing(tmp_path, mirror, monkeypatch):
    folder, url = mirror
    (folder / "arxiv.zip").write_bytes(b"x" * 1000)

    def send_header(self, name, value):
        more = 1 if name == "Content-Length" else 0
        SimpleHTTPRequestHandler.send_header(self, name, str(int(value) + more) if more else value)

    monkeypatch.setattr(Quiet, "send_header", send_header, raising=False)
    with pytest.raises(FetchError, match="IncompleteRead"):
        fetch_zip(url + "arxiv.zip", tmp_path / "data" / "ogbn_arxiv", "arxiv")
    assert [p.name for p in tmp_path.iterdir()] == ["mirror"]


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
