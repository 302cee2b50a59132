"""Builds a ``Graph`` from a PyG object: ``Data``, ``HeteroData`` or the parts of a link split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from gnnpipe.data.arrays import array_of, edges_of, shape_of
from gnnpipe.data.clean import RawGraph, clean, without_labels
from gnnpipe.data.hetero import raw_hetero_graph
from gnnpipe.data.labels import TASKS, clean_num_classes
from gnnpipe.data.links import split_links, with_given_links
from gnnpipe.data.messages import fail
from gnnpipe.data.split import SPLIT_NAMES, parts_of_split_idx, split_in
from gnnpipe.graph.graph import EDGE_DATA, Graph

if TYPE_CHECKING:
    from torch_geometric.data import Data, Dataset, HeteroData


def from_pyg(
    data: Data | HeteroData | Dataset | Sequence[Data],
    *,
    name: str,
    split: str | Mapping[str, Any],
    seed: int,
    symmetrize: bool,
    target: str,
    task: str,
    num_classes: int | None,
) -> Graph:
    """The cleaned graph; the arguments are those of ``Graph.from_pyg``.

    ``split``: 'given', percentages or the split in OGB's form (``split_idx``).
    """
    if not isinstance(seed, Integral) or seed < 0:
        fail(name, f"seed {seed!r}", "a whole number from 0")
    if not isinstance(symmetrize, bool | np.bool_):
        fail(name, f"symmetrize {symmetrize!r}", "True or False")
    split_idx, split = (None, split) if isinstance(split, str) else (split, "given")
    if is_dataset(data):
        if split_idx is None and split == "given" and hasattr(data, "get_idx_split"):
            split_idx = data.get_idx_split()
        data = _only_graph(data, name)
    has_types = hasattr(data, "edge_types") and hasattr(data, "node_types")
    if task not in (*TASKS, "links"):
        fail(name, f"task {task!r}", f"{', '.join(TASKS)} or links")
    if target and (task == "links" or not has_types):
        what = "links" if task == "links" else "one type of vertices"
        fail(name, f"target {target!r} has no meaning for {what}", "leave it out")
    if num_classes is not None and task != "classification":
        fail(name, f"num_classes {num_classes} has no meaning for {task}", "leave it out")
    if task == "links":
        if split_idx is not None:
            fail(name, "split_idx, which splits vertices, has no meaning for links", "leave it out")
        return _graph_of_links(data, name, split, seed, symmetrize)
    if isinstance(data, list | tuple):
        hint = "give one, or task='links' for the three of RandomLinkSplit"
        fail(name, f"{len(data)} graphs", hint)
    if has_types:
        raw = raw_hetero_graph(data, name, target, seed, task, split_idx)
    else:
        raw = raw_graph(data, name)
        if split_idx is not None:
            raw = replace(raw, masks=parts_of_split_idx(split_idx, name, ""))
    num_classes = clean_num_classes(num_classes, name)
    own = replace(raw, is_own_data=True, task=task, num_classes=num_classes)
    return clean(
        own, split=split, seed=seed, symmetrize=symmetrize, needs_labels=False, needs_split=False
    )


def is_dataset(value: Any) -> bool:
    """Whether ``value`` is a dataset of PyG or OGB."""
    import torch

    return isinstance(value, torch.utils.data.Dataset) or hasattr(value, "get_idx_split")


def _only_graph(dataset: Any, name: str) -> Any:
    """The graph of a dataset with one; ``InputError`` for another number."""
    count = len(dataset)
    if count != 1:
        fail(name, f"a dataset of {count} graphs", "one of them, such as dataset[0]")
    return dataset[0]


def _graph_of_links(data: Any, name: str, split: str, seed: int, symmetrize: bool) -> Graph:
    """A graph for link prediction from a ``Data``, or from the three of ``RandomLinkSplit``."""
    is_given = isinstance(data, list | tuple)
    graphs = list(data) if is_given else [data]
    if not graphs:
        fail(name, "no graphs", "(train, val, test), as RandomLinkSplit gives them")
    if is_given and (split != "given" or symmetrize):
        wrong = "split and symmetrize have no meaning for pairs that are given"
        fail(name, wrong, "leave them out")
    for one in graphs:
        if not hasattr(one, "get"):
            fail(name, f"a {type(one).__name__}", "a Data, or the three of RandomLinkSplit")
    if hasattr(graphs[0], "edge_types"):
        fail(name, "links of several types of vertices", "data.to_homogeneous()")
    raw = without_labels(raw_graph(graphs[0], name))
    graph = clean(replace(raw, is_own_data=True), symmetrize=symmetrize)
    return with_given_links(graph, graphs, seed) if is_given else split_links(graph, split, seed)


def raw_graph(data: Any, name: str) -> RawGraph:
    """The arrays of a PyG ``Data``.

    Args:
        data: with ``edge_index`` [2, E], or ``adj_t`` [N, N] (torch sparse or ``SparseTensor``),
            whose values become ``edge_weight``; optionally ``edge_weight`` [E], ``edge_attr``
            [E, D] and ``edge_type`` [E]; ``x`` [N, F] dense or sparse; ``y`` [N], [N, 1] or [N, T];
            ``train_mask``, ``val_mask``, ``test_mask`` as bool [N] or [N, T] or as indices, or
            ``train_idx``, ``val_idx`` (or ``valid_idx``), ``test_idx``.
        name: for messages and for the graph.

    Raises:
        InputError: naming the attribute that is missing or wrong.
    """
    _check_attributes(data, name)
    x, y = data.get("x"), data.get("y")
    edge_data = {k: array_of(data[k]) for k in EDGE_DATA if data.get(k) is not None}
    edges = edges_of(data, name)
    if edge_data and data.get("edge_index") is None:
        wrong = f"{', '.join(edge_data)} beside adj_t, whose edges may be in another order"
        fail(name, wrong, "data.edge_index = ...")
    if edges.weights is not None:
        edge_data["edge_weight"] = edges.weights
    return RawGraph(
        name=name,
        edge_index=edges.edge_index,
        adjacency=edges.form,
        x=None if x is None else array_of(x),
        y=None if y is None else array_of(y),
        masks=split_in(data),
        num_vertices=None if x is None else int(shape_of(x)[0]),
        edge_data=edge_data,
        vertex_data=_other_arrays(data),
    )


def _other_arrays(data: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The dense arrays of a ``Data`` beside features, labels, edges and masks."""
    known = ("x", "y", "adj_t", *SPLIT_NAMES)
    names = [name for name in data.keys() if name not in known and not name.startswith("edge")]  # noqa: SIM118
    found = {name: array_of(data[name]) for name in names}
    return {name: values for name, values in found.items() if isinstance(values, np.ndarray)}


def _check_attributes(data: Any, name: str) -> None:
    """``InputError`` unless the attributes are tensors or arrays."""
    if not hasattr(data, "get"):
        fail(name, f"a {type(data).__name__}", "a torch_geometric.data.Data, HeteroData or Dataset")
    for field in ("x", "y", "edge_index", "adj_t", *EDGE_DATA, *SPLIT_NAMES):
        value = data.get(field)
        if value is not None and not (hasattr(value, "shape") or hasattr(value, "sizes")):
            fail(name, f"{field} is a {type(value).__name__}", "a tensor")
    x = data.get("x")
    if x is not None and not shape_of(x):
        fail(name, "x is a single number", "[N, F], a row for each vertex")
