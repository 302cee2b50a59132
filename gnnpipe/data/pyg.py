"""Graphs from PyG: a user's ``Data`` object, or one of PyG's own datasets by name.

PyG is what the users come from. Its ``Data`` is a loose bag of attributes, so everything it may
hold is turned into plain arrays here, and ``clean`` judges them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from gnnpipe.data.clean import clean
from gnnpipe.data.download import data_root, locked, tidied
from gnnpipe.data.ogb_arrays import array_of, edges_of, shape_of
from gnnpipe.data.safe_unpickle import only_data
from gnnpipe.data.split import SPLIT_NAMES, STANDARD_SPLIT, fail, split_masks
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import EDGE_DATA, Graph
from gnnpipe.registry import nearest

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["PYG_FAMILIES", "find_pyg", "graph_from_data", "read_pyg"]


SPARSE_BELOW = 0.1
"""Share of non-zero features below which the first Linear is better off with CSR rows."""


@dataclass(frozen=True)
class Family:
    """A dataset class of PyG: its name there, its members, and how it differs from the plain case.

    ``own_split`` is false where PyG gives no masks: 'given' is then a 60/20/20 split with seed 0.
    """

    cls: str
    names: tuple[str, ...] = ()
    own_split: bool = True
    parts: tuple[str, ...] = ()
    """Several graphs, in one dataset for each part of the split: taken as one graph of them all."""
    options: tuple[tuple[str, Any], ...] = ()


PYG_FAMILIES = {
    "planetoid": Family("Planetoid", ("Cora", "CiteSeer", "PubMed")),
    "citationfull": Family(
        "CitationFull", ("Cora", "Cora_ML", "CiteSeer", "DBLP", "PubMed"), own_split=False
    ),
    "coauthor": Family("Coauthor", ("CS", "Physics"), own_split=False),
    "amazon": Family("Amazon", ("Computers", "Photo"), own_split=False),
    "wikipedia": Family("WikipediaNetwork", ("chameleon", "squirrel")),
    "webkb": Family("WebKB", ("Cornell", "Texas", "Wisconsin")),
    "heterophilous": Family(
        "HeterophilousGraphDataset",
        ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions"),
    ),
    "linkx": Family("LINKXDataset", ("penn94",)),
    "twitch": Family("Twitch", ("DE", "EN", "ES", "FR", "PT", "RU"), own_split=False),
    "airports": Family("Airports", ("USA", "Brazil", "Europe"), own_split=False),
    "city": Family("CityNetwork", ("paris", "shanghai", "la", "london")),
    "actor": Family("Actor"),
    "flickr": Family("Flickr"),
    "reddit": Family("Reddit"),
    "reddit2": Family("Reddit2"),
    "nell": Family("NELL"),
    "wikics": Family("WikiCS", options=(("is_undirected", True),)),
    "github": Family("GitHub", own_split=False),
    "facebook": Family("FacebookPagePage", own_split=False),
    "lastfmasia": Family("LastFMAsia", own_split=False),
    "deezereurope": Family("DeezerEurope", own_split=False),
    "yelp": Family("Yelp"),
    "amazonproducts": Family("AmazonProducts"),
    "ppi": Family("PPI", parts=("train", "val", "test")),
}
"""PyG's datasets with features and a class, or several labels, for each vertex, by family."""


def find_pyg(dataset: str) -> tuple[str, str] | None:
    """The family and PyG's spelling of the name in 'family:name', 'family' or 'name'.

    A name alone means the first family that has it.

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


def read_pyg(
    dataset: str,
    *,
    data_dir: str = "",
    split: str = "given",
    seed: int = 0,
    symmetrize: bool = False,
) -> Graph:
    """One of PyG's datasets, through PyG's own class, which downloads it if it is not there.

    It lies in ``data_dir``/<family>, laid out as PyG does.

    Raises:
        InputError: unknown, or absent with no network.
    """
    found = find_pyg(dataset)
    if found is None:
        raise InputError(f"--dataset {dataset!r}: {nearest(dataset, PYG_FAMILIES)}")
    key, name = found
    family = PYG_FAMILIES[key]
    root = data_root(data_dir) / key
    if family.parts:
        data = _joined([_load(dataset, family, name, root, split=part) for part in family.parts])
    else:
        data = _load(dataset, family, name, root)[0]
    x = array_of(data.x)
    if not sp.issparse(x) and np.count_nonzero(x) < SPARSE_BELOW * x.size:
        # PyG unpacks bags of words to dense arrays (1.2 GB for coauthor:Physics).
        data.x = sp.csr_array(x)
    if split == "given" and not family.own_split:
        y = data.y.reshape(-1).numpy().astype(np.int64)
        for field, mask in zip(
            SPLIT_NAMES, split_masks(y >= 0, STANDARD_SPLIT, seed=0), strict=True
        ):
            data[field] = mask
    title = f"{key}:{name}" if name else key
    return graph_from_data(
        data, name=title, split=split, seed=seed, symmetrize=symmetrize, report=False
    )


def graph_from_data(
    data: Data,
    *,
    name: str,
    split: str = "given",
    seed: int = 0,
    symmetrize: bool = False,
    report: bool = True,
    task: str = "classification",
) -> Graph:
    """A cleaned ``Graph`` from a PyG ``Data``.

    Args:
        data: with ``edge_index`` [2, E], or ``adj_t`` [N, N] (torch sparse or ``SparseTensor``,
            whose values are not read); ``edge_weight`` [E], ``edge_attr`` [E, D] and ``edge_type``
            [E] as far as there are such; ``x`` [N, F] dense or sparse; ``y`` [N], [N, 1] or [N, T];
            ``train_mask``, ``val_mask``, ``test_mask`` as bool [N] or [N, T] or as indices, unless
            ``split`` is not 'given'.
        name: for messages and for the graph.
        split: 'given' or percentages such as '60/20/20'.
        seed: of that split.
        symmetrize: add the reverse of every edge.
        report: warn of what ``data`` holds and the graph does not.
        task: 'classification', or 'regression': what ``y`` means.

    Warns:
        UserWarning: masks that overlap; loops, duplicate edges and values of adj_t, if ``report``.

    Raises:
        InputError: naming the attribute that is missing or wrong.
    """
    if not hasattr(data, "get"):
        fail(name, f"a {type(data).__name__}", "a torch_geometric.data.Data or HeteroData")
    for field in ("x", "y", "edge_index", "adj_t", *EDGE_DATA, *SPLIT_NAMES):
        value = data.get(field)
        if value is not None and not (hasattr(value, "shape") or hasattr(value, "sizes")):
            fail(name, f"{field} is a {type(value).__name__}", "a tensor")
    x, y = data.get("x"), data.get("y")
    if x is not None and not shape_of(x):
        fail(name, "x is a single number", "[N, F], a row for each vertex")
    if y is None:
        raise InputError(
            f"dataset {name!r}: no y; set data.y to a class for each vertex, [N], or to T labels "
            "of 0 and 1, [N, T]"
        )
    edge_data = {k: array_of(data[k]) for k in EDGE_DATA if data.get(k) is not None}
    edge_index, has_values = edges_of(data, repr(name))
    if edge_data and data.get("edge_index") is None:
        raise InputError(
            f"dataset {name!r}: {', '.join(edge_data)} beside adj_t, whose edges may be in another "
            "order; set data.edge_index"
        )
    masks = [None if data.get(m) is None else array_of(data[m]) for m in SPLIT_NAMES]
    graph = clean(
        edge_index,
        name=name,
        x=None if x is None else array_of(x),
        y=array_of(y),
        masks=None if all(m is None for m in masks) else masks,
        num_vertices=None if x is None else int(shape_of(x)[0]),
        split=split,
        seed=seed,
        symmetrize=symmetrize,
        report=report,
        edge_data=edge_data,
        task=task,
    )
    if has_values and report:
        warnings.warn(
            f"graph {name!r}: the values of adj_t are not used; set data.edge_index and "
            "data.edge_weight",
            UserWarning,
            stacklevel=3,
        )
    return graph


class _AbsentError(Exception):
    """Raised in place of a download, to learn where PyG expects which files."""


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
    """PyG's dataset."""
    import torch_geometric.datasets

    cls = getattr(torch_geometric.datasets, family.cls)
    arguments = (str(root), name) if name else (str(root),)
    options |= dict(family.options)

    def absent(self: Any) -> None:
        raise _AbsentError(self.raw_dir, self.raw_file_names)

    probe = type(cls.__name__, (cls,), {"download": absent})
    with locked(root), warnings.catch_warnings():
        # PyG tells of a pickle that it could not read safely before it tries otherwise.
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
