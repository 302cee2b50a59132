"""What is fuzzed: every reader of files and words, fed with near-sound and with senseless input.

A target is a strategy and a function that reads what was drawn. It may come to an end, or raise
gnnpipe's own ``InputError`` of one line; whatever else comes out of it is a fault. ``test_fuzz``
runs a few examples of each, ``scripts/fuzz.py`` runs them for minutes.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bad_files import OGB_CSV, entry, good_arrays, npz, ogb, ogb_binary
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gnnpipe import Graph
from gnnpipe.checkpoint.reader import MANIFEST, StoredCheckpoint
from gnnpipe.cli.commands import make_parser
from gnnpipe.cli.main import main
from gnnpipe.cli.parser import config_of
from gnnpipe.config import TrainConfig
from gnnpipe.data.load import load_graph
from gnnpipe.data.synthetic import parse_synthetic
from gnnpipe.errors import InputError
from gnnpipe.graph.cache import _checksum, keep, recall
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, Profile
from gnnpipe.plan import Plan
from gnnpipe.plan.cluster import Cluster
from gnnpipe.report.html import page
from gnnpipe.report.run import read_run
from gnnpipe.runtime.comm.launch import check_rendezvous

__all__ = ["TARGETS", "Target", "attempt"]


@dataclasses.dataclass(frozen=True)
class Target:
    """A reader, and what it is fed with."""

    strategy: st.SearchStrategy[Any]
    read: Callable[[Any], object]


def attempt(target: Target, drawn: Any) -> None:
    """Read what was drawn; raise what no user may see."""
    text = "read"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target.read(drawn)
        except InputError as error:
            text = str(error)
    assert text.strip(), "an error that says nothing"
    assert "\n" not in text, f"more than one line: {text}"


# --- bytes --------------------------------------------------------------------------------------

CHANGES = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=9), st.integers(0, 9)), max_size=9)
"""At a place in a file: bytes that come in, and how many go."""


def changed(data: bytes, changes: list[tuple[float, bytes, int]]) -> bytes:
    for place, new, gone in changes:
        at = int(place * len(data))
        data = data[:at] + new + data[at + gone :]
    return data


# --- npz ----------------------------------------------------------------------------------------

DTYPES = st.sampled_from(
    ["i1", "i4", "i8", "u8", "f2", "f4", "f8", "?", "c8", "U2", "S3", "M8[s]", "i4,f4"]
).map(np.dtype)
SHAPES = st.one_of(
    st.sampled_from([(40,), (40, 5), (2, 160), (160,), (40, 1), (), (0,), (3, 40), (40, 0)]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
)
ARRAYS = st.tuples(DTYPES, SHAPES).flatmap(
    lambda both: hnp.arrays(both[0], both[1], fill=st.nothing() if np.prod(both[1]) < 30 else None)
)
KEYS = [
    *good_arrays(),
    "num_classes",
    "task",
    "edge_weight",
    "edge_attr",
    "edge_type",
    "x_data",
    "x_indices",
    "x_indptr",
    "x_shape",
    "train_masks",
    "junk",
]


def read_arrays_of_npz(changes: dict[str, Any]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        npz(**changes)(Path(folder))
        return load_graph(str(Path(folder) / "graph.npz"))


def read_bytes_of_npz(changes: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.npz"
        npz()(Path(folder))
        path.write_bytes(changed(path.read_bytes(), changes))
        return load_graph(str(path), split="60/20/20")


def read_entry_of_npz(changes: Any) -> object:
    """The bytes of an array are others, and the archive around it is sound."""
    import zipfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.npz"
        with zipfile.ZipFile(path, "w") as packed:
            for name, array in good_arrays().items():
                data = entry(array)
                packed.writestr(f"{name}.npy", changed(data, changes) if name == "x" else data)
        return load_graph(str(path))


# --- TOML and words -----------------------------------------------------------------------------

NAMES = [f.name for f in dataclasses.fields(TrainConfig)]
VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=9),
    st.none(),
    st.sampled_from(["given", "off", "60/20/20", "gat", "exact", "cosine", 0, 1, 2, -1, 1e308]),
)
TOML_TEXT = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.tuples(
            st.sampled_from([*NAMES, "junk"]),
            st.one_of(
                VALUES.map(repr),
                VALUES.map(lambda v: json.dumps(v, default=str)),
                st.sampled_from(["[1]", "{a=1}", "2026-11-22", "inf", "'''", '"\\u0000"']),
            ),
        ),
        max_size=5,
    ).map(lambda lines: "\n".join(f"{key} = {value}" for key, value in lines)),
)


def read_toml(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(data)
        config = TrainConfig.from_dict(TrainConfig.read_toml(path))
        # What was taken can be written and read again.
        path.write_text(config.to_toml(), encoding="utf-8")
        assert TrainConfig.from_dict(TrainConfig.read_toml(path)) == config
        return config


FLAGS = sorted(
    w for w in make_parser()[1]["train"]._option_string_actions if w not in ("-h", "--help")
)
WORDS = st.lists(
    st.one_of(st.sampled_from(FLAGS), VALUES.map(str), st.text(max_size=6)), max_size=8
)


def read_words(words: list[str]) -> object:
    parser, commands = make_parser()
    words = ["train", *(w for w in words if w not in ("-h", "--help", "--version", "--resume"))]
    options, unknown = parser.parse_known_args(words)
    if unknown:
        commands["train"].refuse(unknown, words, commands)
    options.resume = None
    return config_of(options)


# --- plan ---------------------------------------------------------------------------------------

PLAN = {
    "version": 6,
    "stages": [
        {"ops": [0, 1], "ranks": [0], "shares": [1.0]},
        {"ops": [2, 3], "ranks": [2, 1], "shares": [0.25, 0.75]},
    ],
    "chunks": 4,
    "schedule": "fill-drain",
    "collectives": {"row_exchange": "all-to-all", "shard_sum": "ordered"},
    "ways": {"3": "columns"},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ops", "ranks", "shares", "row_exchange", "x"]), inner)
    ),
    max_leaves=8,
)
PLAN_TEXT = st.one_of(
    st.text(max_size=100),
    st.dictionaries(st.sampled_from([*PLAN, "junk"]), JSON, max_size=3).map(
        lambda changes: json.dumps(PLAN | changes)
    ),
    CHANGES.map(lambda c: changed(json.dumps(PLAN).encode(), c).decode(errors="replace")),
    st.integers(1, 10**5).map(lambda depth: "[" * depth),
)

SOUND_PROFILE = Profile(
    "box",
    "by hand",
    "",
    "cpu",
    "float32",
    "same",
    "same",
    "auto",
    False,
    1,
    (ComputeTimes(1, {}, Affine(), Affine(), 1e-9),),
    LinkTimes(1e-5, 1e9, 0.0),
    None,
    None,
)
PROFILE_TEXT = st.one_of(
    CHANGES.map(lambda c: changed(SOUND_PROFILE.to_json().encode(), c).decode(errors="replace")),
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(Profile)]), JSON, max_size=3
    ).map(lambda changes: json.dumps(json.loads(SOUND_PROFILE.to_json()) | changes)),
)

CLUSTER = """devices = [{count = 2, speed = 1.0, memory_bytes = 8e9}]
link = {bandwidth_bytes_per_s = 1e9, latency_s = 0}
pairs = [{ranks = [0, 1], bandwidth_bytes_per_s = 2e9, latency_s = 1e-5}]
"""
CLUSTER_TEXT = st.one_of(
    CHANGES.map(lambda c: changed(CLUSTER.encode(), c)),
    st.tuples(
        st.sampled_from(["2", "1.0", "8e9", "1e9", "0", "[0, 1]", "2e9", "1e-5", "count", "pairs"]),
        st.sampled_from(
            ["-1", "nan", "inf", "'a'", "true", "1e40", "[]", "{}", "[[1]]", "9" * 5000]
        ),
    ).map(lambda both: CLUSTER.replace(*both).encode()),
)


def read_cluster(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_bytes(data)
        cluster = Cluster.read(str(path))
        # What was taken can be written and read again.
        path.write_text(cluster.to_toml(), encoding="utf-8")
        assert Cluster.read(str(path)) == cluster
        return cluster


# --- OGB ----------------------------------------------------------------------------------------

SHORT = [name.rpartition("/")[2].replace("-", "_") for name in OGB_CSV]
CELLS = st.one_of(st.integers(), st.floats(), st.text("0123456789.-eE,nai \n", max_size=8))
ROWS = st.lists(st.lists(CELLS, min_size=1, max_size=3), max_size=6)


def read_ogb(changes: dict[str, Any]) -> object:
    given = {
        name: gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode())
        if isinstance(rows, list)
        else rows
        for name, rows in changes.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        ogb(**given)(Path(folder))
        return load_graph("ogbn-arxiv", data_dir=str(Path(folder) / "data"))


def read_ogb_binary(changes: dict[str, Any]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        ogb_binary(**changes)(Path(folder))
        return load_graph("ogbn-papers100M", data_dir=str(Path(folder) / "data"))


# --- PyG's Data ---------------------------------------------------------------------------------

TENSORS = st.one_of(
    ARRAYS.filter(lambda a: a.dtype.kind in "if?c" and a.dtype != np.float16).map(
        lambda a: torch.from_numpy(a.copy())
    ),
    st.sampled_from([torch.eye(40).to_sparse_coo(), torch.eye(3).to_sparse_coo()]),
    ARRAYS,
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
)


def read_data(changes: dict[str, Any]) -> object:
    from torch_geometric.data import Data

    given = {k: torch.from_numpy(v) for k, v in good_arrays().items()} | changes
    return Graph.from_pyg(Data(**given))


# --- the rest -----------------------------------------------------------------------------------

SYNTHETIC = st.lists(
    st.tuples(
        st.sampled_from(["n", "degree", "classes", "features", "seed", "noise", "junk", ""]),
        VALUES.map(str),
    ),
    max_size=4,
).map(lambda items: "synthetic:planted:" + ",".join(f"{k}={v}" for k, v in items))
ENVIRONMENT = st.dictionaries(
    st.sampled_from(["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"]), VALUES.map(str)
).map(lambda given: given | {"MASTER_ADDR": "127.0.0.1"})


def read_cache(changes: Any) -> object:
    """A cached cut that was changed, by somebody who makes its checksum right."""
    with tempfile.TemporaryDirectory() as name:
        folder, key = Path(name), "a" * 64
        keep(folder, key, {"perm": np.arange(40), "ptr": np.array([[0, 40]])})
        (path,) = folder.glob("chunking-*")
        data = changed(path.read_bytes()[32:], changes)
        path.write_bytes(_checksum(key, data) + data)
        return recall(folder, key)


@cache
def sound_run() -> dict[str, bytes]:
    """The files of a short run with a checkpoint, by their paths in its folder."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        words = "train --dataset karate --hidden 4 --epochs 2 --chunks 2 --checkpoint-every 1"
        assert main([*words.split(), "--quiet", "--cache-dir", "off", "--out", str(run)]) == 0
        paths = [p for p in run.rglob("*") if p.is_file()]
        return {str(p.relative_to(run)): p.read_bytes() for p in paths}


def with_run(read: Callable[[Path], object]) -> Callable[[Any], object]:
    """Reads a run one of whose files was changed."""

    def from_changes(drawn: tuple[int, Any]) -> object:
        number, changes = drawn
        with tempfile.TemporaryDirectory() as name:
            files = sound_run()
            spoiled = sorted(files)[number % len(files)]
            for path, data in files.items():
                place = Path(name) / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(changed(data, changes) if path == spoiled else data)
            return read(Path(name))

    return from_changes


def read_checkpoint(run: Path) -> object:
    """Also with a manifest that was changed by somebody who makes its checksum right."""
    (folder, *_) = sorted(p.parent for p in run.rglob(MANIFEST))
    text = (folder / MANIFEST).read_bytes().partition(b"\n")[2]
    checksum = hashlib.sha256(text).hexdigest().encode()
    (folder / MANIFEST).write_bytes(checksum + b"\n" + text)
    stored = StoredCheckpoint(folder, verifies=False)
    return stored.read(stored.tensors)


TARGETS = {
    "npz arrays": Target(
        st.dictionaries(st.sampled_from(KEYS), ARRAYS | st.none(), min_size=1, max_size=3),
        read_arrays_of_npz,
    ),
    "npz bytes": Target(CHANGES, read_bytes_of_npz),
    "npz entry": Target(CHANGES, read_entry_of_npz),
    "TOML": Target(TOML_TEXT.map(lambda text: text.encode(errors="replace")), read_toml),
    "TOML bytes": Target(
        CHANGES.map(lambda c: changed(TrainConfig().to_toml().encode(), c)), read_toml
    ),
    "words": Target(WORDS, read_words),
    "plan": Target(PLAN_TEXT, Plan.from_json),
    "profile": Target(PROFILE_TEXT, Profile.from_json),
    "cluster": Target(CLUSTER_TEXT, read_cluster),
    "OGB text": Target(
        st.dictionaries(
            st.sampled_from(SHORT), ROWS | st.binary(max_size=40) | st.none(), max_size=2
        ),
        read_ogb,
    ),
    "OGB arrays": Target(
        st.dictionaries(
            st.sampled_from(["edge_index", "node_feat", "num_nodes_list", "node_label"]),
            ARRAYS,
            max_size=2,
        ),
        read_ogb_binary,
    ),
    "PyG Data": Target(
        st.dictionaries(st.sampled_from([*KEYS, "adj_t"]), TENSORS, min_size=1, max_size=3),
        read_data,
    ),
    "synthetic": Target(SYNTHETIC, parse_synthetic),
    "environment": Target(ENVIRONMENT, check_rendezvous),
    "report": Target(
        st.tuples(st.integers(0, 99), CHANGES), with_run(lambda run: page(read_run(run)))
    ),
    "checkpoint": Target(st.tuples(st.integers(0, 99), CHANGES), with_run(read_checkpoint)),
    "cached cut": Target(CHANGES, read_cache),
}
