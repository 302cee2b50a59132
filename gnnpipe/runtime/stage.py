"""One stage on one rank: its ops, its histories, and the tape for backward.

The steps of a stage are cut where rows are pushed. Each step of a chunk is a small autograd graph
of its own, from leaves (aggregated rows, values of the previous step) to pushed rows and values.
The histories connect the steps. The same code therefore runs the steps of all chunks in any order
that ``schedule.check`` accepts: chunk by chunk in a pipeline, or layer by layer.

Shapes: C rows of a chunk, R loss rows of a chunk, F columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gnnpipe.models import Aggregation, MeanOfRows, Received, Rows, StageModule, Values
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.plan import Segments
from gnnpipe.runtime.history.base import History
from gnnpipe.runtime.history.block import BlockHistory
from gnnpipe.runtime.history.mean import MeanHistory


class Criterion(Protocol):
    """The loss, which is a sum over chunks."""

    def __call__(self, logits: Tensor, chunk: int, epoch: int) -> Tensor:
        """Return the chunk's part of the loss, a scalar, for its logits [C or R, classes]."""

    def step_scale(self, chunks: Sequence[int]) -> float:
        """Return the factor that makes the sum of these chunks' parts a mean of their own."""


Edges = dict[str, GradientEdge | None]
"""Start of backward by name; ``None`` if the value depends on no weight and no leaf. Unlike a value
tensor, an edge keeps nothing alive that autograd has not saved."""


@dataclass
class _StepRecord:
    """State of one step of one chunk that backward needs."""

    leaves: Values | None
    """``None``: backward computes these again, from the last step before with leaves."""
    received: dict[str, Received]
    """Without leaves only the rows that cannot be aggregated again (``History.can_repeat``)."""
    edges: tuple[Edges, Edges] | None
    """Gradient edges of the pushed rows and of the values; ``None``: the step is recomputed."""
    output_buffer: OutputBuffer | None


@dataclass
class _ChunkState:
    """A chunk between two steps."""

    values: Values
    epoch: int
    rows: Rows
    loss_rows: Rows
    """The rows that the last step of training computes."""
    tape: list[_StepRecord] = field(default_factory=list)
    grads: Values = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ChunkLossRows:
    """Loss rows of each chunk: in training the last step computes only these."""

    rows: Sequence[Rows]
    """By chunk, R rows each."""
    places: Sequence[Tensor]
    """By chunk [R] int64, row numbers inside the chunk."""


class Stage:
    """The ops of one stage, with a history for each aggregation."""

    def __init__(
        self,
        stage_module: StageModule,
        rows: Sequence[Rows],
        open_history: Callable[[Aggregation, bool], History],
        criterion: Criterion | None,
        recompute_every: int = 0,
        loss_rows: ChunkLossRows | None = None,
    ) -> None:
        """Set up a stage.

        Args:
            stage_module: The ops.
            rows: Rows of each chunk.
            open_history: Makes the history of an aggregation, for training (True) or evaluation.
            criterion: Loss of a chunk, on the last stage.
            recompute_every: Number n of steps that backward runs again from the inputs of the
                first (``plan.Segments``); 0: keep what autograd saves. Of the other steps, only the
                aggregated rows are kept, and only where the tables have changed by then.
            loss_rows: Rows that the last step computes in training; ``None``: all rows.
        """
        self.stage_module = stage_module
        self.segments = (
            Segments(stage_module.num_steps, recompute_every) if recompute_every else None
        )
        """Steps that are recomputed together; ``None``: nothing is recomputed."""
        self.num_steps = stage_module.num_steps
        self.rows = list(rows)
        self.criterion = criterion
        self.watch: Callable[[int, int, Values], None] | None = None
        """Called with chunk, step and the step's results, to look for faults."""
        self.draw_edges: Callable[[int | None, bool], None] | None = None
        """Called before every pass, if forward draws random edges, with the number of the training
        epoch (``None``: evaluation) and whether the pass is a label iteration."""
        self._open = open_history
        self.histories = {a.name: open_history(a, True) for a in stage_module.aggregations}
        """By aggregation."""
        self._scratch: dict[str, History] = {}
        """Histories of the current evaluation, by aggregation."""
        self._means: dict[str, MeanOfRows] = {}
        """Means and sums over all vertices in a pass that ends, by aggregation."""
        self._chunks: dict[int, _ChunkState] = {}
        self._loss_rows = loss_rows
        self._epoch = 0
        self._training = self._is_exact = self._is_label_iteration = False

    def begin(
        self,
        epoch: int,
        training: bool,
        order: Sequence[int] = (),
        is_exact: bool = False,
        by_chunk: bool = False,
    ) -> None:
        """Start a pass over all chunks, or in training several from this epoch on.

        Args:
            epoch: Number of the epoch.
            training: Whether backward follows.
            order: In training, the chunk of every pass.
            is_exact: No read is stale.
            by_chunk: Gradients stay in their chunk, and the optimizer may step after each chunk.
        """
        self._epoch, self._training, self._is_exact = epoch, training, is_exact
        self._is_label_iteration = False
        self._chunks.clear()
        if self.draw_edges is not None:
            self.draw_edges(epoch if training else None, False)
        if training:
            loss_rows = [] if self._loss_rows is None else self._loss_rows.rows
            for table in self._feature_tables():
                table.begin()
            self._begin_masks(self.rows, epoch, order)
            self._begin_masks(loss_rows, epoch, order)
            for history in self.histories.values():
                history.begin_epoch(is_exact, by_chunk)

    def begin_label_iteration(self, dropout_epoch: int) -> None:
        """Start a forward pass of the model in training mode, which keeps nothing for backward.

        ``dropout_epoch``: number that keys the dropout masks and random edges.
        """
        self.begin(dropout_epoch, False)
        self._is_label_iteration = True
        if self.draw_edges is not None:
            self.draw_edges(dropout_epoch, True)
        self._begin_masks(self.rows, dropout_epoch, range(len(self.rows)))

    def _begin_masks(self, chunks: Sequence[Rows], epoch: int, order: Sequence[int]) -> None:
        """Tell the sources of dropout masks which chunks will pass."""
        for rows in self._parts(chunks[:1]):
            if rows.masks is not None:
                rows.masks.begin(rows.seed, epoch, order)

    def end(self, has_stepped: bool = True) -> None:
        """End the pass; running statistics are updated only if the optimizer ``has_stepped``."""
        if self._training:
            for table in self._feature_tables():
                table.end()
            for name, history in self.histories.items():
                history.end_epoch(self._epoch, self._is_exact)
                self._keep_mean(name, history)
        self._free_scratch(frozenset())
        if (self._training and has_stepped) or self._is_label_iteration:
            self.stage_module.observe(self._means)
        self._means.clear()
        self._chunks.clear()

    def end_inner_epoch(self, has_stepped: bool) -> None:
        """Update running statistics at the end of an epoch that no flush ends.

        The means are over the newest rows, some of which may be of the next epoch already, and then
        of a chunk whose loss is not known yet. Means that are not finite change no statistics.
        """
        if has_stepped:
            for name, history in self.histories.items():
                self._keep_mean(name, history)
            if all(bool(mean.value.isfinite().all()) for mean in self._means.values()):
                self.stage_module.observe(self._means)
        self._means.clear()

    def abandon(self) -> None:
        """Free the rows and tables of a pass that failed."""
        self._scratch.clear()
        self._means.clear()
        self._chunks.clear()

    def _keep_mean(self, name: str, history: History) -> None:
        """Keep a mean or sum over all vertices, from which buffers are updated."""
        if isinstance(history, MeanHistory) and history.count:
            self._means[name] = MeanOfRows(history.mean, history.count)

    def _feature_tables(self) -> set[FeatureTable]:
        parts = self._parts(self.rows)
        return {part.features.table for part in parts if part.features is not None}

    def _parts(self, chunks: Sequence[Rows]) -> list[Rows]:
        """Return the rows of all chunks and of all vertex types."""
        return [part for rows in chunks for part in (rows, *rows.parts.values())]

    def enter(self, chunk: int, values: Values, later: int = 0) -> None:
        """Start a pass of a chunk with the values [C, width] from earlier stages.

        ``later``: epochs since that of ``begin``.
        """
        assert chunk not in self._chunks or not self._chunks[chunk].tape, "a pass is in flight"
        epoch = self._epoch + later
        drops = self._training or self._is_label_iteration
        rows = replace(self.rows[chunk], epoch=epoch, training=drops)
        loss_rows = rows
        if self._training and self._loss_rows is not None:
            loss_rows = replace(self._loss_rows.rows[chunk], epoch=epoch, training=True)
        self._chunks[chunk] = _ChunkState(values, epoch, rows, loss_rows)

    def forward(self, chunk: int, steps: range) -> Values:
        """Run steps of a chunk; return the values of the last step."""
        state = self._chunks[chunk]
        for step in steps:
            state.values = self._forward_step(chunk, step, state)
        return state.values

    def _forward_step(self, chunk: int, step: int, state: _ChunkState) -> Values:
        leaves = {name: _leaf(value, self._training) for name, value in state.values.items()}
        if not self._training:
            rounds = self.stage_module.rounds[max(step - 1, 0) : step + 1]
            self._free_scratch({aggregation.name for one in rounds for aggregation in one})
        received = self._received(chunk, step)
        output_buffer = self._output_buffer(chunk, step)
        with torch.set_grad_enabled(is_tracked := self._training and self.segments is None):
            pushed, values = self._compute(chunk, step, leaves, received, is_tracked, output_buffer)
        if output_buffer is not None:
            output_buffer.check(pushed)
        if self.watch is not None:
            self.watch(chunk, step, pushed | values)
        if step < self.num_steps - 1:
            for aggregation in self.stage_module.rounds[step]:
                if aggregation.name in pushed:
                    self._history(aggregation).push(chunk, pushed[aggregation.name])
        if self._training:
            edges = (_edges(pushed), _edges(values)) if is_tracked else None
            record = _StepRecord(leaves, received, edges, output_buffer)
            if self.segments is not None and not self.segments.is_kept(step):
                self._forget_inputs(record)
            state.tape.append(record)
        return values

    def _forget_inputs(self, record: _StepRecord) -> None:
        """Free the inputs of a step that backward can compute again."""
        record.leaves = None
        record.received = {
            name: received
            for name, received in record.received.items()
            if not self.histories[name].can_repeat
        }

    def _free_scratch(self, needed: Collection[str]) -> None:
        """Free the tables of an evaluation, except those of the ``needed`` aggregations."""
        for name in self._scratch.keys() - set(needed):
            history = self._scratch.pop(name)
            if self._is_label_iteration:
                self._keep_mean(name, history)

    def _received(
        self, chunk: int, step: int, kept: Mapping[str, Received] | None = None
    ) -> dict[str, Received]:
        """Aggregate the rows that the previous step pushed, except rows that were ``kept``."""
        received: dict[str, Received] = {}
        for aggregation in self.stage_module.rounds[step - 1] if step else ():
            name = aggregation.name
            if kept is not None and name in kept:
                received[name] = kept[name]
                continue
            history = self._history(aggregation)
            block = history.block(chunk) if isinstance(history, BlockHistory) else None
            received[name] = Received(_leaf(history.read(chunk), self._training), block)
        return received

    def _compute(
        self,
        chunk: int,
        step: int,
        leaves: Values,
        received: dict[str, Received],
        may_overwrite: bool,
        output_buffer: OutputBuffer | None = None,
    ) -> tuple[Values, Values]:
        """Return the pushed rows and the values of a step; of the last training step the loss."""
        loss_rows, state = self._loss_rows if self._training else None, self._chunks[chunk]
        is_last = step == self.num_steps - 1
        rows = state.loss_rows if is_last else state.rows
        rows = replace(rows, output_buffer=output_buffer, may_overwrite=may_overwrite)
        pushed, values = self.stage_module.step(step, leaves, received, rows)
        if step == self.num_steps - 2 and loss_rows is not None:
            # Inside the step, so that autograd scatters the gradients.
            values = {
                name: v.index_select(0, loss_rows.places[chunk]) for name, v in values.items()
            }
        if is_last and self._training and self.criterion is not None:
            values = {"loss": self.criterion(values["x"], chunk, state.epoch)}
        return pushed, values

    def _output_buffer(self, chunk: int, step: int) -> OutputBuffer | None:
        """Return the memory for the rows that a step pushes, if the step can use one."""
        if not self.stage_module.writes_output_buffer(step):
            return None
        (aggregation,) = self.stage_module.rounds[step]
        return self._history(aggregation).output_buffer(chunk)

    def seed(self, chunk: int, grads: Values) -> None:
        """Start backward from the gradients of the chunk's output values.

        The values themselves are dropped, because they keep their graph and its leaves alive.
        """
        state = self._chunks[chunk]
        state.values, state.grads = {}, grads

    def seed_loss(self, chunk: int, together: Sequence[int]) -> None:
        """Start backward at the loss, on the last stage.

        ``together``: the chunks of the optimizer step, whose gradient is that of their mean loss.
        """
        assert self.criterion is not None
        loss, scale = self._chunks[chunk].values["loss"], self.criterion.step_scale(together)
        # Gradients of a loss that is not finite are NaN, even where its derivatives are finite: so
        # stages that decide alone leave the step out, too.
        self.seed(chunk, {"loss": loss.detach() * 0 + scale})

    def backward(self, chunk: int, steps: range, following: int | None = None) -> Values:
        """Run steps backward, the last first; return the gradients of the first step's leaves.

        ``following``: the next chunk, if all gradients that it pulls in the last of ``steps`` have
        been recorded. Its halo gradients are then sent during this chunk's backward.
        """
        state = self._chunks[chunk]
        for step in reversed(steps):
            if state.tape[step].edges is None:
                self._run_again(chunk, step, state)
            record = state.tape.pop()
            if record.output_buffer is not None:
                record.output_buffer.check_kept()
            assert record.edges is not None
            assert record.leaves is not None
            pushed, values = record.edges
            grads = [self.histories[name].pull(chunk) for name in pushed]
            grads += [state.grads[name] for name in values]
            if following is not None and step == steps.stop - 1:
                for name in pushed:
                    self.histories[name].begin_pull(following)
            _backward([*pushed.values(), *values.values()], grads)
            for name, received in record.received.items():
                self.histories[name].record(chunk, _grad(received.rows))
            state.grads = {name: _grad(leaf) for name, leaf in record.leaves.items()}
        if not state.tape:
            del self._chunks[chunk]
        return state.grads

    def _run_again(self, chunk: int, last: int, state: _ChunkState) -> None:
        """Compute the segment of step ``last`` again, from the last step before with leaves."""
        assert self.segments is not None
        segment, tape = self.segments.start(last), state.tape
        first = segment
        while tape[first].leaves is None:
            first -= 1
        values: Values = {}
        for step in range(first, last + 1):
            record, is_tracked = tape[step], step >= segment
            if record.leaves is None:
                record.leaves = {name: _leaf(value, True) for name, value in values.items()}
                record.received = self._received(chunk, step, record.received)
            with torch.set_grad_enabled(is_tracked):
                pushed, values = self._compute(
                    chunk, step, record.leaves, record.received, is_tracked
                )
            if step < last:
                self._push_again(chunk, pushed)
            if is_tracked:
                record.edges = _edges(pushed), _edges(values)
            elif step != self.segments.start(step):
                self._forget_inputs(record)

    def _push_again(self, chunk: int, pushed: Values) -> None:
        """Push rows once more whose table has been freed; all other tables still hold the rows."""
        for name, rows in pushed.items():
            if self.histories[name].can_repeat:
                self.histories[name].push(chunk, rows)

    def _history(self, aggregation: Aggregation) -> History:
        """Return an aggregation's history: the stage's own in training, else a temporary one."""
        if self._training:
            return self.histories[aggregation.name]
        if aggregation.name not in self._scratch:
            self._scratch[aggregation.name] = self._open(aggregation, False)
        return self._scratch[aggregation.name]


def _edges(made: Values) -> Edges:
    return {name: get_gradient_edge(t) if t.requires_grad else None for name, t in made.items()}


def _backward(edges: list[GradientEdge | None], grads: list[Tensor]) -> None:
    pairs = [(e, g) for e, g in zip(edges, grads, strict=True) if e is not None]
    if pairs:
        torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])


def _leaf(value: Tensor, requires_grad: bool) -> Tensor:
    return value.detach().requires_grad_(requires_grad)


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
