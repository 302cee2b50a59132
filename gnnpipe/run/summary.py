"""Text about a run: the lines before training, the result, and the output of ``gnnpipe info``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnnpipe.collectives import DEFAULT_COLLECTIVES
from gnnpipe.models import MODELS
from gnnpipe.output import human_bytes
from gnnpipe.perf.memory import ON_TOP, MemoryEstimate
from gnnpipe.plan import RowWay
from gnnpipe.run.epoch_times import prediction_line, time_lines
from gnnpipe.run.exact_epochs import LONGEST
from gnnpipe.run.result import RunResult
from gnnpipe.setup.inputs import reason_not_recorded, rounding_lines
from gnnpipe.setup.memory_estimate import partition_memory_bytes
from gnnpipe.setup.prepared import Prepared
from gnnpipe.tasks.loss import REGRESSION

MOST_OPS = 40
"""Ops that are listed by name."""

SMALL_CHUNK = 1 << 16
"""Numbers of a chunk in a layer under which the calls of a chunk take longer than its numbers: on
one core, GCN of 4 layers of 64, an async epoch of 32 chunks of 39,000 took 2.6 times as long as the
full batch, and one of 8 chunks of 158,000 numbers 1.2 times (pubmed, by hand, 28 November 2026)."""


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def score(value: float) -> str:
    """Format a score with four digits; '-' for NaN.

    >>> score(0.5), score(math.nan)
    ('0.5000', '-')
    """
    return "-" if math.isnan(value) else f"{value:.4f}"


def head_lines(prepared: Prepared) -> list[str]:
    """Return the lines before training: graph, model, shape, partition and staleness."""
    graph, config, plan = prepared.graph, prepared.config, prepared.plan
    if graph.pairs is None:
        split = [int(m.sum()) for m in (graph.train_mask, graph.val_mask, graph.test_mask)]
    else:
        split = list(graph.pairs.counts)
    lines = [
        f"graph {graph.name}: {graph.num_vertices:,} vertices, {graph.num_edges:,} "
        f"{'edges' if graph.is_symmetric else 'directed edges'}, "
        f"{graph.feature_text}, {graph.label_text}, "
        f"split {split[0]:,}/{split[1]:,}/{split[2]:,}",
        f"model {_model_text(prepared)}, {prepared.model_graph.num_parameters:,} parameters",
        f"shape: {_count(plan.num_stages, 'stage')} x {plan.shards_text} "
        f"shard{'s' * (plan.shards_text != '1')} x "
        f"{_count(plan.chunks, 'chunk')} on {_count(plan.num_ranks, 'rank')}, "
        f"schedule {plan.schedule}, {prepared.program.reads_text()}",
    ]
    found = {"self-loops": graph.self_loops, "parallel edges": graph.parallel_edges}
    kept = [f"{len(places):,} {kind}" for kind, places in found.items() if len(places)]
    if kept:
        lines[0] += f"; {' and '.join(kept)}"
    if reason := reason_not_recorded(prepared.model):
        lines.append(
            "the model runs as it is, as in plain PyG: it cannot be recorded, so it can have no "
            f"chunks, stages or shards ({reason.removeprefix('model: ')})"
        )
    if prepared.dag.depth < plan.num_stages:
        ways = ", ".join(f"{t.source} -> {t.target}" for t in prepared.dag.transfers)
        lines.append(f"stages form a DAG of depth {prepared.dag.depth}: {ways}")
    if plan.recomputes and not config.recompute:
        chosen = [str(i) for i, stage in enumerate(plan.stages) if stage.recompute]
        many = "stages" if len(chosen) > 1 else "stage"
        lines.append(f"recomputation, to fit into memory: {many} {', '.join(chosen)}")
    if plan.collectives != DEFAULT_COLLECTIVES:
        used = plan.collectives
        lines.append(f"collectives: row exchange {used.row_exchange}, sum {used.shard_sum}")
    if plan.ways:
        lines.append(_ways_line(prepared))
    if prepared.loss_rows.ops:
        lines.append(
            f"last layer computed for {prepared.loss_rows.rows:,} of {graph.num_vertices:,} "
            "vertices (those with a training label)"
        )
    if config.label_inputs:
        lines.append(
            f"labels as inputs: the last {graph.num_classes:,} features, in each epoch of "
            f"{config.label_inputs:g} of the training vertices, "
            f"{_count(config.label_iterations, 'label iteration')}"
        )
    lines += rounding_lines(config, prepared.model, graph)
    if plan.chunks * plan.most_shards > 1:
        cut = [quality for quality in prepared.qualities if quality.chunks * quality.shards > 1]
        lines += dict.fromkeys(line for quality in cut for line in quality.lines())
    if plan.chunks > 1 and not prepared.program.is_exact:
        lines += _staleness_lines(prepared)
    if plan.chunks == 1 and prepared.program.steps_by_chunk:
        lines.append(f"schedule {plan.schedule}: one chunk is the full batch; try --chunks 32")
    return lines


def _model_text(prepared: Prepared) -> str:
    """Return the name and the size of the model."""
    config, model = prepared.config, prepared.model
    if config.model in set(MODELS):
        return f"{config.model}: {config.layers} layers x {config.hidden}, {model.size_text}"
    return f"{model.name}: {model.size_text}"


def _ways_line(prepared: Prepared) -> str:
    """Return how the rows of every aggregation travel among the shards."""
    plan, model = prepared.plan, prepared.model_graph
    pushing = [i for i, op in enumerate(model.ops) if op.aggregates and not op.is_mean]
    by_way = {way: [i for i in pushing if plan.way(i) is way] for way in RowWay}
    parts = [f"{way} (ops {_ranges(ops)})" for way, ops in by_way.items() if ops]
    return f"rows travel among shards by {', by '.join(parts)}"


def _steps_line(prepared: Prepared, order: str) -> str:
    """Return how often the optimizer steps, and the weights of passes with a version gap."""
    program = prepared.program
    every = program.chunks // (program.consistency.optimizer_steps or 1)
    text = f"not the full batch: an optimizer step after {_count(every, 'chunk')}, {order}"
    if program.largest_gap:
        text += f", weights {prepared.config.weights}"
    return f"{text}, a flush every {_count(program.epochs, 'epoch')}"


def _small_chunks_line(prepared: Prepared) -> list[str]:
    """Return a line that chunks are too small to pay, if they are."""
    plan, ops = prepared.plan, prepared.model_graph.ops
    rows = prepared.graph.num_vertices // (plan.chunks * plan.most_shards)
    width = max(sum(op.outputs.values()) for op in ops)
    if rows * width >= SMALL_CHUNK:
        return []
    return [
        f"a chunk has about {rows:,} vertices x {width:,} columns: starting its operations takes "
        "longer than computing them; an epoch is faster with fewer --chunks or with the full batch "
        "(--chunks 1)"
    ]


def _staleness_lines(prepared: Prepared) -> list[str]:
    config, settings, num_probes = prepared.config, prepared.staleness, len(prepared.probes)
    parts = [f"chunks {'shuffled' if settings.shuffle_chunks else 'in fixed order'}"]
    if prepared.program.steps_by_chunk:
        return [_steps_line(prepared, parts[0]), *_small_chunks_line(prepared)]
    if settings.snapshot_every > 1:
        parts.append(f"snapshot every {settings.snapshot_every} epochs")
    parts.append(f"gradients from other chunks x {settings.scale_live_gradients:g}")
    if num_probes:
        parts.append(f"stale rows forecast from {num_probes:,} probe vertices")
    if settings.exact_epochs:
        many = f"{settings.exact_epochs} epochs" if settings.exact_epochs > 1 else "epoch"
        parts.append(f"first {many} exact")
    if settings.exact_above:
        parts.append(
            f"gradient norm clipped to {LONGEST:g} x its median, exact epoch after a norm above "
            f"{settings.exact_above:g} x its median"
        )
    lines = [f"staleness {config.staleness}: {', '.join(parts)}"]
    if settings.snapshot_every >= config.epochs > 1 and not settings.exact_epochs:
        lines.append(
            f"the run ends before its first snapshot: every stale row is zero; try "
            f"--snapshot-every {max(1, config.epochs // 5)}"
        )
    return lines


def result_lines(result: RunResult) -> list[str]:
    """Return the lines after training: scores, times, memory, staleness and communication."""
    counted, formula = result.comm_bytes_per_epoch, result.comm_bytes_closed_form
    scored = [("accuracy", result.train_acc, result.val_acc, result.test_acc)]
    if result.metric in REGRESSION:
        scored = []
    if result.metric != "accuracy":
        name = f"{result.metric}", result.train_metric, result.val_metric, result.test_metric
        scored.insert(0, name)
    lines = [f"last epoch: loss {result.loss:.4f}"]
    for what, train, val, test in scored:
        words = "" if what == "accuracy" and len(scored) == 1 else f"{what}: "
        lines[0] += f"  {words}train {score(train)}  val {score(val)}  test {score(test)}"
    if not math.isnan(result.best_val_metric):
        lines.append(
            f"best validation {score(result.best_val_metric)} at epoch {result.best_epoch}: "
            f"test {score(result.test_metric_at_best_val)}"
        )
    before = zip(result.peak_memory_bytes, result.memory_before_bytes, strict=True)
    grown = [max(peak - held, 0) for peak, held in before]
    sizes = result.peak_memory_bytes, grown, [e.total for e in result.memory_estimate_bytes]
    peak, growth, estimate = (", ".join(map(human_bytes, some)) for some in sizes)
    lines.append(f"{result.epoch_time_s:.3f} s per epoch; peak memory per rank {peak}")
    lines.append(f"memory grew by {growth} in training, estimated {estimate}")
    if result.predicted_epoch_time_s is not None:
        lines.append(
            prediction_line(
                result.predicted_epoch_time_s,
                result.epoch_time_s,
                result.predicted_time_shares,
                result.time_shares,
            )
        )
    if not all(map(math.isnan, result.drift)):
        lines.append(_staleness_line(result))
    if result.world_size > 1:
        lines.append(
            f"sent per epoch: {human_bytes(counted['total'])} "
            f"(pipeline {counted['pipeline']:,}, graph {counted['graph']:,}, gradient "
            f"{counted['gradient']:,}, control {counted['control']:,} bytes; closed "
            f"form {formula['total']:,}"
            f"{', equal' if counted == formula else ', NOT EQUAL'})"
        )
        lines += time_lines(result.time_shares)
    if result.path is not None:
        lines.append(f"weights (epoch {result.weights_of_epoch}) and result: {result.path}")
    return lines


def _staleness_line(result: RunResult) -> str:
    text = f"stale reads: {result.stale_reads:.0%} of the edges; "
    if result.exact_epochs:
        text += f"{result.exact_epochs} of {result.epochs} epochs exact; "
    text += "in the last stale epoch " if result.exact_epochs else "in the last epoch "
    if result.moved:
        changed, missed = _span(result.moved), _span(result.missed)
        return text + f"rows changed by {changed}, error of the forecast {missed}"
    return text + f"stale rows differed by {_span(result.drift)}, including dropout"


def _span(by_layer: Sequence[float]) -> str:
    low, high = min(by_layer), max(by_layer)
    return f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as runs.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = zip(starts, ends, strict=True)
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs)


def _ops_line(prepared: Prepared) -> str:
    """Return the numbers and names of the first ops, as a plan counts them."""
    ops = prepared.model_graph.ops
    named = [f"{i} {op.name}{'*' * op.aggregates}" for i, op in enumerate(ops[:MOST_OPS])]
    more = f", ... ({len(ops)} ops)" if len(ops) > MOST_OPS else ""
    return f"ops (*: aggregates): {', '.join(named)}{more}"


def info_lines(prepared: Prepared, memory: Sequence[MemoryEstimate]) -> list[str]:
    """Return the output of ``gnnpipe info``; ``memory``: the estimate of every rank."""
    lines = [*head_lines(prepared), _ops_line(prepared)]
    lines.append(f"memory per rank, estimated ({ON_TOP}):")
    for rank, m in enumerate(memory):
        ops = prepared.plan.stages[prepared.plan.placement.stage(rank)].ops
        # The op that scores pairs is the task's, not the model's.
        shown = [i for i in ops if not prepared.model_graph.ops[i].over_pairs]
        names = f"ops {_ranges(shown)}"
        lines.append(
            f"  rank {rank} ({names}): {human_bytes(m.total)} = structure "
            f"{human_bytes(m.structure)}, features {human_bytes(m.features)}, history "
            f"{human_bytes(m.history)}, activations {human_bytes(m.activations)}, weights "
            f"{human_bytes(m.weights)}"
            + (f"; while it is built, {human_bytes(m.setup)} more" if m.setup else "")
        )
    before = human_bytes(partition_memory_bytes(prepared))
    lines.append(
        f"before training, reading and partitioning the graph take up to {before} on rank 0"
    )
    v = prepared.volume
    lines.append(
        f"sent per epoch over all ranks: {human_bytes(v.total)} (pipeline {v.pipeline:,}, graph "
        f"{v.graph:,}, gradient {v.gradient:,}, control {v.control:,} bytes)"
    )
    return lines
