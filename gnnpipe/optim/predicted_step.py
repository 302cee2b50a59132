r"""Predicts where an optimizer's next steps will move the weights (PipeOptim, arXiv 2312.00839).

A step subtracts the learning rate times a direction d. The direction of the last step, read from
the optimizer's state, is taken for the next s steps too:

.. math:: \hat W = W - \sum_{i=1}^{s} \eta_i \, d

with the learning rate of each coming step, and d of

- SGD: the last gradient; with momentum the momentum buffer, also with ``nesterov``,
- Adam, AdamW: :math:`\hat m / (\sqrt{\hat v} + \epsilon)`, bias-corrected, also with ``amsgrad``,
- RMSprop: the last gradient over :math:`\sqrt{v} + \epsilon`; with momentum the momentum buffer.

Weight decay that no average of the optimizer contains (AdamW; SGD without momentum) shrinks the
weights in each predicted step as in a real one; the paper leaves it out. Other weight decay is
part of d.

Under a constant gradient the prediction equals the real steps: of SGD after one step; of Adam and
AdamW after any number of steps with that gradient, because the bias correction makes
:math:`\hat m` the gradient; with momentum, and of RMSprop, when the averages have converged. Weight
decay inside an average changes with the weights and is never constant.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, RMSprop

from gnnpipe.errors import InputError

Rates: TypeAlias = Callable[[int], Sequence[float]]
"""Maps a number of steps, 0 for the next one, to the learning rate of each parameter group in the
step that many steps later."""

_Group: TypeAlias = dict[str, Any]

_PIECE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers of the weights that are predicted at a time."""


@dataclass(frozen=True, eq=False)
class _Stepped:
    """Weights of one parameter group that have been stepped."""

    group: _Group
    weights: list[Tensor]
    states: list[dict[str, Any]]
    grads: list[Tensor]
    """Gradients of the last step, negated with ``maximize``; empty if the rule needs none."""

    def of(self, name: str) -> list[Tensor]:
        """Return one tensor of the state of each weight."""
        return [state[name] for state in self.states]


@dataclass(frozen=True)
class _Rule:
    """Direction of the steps of one kind of optimizer."""

    direction: Callable[[_Stepped], list[Tensor]]
    needs_gradient: Callable[[_Group], bool]
    decay: Callable[[_Group], float]
    """Part of the weights that a step subtracts, divided by the learning rate."""


def _sgd(stepped: _Stepped) -> list[Tensor]:
    return stepped.of("momentum_buffer") if stepped.group["momentum"] else stepped.grads


def _adam(stepped: _Stepped) -> list[Tensor]:
    group = stepped.group
    first, second = (float(beta) for beta in group["betas"])
    # One transfer from a GPU, where the counts of a fused optimizer are.
    steps = torch.stack(stepped.of("step")).tolist()
    lengths = torch._foreach_sqrt(
        stepped.of("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
    )
    torch._foreach_div_(lengths, [math.sqrt(1 - second**t) for t in steps])
    torch._foreach_add_(lengths, group["eps"])
    torch._foreach_mul_(lengths, [1 - first**t for t in steps])
    return list(torch._foreach_div(stepped.of("exp_avg"), lengths))


def _rmsprop(stepped: _Stepped) -> list[Tensor]:
    group = stepped.group
    if group["momentum"]:
        return stepped.of("momentum_buffer")
    grads = stepped.grads
    if group["weight_decay"]:
        grads = list(torch._foreach_add(grads, stepped.weights, alpha=group["weight_decay"]))
    squares = stepped.of("square_avg")
    if group["centered"]:
        means = stepped.of("grad_avg")
        squares = list(torch._foreach_addcmul(squares, means, means, value=-1))
    lengths = torch._foreach_sqrt(squares)
    torch._foreach_add_(lengths, group["eps"])
    return list(torch._foreach_div(grads, lengths))


def _has_no_momentum(group: _Group) -> bool:
    return float(group["momentum"]) == 0


def _decay(group: _Group) -> float:
    return float(group["weight_decay"])


_RULES: dict[type[Optimizer], _Rule] = {
    SGD: _Rule(_sgd, _has_no_momentum, lambda g: _decay(g) if _has_no_momentum(g) else 0.0),
    # AdamW is an Adam with decoupled decay.
    Adam: _Rule(
        _adam, lambda _: False, lambda g: _decay(g) if g["decoupled_weight_decay"] else 0.0
    ),
    RMSprop: _Rule(_rmsprop, _has_no_momentum, lambda _: 0.0),
}


def check_predictable(kind: type[Optimizer], field: str) -> None:
    """Raise ``InputError`` for an optimizer whose steps cannot be predicted.

    ``field``: flag and value that ask for the prediction, for the message.
    """
    if _rule_of(kind) is None:
        raise InputError(
            f"{field}: the steps of the optimizer {kind.__name__} cannot be predicted; try SGD, "
            "Adam, AdamW or RMSprop, or --weights stash"
        )


def _rule_of(kind: type[Optimizer]) -> _Rule | None:
    """Return the rule of a class; a subclass with a step of its own has none."""
    for known, rule in _RULES.items():
        if issubclass(kind, known) and inspect.unwrap(kind.step) is inspect.unwrap(known.step):
            return rule
    return None


class StepRates:
    """Learning rates of the coming steps of a program, for weight policies that predict steps."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """``groups``: of the optimizer."""
        self._groups = groups
        self._by_epoch: Sequence[Sequence[float]] = ()
        self._steps_per_epoch, self._done = 1, 0

    def begin(self, by_epoch: Sequence[Sequence[float]], steps_per_epoch: int) -> None:
        """Begin a program; ``by_epoch``: rates [epoch][group], empty: those of the optimizer."""
        self._by_epoch, self._steps_per_epoch, self._done = by_epoch, steps_per_epoch, 0

    def count_step(self) -> None:
        """Note that a step is over, also one that was skipped."""
        self._done += 1

    def __call__(self, ahead: int) -> Sequence[float]:
        """Return the rates by group of the step ``ahead`` steps after the next one."""
        epoch = (self._done + ahead) // self._steps_per_epoch
        if epoch < len(self._by_epoch):
            return self._by_epoch[epoch]
        return [float(group["lr"]) for group in self._groups]


class StepPrediction:
    """Predicts the next steps of one optimizer."""

    def __init__(self, optimizer: Optimizer, rates: Rates | None = None) -> None:
        """``rates``: learning rates of the coming steps; ``None``: those of the groups now.

        Raises:
            ValueError: the steps of the optimizer cannot be predicted (``check_predictable``).
        """
        rule = _rule_of(type(optimizer))
        if rule is None:
            raise ValueError(f"the steps of {type(optimizer).__name__} cannot be predicted")
        self._optimizer, self._rule = optimizer, rule
        self._rates = rates or (lambda _: [float(group["lr"]) for group in optimizer.param_groups])
        self._grads: dict[Tensor, Tensor] = {}

    def stepped(self) -> None:
        """Keep the gradients of the step that was just made, if the rule reads them."""
        self._grads = {
            weight: weight.grad.neg() if group["maximize"] else weight.grad.clone()
            for group in self._optimizer.param_groups
            if self._rule.needs_gradient(group)
            for weight in group["params"]
            if weight.grad is not None
        }

    def forget(self) -> None:
        """Drop the kept gradients; weights that need one are predicted to stay until a step."""
        self._grads.clear()

    @torch.no_grad()
    def apply(self, steps: int) -> None:
        """Move the weights in place to their predicted values after the next ``steps`` steps.

        Weights that have not been stepped stay as they are. Autograd does not see the change.
        """
        rates = [self._rates(ahead) for ahead in range(steps)]
        for number, group in enumerate(self._optimizer.param_groups):
            stepped = self._stepped(group)
            if not stepped.weights or not steps:
                continue
            left, moved = _after_steps([one[number] for one in rates], self._rule.decay(group))
            for piece in _in_pieces(stepped):
                directions = self._rule.direction(piece)
                if left != 1.0:
                    torch._foreach_mul_(piece.weights, left)
                torch._foreach_add_(piece.weights, directions, alpha=-moved)

    def _stepped(self, group: _Group) -> _Stepped:
        needs_gradient, state = self._rule.needs_gradient(group), self._optimizer.state
        known = self._grads if needs_gradient else state
        weights = [weight for weight in group["params"] if weight in known]
        grads = [self._grads[weight] for weight in weights] if needs_gradient else []
        return _Stepped(group, weights, [state[w] for w in weights if w in state], grads)


def _in_pieces(stepped: _Stepped) -> Iterator[_Stepped]:
    """Split weights into pieces, because directions of all weights at once would be two copies.

    The weights of a piece are views, whose changes autograd does not see.
    """
    piece, count = _Stepped(stepped.group, [], [], []), 0
    for number, weight in enumerate(stepped.weights):
        most = _PIECE_NUMBERS.get(weight.device.type, 1 << 24)
        # Along the axis with the longest stride, so that pieces are contiguous.
        axis = max(range(weight.dim()), key=weight.stride, default=0)
        length = weight.shape[axis] if weight.dim() else 1
        rows = max(most * length // max(weight.numel(), 1), 1)
        for start in range(0, length, rows):
            part = _Part(weight.shape, axis, start, min(rows, length - start))
            piece.weights.append(part.of(weight.data))
            if stepped.states:
                piece.states.append(part.of_state(stepped.states[number]))
            if stepped.grads:
                piece.grads.append(part.of(stepped.grads[number]))
            count += piece.weights[-1].numel()
            if count >= most:
                yield piece
                piece, count = _Stepped(stepped.group, [], [], []), 0
    if piece.weights:
        yield piece


@dataclass(frozen=True)
class _Part:
    """Rows of a weight along an axis, and of tensors of the same shape."""

    shape: torch.Size
    axis: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part as a view."""
        return tensor.narrow(self.axis, self.start, self.length) if self.shape else tensor

    def of_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the part; numbers that count for the whole weight stay."""
        return {
            name: self.of(value)
            if isinstance(value, Tensor) and value.shape == self.shape
            else value
            for name, value in state.items()
        }


def _after_steps(rates: Sequence[float], decay: float) -> tuple[float, float]:
    """Return a and b of W -> a W - b d, the steps W -> (1 - rate * decay) W - rate * d."""
    left, moved = 1.0, 0.0
    for rate in rates:
        left *= 1 - rate * decay
        moved = moved * (1 - rate * decay) + rate
    return left, moved
