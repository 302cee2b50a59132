"""One stage on one rank: its piece of the model, the histories, and the tape that backward walks.

The steps of a stage are cut where rows are pushed. Each step of a chunk is a small autograd graph
of its own, from leaves (what was aggregated, values from the step before) to the rows it pushes and
the values it hands on; what lies between two steps is done by the histories. So the order of steps
is free, and the same code serves a pipeline and a layer-by-layer walk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gnnpipe.models import Aggregation, Received, Rows, StageModule, Values
from gnnpipe.models.sparse_input_linear import FeatureTable
from gnnpipe.ops.output_buffer import OutputBuffer
from gnnpipe.runtime.history.base import History
from gnnpipe.runtime.history.block import BlockHistory
from gnnpipe.runtime.history.mean import MeanHistory

__all__ = ["ChunkLossRows", "Stage"]

Criterion = Callable[[Tensor, int], Tensor]
"""Logits [C, classes] of a chunk's own rows, or of those asked for, and the chunk to its part of
the loss, a scalar."""

Entries = dict[str, GradientEdge | None]
"""Where backward enters, by name; None where nothing there depends on a weight or on another row.
The rows themselves are not kept: autograd keeps those that it needs."""


@dataclass
class _Step:
    """What backward needs of one step of one chunk."""

    leaves: Values
    received: dict[str, Received]
    made: tuple[Entries, Entries] | None
    """Of what was pushed, and of what was handed on; None: the step is to be run again."""
    output_buffer: OutputBuffer | None  # of what was pushed


@dataclass
class _Walk:
    """A chunk on its way through the stage."""

    values: Values
    tape: list[_Step] = field(default_factory=list)
    grads: Values = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ChunkLossRows:
    """The rows that the last step of training makes, where it does not make all of a chunk."""

    rows: Sequence[Rows]
    """By chunk, [R] of them."""
    places: Sequence[Tensor]
    """[R] int64, their numbers in the chunk."""


class Stage:
    """A piece of the model, with a history for each of its aggregations."""

    def __init__(
        self,
        stage_module: StageModule,
        rows: Sequence[Rows],
        open_history: Callable[[Aggregation, bool], History],
        criterion: Criterion | None,
        recompute: bool = False,
        precomputed: Mapping[str, Tensor] | None = None,
        loss_rows: ChunkLossRows | None = None,
    ) -> None:
        """The piece, the ``Rows`` of each chunk, and for the last stage the loss.

        ``open_history`` makes the history of an aggregation, for training (True) or evaluation.
        With ``recompute`` only what a step reads is kept until backward, not what it makes on the
        way; what it read stale cannot be read again, for the tables have moved on.

        ``precomputed``: by aggregation of features its result [n, F] for all rows, without history.
        ``loss_rows``: the rows that the last aggregations make in training, if not all.
        """
        self._precomputed = precomputed or {}
        self.recompute = recompute
        self.stage_module = stage_module
        self.rows = list(rows)
        self.criterion = criterion
        self.watch: Callable[[int, int, Values], None] | None = None
        """Called with (chunk, step, what it made), where somebody looks for a fault."""
        self._open = open_history
        self.histories = {
            a.name: open_history(a, True)
            for a in stage_module.aggregations
            if a.name not in self._precomputed
        }
        """Of all aggregations but those that are made once."""
        self._scratch: dict[str, History] = {}
        self._walks: dict[int, _Walk] = {}
        self._loss_rows = loss_rows
        self._rows_now = self._loss_rows_now = self.rows
        self._epoch = 0
        self._training = self._is_exact = False

    @property
    def num_steps(self) -> int:
        """Those of the piece."""
        return self.stage_module.num_steps

    def begin(self, epoch: int, training: bool, is_exact: bool = False) -> None:
        """Start a pass over all chunks; ``is_exact``: none of its reads is stale."""
        self._epoch, self._training, self._is_exact = epoch, training, is_exact
        self._rows_now = _in_pass(self.rows, epoch, training)
        self._walks.clear()
        if training:
            loss_rows = [] if self._loss_rows is None else self._loss_rows.rows
            self._loss_rows_now = _in_pass(loss_rows, epoch, training)
            for table in self._feature_tables():
                table.begin()
            for rows in self._parts([*self.rows[:1], *loss_rows[:1]]):
                if rows.masks is not None:
                    rows.masks.begin(rows.seed, epoch)
            for history in self.histories.values():
                history.begin_epoch(is_exact)

    def end(self, has_stepped: bool = True) -> None:
        """Finish the pass: snapshots after training, nothing left after evaluation.

        Moving statistics follow a pass only if its step was made.
        """
        if self._training:
            for table in self._feature_tables():
                table.end()
            for name, history in self.histories.items():
                history.end_epoch(self._epoch, self._is_exact)
                if has_stepped and isinstance(history, MeanHistory) and history.count:
                    self.stage_module.observe(name, history.mean, history.count)
        self._scratch.clear()
        self._walks.clear()

    def _feature_tables(self) -> set[FeatureTable]:
        """Those that the chunks read, of every type of vertices."""
        parts = self._parts(self.rows)
        return {part.features.table for part in parts if part.features is not None}

    def _parts(self, several: Sequence[Rows]) -> list[Rows]:
        """Of every type of vertices."""
        return [part for rows in several for part in (rows, *rows.parts.values())]

    def enter(self, chunk: int, values: Values) -> None:
        """Values [C, width] of a chunk from the stage before; none for the first stage."""
        self._walks[chunk] = _Walk(values)

    def forward(self, chunk: int, steps: range) -> Values:
        """Run steps of a chunk; the values behind the last of them."""
        walk = self._walks[chunk]
        for step in steps:
            walk.values = self._forward_step(chunk, step, walk)
        return walk.values

    def _forward_step(self, chunk: int, step: int, walk: _Walk) -> Values:
        leaves = {name: _leaf(value, self._training) for name, value in walk.values.items()}
        received = {}
        if not self._training:
            # Step by step only the tables that are read and those that are written are needed.
            alive = {
                a.name for one in self.stage_module.rounds[max(step - 1, 0) : step + 1] for a in one
            }
            self._scratch = {k: h for k, h in self._scratch.items() if k in alive}
        if step > 0:
            for aggregation in self.stage_module.rounds[step - 1]:
                if aggregation.name in self._precomputed:
                    rows = self._precomputed[aggregation.name][self._rows_of(chunk)]
                    received[aggregation.name] = Received(rows)
                    continue
                history = self._history(aggregation)
                block = history.block(chunk) if isinstance(history, BlockHistory) else None
                leaf = _leaf(history.read(chunk), self._training)
                received[aggregation.name] = Received(leaf, block)
        output_buffer = self._output_buffer(chunk, step)
        with torch.set_grad_enabled(is_tracked := self._training and not self.recompute):
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
            made = None if self.recompute else (_entries(pushed), _entries(values))
            walk.tape.append(_Step(leaves, received, made, output_buffer))
        return values

    def _compute(
        self,
        chunk: int,
        step: int,
        leaves: Values,
        received: dict[str, Received],
        may_overwrite: bool,
        output_buffer: OutputBuffer | None = None,
    ) -> tuple[Values, Values]:
        """What a step of the piece pushes and hands on; behind the last one the loss."""
        loss_rows = self._loss_rows if self._training else None
        is_last = step == self.num_steps - 1
        rows = (self._loss_rows_now if is_last and loss_rows is not None else self._rows_now)[chunk]
        rows = replace(rows, output_buffer=output_buffer, may_overwrite=may_overwrite)
        pushed, values = self.stage_module.step(step, leaves, received, rows)
        pushed = {name: made for name, made in pushed.items() if name not in self._precomputed}
        if step == self.num_steps - 2 and loss_rows is not None:
            # Inside of the step, so that autograd brings the gradients to their places.
            values = {
                name: v.index_select(0, loss_rows.places[chunk]) for name, v in values.items()
            }
        if is_last and self._training and self.criterion is not None:
            values = {"loss": self.criterion(values["x"], chunk)}
        return pushed, values

    def _output_buffer(self, chunk: int, step: int) -> OutputBuffer | None:
        """Where the step can make what it pushes; not again in backward, with ``recompute``."""
        if not self.stage_module.writes_output_buffer(step):
            return None
        (aggregation,) = self.stage_module.rounds[step]
        if aggregation.name in self._precomputed:
            return None
        return self._history(aggregation).output_buffer(chunk)

    def seed(self, chunk: int, grads: Values) -> None:
        """Gradients of the values that the chunk left the stage with.

        Those are let go: while they are there, so is the graph behind them, with its leaves.
        """
        walk = self._walks[chunk]
        walk.values, walk.grads = {}, grads

    def seed_loss(self, chunk: int) -> None:
        """The last stage starts backward at the loss itself."""
        loss = self._walks[chunk].values["loss"]
        self.seed(chunk, {"loss": torch.ones_like(loss)})

    def backward(self, chunk: int, steps: range, following: int | None = None) -> Values:
        """Undo steps, the last first; the gradients of the values in front of them.

        ``following``: a chunk whose gradients of the last step's push are all recorded by now, and
        which comes next; those of its halo rows leave meanwhile.
        """
        walk = self._walks[chunk]
        for step in reversed(steps):
            record = walk.tape.pop()
            made = record.made
            if record.output_buffer is not None:
                record.output_buffer.check_kept()
            if made is None:
                with torch.enable_grad():
                    again = self._compute(chunk, step, record.leaves, record.received, True)
                made = _entries(again[0]), _entries(again[1])
                del again
            pushed, handed_on = made
            grads = [self.histories[name].pull(chunk) for name in pushed]
            grads += [walk.grads[name] for name in handed_on]
            if following is not None and step == steps.stop - 1:
                for name in pushed:
                    self.histories[name].begin_pull(following)
            _backward([*pushed.values(), *handed_on.values()], grads)
            for name, received in record.received.items():
                if name not in self._precomputed:
                    self.histories[name].record(chunk, _grad(received.rows))
            walk.grads = {name: _grad(leaf) for name, leaf in record.leaves.items()}
        return walk.grads

    def _rows_of(self, chunk: int) -> slice:
        """Those of a chunk among all own rows."""
        rows = self._rows_now[chunk]
        return slice(rows.start, rows.start + len(rows.keys))

    def _history(self, aggregation: Aggregation) -> History:
        """The table of an aggregation: the lasting one in training, a passing one otherwise."""
        if self._training:
            return self.histories[aggregation.name]
        if aggregation.name not in self._scratch:
            self._scratch[aggregation.name] = self._open(aggregation, False)
        return self._scratch[aggregation.name]


def _in_pass(several: Sequence[Rows], epoch: int, training: bool) -> list[Rows]:
    return [replace(rows, epoch=epoch, training=training) for rows in several]


def _entries(made: Values) -> Entries:
    return {name: get_gradient_edge(t) if t.requires_grad else None for name, t in made.items()}


def _backward(entries: list[GradientEdge | None], grads: list[Tensor]) -> None:
    pairs = [(e, g) for e, g in zip(entries, grads, strict=True) if e is not None]
    if pairs:
        torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])


def _leaf(value: Tensor, requires_grad: bool) -> Tensor:
    return value.detach().requires_grad_(requires_grad)


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
