"""The embedded graph is what its card says, and its script builds it."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from gnnpipe.data.embedded import debian_class_names
from gnnpipe.data.load import load_graph

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "datasets" / "build_debian.py"

INDEX = """\
Package: tool
Version: 1.0
Architecture: amd64
Section: utils
Depends: libtool (>= 1), ghost | doc:any, tool
Recommends: lib+extra.0
Description: Sharp sharp TOOL
Filename: pool/main/t/tool.deb

Package: libtool
Version: 2.0
Architecture: amd64
Section: libs
Pre-Depends: tool
Description: sharp library
 of several lines
Filename: pool/main/l/libtool_2.deb

Package: libtool
Version: 1.9
Architecture: amd64
Section: oldlibs
Suggests: doc
Description: library
Filename: pool/main/l/libtool_1.deb

Package: doc
Version: 1
Architecture: all
Section: doc
Description: papers
Filename: pool/main/d/doc.deb

Package: lib+extra.0
Version: 1
Architecture: all
Section: libs
Enhances: doc
Description: more
Filename: pool/main/l/extra.deb

Package: shady
Version: 1
Architecture: all
Section: non-free/libs
Depends: tool
Description: not of main
Filename: pool/non-free/s/shady.deb

Package: other
Version: 1
Architecture: arm64
Section: libs
Depends: tool
Description: of another machine
Filename: pool/main/o/other.deb

Package: installed
Version: 1
Architecture: all
Section: libs
Depends: tool
Description: from dpkg alone, as apt-cache dumpavail lists it
"""


@pytest.fixture(scope="module")
def debian():
    return load_graph("debian")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_debian", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_statistics(debian):
    assert debian.num_vertices == 63_436
    assert debian.num_edges == 590_600
    assert debian.num_classes == len(debian_class_names()) == 58
    assert debian.num_features == 1_000
    assert debian.degrees.max() == 21_815
    assert int((debian.degrees == 0).sum()) == 3_060
    sizes = [int(m.sum()) for m in (debian.train_mask, debian.val_mask, debian.test_mask)]
    assert sizes == [38_062, 12_687, 12_687]
    source, target = debian.edge_index
    assert (debian.y[source] == debian.y[target]).mean() == pytest.approx(0.4669, abs=1e-4)


def test_is_undirected_and_binary(debian):
    one = np.ones(debian.num_edges)
    a = sp.csr_array((one, debian.indices, debian.indptr), shape=(debian.num_vertices,) * 2)
    assert abs(a - a.T).nnz == 0
    assert isinstance(debian.x, sp.csr_array)
    assert debian.x.nnz == 308_329
    assert set(debian.x.data.tolist()) == {1.0}


def test_the_file_is_small_enough_to_ship():
    size_bytes = (ROOT / "gnnpipe" / "data" / "files" / "debian.npz").stat().st_size
    assert size_bytes < 1_600_000


def test_script_on_a_small_index(script, tmp_path, monkeypatch):
    index = tmp_path / "Packages.gz"
    index.write_bytes(gzip.compress(INDEX.encode()))
    # dpkg compares versions, and is not on every machine.
    monkeypatch.setattr(script, "_newer", lambda a, b: a > b)
    packages = script.main_packages(script.packages_file(index))
    assert list(packages) == ["doc", "lib+extra.0", "libtool", "tool"]
    assert packages["libtool"]["Version"] == "2.0"
    pairs = script.dependency_pairs(packages)
    assert pairs.tolist() == [[0, 1], [0, 3], [1, 3], [2, 3]]
    words, bags = script.word_bags(packages)
    assert words == ["library", "lines", "more", "of", "papers", "several", "sharp", "tool"]
    assert [words[i] for i in bags[3]] == ["sharp", "tool"]


def test_built_file_loads_and_is_the_same_each_time(script, tmp_path, monkeypatch):
    index = tmp_path / "Packages"
    index.write_text(INDEX)
    monkeypatch.setattr(script, "_newer", lambda a, b: a > b)
    outs = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for out in outs:
        monkeypatch.setattr("sys.argv", ["x", "--packages", str(index), "--out", str(out)])
        script.main()
    assert outs[0].read_bytes() == outs[1].read_bytes()

    folder = tmp_path / "files"
    folder.mkdir()
    outs[0].rename(folder / "debian.npz")
    monkeypatch.setattr("gnnpipe.data.embedded.resources.files", lambda _: tmp_path)
    g = load_graph("debian")
    assert g.edge_index.tolist() == [[1, 3, 0, 3, 3, 0, 1, 2], [0, 0, 1, 1, 2, 3, 3, 3]]
    assert debian_class_names() == ["doc", "libs", "utils"]
    assert g.y.tolist() == [0, 1, 1, 2]
    assert g.x.toarray().sum(axis=1).tolist() == [1, 1, 5, 2]
