"""Data source of OGB's vertex classification data sets, in OGB's own layout on disk.

The ``ogb`` loader caches pickled objects, which torch >= 2.6 refuses to load, and needs three times
the memory. The files below are plain: numbers as csv.gz, or one npz for the largest graph. So they
are read directly, from the folder that ``ogb`` made or from the official archive.

    ogbn_arxiv/raw/        edge.csv.gz  node-feat.csv.gz  node-label.csv.gz  num-node-list.csv.gz
    ogbn_arxiv/split/time/ train.csv.gz  valid.csv.gz  test.csv.gz
    ogbn_proteins/raw/     edge.csv.gz  edge-feat.csv.gz  node-label.csv.gz  num-node-list.csv.gz
    ogbn_papers100M/raw/   data.npz (edge_index, node_feat, num_nodes_list)  node-label.npz

A folder in this layout is also read by its path. OGB's own data sets are then recognised by the
name of the folder or the number of vertices, because the files do not say how many classes there
are and whether each undirected edge is listed once.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnpipe.data.clean import RawGraph
from gnnpipe.data.download import FetchError, data_root, fetch_zip, locked, tidied
from gnnpipe.data.source import DataRequest, Source
from gnnpipe.errors import InputError
from gnnpipe.files import open_plain
from gnnpipe.graph.npz_archive import UNREADABLE, opened, read_arrays

URL = "http://snap.stanford.edu/ogb/data/nodeproppred/"

MAPPED_BYTES = 4 << 30
"""Features above this size are unpacked to a file and memory-mapped, not read."""


@dataclass(frozen=True)
class _Ogb:
    archive: str
    size: str
    scheme: str
    num_vertices: int
    classes: int
    has_one_direction: bool
    """The files hold each undirected edge once."""


OGB_DATASETS = {
    "ogbn-arxiv": _Ogb("arxiv", "81 MB", "time", 169_343, 40, has_one_direction=False),
    "ogbn-products": _Ogb(
        "products", "1.4 GB", "sales_ranking", 2_449_029, 47, has_one_direction=True
    ),
    "ogbn-proteins": _Ogb("proteins", "0.2 GB", "species", 132_534, 112, has_one_direction=True),
    "ogbn-papers100M": _Ogb(
        "papers100M-bin", "56 GB", "time", 111_059_956, 172, has_one_direction=False
    ),
}


def _read(request: DataRequest) -> RawGraph:
    """One of ``OGB_DATASETS`` from ``data_dir``, downloaded if it is not there; or a folder.

    ``ogbn-arxiv`` and ``ogbn-papers100M`` are directed, as in OGB. The features of
    ``ogbn-proteins``, which has none, are the means of each vertex's edge features, as in OGB's
    example. ``InputError``: not on disk with no network; a file missing or damaged.
    """
    name = request.dataset
    if name in OGB_DATASETS:
        folder = _folder(name, OGB_DATASETS[name], data_root(request.data_dir))
    else:
        folder = _path_of(name)
    raw = folder / "raw"
    is_packed = (raw / "data.npz").exists()
    # The small files first: their faults show before minutes of reading.
    num_vertices = _num_vertices(raw, is_packed)
    name = name if name in OGB_DATASETS else _known_name(folder, num_vertices)
    facts = OGB_DATASETS.get(name)
    scheme = "" if facts is None else facts.scheme
    masks = _split(folder / "split", scheme) if request.needs_split else None
    edge_data = {}
    if is_packed:
        edge_index = _member(raw / "data.npz", "edge_index")
        x = _large_member(raw / "data.npz", "node_feat", folder / "gnnpipe" / "node_feat.npy")
        y = _member(raw / "node-label.npz", "node_label")
    else:
        edge_index = _csv(raw / "edge.csv.gz", np.int64).T
        y = _csv(raw / "node-label.csv.gz", np.float64)
        if (raw / "edge-feat.csv.gz").exists():
            edge_data["edge_attr"] = _csv(raw / "edge-feat.csv.gz", np.float32)
        if edge_data and not (raw / "node-feat.csv.gz").exists():
            x = _means_of_edges(edge_index, edge_data["edge_attr"], num_vertices)
        else:
            x = _csv(raw / "node-feat.csv.gz", np.float32)
    return RawGraph(
        name=name,
        edge_index=edge_index,
        x=x,
        y=y,
        masks=masks,
        num_vertices=num_vertices,
        num_classes=None if facts is None else facts.classes,
        edge_data=edge_data,
        has_one_direction=facts is not None and facts.has_one_direction,
        is_own_data=facts is None,
    )


def _means_of_edges(edge_index: Any, features: Any, num_vertices: int) -> Any:
    """Mean features [N, D] of the edges of each vertex, which are listed in one direction."""
    edge_index = edge_index.clip(0, num_vertices - 1)  # ``clean`` reports those out of range
    found = [
        sum(np.bincount(ends, column, num_vertices) for ends in edge_index) for column in features.T
    ]
    degrees = sum(np.bincount(ends, minlength=num_vertices) for ends in edge_index)
    return (np.stack(found, axis=1) / np.maximum(degrees, 1)[:, None]).astype(np.float32)


def _num_vertices(raw: Path, is_packed: bool) -> int:
    if is_packed:
        counts = _member(raw / "data.npz", "num_nodes_list")
    else:
        counts = _csv(raw / "num-node-list.csv.gz", np.int64)
    if counts.size != 1 or counts.dtype.kind not in "iu":
        raise InputError(
            f"--dataset: the number of vertices in {str(raw)!r} is {counts.ravel().tolist()[:9]}, "
            "not one whole number; unpack OGB's archive anew"
        )
    return int(counts.item())


def _path_of(name: str) -> Path:
    return Path(os.path.expanduser(name)).absolute()


def _is_folder(name: str) -> bool:
    """Whether ``name`` is a folder in OGB's layout. ``InputError`` for several vertex types."""
    path = _path_of(name)
    if not os.path.isdir(path / "raw"):  # False for a name that is no path
        return False
    if (path / "raw" / "num-node-dict.csv.gz").exists():
        raise InputError(
            f"--dataset {name!r}: has several types of vertices, which are not read from OGB's "
            "files; load it with PyG in Python: Graph.from_pyg(data)"
        )
    files = ("edge.csv.gz", "num-node-list.csv.gz", "data.npz")
    return (path / "split").is_dir() or any((path / "raw" / file).exists() for file in files)


def _known_name(folder: Path, num_vertices: int) -> str:
    """The name of OGB's data set in a folder, or else the folder's own name."""
    for name, facts in OGB_DATASETS.items():
        short = name.removeprefix("ogbn-").lower()
        if short in folder.name.lower() or num_vertices == facts.num_vertices:
            return name
    return folder.name


def _folder(name: str, facts: _Ogb, root: Path) -> Path:
    """The data set's folder: ``ogb``'s, or the archive unpacked by hand; else downloaded."""
    own = name.replace("-", "_")
    places = [root / own, root / f"{own}_pyg", root / facts.archive]
    with locked(root / own):
        for place in places:
            if (place / "raw").is_dir():
                return place
        url = f"{URL}{facts.archive}.zip"
        try:
            fetch_zip(url, places[0], facts.archive)
        except FetchError as error:
            raise InputError(
                f"--dataset {name!r}: not in --data-dir {str(root)!r} and not to be had from the "
                f"network ({error}); put there the unpacked {url} ({facts.size}) as "
                f"{str(places[0])!r} with its folders raw/ and split/"
            ) from None
    return places[0]


def _split(folder: Path, scheme: str) -> list[Any]:
    """The indices of the train, val and test vertices."""
    place = folder / (scheme or "<scheme>")
    if not place.is_dir():
        others = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
        if len(others) != 1:
            found = f" but {', '.join(others)}" if others else ""
            raise InputError(
                f"--dataset: no folder {str(place)!r}{found}; keep one, which must hold "
                "train.csv.gz, valid.csv.gz and test.csv.gz, or use --split 60/20/20"
            )
        place = folder / others[0]
    return [_csv(place / f"{part}.csv.gz", np.int64)[:, 0] for part in ("train", "valid", "test")]


def _csv(path: Path, dtype: Any) -> Any:
    """[rows, columns] of a csv.gz file without a header."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty file: val may be empty
            return np.loadtxt(path, delimiter=",", dtype=dtype, ndmin=2)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def _member(path: Path, key: str) -> Any:
    try:
        with open_plain(path) as file:
            return read_arrays(file, {key})[key]
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def _large_member(path: Path, key: str, unpacked: Path) -> Any:
    """Like ``_member``, but memory-mapped from the file ``unpacked`` if it is large.

    The features of papers100M are 57 GB. Read through zip, every rank would hold them in memory; of
    a mapped file only the used pages are read, and the ranks share them.
    """
    try:
        with open_plain(path) as file, opened(file) as entries:
            if entries.size_bytes(key) < MAPPED_BYTES:
                return entries.read({key})[key]
            with locked(unpacked), tidied(unpacked.parent):
                if not unpacked.exists():
                    unpacked.parent.mkdir(exist_ok=True)
                    part = unpacked.with_suffix(".part")
                    with open(part, "wb") as out:
                        entries.unpack(key, out)
                    os.replace(part, unpacked)
        return np.load(unpacked, mmap_mode="r", allow_pickle=False)
    except UNREADABLE as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"--dataset: no file {str(path)!r}; unpack OGB's archive anew")
    why = " ".join(str(error).split())
    return InputError(f"--dataset: cannot read {str(path)!r} ({why}); unpack OGB's archive anew")


SOURCE = Source(
    handles=lambda name: name in OGB_DATASETS or _is_folder(name),
    read=_read,
    listing=(
        *(
            (name, f"OGB's, {facts.size} to download, {facts.classes} classes")
            for name, facts in OGB_DATASETS.items()
        ),
        ("<folder of OGB>", "a folder with raw/ and split/ in OGB's layout"),
    ),
)
