"""Builds a ``Graph`` from a PyG object: ``Data``, ``HeteroData`` or the parts of a link split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gnnpipe.data.hetero import graph_from_hetero
from gnnpipe.data.labels import TASKS
from gnnpipe.data.links import graph_of_links
from gnnpipe.data.pyg import graph_from_data
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

__all__ = ["from_pyg"]


def from_pyg(
    data: Data | HeteroData | Sequence[Data],
    *,
    name: str,
    split: str,
    seed: int,
    symmetrize: bool,
    target: str,
    task: str,
) -> Graph:
    """The cleaned graph; the arguments are those of ``Graph.from_pyg``."""
    if task not in (*TASKS, "links"):
        raise InputError(f"dataset {name!r}: task {task!r}; try {', '.join(TASKS)} or links")
    if task == "links" and target:
        raise InputError(
            f"dataset {name!r}: target {target!r} has no meaning for links; leave it out"
        )
    if task == "links":
        return graph_of_links(data, name=name, split=split, seed=seed, symmetrize=symmetrize)
    if isinstance(data, list | tuple):
        raise InputError(
            f"dataset {name!r}: {len(data)} graphs; give one, or task='links' for the three "
            "of RandomLinkSplit"
        )
    if hasattr(data, "edge_types") and hasattr(data, "node_types"):
        if symmetrize:
            raise InputError(
                f"dataset {name!r}: symmetrize has no meaning for relations between types; "
                "try torch_geometric.transforms.ToUndirected()"
            )
        return graph_from_hetero(data, name=name, target=target, split=split, seed=seed, task=task)
    if target:
        raise InputError(
            f"dataset {name!r}: target {target!r} has no meaning for one type of vertices; "
            "leave it out, or give a HeteroData"
        )
    return graph_from_data(
        data, name=name, split=split, seed=seed, symmetrize=symmetrize, task=task
    )
