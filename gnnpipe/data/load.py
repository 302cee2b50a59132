"""From the word after ``--dataset`` to a ``Graph``.

The one function that knows every way in; each way is a file of its own. PyG is imported only when
one of its datasets is asked for, since that takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gnnpipe.data.embedded import read_debian, read_karate
from gnnpipe.data.links import split_links
from gnnpipe.data.npz import read_npz
from gnnpipe.data.ogb import OGB_DATASETS, read_ogb
from gnnpipe.data.pyg import PYG_FAMILIES, find_pyg, read_pyg
from gnnpipe.data.synthetic import make_synthetic
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.registry import nearest

__all__ = ["dataset_names", "load_graph"]

OTHER_FILES = (".pt", ".pth", ".pkl", ".npy", ".csv", ".txt", ".json", ".mat", ".gz", ".zip")
"""Endings of files that look like datasets and cannot be read; no dataset has such a name."""

EMBEDDED: dict[str, Callable[..., Graph]] = {"debian": read_debian, "karate": read_karate}


def load_graph(
    dataset: str,
    *,
    data_dir: str = "",
    split: str = "given",
    seed: int = 0,
    symmetrize: bool = False,
    task: str = "labels",
) -> Graph:
    """The graph that ``dataset`` names (see ``dataset_names``), cleaned.

    Args:
        dataset: a name, or the path of an .npz file.
        data_dir: folder of downloaded datasets; '' is ~/.cache/gnnpipe/datasets.
        split: 'given' for the dataset's own split (60/20/20 with seed 0 where it has none), or
            percentages such as '60/20/20'.
        seed: of the split by percentages.
        symmetrize: add the reverse of every edge.
        task: 'labels' of the vertices, or 'links': ``split`` is then that of the links, of which
            'given' holds out 5 % to validate and 10 % to test.

    Raises:
        InputError: one line naming the dataset or field, the value and what to try.

    >>> load_graph("karate").num_vertices
    34
    """
    if dataset.startswith("passed-in:"):
        raise InputError(
            f"--dataset {dataset!r}: this run's graph was passed in from Python; pass it again: "
            "Trainer(config, graph=graph)"
        )
    if task == "links":
        # Labels are not read, but most readers ask for a split of them.
        if dataset.endswith(".npz"):
            whole = read_npz(dataset, split="60/20/20", symmetrize=symmetrize, labelled=False)
        else:
            whole = load_graph(dataset, data_dir=data_dir, split="60/20/20", symmetrize=symmetrize)
        return split_links(whole, split, seed)
    if dataset in EMBEDDED:
        return EMBEDDED[dataset](split=split, seed=seed, symmetrize=symmetrize)
    if dataset.partition(":")[0] == "synthetic":
        return make_synthetic(dataset, split=split, seed=seed, symmetrize=symmetrize)
    if dataset.endswith(".npz") or os.sep in dataset:
        return read_npz(dataset, split=split, seed=seed, symmetrize=symmetrize)
    if dataset.endswith(OTHER_FILES):
        raise InputError(
            f"--dataset {dataset!r}: is no .npz file; write one with numpy.savez(path, "
            "edge_index=..., x=..., y=..., train_mask=..., ...), or pass a PyG Data from Python: "
            "Graph.from_pyg(data)"
        )
    reader = read_ogb if dataset in OGB_DATASETS else read_pyg if find_pyg(dataset) else None
    if reader is None:
        raise InputError(
            f"--dataset {dataset!r}: unknown dataset; {_hint(dataset)}; see "
            "`gnnpipe info --list`, or give the path of an .npz file"
        )
    return reader(dataset, data_dir=data_dir, split=split, seed=seed, symmetrize=symmetrize)


def dataset_names() -> list[str]:
    """Every dataset or pattern of names, each with a few words of help, aligned."""
    lines = [
        ("debian", "packages of Debian 12 and their dependencies (comes with gnnpipe)"),
        ("karate", "Zachary's karate club, 34 vertices (comes with gnnpipe)"),
        (
            "synthetic:planted",
            "planted partition; :n=20000,degree=10,classes=8,features=64,homophily=0.8,noise=1,"
            "seed=0",
        ),
        ("synthetic:rmat", "R-MAT; :n=20000,degree=10,classes=8,features=64,seed=0"),
    ]
    lines += [
        (name, f"OGB's, {facts.size} to download, {facts.classes} classes")
        for name, facts in OGB_DATASETS.items()
    ]
    for key, family in PYG_FAMILIES.items():
        split = "" if family.own_split else ", split 60/20/20 unless --split"
        name = f"{key}:{'|'.join(family.names)}" if family.names else key
        lines.append((name, f"PyG's {family.cls}{split}"))
    lines.append(("<path>.npz", "a file with edge_index, x (or x_data, ...), y, train_mask, ..."))
    width = max(len(name) for name, _ in lines if len(name) < 45)
    return [f"{name:<{width}}  {text}" for name, text in lines]


def _hint(dataset: str) -> str:
    """The nearest single name, or else the families, for all single names would fill a page."""
    names = [*EMBEDDED, "synthetic:planted", "synthetic:rmat", *OGB_DATASETS]
    for key in PYG_FAMILIES:
        names += [f"{key}:{n}" for n in PYG_FAMILIES[key].names] or [key]
        names += PYG_FAMILIES[key].names
    hint = nearest(dataset, set(names))
    if hint.startswith("did you mean"):
        return hint
    return "known: " + ", ".join([*EMBEDDED, "synthetic", *OGB_DATASETS, *PYG_FAMILIES])
