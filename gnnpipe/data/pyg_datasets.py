"""Data source of PyG's own data sets, by name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from gnnpipe.data.arrays import array_of
from gnnpipe.data.clean import RawGraph
from gnnpipe.data.download import data_root, locked, tidied
from gnnpipe.data.pyg import raw_graph
from gnnpipe.data.safe_unpickle import only_data
from gnnpipe.data.source import DataRequest, Source
from gnnpipe.data.split import SPLIT_NAMES
from gnnpipe.errors import InputError
from gnnpipe.registry import nearest

if TYPE_CHECKING:
    from torch_geometric.data import Data

SPARSE_BELOW = 0.1
"""Share of non-zero features below which the first Linear is faster with CSR rows."""


@dataclass(frozen=True)
class Family:
    """A data set class of PyG and the names of its data sets."""

    cls: str
    names: tuple[str, ...] = ()
    has_split: bool = True
    """False if PyG gives no masks: 'given' is then a 60/20/20 split with seed 0."""
    parts: tuple[str, ...] = ()
    """PyG has one data set of several graphs for each part of the split; they form one graph."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of the class."""


PYG_FAMILIES = {
    "planetoid": Family("Planetoid", ("Cora", "CiteSeer", "PubMed")),
    "citationfull": Family(
        "CitationFull", ("Cora", "Cora_ML", "CiteSeer", "DBLP", "PubMed"), has_split=False
    ),
    "coauthor": Family("Coauthor", ("CS", "Physics"), has_split=False),
    "amazon": Family("Amazon", ("Computers", "Photo"), has_split=False),
    "wikipedia": Family("WikipediaNetwork", ("chameleon", "squirrel")),
    "webkb": Family("WebKB", ("Cornell", "Texas", "Wisconsin")),
    "heterophilous": Family(
        "HeterophilousGraphDataset",
        ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions"),
    ),
    "linkx": Family("LINKXDataset", ("penn94",)),
    "twitch": Family("Twitch", ("DE", "EN", "ES", "FR", "PT", "RU"), has_split=False),
    "airports": Family("Airports", ("USA", "Brazil", "Europe"), has_split=False),
    "city": Family("CityNetwork", ("paris", "shanghai", "la", "london")),
    "actor": Family("Actor"),
    "flickr": Family("Flickr"),
    "reddit": Family("Reddit"),
    "reddit2": Family("Reddit2"),
    "nell": Family("NELL"),
    "wikics": Family("WikiCS", options=(("is_undirected", True),)),
    "github": Family("GitHub", has_split=False),
    "facebook": Family("FacebookPagePage", has_split=False),
    "lastfmasia": Family("LastFMAsia", has_split=False),
    "deezereurope": Family("DeezerEurope", has_split=False),
    "yelp": Family("Yelp"),
    "amazonproducts": Family("AmazonProducts"),
    "ppi": Family("PPI", parts=("train", "val", "test")),
}
"""PyG's datasets with features and a class, or several labels, for each vertex, by family."""


def find_pyg(dataset: str) -> tuple[str, str] | None:
    """The family and PyG's spelling of the name in 'family:name', 'family' or 'name'.

    A name without a family means the first family that has it.

    >>> find_pyg("amazon:photo"), find_pyg("CORA"), find_pyg("Reddit")
    (('amazon', 'Photo'), ('planetoid', 'Cora'), ('reddit', ''))

    Raises:
        InputError: a known family without such a member.
    """
    head, colon, tail = dataset.lower().partition(":")
    for key, family in PYG_FAMILIES.items():
        if head in (key, family.cls.lower()) and (colon or not family.names):
            spelled = {n.lower(): n for n in family.names}
            if tail in spelled:
                return key, spelled[tail]
            if not tail and not family.names:
                return key, ""
            hint = nearest(tail, family.names) if family.names else f"use {key!r}"
            raise InputError(f"--dataset {dataset!r}: {key} has no {tail!r}; {hint}")
    for key, family in PYG_FAMILIES.items():
        for name in family.names:
            if not colon and name.lower() == head:
                return key, name
    return None


def _read(request: DataRequest) -> RawGraph:
    """One of PyG's data sets, through PyG's own class, which downloads it if it is not there.

    Its folder is ``data_dir``/<family>, in PyG's layout. ``InputError``: not on disk with no
    network.
    """
    dataset = request.dataset
    found = find_pyg(dataset)
    assert found is not None, "``handles`` is called first"
    key, name = found
    family = PYG_FAMILIES[key]
    root = data_root(request.data_dir) / key
    if family.parts:
        data = _joined([_load(dataset, family, name, root, split=part) for part in family.parts])
    else:
        data = _load(dataset, family, name, root)[0]
    x = array_of(data.x)
    if not sp.issparse(x) and np.count_nonzero(x) < SPARSE_BELOW * x.size:
        # PyG unpacks bags of words to dense arrays (1.2 GB for coauthor:Physics).
        data.x = sp.csr_array(x)
    raw = raw_graph(data, f"{key}:{name}" if name else key)
    return raw if family.has_split else replace(raw, masks=None, split_seed=0)


class _AbsentError(Exception):
    """Raised instead of a download, with the folder and the files that PyG expects there."""


def _joined(parts: Sequence[Any]) -> Data:
    """The graphs of a train, a val and a test dataset side by side, without edges between them."""
    from torch_geometric.data import Batch

    graphs = [graph for part in parts for graph in part]
    data = Batch.from_data_list(graphs)
    which = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    for i, field in enumerate(SPLIT_NAMES):
        data[field] = np.repeat(which == i, [graph.num_nodes for graph in graphs])
    return data


def _load(dataset: str, family: Family, name: str, root: Path, **options: Any) -> Any:
    """PyG's data set, from its files or downloaded."""
    import torch_geometric.datasets

    cls = getattr(torch_geometric.datasets, family.cls)
    arguments = (str(root), name) if name else (str(root),)
    options |= dict(family.options)

    def absent(self: Any) -> None:
        raise _AbsentError(self.raw_dir, self.raw_file_names)

    probe = type(cls.__name__, (cls,), {"download": absent})
    with locked(root), warnings.catch_warnings():
        # PyG warns about a pickle that it cannot read safely before it tries another way.
        warnings.filterwarnings("ignore", "Weights only load failed")
        try:
            with tidied(root), only_data():
                return probe(*arguments, **options)
        except _AbsentError as place:
            folder, files = place.args
        except Exception as error:
            raise InputError(
                f"--dataset {dataset!r}: the files in {str(root)!r} cannot be read "
                f"({_brief(error)}); remove them to download anew"
            ) from error
        try:
            with tidied(root), only_data():
                return cls(*arguments, **options)
        except Exception as error:
            wanted = files if isinstance(files, str) else ", ".join(files[:8])
            raise InputError(
                f"--dataset {dataset!r}: not in --data-dir {str(root.parent)!r} and not to be had "
                f"from the network ({_brief(error)}); put there, in "
                f"{folder!r}: {wanted}"
            ) from None


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _listing() -> tuple[tuple[str, str], ...]:
    lines = []
    for key, family in PYG_FAMILIES.items():
        split = "" if family.has_split else ", split 60/20/20 unless --split"
        name = f"{key}:{'|'.join(family.names)}" if family.names else key
        lines.append((name, f"PyG's {family.cls}{split}"))
    return tuple(lines)


SOURCE = Source(
    handles=lambda name: find_pyg(name) is not None,
    read=_read,
    listing=_listing(),
    names=tuple(
        alias
        for key, family in PYG_FAMILIES.items()
        for name in family.names
        for alias in (name, f"{key}:{name}")
    ),
)
