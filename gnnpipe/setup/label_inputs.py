"""Widens the features by the labels of the training vertices (arXiv 2103.13355, label usage).

The graph that the model reads has C more columns of features: one-hot classes, or T labels of 0 and
1. They hold all training labels, as in evaluation; in training they are written anew in every
epoch (``runtime.label_inputs``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Features, Graph


def with_label_inputs(graph: Graph, config: TrainConfig) -> Graph:
    """Returns the graph with the training labels in the last C columns of its features.

    The graph itself without ``--label-inputs``. For several vertex types: the features of the type
    with labels.

    Raises:
        InputError: The labels are numbers or pairs, or there are none.
    """
    if not config.label_inputs:
        return graph
    if graph.pairs is not None or graph.is_regression or not graph.num_classes:
        raise InputError(
            f"--label-inputs {config.label_inputs:g}: needs classes or labels of 0 and 1, but "
            f"{graph.name} has {graph.label_text}; leave it out"
        )
    labels = _label_columns(graph)
    if graph.types is None:
        return replace(graph, x=_widened(graph.x, labels))
    features: dict[str, Any] = dict(graph.types.features)
    x = features.get(graph.target, labels[:, :0])
    features[graph.target] = _widened(x, labels)
    return replace(graph, types=replace(graph.types, features=features))


def _label_columns(graph: Graph) -> npt.NDArray[np.float32]:
    """Returns the labels [n, C] of the vertices of the labelled type; 0 without training label."""
    is_own = graph.row_types[graph.target]
    y, train = graph.y[is_own], np.flatnonzero(graph.train_mask[is_own])
    labels = np.zeros((len(y), graph.num_classes), dtype=np.float32)
    if graph.is_multi_label:
        labels[train] = np.maximum(y[train], 0)
    else:
        train = train[y[train] >= 0]
        labels[train, y[train]] = 1
    return labels


def _widened(x: Features, labels: npt.NDArray[np.float32]) -> Features:
    if isinstance(x, np.ndarray):
        return np.concatenate([x, labels], axis=1)
    return sp.csr_array(sp.hstack([x, sp.csr_array(labels)], format="csr"))
