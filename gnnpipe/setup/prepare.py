"""From a config to every decision: graph, chunks, model, plan, program, closed forms.

All of it is checked here, before anything large is allocated; ``gnnpipe info`` stops at this point,
and ``build_rank`` goes on.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import nn

from gnnpipe.config import TrainConfig
from gnnpipe.data.load import load_graph
from gnnpipe.errors import InputError
from gnnpipe.graph.chunking import Chunking, make_chunking, renumber
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.pairs import PAIRS
from gnnpipe.graph.quality import CutQuality, chunk_edges, cut_quality
from gnnpipe.graph.stale_rows import choose_probe_vertices
from gnnpipe.models import Model
from gnnpipe.ops.spmm import kernel_named
from gnnpipe.perf import CommVolume, closed_form_volume, probe_rows_bytes
from gnnpipe.plan import (
    LossRows,
    ModelGraph,
    Plan,
    gradient_buckets,
    precomputed_aggregations,
    shared_tables,
)
from gnnpipe.planner import plan_uniform
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.schedule import EXACT_SCHEDULE, CheckedProgram, training_program, with_forecast
from gnnpipe.setup.inputs import (
    check_parts,
    check_validation,
    choose_model,
    number_dtype,
    row_dtype,
    without_unread,
)
from gnnpipe.setup.loss_rows import find_loss_rows, loss_row_mask
from gnnpipe.setup.model_graph import describe
from gnnpipe.tasks.loss import LossFn, check_loss, choose_metric

__all__ = ["Prepared", "agreed_digest", "chunk_order", "prepare", "shared_of"]


_SAMPLED = 10_000
"""Rows of features that are looked at."""


def agreed_digest(graph: Graph, mesh: Mesh) -> str:
    """A short digest of the graph, of whose features a sample is looked at.

    ``InputError`` if the ranks have made different graphs.
    """
    digest = _digest(graph)
    if len(set(mesh.gather(digest))) > 1:
        raise InputError(
            "graph: is another on every rank; make it in the same way, and seed what draws "
            "(RandomLinkSplit and other transforms: torch_geometric.seed_everything(0) before)"
        )
    return digest


def _digest(graph: Graph) -> str:
    arrays: list[Any] = [graph.indptr, graph.indices, graph.y, graph.train_mask, graph.val_mask]
    arrays += [graph.test_mask, *graph.edge_data.values()]
    if graph.pairs is not None:
        arrays += [graph.pairs.ends, graph.pairs.label, graph.pairs.part]
    for name in graph.row_types if graph.types is None else graph.types.features:
        x = graph.features(name)
        rows = x[:: max(1, graph.num_vertices // _SAMPLED)]
        arrays.append(rows.data if sp.issparse(rows) else rows)
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
    return f"{found:08x}"


def shared_of(prepared: Prepared) -> frozenset[str]:
    """Names of their ops (see ``plan.shared_tables``)."""
    return shared_tables(
        prepared.model_graph,
        prepared.plan,
        prepared.precomputed,
        prepared.loss_rows.ops,
        prepared.row_dtype != prepared.dtype,
        prepared.program.is_exact,
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that is decided before anything is allocated; the same on every rank."""

    config: TrainConfig
    graph: Graph
    """In the order of ``chunking``."""
    chunking: Chunking
    quality: CutQuality
    model: Model
    model_graph: ModelGraph
    plan: Plan
    program: CheckedProgram
    exact_program: CheckedProgram
    """Of the epochs that are walked layer by layer."""
    volume: CommVolume
    """Bytes of an epoch with a forecast, if there are any."""
    recall_bytes: int
    """Of its pilot rows, those that pass with the weights of the last epoch."""
    probes: npt.NDArray[np.int64]
    """[P] rows that forecast the stale ones, ascending; none where nothing is forecast."""
    chunk_edges: sp.coo_array | None
    """[K, K] edges by (reading chunk, chunk read); none where nothing is stale."""
    metric: str
    """What is reported beside accuracy; never 'auto'."""
    digest: str
    """Of the graph as it was given: a run goes on with the same one only."""
    loss_fn: LossFn | None = None
    """The user's own; none: cross entropy, of classes or of labels."""

    def program_of(self, epoch: int) -> CheckedProgram:
        """What an epoch (from 0) runs, unless the gradients have jumped (see ``ExactEpochs``)."""
        return self.exact_program if epoch < self.exact_epochs else self.program

    def volume_of(self, is_exact: bool) -> CommVolume:
        """Bytes of an epoch: an exact one forecasts nothing, and recalls for those that do."""
        return replace(self.volume, control=self.recall_bytes) if is_exact else self.volume

    def program_text(self) -> str:
        """Every program of the run, for a person."""
        when = [f"epochs 1 to {self.exact_epochs}"] if self.exact_epochs else []
        if self.config.staleness_settings.exact_above and not self.program.is_exact:
            when.append("those behind a jump of the gradients")
        exact = f"# {', '.join(when)}\n{self.exact_program.text()}# others\n" if when else ""
        return exact + self.program.text()

    @property
    def exact_epochs(self) -> int:
        """Epochs at the start without stale reads, where others have them."""
        return 0 if self.program.is_exact else self.config.staleness_settings.exact_epochs

    @property
    def precomputed(self) -> frozenset[str]:
        """Aggregations that are made once for all epochs."""
        return precomputed_aggregations(
            self.model_graph, self.plan, self.row_dtype != self.dtype, self.program.is_exact
        )

    @cached_property
    def loss_rows(self) -> LossRows:
        """What the loss asks for of the whole graph."""
        return find_loss_rows(
            self.model_graph, self.graph, self.loss_row_mask, self.plan.stages[-1], self.precomputed
        )

    @cached_property
    def loss_row_mask(self) -> npt.NDArray[np.bool_]:
        """[N], the rows that are."""
        return loss_row_mask(self.graph, self.chunking)

    @property
    def dtype(self) -> torch.dtype:
        """Number type of weights and rows."""
        return number_dtype(self.config)

    @property
    def row_dtype(self) -> torch.dtype:
        """Number type of rows on the wire and in the tables."""
        return row_dtype(self.config)


def prepare(
    config: TrainConfig,
    mesh: Mesh,
    graph: Graph | None = None,
    model: nn.Module | None = None,
    plan: Plan | None = None,
    loss_fn: LossFn | None = None,
) -> Prepared:
    """Read, cut, plan and prove. ``InputError`` on every rank if any rank has one.

    Rank 0 alone cuts the graph and tells the others.
    """
    check_parts(config, graph, model, plan)
    error: InputError | None = None
    device = "cuda" if config.device == "cuda" else mesh.device.type  # or as `info` is asked for
    try:
        if config.kernel not in ("auto", "measured") and device == mesh.device.type:
            kernel_named(config.kernel, row_dtype(config), mesh.device)  # that it works here
        if graph is None:
            graph = load_graph(
                config.dataset,
                data_dir=config.data_dir,
                split=config.split,
                seed=config.seed,
                symmetrize=config.symmetrize,
                task=config.task,
            )
    except InputError as fault:
        error = fault
    mesh.agree(error)
    assert graph is not None
    digest = agreed_digest(graph, mesh)
    metric = choose_metric(graph, config.metric)
    check_validation(config, graph, metric)
    dtype = number_dtype(config)
    if loss_fn is not None:
        check_loss(loss_fn, graph, dtype)
    # Before the cut, which may take long: a model that cannot be used is told of at once.
    chosen = choose_model(model, config, graph, mesh, dtype)
    graph = without_unread(graph, chosen, mesh)
    chunking = _cut(config, graph, mesh)
    quality = cut_quality(graph, chunking)
    graph = renumber(graph, chunking)
    described = describe(chosen, graph)
    if plan is None:
        plan = plan_uniform(
            described,
            stages=config.stages,
            shards=config.shards,
            chunks=config.chunks,
            exact=config.staleness_settings.is_exact,
            num_vertices=graph.vertex_counts,
            num_edges=_num_edges(graph),
            loss_rows=find_loss_rows(described, graph, graph.train_mask, (0, described.num_ops)),
            feature_entries={t: _entries(graph, t) for t in graph.vertex_counts},
        )
    else:
        _check_plan(plan, config, described)
    probes = np.empty(0, dtype=np.int64)
    staleness = config.staleness_settings
    buckets = gradient_buckets(described, plan, dtype.itemsize)
    program = training_program(plan, buckets)
    exact_program = training_program(replace(plan, schedule=EXACT_SCHEDULE), buckets)
    if staleness.probes_per_column and not program.is_exact:
        counts = _probes_wanted(described, list(graph.row_types), staleness.probes_per_column)
        probes = choose_probe_vertices(chunking, counts, graph.row_types, config.seed)
    if len(probes):
        program, exact_program = with_forecast(plan, program), with_forecast(plan, exact_program)
    if not program.is_exact and any(op.is_mean for op in described.ops) and mesh.rank == 0:
        warnings.warn(
            f"model: {chosen.name} normalises over all vertices: chunks that come later in the "
            "walk count with their rows of the last epoch, forecast by --staleness auto; exact "
            "with --chunks 1 or --staleness exact",
            UserWarning,
            stacklevel=2,
        )
    edges = None if program.is_exact else chunk_edges(graph, chunking)
    counts = {name: int(rows[probes].sum()) for name, rows in graph.row_types.items()}
    volume = closed_form_volume(
        plan,
        described,
        num_vertices=graph.vertex_counts,
        crossings=quality.crossings_by_type,
        number_bytes=dtype.itemsize,
        row_bytes=row_dtype(config).itemsize,
        probes=counts,
    )
    recalled = probe_rows_bytes(plan, counts, row_dtype(config).itemsize)
    return Prepared(
        config,
        graph,
        chunking,
        quality,
        chosen,
        described,
        plan,
        program,
        exact_program,
        volume,
        recalled,
        probes,
        edges,
        metric,
        digest,
        loss_fn,
    )


def _probes_wanted(model: ModelGraph, types: list[str], each: int) -> dict[str, int]:
    """By type: ``each`` of every number in a column of the widest map that is fitted to them."""
    widths = dict.fromkeys(types, 0)
    forecast = [op for op in model.aggregations if op.is_forecast]
    for op in forecast:
        if not op.is_mean:
            pushing = op.vertex_type if op.over_pairs else op.pushed_type
            widths[pushing] = max(widths[pushing], op.push_width)
    return {name: each * (width + 1) * bool(forecast) for name, width in widths.items()}


def _num_edges(graph: Graph) -> dict[str, int]:
    """Edges into the vertices of each type, and pairs."""
    found = {t: int(graph.degrees[of].sum()) for t, of in graph.row_types.items()}
    return found if graph.pairs is None else found | {PAIRS: graph.pairs.num_pairs}


def _cut(config: TrainConfig, graph: Graph, mesh: Mesh) -> Chunking:
    chunking, error = None, None
    try:
        if mesh.rank == 0:
            chunking = make_chunking(
                graph,
                chunks=config.chunks,
                shards=config.shards,
                seed=config.seed,
                partitioner=config.partitioner,
                order=config.order,
                cache_dir=config.cache_dir,
            )
    except InputError as fault:
        error = fault
    failed = mesh.share(str(error) if error else None)
    if failed:
        raise InputError(failed)
    shared: Chunking = mesh.share(chunking)
    return shared


def _check_plan(plan: Plan, config: TrainConfig, model: ModelGraph) -> None:
    if plan.num_ops != model.num_ops:
        raise InputError(f"plan: is for {plan.num_ops} {model.unit}s, not {model.num_ops}")
    for name, value in (
        ("stages", plan.num_stages),
        ("shards", plan.shards),
        ("chunks", plan.chunks),
    ):
        if value != getattr(config, name):
            raise InputError(
                f"plan: has {value} {name}, but --{name} is {getattr(config, name)}; "
                f"try --{name} {value}"
            )
    wrong = [first for first, _ in plan.stages[1:] if first not in model.cuts]
    if wrong:
        raise InputError(
            f"plan: a stage begins with {model.unit} {wrong[0]}, which must stay with the one "
            f"before it; stages may begin with {', '.join(map(str, model.cuts))}"
        )
    transfers = model.transfers(plan.stages)
    if plan.transfers != transfers:
        raise InputError(
            f"plan: its transfers do not carry what the stages read; expected {transfers}"
        )
    steps = tuple(model.num_steps(*run) for run in plan.stages)
    if plan.steps != steps:
        raise InputError(f"plan: its steps are {plan.steps}; its stages have {steps}")
    if plan.chunks > 1 and (plan.schedule == "layer-sync") != config.staleness_settings.is_exact:
        want = "exact" if plan.schedule == "layer-sync" else "auto"
        raise InputError(
            f"plan: its schedule {plan.schedule!r} does not go with --staleness "
            f"{config.staleness}; try --staleness {want}"
        )


def _entries(graph: Graph, vertex_type: str) -> int:
    """Stored numbers of the features of a type."""
    if graph.types is not None and vertex_type not in graph.types.features:
        return 0
    x = graph.features(vertex_type)
    return int(x.nnz) if isinstance(x, sp.csr_array) else int(x.size)


def chunk_order(config: TrainConfig, epoch: int) -> Sequence[int]:
    """The walk of an epoch: ``order[position]`` is a chunk; the same on every stage."""
    if not config.staleness_settings.shuffle_chunks:
        return range(config.chunks)
    order: list[int] = (
        np.random.default_rng([config.seed, epoch]).permutation(config.chunks).tolist()
    )
    return order
