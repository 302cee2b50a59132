"""Builds a ``Graph`` from a PyG ``Data`` object of one type of vertices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnpipe.data.arrays import array_of, edges_of, shape_of
from gnnpipe.data.clean import RawGraph, clean
from gnnpipe.data.messages import fail, warn
from gnnpipe.data.split import SPLIT_NAMES
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import EDGE_DATA, Graph

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["graph_from_data"]


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
            whose values are not used); optionally ``edge_weight`` [E], ``edge_attr`` [E, D] and
            ``edge_type`` [E]; ``x`` [N, F] dense or sparse; ``y`` [N], [N, 1] or [N, T];
            ``train_mask``, ``val_mask``, ``test_mask`` as bool [N] or [N, T] or as indices, unless
            ``split`` gives percentages.
        name: for messages and for the graph.
        split: 'given' or percentages such as '60/20/20'.
        seed: of the split by percentages.
        symmetrize: add the reverse of every edge.
        report: warn about content of ``data`` that the graph leaves out.
        task: 'classification' or 'regression': the meaning of ``y``.

    Warns:
        UserWarning: masks that overlap; loops, duplicate edges and values of adj_t, if ``report``.

    Raises:
        InputError: naming the attribute that is missing or wrong.
    """
    raw, has_values = _raw_graph(data, name, task)
    graph = clean(raw, split=split, seed=seed, symmetrize=symmetrize, report=report)
    if has_values and report:
        warn(name, "the values of adj_t are not used; set data.edge_index and data.edge_weight")
    return graph


def _raw_graph(data: Any, name: str, task: str) -> tuple[RawGraph, bool]:
    """The arrays of ``data``, and whether adj_t has values."""
    _check_attributes(data, name)
    x = data.get("x")
    edge_data = {k: array_of(data[k]) for k in EDGE_DATA if data.get(k) is not None}
    edge_index, has_values = edges_of(data, repr(name))
    if edge_data and data.get("edge_index") is None:
        raise InputError(
            f"dataset {name!r}: {', '.join(edge_data)} beside adj_t, whose edges may be in another "
            "order; set data.edge_index"
        )
    masks = [None if data.get(m) is None else array_of(data[m]) for m in SPLIT_NAMES]
    raw = RawGraph(
        name=name,
        edge_index=edge_index,
        x=None if x is None else array_of(x),
        y=array_of(data.y),
        masks=None if all(m is None for m in masks) else masks,
        num_vertices=None if x is None else int(shape_of(x)[0]),
        edge_data=edge_data,
        task=task,
    )
    return raw, has_values


def _check_attributes(data: Any, name: str) -> None:
    """``InputError`` unless the attributes are tensors or arrays and there is a y."""
    if not hasattr(data, "get"):
        fail(name, f"a {type(data).__name__}", "a torch_geometric.data.Data or HeteroData")
    for field in ("x", "y", "edge_index", "adj_t", *EDGE_DATA, *SPLIT_NAMES):
        value = data.get(field)
        if value is not None and not (hasattr(value, "shape") or hasattr(value, "sizes")):
            fail(name, f"{field} is a {type(value).__name__}", "a tensor")
    x = data.get("x")
    if x is not None and not shape_of(x):
        fail(name, "x is a single number", "[N, F], a row for each vertex")
    if data.get("y") is None:
        raise InputError(
            f"dataset {name!r}: no y; set data.y to a class for each vertex, [N], or to T labels "
            "of 0 and 1, [N, T]"
        )
