"""Executes a program on one rank: one small method per kind of action.

The executor knows no schedule and no mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from gnnpipe.models import Values
from gnnpipe.models.sparse_input_linear import store_by_column
from gnnpipe.perf import CommVolume
from gnnpipe.plan import StageDag
from gnnpipe.runtime.comm.column_exchange import ColumnExchange
from gnnpipe.runtime.comm.halo_exchange import GradientSum, HaloExchange
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.p2p import PointToPoint, ValueSize
from gnnpipe.runtime.comm.row_links import RowLinks
from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.runtime.label_inputs import LabelInputs, LabelIterations
from gnnpipe.runtime.stage import Stage
from gnnpipe.runtime.staleness.forecast import Forecaster
from gnnpipe.runtime.weight_hooks import WeightHooks
from gnnpipe.schedule import Action, ActionKind, CheckedProgram, Direction, SpecialPosition

_EXCERPT = 4
"""Actions shown before and after one that fails."""


class WeightPolicy(Protocol):
    """Choice of the weights in each pass of a chunk (``optim.weight_policies``).

    In an open context the parameters may hold other weights. When the context ends, they hold the
    same bits as before.
    """

    def begin(self, gaps: Sequence[int]) -> None:
        """Begin a program; ``gaps``: by position, steps between forward and backward."""

    def for_forward(self, position: int) -> AbstractContextManager[None]:
        """Return the context of forward at a position of the program."""

    def for_backward(self, position: int) -> AbstractContextManager[None]:
        """Return the context of backward at a position of the program."""

    def stepped(self) -> None:
        """Note an optimizer step, while the parameters still have its gradients."""

    def skipped(self) -> None:
        """Note a step of the program that did not change the weights."""

    def flush(self) -> None:
        """Forget all versions but the current one: no chunk is between forward and backward."""


class FlatStep(Protocol):
    """Step of all weights as one tensor (``optim.flat_step``)."""

    def adopt(self) -> None:
        """Take over the state of the optimizer, if a checkpoint was loaded."""

    def step(self) -> None:
        """Step the weights; ``GradClip`` has gathered their gradients."""


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """Parts of the optimizer step, and the weights of passes with a version gap."""

    gradient_sum: GradientSum
    grad_clip: GradClip
    optimizer: torch.optim.Optimizer | None
    policy: WeightPolicy | None = None
    """``None``: every pass computes with the newest weights."""
    flat: FlatStep | None = None
    """``None``: the optimizer steps the weights one by one."""
    count_step: Callable[[], None] = lambda: None
    """Called after every step, also after one that was skipped."""


@dataclass(eq=False)
class _Running:
    """A program that is being executed."""

    program: CheckedProgram
    order: Sequence[int]
    """The chunk of every pass."""
    policy: WeightPolicy | None = None
    epoch_end: Callable[[], None] | None = None
    new_losses: list[tuple[int, Tensor]] = field(default_factory=list)
    """Position and loss of the passes since the last step."""


@dataclass
class _PassedOn:
    """Values that a stage receives and sends on, until the stage sends them."""

    names: Collection[str]
    values: dict[int, Values] = field(default_factory=dict)
    """By position."""
    grads: dict[int, Values] = field(default_factory=dict)
    """Gradients that later stages have sent, by position."""

    def select(self, received: Values) -> Values:
        """Return those of ``received`` that are passed on, or their gradients."""
        return {name: received[name] for name in self.names}

    def clear(self) -> None:
        self.values.clear()
        self.grads.clear()


class Executor:
    """Interpreter of the programs of one plan, on one rank."""

    sparse_maps: Sequence[nn.Parameter] = ()
    """Maps of sparse features, which training epochs store by column."""

    def __init__(
        self,
        dag: StageDag,
        mesh: Mesh,
        stage: Stage,
        row_links: RowLinks,
        exchanges: Sequence[HaloExchange | ColumnExchange],
        update: WeightUpdate,
        dtypes: tuple[torch.dtype, torch.dtype],
        forecaster: Forecaster | None = None,
    ) -> None:
        """Set up the interpreter.

        Args:
            dag: The stages of the plan of all programs.
            mesh: The ranks.
            stage: This rank's stage.
            row_links: Rows of this rank that ranks of other stages own too.
            exchanges: Exchanges of the stage's histories, whose bytes are counted.
            update: Parts of the optimizer step.
            dtypes: Type of values on this rank, and type of values in messages.
            forecaster: Forecast of stale rows; ``None`` without a forecast.
        """
        self.num_chunks, self.mesh, self.stage = dag.plan.chunks, mesh, stage
        self._row_links = row_links
        self.exchanges = exchanges
        self.optimizer = update.optimizer
        self.weight_policy, self._count_step = update.policy, update.count_step
        self._flat = update.flat
        self.forecaster = forecaster
        self.label_inputs: LabelInputs | None = None
        """Labels that are inputs, if there are any."""
        self.grad_clip = update.grad_clip
        self.gradient_sum = update.gradient_sum
        self._weights = [p for _, p in stage.stage_module.named_parameters()]
        self._weight_hooks = WeightHooks(self._weights)
        self.p2p = PointToPoint(mesh, *dtypes)
        self.has_stepped = True
        """Whether all optimizer steps of the last program changed the weights: a step does not if
        its loss or gradients are not finite."""
        self.faulty_losses: list[tuple[int, int]] = []
        """Position and chunk of each loss that was not finite in the last program."""
        self.fault_pass: int | None = None
        """Position of the first pass, or step, of the last program that was not finite here."""
        self.epoch_bytes = CommVolume(0, 0, 0, 0)
        """Bytes that this rank sent in an epoch of the last training program."""
        self._has_stepped_in_epoch = True  # since the last end of an epoch
        self._widths_in = {t.source: t.widths for t in dag.receives(mesh.stage)}
        self._widths_out = {t.target: t.widths for t in dag.sends(mesh.stage)}
        self._types = {k: v for t in dag.transfers for k, v in t.types.items()}
        self._probe_bytes = 0
        self._running: _Running | None = None
        self._next: Action | None = None
        self._at: tuple[Action, int] | None = None
        """Current action and epoch."""
        self._leaving: dict[int, dict[str, Tensor]] = {}
        """Values or gradients for other stages, by position."""
        self._passed_on = _PassedOn(dag.passed_on(mesh.stage))
        self._results: dict[int, dict[str, Tensor]] = {}

    def run(
        self,
        program: CheckedProgram,
        order: Sequence[int],
        *,
        epoch: int,
        training: bool,
        epoch_end: Callable[[], None] | None = None,
    ) -> dict[int, dict[str, Tensor]]:
        """Execute a program; label iterations, if there are any, run before.

        Args:
            program: The program.
            order: The chunk of every pass.
            epoch: Number of the (first) epoch.
            training: Whether backward follows.
            epoch_end: Called after the last optimizer step of each epoch but the last.

        Returns:
            Results of the last stage by position: {"loss": scalar} in training, {"x": logits
            [C, classes]} in evaluation; empty on other stages.

        Raises:
            Exception: An action failed; notes name its rank, stage, chunk and place in the program.
        """
        before = self._sent_bytes()
        recorder = self.mesh.recorder
        recorder.discard_epoch()
        if self.label_inputs is not None:
            self._prepare_labels(self.label_inputs, epoch, training)
        if training:
            recorder.begin_epoch(order, program.is_exact, program.epochs)
            self.has_stepped, self._has_stepped_in_epoch = True, True
            self.faulty_losses, self.fault_pass = [], None
            self.grad_clip.faulty = []
        self.gradient_sum.forget()
        self.stage.begin(epoch, training, order, program.is_exact, program.steps_by_chunk)
        if training:
            for weight in self._weights:
                weight.grad = None  # of training by the user
            stepped = self.optimizer if self._flat is None else None
            store_by_column(self.sparse_maps, {} if stepped is None else stepped.state)
            if self._flat is not None:
                self._flat.adopt()
        policy = self.weight_policy if training and program.steps_by_chunk else None
        self._pass(_Running(program, order, policy, epoch_end), epoch)
        if training and not _steps_together(program):
            self._tell_faults()
        self.stage.end(self.has_stepped)
        if training:
            sent = zip(before, self._sent_bytes(), strict=True)
            self.epoch_bytes = CommVolume(*((b - a) // program.epochs for a, b in sent))
        return self._results

    def _tell_faults(self) -> None:
        """Tell all ranks of steps that stages have skipped on their own."""
        has_fault = float(not self.has_stepped or bool(self.faulty_losses))
        self.has_stepped = not self.mesh.sum([has_fault])[0]

    def _pass(self, running: _Running, epoch: int) -> None:
        """Execute the actions of a program that has begun."""
        self._running, self._results = running, {}
        if running.policy is not None:
            running.policy.begin(running.program.version_gaps[self.mesh.stage])
        try:
            with self._weight_hooks.held_back():
                self._walk(running.program.stages[self.mesh.stage], epoch)
        except BaseException:
            self.stage.abandon()
            self._results.clear()
            self._leaving.clear()
            self._passed_on.clear()
            self.p2p.abandon()
            raise
        finally:
            running.epoch_end = None  # holds the caller
            if running.policy is not None:
                running.policy.flush()
        self.mesh.recorder.end_actions()
        self.p2p.drain()
        self._leaving.clear()

    @property
    def _now(self) -> _Running:
        """The program that is being executed."""
        assert self._running is not None
        return self._running

    def _prepare_labels(self, labels: LabelInputs, epoch: int, training: bool) -> None:
        """Write the label inputs of a pass; label iterations predict the other vertices' inputs."""
        labels.begin(epoch if training else None)
        iterations = labels.iterations
        if iterations is None:
            return
        with torch.no_grad():
            for number in range(iterations.count):
                if training:
                    self.stage.begin_label_iteration(iterations.dropout_epoch(epoch, number))
                else:
                    self.stage.begin(epoch, False)
                self._pass(_Running(iterations.program, range(self.num_chunks)), epoch)
                self.stage.end()
                labels.write(self._predicted(iterations))

    def _predicted(self, iterations: LabelIterations) -> Tensor:
        """Return the predicted probabilities of own rows, on every stage that reads features."""
        own, last = self.mesh.stage, self.mesh.stages - 1
        way, position = Direction.FORWARD, SpecialPosition.NO_CHUNK
        if own == last:
            logits = [self._results[chunk]["x"] for chunk in range(self.num_chunks)]
            found = iterations.probabilities(torch.cat(logits))
            for stage in iterations.readers:
                if stage != last:
                    pieces = self._row_links.pieces(stage, position, iterations.vertex_type)
                    self.p2p.send(way, position, {"labels": found}, {"labels": pieces})
            self.p2p.drain()
            return found
        if own not in iterations.readers:
            return torch.empty(0)
        size = self._size(last, position, iterations.vertex_type, iterations.width)
        self.p2p.post(way, last, position, {"labels": size})
        return self.p2p.take(way, last, position)["labels"]

    def _walk(self, actions: Sequence[Action], epoch: int) -> None:
        for index, action in enumerate(actions):
            # An asynchronous program spans several epochs.
            self._at = action, epoch + max(action.position, 0) // self.num_chunks
            self._next = actions[index + 1] if index + 1 < len(actions) else None
            start_s = self.mesh.recorder.clock()
            try:
                _METHODS[action.kind](self, action)
            except Exception as error:
                error.add_note(f"gnnpipe: {self.doing}")
                error.add_note(self._excerpt(actions, index))
                raise
            self.mesh.recorder.add_action(action, start_s)
        self._at = None

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
        """The current chunk, epoch and action of this rank, or that it is between two passes."""
        place = f"rank {self.mesh.rank} (stage {self.mesh.stage}, shard {self.mesh.shard})"
        if self._at is None:
            return f"{place}, between two passes"
        action, epoch = self._at
        chunk = f", chunk {self._chunk(action)}" if action.position >= 0 else ""
        return f"{place}{chunk}, epoch {epoch + 1}, action {action.text(self.stage.num_steps)}"

    def _excerpt(self, actions: Sequence[Action], index: int) -> str:
        """Return the part of the stage's program around an action; the action itself is marked."""
        first, last = max(index - _EXCERPT, 0), index + _EXCERPT + 1
        texts = [a.text(self.stage.num_steps) for a in actions[first:last]]
        texts[index - first] = f">>> {texts[index - first]} <<<"
        dots = ["..."] if first else [], ["..."] if last < len(actions) else []
        words = " ".join([*dots[0], *texts, *dots[1]])
        return f"stage {self.mesh.stage}, action {index + 1} of {len(actions)}: {words}"

    def _take(self, direction: Direction, peers: Iterable[int], position: int) -> Values:
        """Return the values that other stages sent; gradients of the same value are added up."""
        values: Values = {}
        for peer in peers:
            for name, value in self.p2p.take(direction, peer, position).items():
                values[name] = values[name] + value if name in values else value
        return values

    def _forward(self, action: Action) -> None:
        chunk = self._now.order[action.position]
        if action.steps[0] == 0:
            values = self._take(Direction.FORWARD, self._widths_in, action.position)
            self._passed_on.values[action.position] = self._passed_on.select(values)
            self.stage.enter(chunk, values, action.position // self.num_chunks)
        policy = self._now.policy
        with nullcontext() if policy is None else policy.for_forward(action.position):
            values = self.stage.forward(chunk, range(*action.steps))
        if action.steps[1] == self.stage.num_steps:
            # Detached: their graph would keep its leaves alive.
            values = {name: value.detach() for name, value in values.items()}
            values |= self._passed_on.values.pop(action.position)
            if self._widths_out:
                self._leaving[action.position] = values
                return
            self._results[action.position] = values
            if "loss" in values:
                self._now.new_losses.append((action.position, values["loss"]))

    def _backward(self, action: Action) -> None:
        chunk = self._now.order[action.position]
        if action.steps[1] == self.stage.num_steps:
            if self._widths_out:
                grads = self._take(Direction.BACKWARD, self._widths_out, action.position)
                self._passed_on.grads[action.position] = self._passed_on.select(grads)
                others = self._passed_on.names
                self.stage.seed(chunk, {k: v for k, v in grads.items() if k not in others})
            else:
                passes = self._now.program.step_passes(action.position)
                self.stage.seed_loss(chunk, [self._now.order[p] for p in passes])
        policy = self._now.policy
        with nullcontext() if policy is None else policy.for_backward(action.position):
            grads = self.stage.backward(chunk, range(*action.steps), self._next_chunk(action))
        if action.steps[0] == 0:
            later = self._passed_on.grads.pop(action.position, {})
            if self._widths_in:
                for name, grad in later.items():
                    grads[name] = grads[name] + grad
                self._leaving[action.position] = grads

    def _next_chunk(self, action: Action) -> int | None:
        """Return the chunk whose exchange of gradients may start early, if any."""
        following = self._next if action.is_repeated_by(self._next) else None
        return None if following is None else self._now.order[following.position]

    def _forecast(self, action: Action) -> None:
        assert self.forecaster is not None
        values = self._take(Direction.FORWARD, self._widths_in, action.position)
        passed_on = self._passed_on.select(values)
        self._leaving[action.position] = passed_on | self.forecaster.run(values)

    def _carry(self, action: Action) -> None:
        assert self.forecaster is not None
        stale_pairs = self._now.program.stale_pairs(self.mesh.stage)
        self.forecaster.carry(self._now.order, stale_pairs)

    def _widths(self, action: Action) -> Mapping[str, int]:
        """Return name and width of the values in a send or receive."""
        is_downstream = action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD)
        return (self._widths_out if is_downstream else self._widths_in)[action.peer]

    def _send(self, action: Action) -> None:
        before = self.p2p.sent_bytes
        values, chunk = self._leaving[action.position], self._chunk(action)
        named = {name: values[name] for name in self._widths(action)}
        pieces = {
            name: self._row_links.pieces(action.peer, chunk, self._types.get(name, ""))
            for name in named
        }
        self.p2p.send(action.kind.direction, action.position, named, pieces)
        program = self._now.program
        if program.steps_by_chunk:
            # Stages have at most ``most_in_flight`` passes in flight: earlier sends have arrived.
            self.p2p.free(action.position - program.most_in_flight - 1)
        following = self._next
        if following is None or following != replace(action, peer=following.peer):
            del self._leaving[action.position]  # no other stage gets the values
        if action.position == SpecialPosition.PROBE:
            self._probe_bytes += self.p2p.sent_bytes - before

    def _receive(self, action: Action) -> None:
        chunk = self._chunk(action)
        sizes = {
            name: self._size(action.peer, chunk, self._types.get(name, ""), width)
            for name, width in self._widths(action).items()
        }
        self.p2p.post(action.kind.direction, action.peer, action.position, sizes)

    def _size(self, stage: int, chunk: int, vertex_type: str, width: int) -> ValueSize:
        """Return the size of a value that arrives from ``stage``."""
        links = self._row_links
        rows, pieces = links.num_rows(chunk, vertex_type), links.pieces(stage, chunk, vertex_type)
        return ValueSize(rows, width, pieces)

    def _chunk(self, action: Action) -> int:
        """Return the chunk of an action, or its ``SpecialPosition``."""
        return self._now.order[action.position] if action.position >= 0 else action.position

    def _reduce(self, action: Action) -> None:
        self.gradient_sum.begin(range(*action.steps))

    def _step(self, action: Action) -> None:
        self.gradient_sum.finish()
        self._weight_hooks.call()
        is_finite = self._clip_or_skip(action)
        if self.forecaster is not None:
            self.forecaster.remember()
        if self.optimizer is not None:
            self._update_weights(self.optimizer, is_finite)
        done = action.position + 1
        if done % self.num_chunks == 0 and 0 < done < self._now.program.passes:
            self.stage.end_inner_epoch(self._has_stepped_in_epoch)
            self._has_stepped_in_epoch = True
            if self._now.epoch_end is not None:
                self._now.epoch_end()

    def _clip_or_skip(self, action: Action) -> bool:
        """Clip the gradients; return whether they and the losses of the step are finite."""
        now = self._now
        losses = [(position, float(loss)) for position, loss in now.new_losses]
        now.new_losses.clear()
        faulty = [position for position, loss in losses if not math.isfinite(loss)]
        self.faulty_losses += [(position, now.order[position]) for position in faulty]
        if _steps_together(now.program):
            is_finite = self.grad_clip.clip(sum(loss for _, loss in losses))
        else:
            is_finite = self.grad_clip.clip_in_stage()
        self.has_stepped &= is_finite
        self._has_stepped_in_epoch &= is_finite
        if self.fault_pass is None and (faulty or not is_finite):
            self.fault_pass = min(faulty, default=max(action.position, 0))
        return is_finite

    def _update_weights(self, optimizer: torch.optim.Optimizer, is_finite: bool) -> None:
        """Make the optimizer's step, or leave it out if loss or gradients are not finite."""
        if is_finite:
            (self._flat or optimizer).step()
        policy = self._now.policy
        if policy is not None:
            (policy.stepped if is_finite else policy.skipped)()
        self._count_step()
        # Gradients of weights that the optimizer does not step are cleared, too; they would
        # accumulate.
        for weight in self._weights:
            weight.grad = None


def _steps_together(program: CheckedProgram) -> bool:
    """Whether the stages are drained before every optimizer step, so that all may decide on it."""
    return program.consistency.max_versions_behind == 0


# Unbound methods: bound ones would make a cycle that keeps the executor and its tables alive.
_METHODS: dict[ActionKind, Callable[[Executor, Action], None]] = {
    ActionKind.FORWARD: Executor._forward,
    ActionKind.BACKWARD: Executor._backward,
    ActionKind.SEND_FORWARD: Executor._send,
    ActionKind.RECEIVE_FORWARD: Executor._receive,
    ActionKind.SEND_BACKWARD: Executor._send,
    ActionKind.RECEIVE_BACKWARD: Executor._receive,
    ActionKind.FORECAST: Executor._forecast,
    ActionKind.CARRY: Executor._carry,
    ActionKind.REDUCE_GRADIENTS: Executor._reduce,
    ActionKind.STEP: Executor._step,
}
