"""Tables of edges and vertices, with and without pyarrow; and each fault with file and line."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from helpers import quick_config

from gnnpipe import Trainer
from gnnpipe.data import columns
from gnnpipe.data.load import load_graph
from tests.data.refuse import refused

EDGES = "source,target,weight,length\nada,bob,0.5,3\nbob,eve,2,1\neve,ada,1,0\nada,eve,4,9\n"
VERTICES = (
    "id,label,split,age,height\nada,blue,train,31,1.5\nbob,red,test,44,1.75\neve,blue,valid,5,1\n"
    "zoe,,,0,-2\n"
)


@pytest.fixture(params=["pyarrow", "csv"], autouse=True)
def parser(request, monkeypatch):
    """Every test runs with pyarrow, if it is installed, and with Python's csv module."""
    if request.param == "csv":
        monkeypatch.setattr(columns, "_arrow", lambda: None)
    else:
        pytest.importorskip("pyarrow")
    return request.param


def tables(folder, edges=EDGES, vertices=VERTICES, ending=".csv", stems=("edges", "vertices")):
    """Write both tables to a folder and return it."""
    folder.mkdir(exist_ok=True)
    for stem, text in zip(stems, (edges, vertices), strict=True):
        data = text.encode() if isinstance(text, str) else text
        (folder / f"{stem}{ending}").write_bytes(gzip.compress(data) if ".gz" in ending else data)
    return folder


def check(g, name="mine"):
    """The graph of EDGES and VERTICES, by hand: in the order of the vertex table."""
    assert g.name == name
    found = sorted(zip(*g.edge_index.tolist(), g.edge_weight, g.edge_attr.tolist(), strict=True))
    assert found == [(0, 1, 0.5, [3]), (0, 2, 4, [9]), (1, 2, 2, [1]), (2, 0, 1, [0])]
    assert g.x.tolist() == [[31, 1.5], [44, 1.75], [5, 1], [0, -2]]
    assert g.y.tolist() == [0, 1, 0, -1]
    assert np.argwhere([g.train_mask, g.val_mask, g.test_mask]).tolist() == [[0, 0], [1, 2], [2, 1]]


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv"])
def test_a_folder_or_the_file_of_the_edges(tmp_path, ending):
    change = (lambda text: text.replace(",", "\t")) if ending == ".tsv" else str
    folder = tables(tmp_path / "mine", change(EDGES), change(VERTICES), ending)
    check(load_graph(str(folder)))
    check(load_graph(str(folder / f"edges{ending}")))
    both = tables(tmp_path / "b", change(EDGES), change(VERTICES), ending, ("a-edges", "a-nodes"))
    check(load_graph(str(both / f"a-edges{ending}")), "a-edges")


def test_semicolons_a_byte_order_mark_comments_and_empty_lines(tmp_path):
    edges = "﻿# made by hand\n# twice\n" + EDGES.replace(",", ";").replace("\n", "\r\n") + "\r\n"
    check(load_graph(str(tables(tmp_path / "mine", edges, "\ufeff" + VERTICES))))


def test_whole_numbers_as_ids_in_any_order_and_masks_as_columns(tmp_path):
    vertices = (
        "node_id,train_mask,val_mask,test_mask,y,a\n70,1,false,0,2,0.5\n-3,0,true,0,0,1\n"
        "9,0,false,0,,2\n"
    )
    folder = tables(tmp_path / "mine", "to,from\n9,70\n-3,9\n9,9\n", vertices)
    g = load_graph(str(folder))
    assert sorted(zip(*g.edge_index.tolist(), strict=True)) == [(0, 2), (2, 1), (2, 2)]
    assert (g.edge_weight, g.edge_attr) == (None, None)
    assert g.y.tolist() == [2, 0, -1]
    assert g.x.tolist() == [[0.5], [1], [2]]
    assert g.val_mask.tolist() == [False, True, False]


def test_numbers_without_a_header_and_columns_by_their_place(tmp_path):
    folder = tables(
        tmp_path / "mine", "0,1,2.5\n1,2,3\n", "key,y,name,f\n0,0,a,1\n1,1,b,2\n2,1,c,3\n"
    )
    with pytest.warns(
        UserWarning, match="vertices.csv: the first column, 'key', is read as the id"
    ):
        with pytest.warns(UserWarning, match="vertices.csv: 'name' not read"):
            g = load_graph(str(folder), split="60/20/20")
    assert g.edge_index.tolist() == [[0, 1], [1, 2]]
    assert g.edge_attr.tolist() == [[2.5], [3]]
    assert g.x.tolist() == [[1], [2], [3]]
    (folder / "edges.csv").write_text("one,other\n0,1\n")
    (folder / "vertices.csv").write_text("id,y,f\n0,0,1\n1,1,2\n")
    with pytest.warns(UserWarning, match="'one' is read as the source and 'other' as the target"):
        load_graph(str(folder), split="60/20/20")


def test_text_in_one_table_makes_all_ids_text(tmp_path):
    """'007' is not 7, although both are numbers."""
    folder = tables(tmp_path / "mine", "source,target\n007,7\n", "id,y,f\n7,0,1\n007,1,2\nx,1,3\n")
    assert load_graph(str(folder), split="60/20/20").edge_index.tolist() == [[1], [0]]
    (folder / "vertices.csv").write_text("id,y,f\n7,0,1\n007,1,2\n")
    refused("vertices.csv', column 'id', line 3: id 7 is there twice", folder, split="60/20/20")


def test_links_need_no_labels(tmp_path):
    lines = "".join(f"{i},{(i * i + 1) % 40}\n{i},{(i + 1) % 40}\n" for i in range(40))
    rows = "".join(f"{i},{i % 3}\n" for i in range(40))
    folder = tables(tmp_path / "mine", "source,target\n" + lines, "id,f\n" + rows)
    assert load_graph(str(folder), task="links").pairs.num_pairs > 100
    refused("no column of labels among 'id', 'f'; try: one named 'label'", folder)


def test_a_run_on_tables(tmp_path):
    rng = np.random.default_rng(0)
    lines = "".join(f"v{a},v{b}\n" for a, b in rng.integers(0, 30, (90, 2)))
    rows = "".join(f"v{i},{'red' if i % 2 else 'blue'},{i % 2},{i % 5}\n" for i in range(30))
    folder = tables(tmp_path / "mine", "src,dst\n" + lines, "id,class,a,b\n" + rows)
    config = quick_config(dataset=str(folder), split="60/20/20", epochs=2)
    assert len(Trainer(config).fit().history) == 2


E, V = EDGES, VERTICES


@pytest.mark.parametrize(
    ("edges", "vertices", "message"),
    [
        (
            E + "bob,tom,1,1\n",
            V,
            "edges.csv', column 'target', line 6: vertex tom is not in '.*ver",
        ),
        (E + "bob,,1,1\n", V, "edges.csv', column 'target', line 6: no id; try: an id in each row"),
        (E + "bob,eve,1\n", V, "edges.csv', line 6: 3 cells for 4 columns; try: a cell for each"),
        (E + "bob,eve,1,x\n", V, "column 'length', line 6: 'x' is no number; try: mend it"),
        (E + "bob,eve,,1\n", V, "column 'weight', line 6: no number; try: a number such as 0"),
        (E.replace("length", "weight"), V, "column 'weight': two columns have this name"),
        (E.replace("target", "other"), V, "a column 'source' and no other end; try: columns named"),
        ("source\n1\n", V, "one column alone; try: columns named 'source' and 'target'"),
        ("", V, "edges.csv': empty; try: a line with the names of the columns"),
        (b"source,target\n\xff\xfe,1\n", V, "edges.csv': not a text in UTF-8"),
        (
            E.replace("0.5", "abc").replace("2,", "x,").replace(",1,", ",y,").replace(",4,", ",z,"),
            V,
            "column 'weight': holds text",
        ),
        (E, V + "ada,red,,1,1\n", "vertices.csv', column 'id', line 6: id ada is there twice"),
        (E, V + "ann,red,trian,1,1\n", "column 'split', line 6: 'trian'; try: train, val, test"),
        (E, V.replace("age", "val_mask"), "'split' and 'val_mask' both give the split"),
        (E, V.replace("-2", ""), "vertices.csv', column 'height', line 5: no number"),
        (E, V.replace("-2", "inf"), r"dataset 'mine': x\[3, 1\] = inf"),
        (E, "id,label\nada,0\nbob,1\neve,1\n", "dataset 'mine': no features x"),
        (E, "id,y,f\nada,0,1\nbob,1.5,1\neve,1,1\n", r"y\[1\] = 1.5; try: whole numbers"),
    ],
    ids=range(18),
)
def test_faults_are_named_with_their_place(tmp_path, edges, vertices, message):
    split = "given" if "split" in vertices else "60/20/20"
    text = refused(message, tables(tmp_path / "mine", edges, vertices), split=split)
    assert text.count("; try: ") == 1


def test_a_table_of_vertices_is_needed(tmp_path):
    folder = tables(tmp_path / "mine")
    refused("is not the table of the edges", folder / "vertices.csv")
    (folder / "vertices.csv").unlink()
    refused("no vertices.csv beside it; try: a folder with edges.csv", folder)
    (folder / "nodes.csv").write_text(VERTICES)
    refused("no.csv': no such file", folder / "no.csv")


def test_parquet(tmp_path, parser):
    if parser == "csv":
        for name in ("edges", "vertices"):
            (tmp_path / f"{name}.parquet").touch()
        refused(r"Parquet needs pyarrow; try: pip install 'gnnpipe\[tables\]'", tmp_path)
        return
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "mine"
    folder.mkdir()
    edges = pyarrow.table(
        {
            "source": pyarrow.array(["ada", "bob", "eve", "ada"]).dictionary_encode(),
            "target": ["bob", "eve", "ada", "eve"],
            "weight": pyarrow.array([0.5, 2, 1, 4], pyarrow.float32()),
            "length": pyarrow.array([3, 1, 0, 9], pyarrow.int8()),
        }
    )
    vertices = {
        "id": ["ada", "bob", "eve", "zoe"],
        "label": ["blue", "red", "blue", None],
        "split": ["train", "test", "valid", None],
        "features": [[31, 1.5], [44, 1.75], [5, 1.0], [0, -2.0]],
    }
    parquet.write_table(edges, folder / "edges.parquet")
    parquet.write_table(pyarrow.table(vertices), folder / "vertices.parquet")
    check(load_graph(str(folder)))
    check(load_graph(str(folder / "edges.parquet")))
    (folder / "vertices.parquet").write_bytes(b"PAR1")
    refused("vertices.parquet': not readable", folder)
    ids = {"id": [1, 2, None], "y": [0, None, 1], "f": [True, False, True]}
    parquet.write_table(pyarrow.table(ids), folder / "vertices.parquet")
    refused("vertices.parquet', column 'id', row 2: no id", folder)
