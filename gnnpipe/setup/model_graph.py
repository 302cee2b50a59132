"""Describes a model as plain data (``ModelGraph``) for planners and cost formulas."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from gnnpipe.capture import RecordedModel, WholeModel
from gnnpipe.capture.link_decoder import PAIR_SCORES, PairModel
from gnnpipe.capture.markers import is_mean, of_vertices
from gnnpipe.capture.recording import Recording
from gnnpipe.capture.stage.stage_module import Cut, made_in_table, overwrites_received
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.operators import SUM
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.models import Aggregation, Model
from gnnpipe.plan import ModelGraph, Op


def describe(model: Model, graph: Graph) -> ModelGraph:
    """Returns the DAG of the model's ops."""
    if isinstance(model, PairModel):
        return _with_pairs(describe(model.inner, graph), model)
    if isinstance(model, WholeModel):
        ops: tuple[Op, ...] = (_whole_op(model, graph),)
    else:
        assert isinstance(model, RecordedModel)
        ops = _recorded_ops(model.recording, graph)
    return ModelGraph(model.name, graph.num_features, graph.num_classes, ops)


def _whole_op(model: WholeModel, graph: Graph) -> Op:
    """Returns the only op of a model that runs as it is."""
    weights = dict(model.module.named_parameters())
    matrices = 2 * sum(p.numel() for p in weights.values() if p.dim() == 2)
    edges_per_row = graph.num_edges / graph.num_vertices
    return Op(
        name="model",
        inputs=(),
        outputs={"model": model.width},
        num_parameters=sum(p.numel() for p in weights.values() if p.requires_grad),
        flops_per_row=matrices,
        kept_per_row=model.kept_per_row + round(model.kept_per_edge * edges_per_row),
        vertex_type=graph.target,
        reads_features=True,
        weights=tuple(model.module.state_dict()),
    )


def _with_pairs(inner: ModelGraph, model: PairModel) -> ModelGraph:
    """Appends the op that scores pairs."""
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
        kept_per_pair=model.kept_width,
        pushed_type=PAIRS,
        is_linear=False,
        over_pairs=True,
        weights=model.decode_weights,
    )
    return replace(inner, ops=(*inner.ops, scores), num_classes=1)


def _recorded_ops(recording: Recording, graph: Graph) -> tuple[Op, ...]:
    """Returns one op per recorded call; shared weights count for the first call."""
    ops: list[Op] = []
    counted: set[str] = set()
    cut = Cut(recording, range(len(recording.ops)))
    aggregations = {a.name: a for one in cut.rounds for a in one}
    handed_on, besides = _handed_on(cut), _kept_besides(cut)
    for call in recording.ops:
        facts, found = recording.facts[call], aggregations.get(call.name)
        is_once = recording.aggregates_features(call)
        weights = dict(recording.weights(call))
        new = [p for name, p in weights.items() if name not in counted and p.requires_grad]
        counted |= set(weights)
        is_product = call.target is not of_vertices
        flops = 2 * sum(p.numel() for p in weights.values() if p.dim() == 2 and is_product)
        reads = recording.reads_features(call) and not is_once
        num_features = max(int(graph.features(facts.vertex_type).shape[1]), 1) if reads else 1
        op = Op(
            name=call.name,
            inputs=tuple(source.name for source in recording.inputs(call)),
            outputs={call.name: facts.width},
            num_parameters=sum(p.numel() for p in new),
            flops_per_row=0 if reads else flops,
            flops_per_feature=flops // num_features if reads else 0,
            kept_per_row=_kept(recording, call, found, call in handed_on, besides[call]),
            kept_per_row_recomputed=_kept_recomputed(
                call, found, facts.width * (call in handed_on)
            ),
            vertex_type=facts.vertex_type,
            is_one_row=is_mean(call),
            reads_features=reads,
            weights=(*weights, *recording.buffers(call)),
            structure=str(call.kwargs["structure"]) if is_once else "",
        )
        if found is not None:
            maker = made_in_table(cut, cut.depth[call] - 1)
            op = _with_aggregation(op, found)
            if maker is not None:
                op = replace(op, push_maker=maker.name, holds_pushed=maker in handed_on)
        ops.append(op)
    return tuple(ops)


def _with_aggregation(op: Op, found: Aggregation) -> Op:
    return replace(
        op,
        push_width=found.width,
        passing_per_row=0
        if found.structure == SUM
        else 6 * found.width + 2 * found.kept_per_read_row,
        kept_per_edge=found.kept_per_edge,
        kept_per_read_row=found.kept_per_read_row,
        structure_per_edge=found.structure_per_edge,
        pushed_type=found.pushed_type,
        structure=found.structure,
        is_linear=found.is_linear,
        is_mean=found.is_mean,
        is_sum=found.structure == SUM,
        moves=found.moves,
    )


def _handed_on(cut: Cut) -> set[fx.Node]:
    """Returns the ops whose values a later step reads, so that they are kept until its backward."""
    found = {value for step in range(cut.num_steps - 1) for value in cut.carried[step]}
    return {value for value in found if not is_mean(value)}


def _kept_besides(cut: Cut) -> dict[fx.Node, int]:
    """Returns the numbers per row that each op and its helpers keep besides the op's value.

    A step runs each helper once, so a helper counts for the first op that needs it.
    """
    facts, found = cut.recording.facts, {}
    for step in range(cut.num_steps):
        made: set[fx.Node] = set()
        for op in cut.running[step]:
            helpers = set(cut.recording.helpers(op)) - made
            made |= helpers
            found[op] = sum(facts[one].memory.per_row for one in {op, *helpers})
    return found


def _kept(
    recording: Recording, call: fx.Node, found: Aggregation | None, waits: bool, beside: int
) -> int:
    """Returns the numbers per row that an op keeps until backward."""
    facts, width = recording.facts[call], recording.facts[call].width
    if recording.aggregates_features(call) or (found is not None and found.is_mean):
        return 0
    if found is not None and not found.is_linear:
        # An unchanged convolution reads a copy of the table's rows.
        of_read = found.width + found.kept_per_read_row
        return of_read + width * (facts.memory.is_kept or waits) + found.kept_per_row
    # Aggregated rows are kept until the step's backward, but for those that are written over.
    (reader,) = call.users if len(call.users) == 1 else (None,)
    is_over = found is not None and reader is not None and overwrites_received(reader)
    is_kept = facts.memory.is_kept or waits or found is not None
    return beside + width * (is_kept and not is_mean(call) and not is_over)


def _kept_recomputed(call: fx.Node, found: Aggregation | None, handed_on: int) -> int:
    """Returns the numbers per row that an op keeps with ``--recompute``: the inputs of a step."""
    if found is None or is_mean(call):
        return handed_on
    # An unchanged convolution reads the table's rows and returns other rows.
    return found.width if found.is_linear else found.width + handed_on
