"""Files that no reader may take: each maker writes one into a folder and gives the arguments."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile

import numpy as np


def good_arrays():
    """What a sound .npz file holds: 40 vertices, 4 classes."""
    rng = np.random.default_rng(0)
    part = np.arange(40) % 3
    return {
        "edge_index": rng.integers(0, 40, (2, 160)),
        "x": rng.random((40, 5), np.float32),
        "y": np.arange(40) % 4,
        "train_mask": part == 0,
        "val_mask": part == 1,
        "test_mask": part == 2,
    }


def npz(**changes):
    """A sound file with some arrays replaced, or left out where ``None``."""

    def make(folder):
        arrays = {k: v for k, v in (good_arrays() | changes).items() if v is not None}
        np.savez(folder / "graph.npz", **arrays)
        return ["--dataset", "graph.npz"]

    return make


def x_with(value):
    x = good_arrays()["x"].astype(np.float64)
    x[3, 2] = value
    return x


def packed(entries, **options):
    """A zip archive with these (name, bytes)."""

    def make(folder):
        with zipfile.ZipFile(folder / "graph.npz", "w", **options) as archive:
            for name, content in entries:
                archive.writestr(name, content)
        return ["--dataset", "graph.npz"]

    return make


def entry(array):
    """The bytes of an .npy file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def promising(descr, shape, content=b""):
    """The bytes of an .npy file whose header promises what ``content`` does not hold."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    header = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def entries(**changes):
    """The entries of a sound file, some of them replaced by bytes."""
    plain = {name: entry(array) for name, array in good_arrays().items()} | changes
    return [(f"{name}.npy", content) for name, content in plain.items()]


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def evil_npz(folder):
    array = np.empty(40, dtype=object)
    array[:] = [Evil(folder / "evil")] * 40
    np.savez(folder / "graph.npz", **(good_arrays() | {"y": array}), allow_pickle=True)
    return ["--dataset", "graph.npz"]


def written(name, content, arguments):
    """A file of these bytes."""

    def make(folder):
        (folder / name).write_bytes(content)
        return arguments

    return make


def cut_off(size):
    """A sound file without its last bytes."""

    def make(folder):
        npz()(folder)
        data = (folder / "graph.npz").read_bytes()
        (folder / "graph.npz").write_bytes(data[:-size])
        return ["--dataset", "graph.npz"]

    return make


def flipped(folder):
    """A byte of the features is another: the checksum of the archive tells."""
    npz()(folder)
    data = bytearray((folder / "graph.npz").read_bytes())
    data[3000] ^= 0xFF
    (folder / "graph.npz").write_bytes(data)
    return ["--dataset", "graph.npz"]


def folder_instead(name, arguments):
    def make(folder):
        (folder / name).mkdir()
        return arguments

    return make


def pipe_instead(name, arguments):
    """A pipe that nobody writes to: who opens it to read waits for ever."""

    def make(folder):
        os.mkfifo(folder / name)
        return arguments

    return make


def link_to(name, target, arguments):
    def make(folder):
        (folder / name).symlink_to(target)
        return arguments

    return make


def toml(text):
    """A config file of this text (or bytes)."""
    content = text if isinstance(text, bytes) else text.encode()
    return written("run.toml", content, ["--config", "run.toml"])


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, np.atleast_1d(row))) + "\n" for row in rows)


OGB_CSV = {
    "raw/edge": [(0, 1), (1, 2), (3, 2), (3, 4)],
    "raw/node-feat": np.arange(10.0).reshape(5, 2).tolist(),
    "raw/node-label": [0, 1, 39, 3, 4],
    "raw/num-node-list": [5],
    "raw/num-edge-list": [4],
    "split/time/train": [0, 1],
    "split/time/valid": [2],
    "split/time/test": [3],
}
"""A tiny ogbn-arxiv in OGB's own layout: file to rows."""


def ogb(**changes):
    """That, with the rows of some files replaced; bytes are written as they are."""

    def make(folder):
        base = folder / "data" / "ogbn_arxiv"
        known = {name.rpartition("/")[2].replace("-", "_"): name for name in OGB_CSV}
        for short, name in known.items():
            rows = changes.get(short, OGB_CSV[name])
            path = base / f"{name}.csv.gz"
            if isinstance(rows, bytes):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(rows)
            elif rows is not None:
                write_csv(path, rows)
        return ["--dataset", "ogbn-arxiv", "--data-dir", "data"]

    return make


def ogb_binary(**changes):
    """A tiny ogbn-papers100M, with some arrays replaced."""

    def make(folder):
        base = folder / "data" / "ogbn_papers100M"
        for part, rows in (("train", [0, 1]), ("valid", [2]), ("test", [3])):
            write_csv(base / "split" / "time" / f"{part}.csv.gz", rows)
        arrays = {
            "edge_index": np.array(OGB_CSV["raw/edge"]).T,
            "node_feat": np.arange(10, dtype=np.float32).reshape(5, 2),
            "num_nodes_list": np.array([5]),
            "node_label": np.array([[0.0], [1], [2], [3], [4]]),
        } | changes
        label = {"node_label": arrays.pop("node_label")}
        (base / "raw").mkdir()
        np.savez(base / "raw" / "data.npz", **{k: v for k, v in arrays.items() if v is not None})
        np.savez(base / "raw" / "node-label.npz", **label)
        return ["--dataset", "ogbn-papers100M", "--data-dir", "data"]

    return make


def pyg_files(**files):
    """Bytes in the places where PyG keeps coauthor:CS; '__' in a name for '/'."""

    def make(folder):
        base = folder / "data" / "coauthor" / "CS"
        for name, content in files.items():
            path = base / name.replace("__", "/").replace("_npz", ".npz").replace("_pt", ".pt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(folder) if callable(content) else content)
        return ["--dataset", "coauthor:CS", "--data-dir", "data"]

    return make


def evil_pickle(folder):
    return pickle.dumps(Evil(folder / "evil"))


def evil_pt(folder):
    """What ``torch.save`` writes of it."""
    import torch

    out = io.BytesIO()
    torch.save(Evil(folder / "evil"), out)
    return out.getvalue()
