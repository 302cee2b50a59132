"""The result of ``prepare``: every decision of a run, before anything large is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from gnnpipe.capture import RecordedModel
from gnnpipe.capture.link_decoder import without_pairs
from gnnpipe.config import StalenessSettings, TrainConfig
from gnnpipe.config.settings import BY_CHUNK_SETTINGS
from gnnpipe.graph.chunking import Chunking, renumber
from gnnpipe.graph.graph import Graph
from gnnpipe.graph.quality import CutQuality
from gnnpipe.models import Model
from gnnpipe.optim.optimizers import OptimizerChoice
from gnnpipe.perf import CommVolume
from gnnpipe.plan import (
    LossRows,
    ModelGraph,
    Plan,
    RowWay,
    StageDag,
    gradient_buckets,
    shared_tables,
)
from gnnpipe.schedule import SCHEDULES, CheckedProgram, evaluation_program, training_program
from gnnpipe.setup.inputs import number_dtype, row_dtype
from gnnpipe.setup.loss_rows import find_loss_rows, loss_row_mask
from gnnpipe.tasks.loss import LossFn


@dataclass(frozen=True, eq=False)
class Prepared:
    """All decisions of a run; the same on every rank."""

    config: TrainConfig
    graph: Graph
    """The graph in the order of ``chunking``."""
    digest: str
    """Digest of the graph as it was given; a run is resumed with the same graph only."""
    model: Model
    metric: str
    """The metric reported beside accuracy; never 'auto'."""
    loss_fn: LossFn | None
    """The user's own loss; ``None``: cross entropy, or squared error for numbers."""
    optimizer: OptimizerChoice | None
    """The user's own optimizer; ``None``: the one that the settings name."""
    model_graph: ModelGraph
    dag: StageDag
    """The stages of the plan."""
    chunking: Chunking
    """Chunks, and the parts from which the shards of all stages are made (``Plan.split``)."""
    qualities: tuple[CutQuality, ...]
    """By stage."""
    program: CheckedProgram
    """The program of usual epochs; if it spans several, of the most up to a flush."""
    exact_program: CheckedProgram
    """The program of exact epochs, in a run whose usual epochs have stale reads."""
    probes: npt.NDArray[np.int64]
    """[P] rows of the probe vertices in ``graph``, ascending; empty: no forecast."""
    volume: CommVolume
    """Bytes of an epoch, with its forecast if it has one."""
    chunk_edges: sp.coo_array | None
    """[K, K] edges by (reading chunk, chunk read); ``None`` in an exact run."""
    refill_epochs: int = 0
    """Epochs at the start that are exact to fill tables that a checkpoint did not store."""

    given_edges: Graph | None = None
    """The graph as it was given, without features, if forward makes other edges in every epoch."""

    def edges_of_epoch(self, epoch: int) -> tuple[Graph, Mapping[str, Tensor]]:
        """Draws the edges that the model reads in a training epoch (from 0).

        Returns the graph of these edges in the order of ``chunking``, without features, and the
        values of vertices [N, ...] in the order given.
        """
        assert self.given_edges is not None
        inner = without_pairs(self.model)
        assert isinstance(inner, RecordedModel)
        graph, values = inner.graph_of_epoch(self.given_edges, self.dtype, self.config.seed, epoch)
        return renumber(graph, self.chunking), values

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.dag.plan

    @cached_property
    def _ways(self) -> Mapping[str, RowWay]:
        return {self.model_graph.ops[op].name: way for op, way in self.plan.ways.items()}

    def way_of(self, op: str) -> RowWay:
        """How the rows of the op with this name travel among the shards."""
        return self._ways.get(op, RowWay.HALO)

    @cached_property
    def chunkings(self) -> tuple[Chunking, ...]:
        """The chunks and shards of every stage; stages of equal shards have the same object."""
        made = {bounds: self.chunking.merged(bounds) for bounds in set(self.plan.split.bounds)}
        return tuple(made[bounds] for bounds in self.plan.split.bounds)

    @property
    def quality(self) -> CutQuality:
        """The quality of the partition of the first stage with the most shards."""
        return max(self.qualities, key=lambda quality: quality.shards)

    @cached_property
    def evaluation_program(self) -> CheckedProgram:
        """The program of an exact forward pass."""
        return evaluation_program(self.dag)

    @cached_property
    def staleness(self) -> StalenessSettings:
        """Settings of stale rows for the plan's number of chunks."""
        return self.config.staleness_settings_for(self.plan.chunks, self.plan.schedule)

    def recomputes(self, stage: int) -> bool:
        """Whether a stage keeps only the inputs of its steps until backward."""
        return self.config.recompute or self.plan.stages[stage].recompute

    def recompute_every(self, stage: int) -> int:
        """Steps that backward of a stage recomputes together; 0: none is recomputed."""
        return self.config.recompute_every if self.recomputes(stage) else 0

    @property
    def exact_epochs(self) -> int:
        """Number of exact epochs at the start of a run whose usual epochs have stale reads."""
        if self.program.is_exact or self.program.steps_by_chunk:
            return 0  # by chunk, tables that a checkpoint did not store fill as in a new run
        return max(self.staleness.exact_epochs, self.refill_epochs)

    def program_of(self, epoch: int) -> CheckedProgram:
        """Return the program of an epoch (from 0), unless gradients jumped (``ExactEpochs``)."""
        return self.exact_program if epoch < self.exact_epochs else self.program

    @property
    def spans_epochs(self) -> bool:
        """Whether usual epochs follow each other without a flush between them."""
        return SCHEDULES[self.plan.schedule].spans_epochs

    def program_over(self, epochs: int) -> CheckedProgram:
        """Return the program of some usual epochs up to a flush."""
        if epochs not in self._programs:
            buckets = gradient_buckets(self.model_graph, self.plan, self.dtype.itemsize)
            made = training_program(
                self.dag,
                buckets,
                epochs=epochs,
                steps_every=self.config.steps_every,
                passes_ahead=self.config.passes_ahead,
            )
            self._programs[epochs] = made
        return self._programs[epochs]

    @cached_property
    def drained_by_epoch(self) -> Prepared:
        """The same run by fill-drain, for measuring the steps of a run with steps by chunk.

        The times of rows and edges do not depend on the order of the passes.
        """
        defaults = {name: getattr(TrainConfig, name) for name in BY_CHUNK_SETTINGS}
        config = replace(self.config, staleness="none", **defaults)
        plan = replace(self.plan, schedule=config.schedule)
        dag = StageDag.of(plan, self.model_graph)
        buckets = gradient_buckets(self.model_graph, plan, self.dtype.itemsize)
        program = training_program(dag, buckets)
        return replace(self, config=config, dag=dag, program=program)

    @cached_property
    def _programs(self) -> dict[int, CheckedProgram]:
        return {self.program.epochs: self.program}

    def volume_of(self, is_exact: bool) -> CommVolume:
        """Return the bytes of an epoch; an exact epoch has no forecast."""
        return replace(self.volume, control=0) if is_exact else self.volume

    def chunk_order(self, epoch: int) -> Sequence[int]:
        """Return the chunks in the order of an epoch, the same on every stage."""
        seed = self.config.seed if self.staleness.shuffle_chunks else None
        in_flight = self.program.most_in_flight if self.spans_epochs else 1
        return chunk_order(self.plan.chunks, seed, epoch, in_flight)

    def passes(self, epoch: int, epochs: int) -> list[int]:
        """Return the chunk of every pass of some epochs from ``epoch`` on."""
        return [chunk for e in range(epochs) for chunk in self.chunk_order(epoch + e)]

    def program_text(self) -> str:
        """Returns all programs of the run as text."""
        when = [f"epochs 1 to {self.exact_epochs}"] if self.exact_epochs else []
        if self.staleness.exact_above and not self.program.is_exact:
            when.append("epochs after a jump of the gradients")
        exact = f"# {', '.join(when)}\n{self.exact_program.text()}# others\n" if when else ""
        return exact + self.program.text()

    @cached_property
    def shared_tables(self) -> frozenset[str]:
        """Aggregations whose result and gradient share a table."""
        if self.program.steps_by_chunk:
            return frozenset()  # there is no table of gradients
        return shared_tables(
            self.model_graph,
            self.plan,
            self.loss_rows.ops,
            self.row_dtype != self.dtype,
            self.program.is_exact,
        )

    @cached_property
    def loss_rows(self) -> LossRows:
        """Loss rows of the whole graph: the rows that the last aggregation computes in training."""
        return find_loss_rows(
            self.model_graph, self.graph, self.loss_row_mask, self.plan.stages[-1].ops
        )

    @cached_property
    def loss_row_mask(self) -> npt.NDArray[np.bool_]:
        """[N], whether a row is one of ``loss_rows``."""
        return loss_row_mask(self.graph, self.chunking)

    @property
    def dtype(self) -> torch.dtype:
        """Number type of weights and rows."""
        return number_dtype(self.config)

    @property
    def row_dtype(self) -> torch.dtype:
        """Number type of rows on the wire and in the tables."""
        return row_dtype(self.config)


MOST_EPOCHS, MOST_PASSES = 10, 320
"""Most epochs between two flushes, and about as many passes: a flush of four stages then costs 1 %
of the time."""


def epochs_to_flush(config: TrainConfig, chunks: int, epoch: int, last_epoch: int) -> int:
    """Returns the number of epochs from ``epoch`` (from 0) to the next flush, at least 1.

    Flushes come where evaluations and checkpoints are due, and after ``MOST_EPOCHS`` epochs or,
    with many chunks, ``MOST_PASSES``. They depend on the settings alone, and not on interruptions,
    so that a resumed run is the same.
    """
    most = min(MOST_EPOCHS, math.ceil(MOST_PASSES / chunks))
    periods = (most, config.eval_every, config.checkpoint_every)
    ends = [(epoch // period + 1) * period for period in periods if period]
    return max(min(*ends, last_epoch) - epoch, 1)


def chunk_order(chunks: int, seed: int | None, epoch: int, in_flight: int = 1) -> Sequence[int]:
    """Draws the permutation of the chunks for an epoch; ascending without a ``seed``.

    With up to ``in_flight`` passes in flight across epochs, the chunks are divided into groups that
    keep their places: so at least this many passes lie between two of one chunk, and no epoch's
    order depends on another's.
    """
    if seed is None:
        return range(chunks)
    generator = np.random.default_rng([seed, epoch])
    largest = chunks - in_flight + 1
    if largest >= chunks:
        order: list[int] = generator.permutation(chunks).tolist()
        return order
    drawn = np.random.default_rng([seed]).permutation(chunks)
    groups = np.array_split(drawn, -(-chunks // largest))
    return [int(chunk) for group in groups for chunk in generator.permutation(group)]
