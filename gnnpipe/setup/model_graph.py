"""A model as plain data: what planners and cost formulas see of it."""

from __future__ import annotations

from dataclasses import replace

import scipy.sparse as sp
from torch import fx

from gnnpipe.capture import RecordedModel
from gnnpipe.capture.link_decoder import PAIR_SCORES, PairModel
from gnnpipe.capture.markers import is_mean, of_vertices
from gnnpipe.capture.recording import Recording
from gnnpipe.capture.stage.split import Cut
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.models import GNN, Aggregation, Layer, Model
from gnnpipe.models.layer import PushMaker
from gnnpipe.models.layer_memory import LayerMemory, measure_layers
from gnnpipe.models.layer_stack import layer_name
from gnnpipe.models.sparse_input_linear import FeatureLinear
from gnnpipe.plan import ModelGraph, Op

__all__ = ["describe"]

PASSING_ROWS = 5
"""Rows that backward makes in a layer for a moment, of the width that it pushes."""
INCIDENCE_EDGE_BYTES = 8
"""Of attention without messages, which has the edges by source, too."""
WIDEST = 2
"""Features so many times as wide as the model are aggregated once: they take no more memory than
the rows that a layer keeps anyway."""


def describe(model: Model, graph: Graph) -> ModelGraph:
    """The DAG of the model's ops: of hand-made layers a chain, one op each."""
    if isinstance(model, PairModel):
        return _with_pairs(describe(model.inner, graph), model)
    sizes = model.name, graph.num_features, graph.num_classes
    if isinstance(model, RecordedModel):
        return ModelGraph(*sizes, _recorded_ops(model.recording, graph), unit="op")
    assert isinstance(model, GNN)
    ops: list[Op] = []
    before: Layer | None = None
    layers = model.stack()
    for layer, memory in zip(layers, measure_layers(layers), strict=True):
        op = _layer_op(layer, before, graph, memory)
        ops.append(replace(op, inputs=tuple(ops[-1].outputs) if ops else ()))
        before = layer
    return ModelGraph(*sizes, tuple(ops))


def _with_pairs(inner: ModelGraph, model: PairModel) -> ModelGraph:
    """The op that scores pairs, behind those of a model."""
    counted = {name for op in inner.ops for name in op.weights}
    own = dict(model.module.named_parameters())
    new = [own[name] for name in model.decode_weights if name not in counted]
    scores = Op(
        name=PAIR_SCORES,
        inputs=tuple(inner.ops[-1].outputs),
        outputs={PAIR_SCORES: 1},
        num_parameters=sum(p.numel() for p in new if p.requires_grad),
        flops_per_row=2 * sum(own[n].numel() for n in model.decode_weights if own[n].dim() == 2),
        push_width=model.width,
        kept_widths={"decode": model.kept_width},
        pushed_type=PAIRS,
        is_linear=False,
        over_pairs=True,
        weights=model.decode_weights,
    )
    return replace(inner, ops=(*inner.ops, scores), num_classes=1)


def _width(graph: Graph, recording: Recording, call: fx.Node) -> int:
    """F of the features that an op reads."""
    return max(int(graph.features(recording.facts[call].vertex_type).shape[1]), 1)


def _recorded_ops(recording: Recording, graph: Graph) -> tuple[Op, ...]:
    """One op per recorded call; weights that several calls share count for the first."""
    ops: list[Op] = []
    counted: set[str] = set()
    cut = Cut(recording, range(len(recording.ops)))
    aggregations = {a.name: a for one in cut.rounds for a in one}
    handed_on, beside = _handed_on(cut), _beside(cut)
    for call in recording.ops:
        weights = dict(recording.weights(call))
        new = [p for name, p in weights.items() if name not in counted and p.requires_grad]
        counted |= set(weights)
        is_product = call.target is not of_vertices
        flops = 2 * sum(p.numel() for p in weights.values() if p.dim() == 2 and is_product)
        reads = recording.reads_features(call)
        found = aggregations.get(call.name)
        pushed, width = found.width if found else 0, recording.facts[call].width
        ops.append(
            Op(
                name=call.name,
                inputs=tuple(source.name for source in recording.inputs(call)),
                outputs={call.name: width},
                num_parameters=sum(p.numel() for p in new),
                flops_per_row=0 if reads else flops,
                flops_per_feature=flops // _width(graph, recording, call) if reads else 0,
                push_width=pushed,
                kept_per_row=_kept(recording, call, found, call in handed_on, beside[call]),
                kept_per_row_recomputed=_read_again(call, found, width * (call in handed_on)),
                passing_per_row=6 * pushed + 2 * (found.kept_per_read_row if found else 0),
                kept_per_edge=found.kept_per_edge if found else 0,
                kept_per_read_row=found.kept_per_read_row if found else 0,
                structure_per_edge=found.structure_per_edge if found else 0,
                vertex_type=recording.facts[call].vertex_type,
                pushed_type=found.pushed_type if found else "",
                structure=found.structure if found else "",
                is_linear=found.is_linear if found else True,
                is_mean=found.is_mean if found else False,
                is_one_row=is_mean(call),
                moves=found.moves if found else True,
                reads_features=reads,
                of_features=_is_made_once(found, graph),
                weights=(*weights, *recording.buffers(call)),
            )
        )
    return tuple(ops)


def _handed_on(cut: Cut) -> set[fx.Node]:
    """Ops whose rows wait for a later step, and are there until that goes back."""
    found = {value for step in range(cut.num_steps - 1) for value in cut.carried(step)}
    return {value for value in found if not is_mean(value)}


def _beside(cut: Cut) -> dict[fx.Node, int]:
    """By op the numbers of a row that it keeps beside its value, with those of its helpers.

    A step makes a helper once: it counts for the first op that needs it.
    """
    facts, found = cut.recording.facts, {}
    for step in range(cut.num_steps):
        made: set[fx.Node] = set()
        for op in cut.running(step):
            helpers = set(cut.recording.helpers(op)) - made
            made |= helpers
            found[op] = facts[op].saved + sum(facts[one].saved for one in helpers)
    return found


def _kept(
    recording: Recording, call: fx.Node, found: Aggregation | None, waits: bool, beside: int
) -> int:
    """Numbers of a row that are kept of an op until backward."""
    facts, width = recording.facts[call], recording.facts[call].width
    if found is not None and found.is_mean:
        return 0
    if found is not None and not found.is_linear:
        # What a convolution that runs unchanged reads is a copy out of the table.
        of_read = found.width + found.kept_per_read_row
        return of_read + width * (facts.is_saved or waits) + found.kept_per_row
    # What was aggregated is there until the step goes back.
    is_kept = facts.is_saved or waits or found is not None
    return beside + width * (is_kept and not is_mean(call))


def _read_again(call: fx.Node, found: Aggregation | None, waiting: int) -> int:
    """The same where all else is made again: what a step reads."""
    if found is None or is_mean(call):
        return waiting
    # A convolution that runs unchanged makes other rows of those.
    return found.width if found.is_linear else found.width + waiting


def _is_made_once(found: Aggregation | None, graph: Graph) -> bool:
    """A recorded model's aggregation of features; of types there may be several in a stage."""
    return found is not None and found.of_features and found.is_linear and graph.types is None


def _layer_op(layer: Layer, before: Layer | None, graph: Graph, memory: LayerMemory) -> Op:
    name = layer_name(layer)
    previous = layer_name(before) if before is not None else ""
    makers = {PushMaker.COPY: "", PushMaker.BEFORE: name, PushMaker.AFTER: previous}
    push_maker = makers[layer.push_maker_behind(before)]
    # Aggregated, sparse features are so no more, and wide ones take more than a layer's rows.
    is_narrow = not sp.issparse(graph.x) and graph.num_features <= WIDEST * layer.push_width
    encoders = [m for m in layer.modules() if isinstance(m, FeatureLinear)]
    reads = sum(m.weight.numel() for m in encoders)
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    spared = layer.push_width + sum(layer.kept_widths.values())
    return Op(
        name=name,
        inputs=(),
        outputs={f"{name}.{value}": width for value, width in layer.out_widths.items()},
        num_parameters=sum(p.numel() for p in layer.parameters()),
        flops_per_row=2 * (matrices - reads),
        flops_per_feature=2 * sum(m.weight.shape[0] for m in encoders),
        push_width=layer.push_width,
        kept_widths=layer.kept_widths,
        kept_per_row=memory.per_row,
        kept_before=memory.per_row_before,
        kept_per_row_recomputed=memory.per_row_recomputed,
        push_maker=push_maker,
        holds_pushed=push_maker == previous != "" and "x" in layer.kept_widths,
        passing_per_row=PASSING_ROWS * layer.push_width,
        kept_per_edge=memory.per_edge,
        structure_per_edge=0 if layer.is_linear else INCIDENCE_EDGE_BYTES,
        structure=layer.aggregation,
        is_linear=layer.is_linear,
        reads_features=layer.is_first,
        of_features=is_narrow and layer.accepts_aggregated_features,
        features_kept=graph.num_features if layer.keeps_features else 0,
        # The aggregated row, and what goes by it.
        rows_spared=spared,
        weights=tuple(f"layers.{layer.index}.{n}" for n, _ in layer.named_parameters()),
    )
