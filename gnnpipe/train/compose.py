"""From a config to everything a rank needs, in two steps.

``prepare`` decides and checks: graph, chunks, model, plan, program, closed forms. ``gnnpipe info``
stops there. ``assemble`` then allocates: operators, histories, stage, executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.graph.chunking import Chunking, make_chunking, renumber
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.layout import ShardLayout, shard_layout
from gnnpipe.graph.load import load_graph
from gnnpipe.graph.operators import Blocks, LinearOperator, weighted_rows
from gnnpipe.graph.partition import PARTITIONERS
from gnnpipe.graph.quality import CutQuality, cut_quality
from gnnpipe.models import GNN, MODELS, Layer, LayerSpec, Rows
from gnnpipe.models.dropout import row_keys
from gnnpipe.models.feature_linear import FeatureLinear, feature_rows
from gnnpipe.perf import CommVolume, closed_form_volume
from gnnpipe.plan import LayerOp, ModelGraph, Plan
from gnnpipe.planner import plan_uniform
from gnnpipe.runtime.exchange import Exchange
from gnnpipe.runtime.executor import Executor
from gnnpipe.runtime.history import BlockHistory, History, LinearHistory
from gnnpipe.runtime.mesh import Mesh
from gnnpipe.runtime.stage import Stage
from gnnpipe.schedule import Program, ProgramReport, check, evaluation_program, training_program

__all__ = ["Assembly", "Prepared", "assemble", "chunk_order", "prepare"]


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that is decided before anything is allocated; the same on every rank."""

    config: TrainConfig
    graph: Graph
    """In the order of ``chunking``."""
    chunking: Chunking
    quality: CutQuality
    model: GNN
    model_graph: ModelGraph
    plan: Plan
    program: Program
    report: ProgramReport
    volume: CommVolume

    @property
    def dtype(self) -> torch.dtype:
        """Number type of weights and rows."""
        return torch.float64 if self.config.dtype == "float64" else torch.float32


def prepare(
    config: TrainConfig,
    mesh: Mesh,
    graph: Graph | None = None,
    model: GNN | None = None,
    plan: Plan | None = None,
) -> Prepared:
    """Read, cut, plan and prove. ``InputError`` on every rank if any rank has one.

    Rank 0 alone cuts the graph and tells the others.
    """
    if model is None:
        MODELS[config.model]
    PARTITIONERS[config.partitioner]
    error: InputError | None = None
    try:
        if graph is None:
            graph = load_graph(
                config.dataset, data_dir=config.data_dir, split=config.split, seed=config.seed,
                symmetrize=config.symmetrize,
            )  # fmt: skip
    except InputError as fault:
        error = fault
    mesh.agree(error)
    assert graph is not None
    chunking = _cut(config, graph, mesh)
    quality = cut_quality(graph, chunking)
    graph = renumber(graph, chunking)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    if model is None:
        model = GNN.build(config.model, _spec(config, graph), config.seed, dtype)
    else:
        _check_model(model, config, graph)
        model = model.to(dtype)
    described = describe(model, graph)
    if plan is None:
        plan = plan_uniform(
            described, stages=config.stages, shards=config.shards, chunks=config.chunks,
            exact=config.techniques.exact, num_vertices=graph.num_vertices,
            num_edges=graph.num_edges, feature_entries=_entries(graph),
        )  # fmt: skip
    else:
        _check_plan(plan, config, described)
    program = training_program(plan)
    report = check(program)
    volume = closed_form_volume(
        plan, described, num_vertices=graph.num_vertices, crossings=quality.crossings,
        number_bytes=8 if dtype == torch.float64 else 4,
    )  # fmt: skip
    return Prepared(
        config, graph, chunking, quality, model, described, plan, program, report, volume
    )


def _cut(config: TrainConfig, graph: Graph, mesh: Mesh) -> Chunking:
    chunking, error = None, None
    try:
        if mesh.rank == 0:
            chunking = make_chunking(
                graph, chunks=config.chunks, shards=config.shards, seed=config.seed,
                partitioner=config.partitioner, cache_dir=config.cache_dir,
            )  # fmt: skip
    except InputError as fault:
        error = fault
    failed = mesh.share(str(error) if error else None)
    if failed:
        raise InputError(failed)
    shared: Chunking = mesh.share(chunking)
    return shared


def _spec(config: TrainConfig, graph: Graph) -> LayerSpec:
    return LayerSpec(
        num_features=graph.num_features, num_classes=graph.num_classes,
        num_layers=config.layers, hidden=config.hidden, dropout=config.dropout,
        heads=config.heads, alpha=config.alpha, theta=config.theta,
    )  # fmt: skip


def _check_model(model: GNN, config: TrainConfig, graph: Graph) -> None:
    spec = model.stack()[0].spec
    for name, want in (("num_features", graph.num_features), ("num_classes", graph.num_classes)):
        if getattr(spec, name) != want:
            raise InputError(
                f"model: built for {name} = {getattr(spec, name)}, but the graph has {want}"
            )
    if spec.num_layers != config.layers:
        raise InputError(
            f"model: has {spec.num_layers} layers, but --layers is {config.layers}; make them equal"
        )


def _check_plan(plan: Plan, config: TrainConfig, model: ModelGraph) -> None:
    if plan.num_layers != model.num_layers:
        raise InputError(f"plan: is for {plan.num_layers} layers, not {model.num_layers}")
    for name, value in (
        ("stages", plan.num_stages), ("shards", plan.shards), ("chunks", plan.chunks),
    ):  # fmt: skip
        if value != getattr(config, name):
            raise InputError(
                f"plan: has {value} {name}, but --{name} is {getattr(config, name)}; "
                f"try --{name} {value}"
            )
    if plan.chunks > 1 and (plan.schedule == "layer-sync") != config.techniques.exact:
        want = "exact" if plan.schedule == "layer-sync" else "paper or none"
        raise InputError(
            f"plan: its schedule {plan.schedule!r} does not go with --staleness "
            f"{config.staleness}; try --staleness {want}"
        )


def describe(model: GNN, graph: Graph) -> ModelGraph:
    """The model as plain data for planner and cost formulas."""
    names = {MODELS[name]: name for name in MODELS}
    layers = model.stack()
    name = names.get(type(layers[0]), type(layers[0]).__name__)
    ops = tuple(_layer_op(f"{name}{layer.index}", layer) for layer in layers)
    return ModelGraph(name, graph.num_features, graph.num_classes, ops)


def _layer_op(name: str, layer: Layer) -> LayerOp:
    encoders = [m for m in layer.modules() if isinstance(m, FeatureLinear)]
    reads = sum(m.weight.numel() for m in encoders)
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    return LayerOp(
        name=name,
        push_width=layer.push_width,
        kept_widths=dict(layer.kept_widths),
        out_widths=dict(layer.out_widths),
        num_parameters=sum(p.numel() for p in layer.parameters()),
        flops_per_row=2 * (matrices - reads),
        flops_per_feature=2 * sum(m.weight.shape[0] for m in encoders),
        is_linear=layer.is_linear,
    )


def _entries(graph: Graph) -> int:
    return int(graph.x.nnz) if isinstance(graph.x, sp.csr_array) else int(graph.x.size)


def chunk_order(config: TrainConfig, epoch: int) -> Sequence[int]:
    """The walk of an epoch: ``order[position]`` is a chunk; the same on every stage."""
    if not config.techniques.shuffle_chunks:
        return range(config.chunks)
    order: list[int] = np.random.default_rng([config.seed, epoch]).permutation(
        config.chunks
    ).tolist()  # fmt: skip
    return order


@dataclass(frozen=True, eq=False)
class Assembly:
    """What runs on one rank."""

    executor: Executor
    evaluation: Program
    labels: list[Tensor]
    """Per chunk [C] classes of the own rows; last stage only."""
    masks: list[Tensor]
    """Per chunk [3, C] bool: train, val, test; last stage only."""


def assemble(prepared: Prepared, mesh: Mesh) -> Assembly:
    """Allocate this rank's part: its layers, its shard's rows and tables, the optimizer."""
    config, graph, dtype = prepared.config, prepared.graph, prepared.dtype
    layout = shard_layout(graph, prepared.chunking, mesh.shard)
    first, last = prepared.plan.stages[mesh.stage]
    layers = prepared.model.stack()[first:last]
    for layer in layers:
        layer.to(mesh.device)
    exchange = Exchange(layout, mesh)
    structures = {
        kind: _structure(kind, layers, graph, layout, dtype, mesh.device)
        for kind in sorted({layer.aggregation for layer in layers})
    }
    techniques = config.techniques

    def open_history(layer: Layer, training: bool) -> History:
        structure = structures[layer.aggregation]
        every = techniques.snapshot_every if training else 1
        if isinstance(structure, Blocks):
            return BlockHistory(
                structure, layout, exchange, layer.push_width, dtype=dtype,
                snapshot_every=every, scale=techniques.scale_live_gradients,
            )  # fmt: skip
        return LinearHistory(
            structure, layout, exchange, layer.push_width, dtype=dtype,
            snapshot_every=every, scale=techniques.scale_live_gradients,
        )  # fmt: skip

    own = [layout.own[a:b] for a, b in zip(layout.own_ptr[:-1], layout.own_ptr[1:], strict=True)]
    rows = [
        Rows(
            keys=row_keys(torch.from_numpy(prepared.chunking.perm[part])).to(mesh.device),
            features=feature_rows(graph.x[part], dtype, mesh.device) if first == 0 else None,
            seed=config.seed,
        )
        for part in own
    ]
    is_last = mesh.stage == mesh.stages - 1
    labels = [torch.from_numpy(graph.y[part]).to(mesh.device) for part in own] if is_last else []
    split = np.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    masks = [torch.from_numpy(split[:, part]).to(mesh.device) for part in own] if is_last else []
    num_train = int(graph.train_mask.sum())

    def criterion(logits: Tensor, chunk: int) -> Tensor:
        chosen = masks[chunk][0].nonzero().squeeze(1)
        total = nn.functional.cross_entropy(logits[chosen], labels[chunk][chosen], reduction="sum")
        return total / num_train

    stage = Stage(layers, rows, open_history, criterion if is_last else None)
    optimizer = torch.optim.Adam(
        [p for layer in layers for p in layer.parameters()],
        lr=config.lr, weight_decay=config.weight_decay,
    )  # fmt: skip
    executor = Executor(prepared.plan, mesh, stage, layout, exchange, optimizer, dtype)
    return Assembly(executor, evaluation_program(prepared.plan), labels, masks)


def _structure(
    kind: str,
    layers: Sequence[Layer],
    graph: Graph,
    layout: ShardLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> LinearOperator | Blocks:
    rows = weighted_rows(graph, kind)
    if all(layer.is_linear for layer in layers if layer.aggregation == kind):
        return LinearOperator.build(rows, layout, dtype, device)
    return Blocks.build(rows, layout, device)
