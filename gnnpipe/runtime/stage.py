"""One stage on one rank: its layers, their histories, and the tape that backward walks.

The steps of a stage are cut where rows are pushed. Each step of a chunk is a small autograd graph
of its own, from leaves (what was aggregated, values from the step before) to the rows it pushes and
the values it hands on; what lies between two steps is done by the histories. So the order of steps
is free, and the same code serves a pipeline and a layer-by-layer walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gnnpipe.models import Layer, Rows, Values
from gnnpipe.runtime.history import BlockHistory, History

__all__ = ["Stage"]

Criterion = Callable[[Tensor, int], Tensor]
"""Logits [C, classes] of a chunk's own rows and the chunk to its part of the loss, a scalar."""


@dataclass
class _Step:
    """What backward needs of one step of one chunk."""

    leaves: Values
    received: Tensor | None
    outputs: Values
    pushed: Tensor | None


@dataclass
class _Walk:
    """A chunk on its way through the stage."""

    values: Values
    tape: list[_Step] = field(default_factory=list)
    grads: Values = field(default_factory=dict)


class Stage:
    """n consecutive layers with a history each; n + 1 steps (see ``schedule.program``)."""

    def __init__(
        self,
        layers: Sequence[Layer],
        rows: Sequence[Rows],
        open_history: Callable[[Layer, bool], History],
        criterion: Criterion | None,
    ) -> None:
        """Layers in order, the ``Rows`` of each chunk, and for the last stage the loss.

        ``open_history`` makes the history of a layer, for training (True) or evaluation.
        """
        self.layers = list(layers)
        self.rows = list(rows)
        self.criterion = criterion
        self._open = open_history
        self.histories: list[History] = [open_history(layer, True) for layer in layers]
        self._scratch: dict[int, History] = {}
        self._walks: dict[int, _Walk] = {}
        self._epoch = 0
        self._training = False

    @property
    def num_steps(self) -> int:
        """n + 1."""
        return len(self.layers) + 1

    def begin(self, epoch: int, training: bool) -> None:
        """Start a pass over all chunks."""
        self._epoch, self._training = epoch, training
        self._walks.clear()
        if training:
            for history in self.histories:
                history.begin_epoch(epoch)

    def end(self) -> None:
        """Finish the pass: snapshots after training, nothing left after evaluation."""
        if self._training:
            for history in self.histories:
                history.end_epoch(self._epoch)
        self._scratch.clear()
        self._walks.clear()

    def enter(self, chunk: int, values: Values) -> None:
        """Values [C, width] of a chunk from the stage before; none for the first stage."""
        self._walks[chunk] = _Walk(values)

    def forward(self, chunk: int, steps: range) -> Values:
        """Run steps of a chunk; the values behind the last of them."""
        walk = self._walks[chunk]
        with torch.set_grad_enabled(self._training):
            for step in steps:
                walk.values = self._forward_step(chunk, step, walk)
        return walk.values

    def _forward_step(self, chunk: int, step: int, walk: _Walk) -> Values:
        values = received = pushed = None
        leaves = {name: _leaf(value, self._training) for name, value in walk.values.items()}
        values = leaves
        if step > 0:
            history = self._history(step - 1)
            received = _leaf(history.read(chunk), self._training)
            rows = self._rows(chunk, history)
            values = self.layers[step - 1].after(received, values, rows)
        if step < len(self.layers):
            pushed, values = self.layers[step].before(values, self._rows(chunk, None))
            self._history(step).push(chunk, pushed)
        elif self._training and self.criterion is not None:
            values = {"loss": self.criterion(values["x"], chunk)}
        if self._training:
            walk.tape.append(_Step(leaves, received, values, pushed))
        return values

    def seed(self, chunk: int, grads: Values) -> None:
        """Gradients of the values that the chunk left the stage with."""
        self._walks[chunk].grads = grads

    def seed_loss(self, chunk: int) -> None:
        """The last stage starts backward at the loss itself."""
        loss = self._walks[chunk].values["loss"]
        self.seed(chunk, {"loss": torch.ones_like(loss)})

    def backward(self, chunk: int, steps: range) -> Values:
        """Undo steps (from the last to the first); the gradients of the values in front of them."""
        walk = self._walks[chunk]
        for step in reversed(steps):
            record = walk.tape.pop()
            outputs, grads = [], []
            if record.pushed is not None:
                outputs.append(record.pushed)
                grads.append(self.histories[step].pull(chunk))
            for name, value in record.outputs.items():
                outputs.append(value)
                grads.append(walk.grads[name])
            torch.autograd.backward(outputs, grads)
            if record.received is not None:
                self.histories[step - 1].record(chunk, _grad(record.received))
            walk.grads = {name: _grad(leaf) for name, leaf in record.leaves.items()}
        return walk.grads

    def _history(self, layer: int) -> History:
        """The table of a layer: the lasting one in training, a passing one in evaluation."""
        if self._training:
            return self.histories[layer]
        if layer not in self._scratch:
            # Layer by layer only the table that is read and the one that is written are needed.
            self._scratch = {k: h for k, h in self._scratch.items() if k == layer - 1}
            self._scratch[layer] = self._open(self.layers[layer], False)
        return self._scratch[layer]

    def _rows(self, chunk: int, history: History | None) -> Rows:
        block = history.block(chunk) if isinstance(history, BlockHistory) else None
        return replace(self.rows[chunk], epoch=self._epoch, training=self._training, block=block)


def _leaf(value: Tensor, requires_grad: bool) -> Tensor:
    return value.detach().requires_grad_(requires_grad)


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
