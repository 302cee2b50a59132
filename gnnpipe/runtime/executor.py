"""Runs a program: one small method per kind of action, nothing else.

The executor knows no schedule and no mode. What an epoch costs in bytes is what the mailbox, the
exchange and the gradient sum have counted between its first action and its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gnnpipe.graph.layout import ShardLayout
from gnnpipe.models import Values
from gnnpipe.plan import Plan
from gnnpipe.runtime.comm.halo_exchange import GradientSum, HaloExchange
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.p2p import PointToPoint
from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.runtime.stage import Stage
from gnnpipe.runtime.staleness.forecast import Forecaster, ProbeRows
from gnnpipe.schedule import (
    PROBE_POSITIONS,
    Action,
    ActionKind,
    CheckedProgram,
    Direction,
    recall_actions,
)

__all__ = ["CommBytes", "Executor", "LatestWeights", "WeightPolicy", "WeightUpdate"]

_AROUND = 4
"""Actions before and behind a failing one that are shown with it."""


@dataclass(frozen=True)
class CommBytes:
    """Bytes that one rank sent in an epoch, by axis."""

    pipeline: int
    graph: int
    gradient: int
    control: int
    """What the forecast of stale rows takes."""


class WeightPolicy(Protocol):
    """Weights that a stage computes with, per pass of a chunk."""

    def for_forward(self, action: Action) -> AbstractContextManager[None]:
        """Context of an F action, in which the module has the weights for the pass."""

    def for_backward(self, action: Action) -> AbstractContextManager[None]:
        """Context of a B action."""


class LatestWeights:
    """The current weights in every pass."""

    def for_forward(self, action: Action) -> AbstractContextManager[None]:
        """No change."""
        return nullcontext()

    def for_backward(self, action: Action) -> AbstractContextManager[None]:
        """No change."""
        return nullcontext()


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """Parts of the optimizer step."""

    gradient_sum: GradientSum
    grad_clip: GradClip
    """Checks and clips the gradients before the step."""
    optimizer: torch.optim.Optimizer | None
    weights: WeightPolicy = field(default_factory=LatestWeights)


class Executor:
    """This rank's interpreter of programs for one plan."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        stage: Stage,
        layouts: Mapping[str, ShardLayout],
        exchanges: Sequence[HaloExchange],
        update: WeightUpdate,
        dtypes: tuple[torch.dtype, torch.dtype],
        forecaster: Forecaster | None = None,
    ) -> None:
        """``layouts`` by the type of the vertices; ``exchanges`` are those of the histories;
        ``dtypes``: of values in this rank and of values that stages send.
        """
        self.plan = plan
        self.mesh = mesh
        self.stage = stage
        self.layouts = layouts
        self.exchanges = exchanges
        self.optimizer = update.optimizer
        self.forecaster = forecaster
        self.grad_clip = update.grad_clip
        self.has_stepped = True
        """Whether the last training pass changed the weights: not where loss or gradients were no
        numbers."""
        self.faulty_chunks: list[int] = []
        """Chunks whose loss was no number in the last training pass."""
        self.p2p = PointToPoint(mesh, *dtypes)
        self.gradient_sum = update.gradient_sum
        self._weights = update.weights
        self._widths_in = {t.source: t.widths for t in plan.receives(mesh.stage)}
        self._widths_out = {t.target: t.widths for t in plan.sends(mesh.stage)}
        leaving = {name for widths in self._widths_out.values() for name in widths}
        self._probes = ProbeRows(forecaster, leaving, self.p2p.is_rounding) if forecaster else None
        self._types = {k: v for t in plan.transfers for k, v in t.types.items()}
        self._probe_bytes = 0
        self.epoch_bytes = CommBytes(0, 0, 0, 0)
        """Of the last training pass."""
        self._order: Sequence[int] = range(plan.chunks)
        self._program: CheckedProgram | None = None
        self._next: Action | None = None
        self._at: tuple[Action, int] | None = None
        self._leaving: dict[int, dict[str, Tensor]] = {}
        self._results: dict[int, dict[str, Tensor]] = {}

    def run(
        self, program: CheckedProgram, order: Sequence[int], *, epoch: int, training: bool
    ) -> dict[int, dict[str, Tensor]]:
        """One pass; ``order[position]`` is the chunk that stands there.

        Returns by chunk what left the last stage: {"loss": scalar} in training, {"x": logits
        [C, classes]} in evaluation; empty on other stages. An exception is marked with the rank,
        stage, chunk and action it came from.
        """
        self._order, self._program = order, program
        self._results = {}
        actions = program.stages[self.mesh.stage]
        if any(action.kind is ActionKind.FORECAST for action in actions):
            self._make_ready(epoch)
        before = self._sent_bytes()
        recorder = self.mesh.recorder
        recorder.discard_epoch()
        if training:
            recorder.begin_epoch(order, program.is_exact)
        self.gradient_sum.forget()
        self.stage.begin(epoch, training, program.is_exact)
        self._walk(actions, epoch, _RUN)
        recorder.end_actions()
        self.p2p.drain()
        self._leaving.clear()
        self.stage.end(self.has_stepped)
        if training:
            after = self._sent_bytes()
            self.epoch_bytes = CommBytes(*(b - a for a, b in zip(before, after, strict=True)))
        return self._results

    def _walk(
        self, actions: Sequence[Action], epoch: int, run: Mapping[ActionKind, _Method]
    ) -> None:
        for index, action in enumerate(actions):
            self._at = action, epoch
            self._next = actions[index + 1] if index + 1 < len(actions) else None
            start_s = self.mesh.recorder.clock()
            try:
                run[action.kind](self, action)
            except Exception as error:
                error.add_note(f"gnnpipe: {self.doing}")
                error.add_note(self._marked(actions, index))
                raise
            self.mesh.recorder.add_action(action, start_s)
        self._at = None

    def _make_ready(self, epoch: int) -> None:
        """Recall what the last epoch would have, had it been of this run and without a fault.

        With the weights that are kept of it: the current ones have been through its step.
        """
        forecaster = self.forecaster
        assert forecaster is not None
        if not forecaster.is_ready:
            again = {ActionKind.RECALL: Executor._pass_recalled}
            self._walk(recall_actions(self.plan, self.mesh.stage), epoch, _RUN | again)
            self.p2p.drain()

    def _sent_bytes(self) -> tuple[int, int, int, int]:
        control = self._probe_bytes + (self.forecaster.sent_bytes if self.forecaster else 0)
        return (
            self.p2p.sent_bytes - self._probe_bytes,
            sum(exchange.sent_bytes for exchange in self.exchanges),
            self.gradient_sum.sent_bytes,
            control,
        )

    @property
    def doing(self) -> str:
        """Where this rank is: chunk, epoch and action, or that it is between epochs."""
        place = f"rank {self.mesh.rank} (stage {self.mesh.stage}, shard {self.mesh.shard})"
        if self._at is None:
            return f"{place}, between two passes"
        action, epoch = self._at
        chunk = f", chunk {self._order[action.position]}" if action.position >= 0 else ""
        return f"{place}{chunk}, epoch {epoch + 1}, action {action.text(self.stage.num_steps)}"

    def _marked(self, actions: Sequence[Action], index: int) -> str:
        """The part of the stage's program around an action, with that one marked."""
        first, last = max(index - _AROUND, 0), index + _AROUND + 1
        texts = [a.text(self.stage.num_steps) for a in actions[first:last]]
        texts[index - first] = f">>> {texts[index - first]} <<<"
        dots = ["..."] if first else [], ["..."] if last < len(actions) else []
        words = " ".join([*dots[0], *texts, *dots[1]])
        return f"stage {self.mesh.stage}, action {index + 1} of {len(actions)}: {words}"

    def _rows(self, chunk: int, value: str) -> int:
        pointer = self.layouts[self._types.get(value, "")].own_ptr
        return int(pointer[chunk + 1] - pointer[chunk])

    def _forward(self, action: Action) -> None:
        chunk = self._order[action.position]
        if action.steps[0] == 0:
            values: dict[str, Tensor] = {}
            for peer in self._widths_in:
                values |= self.p2p.take(Direction.FORWARD, peer, action.position)
            self.stage.enter(chunk, values)
        with self._weights.for_forward(action):
            values = self.stage.forward(chunk, range(*action.steps))
        if action.steps[1] == self.stage.num_steps:
            if self._widths_out:
                # Without the graph behind them, which would keep its leaves.
                self._leaving[action.position] = {k: v.detach() for k, v in values.items()}
            else:
                self._results[chunk] = {name: value.detach() for name, value in values.items()}

    def _backward(self, action: Action) -> None:
        chunk = self._order[action.position]
        if action.steps[1] == self.stage.num_steps:
            if not self._widths_out:
                self.stage.seed_loss(chunk)
            else:
                grads: dict[str, Tensor] = {}
                for peer in self._widths_out:
                    for name, grad in self.p2p.take(
                        Direction.BACKWARD, peer, action.position
                    ).items():
                        grads[name] = grads[name] + grad if name in grads else grad
                self.stage.seed(chunk, grads)
        with self._weights.for_backward(action):
            grads = self.stage.backward(chunk, range(*action.steps), self._following(action))
        if action.steps[0] == 0 and self._widths_in:
            self._leaving[action.position] = grads

    def _following(self, action: Action) -> int | None:
        """The chunk that goes back over the same single step next, if one does.

        What it pulls was recorded by the step behind, which all chunks have been through.
        """
        is_same = self._next is not None and replace(self._next, position=action.position) == action
        if not is_same or action.steps[1] - action.steps[0] > 1 or self._next is None:
            return None
        return self._order[self._next.position]

    def _forecast(self, action: Action) -> None:
        assert self._probes is not None
        self._leaving[action.position] = self._probes.run(self._probe_values(action))

    def _recall(self, action: Action) -> None:
        assert self.forecaster is not None
        self.forecaster.remember()
        self._pass_recalled(action)

    def _pass_recalled(self, action: Action) -> None:
        assert self._probes is not None
        self._leaving[action.position] = self._probes.recall(self._probe_values(action))

    def _probe_values(self, action: Action) -> Values:
        values: Values = {}
        for peer in self._widths_in:
            values |= self.p2p.take(Direction.FORWARD, peer, action.position)
        return values

    def _carry(self, action: Action) -> None:
        assert self.forecaster is not None
        assert self._program is not None
        self.forecaster.carry(self._order, self._program.stale_pairs(self.mesh.stage))

    def _send_forward(self, action: Action) -> None:
        before = self.p2p.sent_bytes
        self._send(action, self._widths_out[action.peer])
        if action.position in PROBE_POSITIONS:
            self._probe_bytes += self.p2p.sent_bytes - before

    def _send_backward(self, action: Action) -> None:
        self._send(action, self._widths_in[action.peer])

    def _send(self, action: Action, names: Iterable[str]) -> None:
        values = self._leaving[action.position]
        wanted = {name: values[name] for name in names}
        self.p2p.send(action.kind.direction, action.peer, action.position, wanted)

    def _receive(self, action: Action) -> None:
        is_forward = action.kind is ActionKind.RECEIVE_FORWARD
        widths = (self._widths_in if is_forward else self._widths_out)[action.peer]
        if action.position in PROBE_POSITIONS:
            assert self.forecaster is not None
            counts = self.forecaster.num_rows
            sizes = {name: (counts[self._types.get(name, "")], w) for name, w in widths.items()}
        else:
            chunk = self._order[action.position]
            sizes = {name: (self._rows(chunk, name), w) for name, w in widths.items()}
        self.p2p.post(action.kind.direction, action.peer, action.position, sizes)

    def _reduce(self, action: Action) -> None:
        self.gradient_sum.begin(range(*action.steps))

    def _step(self, action: Action) -> None:
        self.gradient_sum.finish()
        losses = {c: float(r["loss"]) for c, r in self._results.items() if "loss" in r}
        self.faulty_chunks = [c for c, loss in losses.items() if not math.isfinite(loss)]
        self.has_stepped = self.grad_clip.passes(sum(losses.values()))
        if self.optimizer is not None:
            if self.has_stepped:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


# Not of an instance, which a cycle through its own methods would keep, and its tables with it.
_Method: TypeAlias = Callable[[Executor, Action], None]
_RUN: dict[ActionKind, _Method] = {
    ActionKind.FORWARD: Executor._forward,
    ActionKind.BACKWARD: Executor._backward,
    ActionKind.SEND_FORWARD: Executor._send_forward,
    ActionKind.RECEIVE_FORWARD: Executor._receive,
    ActionKind.SEND_BACKWARD: Executor._send_backward,
    ActionKind.RECEIVE_BACKWARD: Executor._receive,
    ActionKind.FORECAST: Executor._forecast,
    ActionKind.CARRY: Executor._carry,
    ActionKind.RECALL: Executor._recall,
    ActionKind.REDUCE_GRADIENTS: Executor._reduce,
    ActionKind.STEP: Executor._step,
}
