import os
from dataclasses import replace

import numpy as np
import pytest

from gnnpipe.graph import cache, chunking
from gnnpipe.graph.chunking import ShardShares, make_chunking
from gnnpipe.graph.partition import PARTITIONERS
from gnnpipe.graph.partition.runs import parts_of_runs
from tests.graph.made import graph_of


@pytest.fixture
def graph():
    rng = np.random.default_rng(0)
    return graph_of(120, rng.integers(0, 120, (400, 2)).tolist())


@pytest.fixture
def cuts(monkeypatch):
    """Counts how often a chunking is really made."""
    count = []
    real = chunking._partition
    monkeypatch.setattr(chunking, "_partition", lambda *a: count.append(1) or real(*a))
    return count


def make(graph, folder, **change):
    settings = {"chunks": 4, "shards": 2, "partitioner": "metis", "seed": 0, **change}
    return make_chunking(graph, cache_dir=str(folder), **settings)


def test_the_second_time_it_is_taken_from_disk(graph, cuts, tmp_path):
    first, second = make(graph, tmp_path), make(graph, tmp_path)
    assert len(cuts) == 1
    assert (first.perm == second.perm).all()
    assert (first.ptr == second.ptr).all()
    assert second.perm.dtype == second.ptr.dtype == np.int64
    assert [p.name[:9] for p in tmp_path.iterdir()] == ["chunking-"]


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": 5},
        {"shards": 3},
        {"seed": 1},
        {"partitioner": "range"},
        {"order": "metis"},
        {"shares": ShardShares((0.6, 0.4))},
    ],
)
def test_another_setting_is_another_entry(graph, cuts, tmp_path, change):
    make(graph, tmp_path)
    make(graph, tmp_path, **change)
    assert len(cuts) == 2


def test_equal_shares_are_the_same_entry(graph, cuts, tmp_path):
    make(graph, tmp_path)
    make(graph, tmp_path, shares=ShardShares((0.5, 0.5)))
    assert len(cuts) == 1


def test_a_partitioner_from_outside_is_not_kept(graph, cuts, tmp_path, monkeypatch):
    """The key does not know its code, which may change."""
    own = dict(PARTITIONERS._things) | {"mine": lambda task: parts_of_runs(task)}
    monkeypatch.setattr(PARTITIONERS, "_things", own)
    make(graph, tmp_path, partitioner="mine")
    make(graph, tmp_path, partitioner="mine")
    assert len(cuts) == 2
    assert list(tmp_path.iterdir()) == []


def test_another_edge_is_another_entry_and_another_width_is_not(graph, cuts, tmp_path):
    make(graph, tmp_path)
    wide = replace(graph, indices=graph.indices.astype(np.int64))
    make(wide, tmp_path)
    assert len(cuts) == 1
    other = graph.indices.copy()
    other[0] = (set(range(120)) - set(other[: graph.indptr[1]].tolist()) - {0}).pop()
    make(replace(graph, indices=other), tmp_path)
    assert len(cuts) == 2


def test_a_damaged_file_is_rebuilt(graph, cuts, tmp_path):
    good = make(graph, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    damages = [b"", whole[:20], whole[:-7], bytes(flipped), b"not a cut at all" * 100]
    for number, damage in enumerate(damages, start=2):
        path.write_bytes(damage)
        made = make(graph, tmp_path)
        assert len(cuts) == number
        assert (made.perm == good.perm).all()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("fault", ["repeated vertex", "empty cell", "other shape", "no perm"])
def test_a_well_formed_file_that_is_no_chunking_is_not_trusted(graph, cuts, tmp_path, fault):
    good = make(graph, tmp_path)
    (path,) = tmp_path.iterdir()
    perm, ptr = good.perm.copy(), good.ptr.copy()
    if fault == "repeated vertex":
        perm[0] = perm[1]
    elif fault == "empty cell":
        ptr[0, 1] = ptr[0, 0]
    elif fault == "other shape":
        ptr = ptr[:, [0, -1]]
    arrays = {"ptr": ptr} if fault == "no perm" else {"perm": perm, "ptr": ptr}
    keys = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "keep", lambda folder, key, _: keys.append(key))
        path.unlink()
        make(graph, tmp_path)
    cache.keep(tmp_path, keys[0], arrays)
    assert path.exists()
    assert (make(graph, tmp_path).perm == good.perm).all()
    assert len(cuts) == 3


def test_a_file_under_another_key_is_refused(tmp_path):
    a, b = "a" * 64, "b" * 64
    cache.keep(tmp_path, a, {"perm": np.arange(3)})
    assert cache.recall(tmp_path, a)["perm"].tolist() == [0, 1, 2]
    os.rename(cache._path(tmp_path, a), cache._path(tmp_path, b))
    assert cache.recall(tmp_path, b) is None


def test_off_keeps_nothing(graph, cuts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make(graph, "off")
    make(graph, "off")
    assert len(cuts) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder(graph, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    make(graph, "")
    assert len(list((tmp_path / "xdg" / "gnnpipe").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / ".cache" / "gnnpipe"


def test_a_folder_that_cannot_be_written_is_gone_without(graph, cuts, tmp_path):
    (tmp_path / "file").write_text("in the way")
    make(graph, tmp_path / "file")
    make(graph, tmp_path / "file" / "below")
    make(graph, "bad\0name")
    assert len(cuts) == 3


def test_a_read_only_folder_is_gone_without(graph, cuts, tmp_path, monkeypatch):
    def refuse(**_):  # root may write everywhere, so the refusal is played
        raise PermissionError("read-only")

    monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    make(graph, tmp_path)
    assert len(cuts) == 1


def test_a_write_that_fails_half_way_leaves_no_file(graph, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(cache.os, "replace", refuse)
    make(graph, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_object_array_is_never_unpickled(tmp_path):
    import io

    content = io.BytesIO()
    np.savez(content, perm=np.array([{}], dtype=object))
    key, payload = "c" * 64, content.getvalue()
    cache._path(tmp_path, key).write_bytes(cache._checksum(key, payload) + payload)
    assert cache.recall(tmp_path, key) is None
