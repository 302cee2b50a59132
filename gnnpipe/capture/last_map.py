"""Moves the last linear map of a model behind its aggregation where this saves time.

A rule records ``A (x W)`` if ``x W`` is narrower than x. Training computes the last aggregation for
the loss rows alone (``plan.loss_rows``), and of ``(A x) W`` the map, too.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.nn.functional as F
from torch import fx

from gnnpipe.capture.fx_names import FEATURES, attribute, is_input
from gnnpipe.capture.markers import aggregate
from gnnpipe.graph.graph import Graph
from gnnpipe.plan.loss_rows import MAX_SHARE
from gnnpipe.plan.model_graph import EDGE_FLOPS


def move_last_map(recording: fx.GraphModule, graph: Graph) -> None:
    """Record ``(A x) W + b`` in place of ``A (x W) + b`` as the result, if it takes less time.

    ``recording`` is changed. ``graph``: the graph of the run.
    """
    calls = list(recording.graph.nodes)
    result: Any = calls[-1].args[0]
    last: Any = result
    if isinstance(last, fx.Node) and last.target is operator.add:
        last = last.args[0]
    if not isinstance(last, fx.Node) or last.target is not aggregate or len(last.users) > 1:
        return
    product = last.all_input_nodes[0]
    if product.target is not F.linear or len(product.users) > 1 or len(product.args) != 2:
        return
    x, weight = product.all_input_nodes
    if is_input(x, FEATURES) or weight.op != "get_attr":
        return
    outputs, inputs = attribute(recording, str(weight.target)).shape
    if not _saves_time(graph, inputs, outputs):
        return
    last.replace_input_with(product, x)
    with last.graph.inserting_after(last):
        mapped = last.graph.call_function(F.linear, (last, weight))
    last.replace_all_uses_with(mapped, lambda user: user is not mapped)
    last.graph.erase_node(product)


def _saves_time(graph: Graph, inputs: int, outputs: int) -> bool:
    """Whether ``(A x) W`` takes fewer operations than ``A (x W)`` for W [outputs, inputs]."""
    if graph.types is not None or graph.pairs is not None:
        return False
    train = graph.train_mask
    others = graph.num_vertices - int(train.sum())
    if others < (1 - MAX_SHARE) * graph.num_vertices or others == graph.num_vertices:
        return False
    wider = EDGE_FLOPS * int(graph.degrees[train].sum()) * (inputs - outputs)
    return 2 * inputs * outputs * others > wider
