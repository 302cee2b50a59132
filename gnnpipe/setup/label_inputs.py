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
    if graph.types is None:
        return replace(graph, x=_widened(graph.x, graph))
    features: dict[str, Any] = dict(graph.types.features)
    count = graph.vertex_counts[graph.target]
    x = features.get(graph.target, np.zeros((count, 0), dtype=np.float32))
    features[graph.target] = _widened(x, graph)
    return replace(graph, types=replace(graph.types, features=features))


def _widened(x: Features, graph: Graph) -> Features:
    """Returns features [n, F] of the labelled type with the label columns, [n, F + C]."""
    rows, labels = _training_labels(graph)
    n, num_features = x.shape
    if isinstance(x, np.ndarray):
        wide = np.zeros((n, num_features + graph.num_classes), dtype=np.float32)
        wide[:, :num_features] = x
        wide[rows, num_features + labels] = 1
        return wide
    ones = np.ones(len(rows), dtype=np.float32)
    columns = sp.csr_array((ones, (rows, labels)), shape=(n, graph.num_classes))
    return sp.csr_array(sp.hstack([x, columns], format="csr"))


def _training_labels(graph: Graph) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns vertex and label of every label that a training vertex has.

    Vertices are numbered within the labelled type.
    """
    is_own = graph.row_types[graph.target]
    y, train = graph.y[is_own], np.flatnonzero(graph.train_mask[is_own])
    if graph.is_multi_label:
        places, labels = np.nonzero(y[train] == 1)
        return train[places], labels
    train = train[y[train] >= 0]
    return train, y[train].astype(np.int64)
