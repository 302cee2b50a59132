"""A model as plain data: what planners and cost formulas see of it."""

from __future__ import annotations

from gnnpipe.graph.graph import Graph
from gnnpipe.models import GNN, Layer
from gnnpipe.models.feature_linear import FeatureLinear
from gnnpipe.models.gnn import layer_name
from gnnpipe.plan import ModelGraph, Op

__all__ = ["describe"]


def describe(model: GNN, graph: Graph) -> ModelGraph:
    """The DAG of the model's ops; a chain, one op per layer."""
    ops: list[Op] = []
    for layer in model.stack():
        ops.append(_layer_op(layer, tuple(ops[-1].outputs) if ops else ()))
    return ModelGraph(model.name, graph.num_features, graph.num_classes, tuple(ops))


def _layer_op(layer: Layer, inputs: tuple[str, ...]) -> Op:
    name = layer_name(layer)
    encoders = [m for m in layer.modules() if isinstance(m, FeatureLinear)]
    reads = sum(m.weight.numel() for m in encoders)
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    return Op(
        name=name,
        inputs=inputs,
        outputs={f"{name}.{value}": width for value, width in layer.out_widths.items()},
        num_parameters=sum(p.numel() for p in layer.parameters()),
        flops_per_row=2 * (matrices - reads),
        flops_per_feature=2 * sum(m.weight.shape[0] for m in encoders),
        push_width=layer.push_width,
        kept_widths=dict(layer.kept_widths),
        is_linear=layer.is_linear,
        reads_features=layer.is_first,
    )
