"""Hostile files: a real attempt to run code through each reader that a pickle can reach."""

from __future__ import annotations

import io
import pickle
import threading
import warnings
from collections import defaultdict

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from bad_files import Evil

from gnnpipe.data import safe_unpickle
from gnnpipe.data.load import load_graph
from gnnpipe.data.safe_unpickle import only_data
from gnnpipe.graph.cache import keep, recall
from tests.data.refuse import refused


def raw_planetoid(folder, **changes):
    """A small Cora as its authors pickled it, in a ring: 4 vertices to train, the last 20 to test.

    600 in all, for PyG takes 500 to validate.
    """
    folder.mkdir(parents=True)
    n = 600
    x = sp.csr_matrix(np.eye(n, 5, dtype=np.float32))
    y = np.eye(2, dtype=np.int32)[np.arange(n) % 2]
    graph = defaultdict(list, {i: [(i + 1) % n, (i - 1) % n] for i in range(n)})
    parts = {
        "x": x[:4],
        "tx": x[-20:],
        "allx": x[:-20],
        "y": y[:4],
        "ty": y[-20:],
        "ally": y[:-20],
        "graph": graph,
    } | changes
    for name, part in parts.items():
        (folder / f"ind.cora.{name}").write_bytes(pickle.dumps(part, protocol=2))
    (folder / "ind.cora.test.index").write_text("\n".join(map(str, range(n - 20, n))))


def test_pickled_arrays_are_still_read(tmp_path):
    """Twice: from the raw files, and from what PyG has made of them."""
    raw_planetoid(tmp_path / "planetoid" / "Cora" / "raw")
    for _ in range(2):
        g = load_graph("cora", data_dir=str(tmp_path))
        assert (g.num_vertices, g.num_edges, g.num_features) == (600, 1200, 5)


@pytest.mark.parametrize("part", ["x", "ally", "graph"])
def test_a_hostile_raw_file(tmp_path, part):
    evil = tmp_path / "evil"
    raw_planetoid(tmp_path / "planetoid" / "Cora" / "raw", **{part: Evil(evil)})
    refused(r"cannot be read .*mkdir.* remove them", "cora", data_dir=str(tmp_path))
    assert not evil.exists()


@pytest.mark.parametrize("name", ["data.pt", "pre_transform.pt", "pre_filter.pt"])
@pytest.mark.parametrize("save", [torch.save, pickle.dump], ids=["zip", "plain"])
def test_a_hostile_file_beside_sound_ones(tmp_path, name, save):
    evil = tmp_path / "evil"
    raw_planetoid(tmp_path / "planetoid" / "Cora" / "raw")
    load_graph("cora", data_dir=str(tmp_path))
    with open(tmp_path / "planetoid" / "Cora" / "processed" / name, "wb") as file:
        save(Evil(evil), file)
    refused("cannot be read .* remove them", "cora", data_dir=str(tmp_path))
    assert not evil.exists()


def test_the_attempts_would_work_without_the_guard(tmp_path, monkeypatch):
    evil = tmp_path / "evil"
    raw_planetoid(tmp_path / "planetoid" / "Cora" / "raw", graph=Evil(evil))
    monkeypatch.setattr(safe_unpickle, "HARMLESS", safe_unpickle.HARMLESS | {("posix", "mkdir")})
    refused("cannot be read", "cora", data_dir=str(tmp_path))
    assert evil.is_dir()


def test_a_hostile_cached_cut(tmp_path):
    """With a checksum that is right, for it is no secret."""
    evil = tmp_path / "evil"
    array = np.empty(1, dtype=object)
    array[0] = Evil(evil)
    payload = io.BytesIO()
    np.savez(payload, perm=array, ptr=array)
    keep(tmp_path, "a" * 64, {"perm": np.arange(3)})
    (path,) = tmp_path.glob("chunking-*")
    from gnnpipe.graph.cache import _checksum

    data = payload.getvalue()
    path.write_bytes(_checksum("a" * 64, data) + data)
    assert recall(tmp_path, "a" * 64) is None
    assert not evil.exists()


def test_outside_of_the_block_and_in_other_threads_pickle_is_as_ever(tmp_path):
    found = []
    data = pickle.dumps(Evil(tmp_path / "fine"))
    with only_data(), pytest.raises(pickle.UnpicklingError, match="mkdir, which is not data"):
        pickle.loads(data)
    pickle.loads(data)
    assert (tmp_path / "fine").is_dir()
    with only_data():
        thread = threading.Thread(target=lambda: found.append(pickle.loads(b"cbuiltins\nlen\n.")))
        thread.start()
        thread.join()
    assert found == [len]


def test_tensors_and_matrices_are_data():
    things = [np.arange(3), np.float32(2), sp.eye_array(3).tocsr(), {1: {2}}]
    with only_data():
        for thing in things:
            found = pickle.loads(pickle.dumps(thing))
            assert type(found) is type(thing)
        stored = io.BytesIO()
        torch.save(torch.ones(3), stored)
        stored.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.load(stored, weights_only=False).tolist() == [1, 1, 1]
