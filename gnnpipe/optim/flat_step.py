"""Steps all weights of a stage as one tensor.

torch's optimizers go through their weights one by one. With a step after each chunk the calls for
many small weights take much of the time, and so do the copies and predictions of the weight
policies (ADR 0046). Here the weights, and their parts of the optimizer's state, are views of flat
tensors. A second optimizer of the same class steps these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

_ELEMENTWISE = (Adam, AdamW, SGD, RMSprop)
"""Classes whose step treats each number of a weight by itself."""

_ALIGNED = 64
"""Bytes at whose multiples weights begin."""

_SHARED = "step"
"""Name of the state that is a count of steps, one for all weights."""


class FlatStep:
    """The step of an optimizer with one group of weights, on one flat tensor.

    Weights without a gradient are left out of a step, as by torch. In the count of steps, by which
    Adam corrects its averages, they take part.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Make the weights of ``optimizer`` views of one tensor. Check ``can_be_flat`` before."""
        self._optimizer = optimizer
        self._weights: list[nn.Parameter] = _trained(optimizer)
        first = self._weights[0]
        each = _ALIGNED // first.element_size()
        self._sizes = [-(-weight.numel() // each) * each for weight in self._weights]
        self.flat = nn.Parameter(first.detach().new_zeros(sum(self._sizes)))
        """The weights, each followed by zeros up to a multiple of 64 bytes."""
        self._gradient = torch.zeros_like(self.flat, requires_grad=False)
        self.flat.grad = self._gradient
        self._gradients = self._views(self._gradient)
        for weight, view in zip(self._weights, self._views(self.flat.data), strict=True):
            view.copy_(weight.detach())
            weight.data = view
        kind: Callable[[list[dict[str, Any]]], Optimizer] = type(optimizer)
        self.optimizer = kind([self._group() | {"params": [self.flat]}])
        """The optimizer of the flat tensor; its learning rate is set with each step."""
        self._published: list[dict[str, Any] | None] = [None] * len(self._weights)
        """State of each weight that this object has written, in views of flat tensors."""
        self._seen: dict[str, Any] = {}
        """State of the flat tensor when it was published."""
        self._missing: list[int] = []
        self._has_called = False

    def adopt(self) -> None:
        """Take over weights that were stored elsewhere, and their state if it was loaded."""
        self._adopt_weights()
        states = [self._optimizer.state.get(weight) for weight in self._weights]
        if all(s is p for s, p in zip(states, self._published, strict=True)):
            return
        known = [state or {} for state in states]
        found: dict[str, Any] = {}
        for name in {name for state in known for name in state}:
            values = [state.get(name) for state in known]
            found[name] = self._joined(name, values)
        self.optimizer.state.clear()
        if found:
            self.optimizer.state[self.flat].update(found)
            self._publish()

    @torch.no_grad()
    def _adopt_weights(self) -> None:
        views = self._views(self.flat.data)
        pairs = list(zip(self._weights, views, strict=True))
        if all(weight.data_ptr() == view.data_ptr() for weight, view in pairs):
            return
        given = [weight.detach().clone() for weight in self._weights]
        for (weight, view), value in zip(pairs, given, strict=True):
            view.copy_(value)
            weight.data = view
        self._gradients = self._views(self._gradient)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """Return all gradients as one tensor; each ``.grad`` becomes its view."""
        grads = [weight.grad for weight in self._weights]
        self._missing = [number for number, grad in enumerate(grads) if grad is None]
        for number in self._missing:
            self._gradients[number].zero_()
        pairs = [(v, g) for v, g in zip(self._gradients, grads, strict=True) if g is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        for weight, view, grad in zip(self._weights, self._gradients, grads, strict=True):
            weight.grad = None if grad is None else view
        return self._gradient

    @torch.no_grad()
    def step(self) -> None:
        """Step the weights whose gradients were gathered."""
        if len(self._missing) == len(self._weights):
            return
        self.optimizer.param_groups[0].update(self._group())
        kept = [(part, part.clone()) for part in self._parts(self._missing)]
        self.optimizer.step()
        for part, before in kept:
            part.copy_(before)
        state = self.optimizer.state.get(self.flat, {})
        if any(state[name] is not self._seen.get(name) for name in state):
            self._publish()
        if not self._has_called:
            self._call_optimizer()

    def _call_optimizer(self) -> None:
        """Call the given optimizer, without gradients: a scheduler warns if it was never called."""
        self._has_called = True
        grads = [weight.grad for weight in self._weights]
        for weight in self._weights:
            weight.grad = None
        self._optimizer.step()
        for weight, grad in zip(self._weights, grads, strict=True):
            weight.grad = grad

    def _group(self) -> dict[str, Any]:
        (group,) = self._optimizer.param_groups
        return {name: value for name, value in group.items() if name != "params"}

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(torch.split(flat, self._sizes), self._weights, strict=True)
        return [_shaped_like(weight, piece[: weight.numel()]) for piece, weight in pieces]

    def _parts(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return views of some weights and of their states."""
        if not numbers:
            return []
        state = self.optimizer.state.get(self.flat, {})
        whole = [self.flat.data, *(v for k, v in state.items() if _is_flat(k, v))]
        return [self._views(tensor)[number] for tensor in whole for number in numbers]

    def _joined(self, name: str, values: list[Any]) -> Any:
        """Return the state of the flat tensor from that of each weight."""
        present = [value for value in values if value is not None]
        if name == _SHARED:
            return max(present).clone()
        if not present:
            return None
        joined = torch.zeros_like(self._gradient)
        for view, value in zip(self._views(joined), values, strict=True):
            if value is not None:
                view.copy_(value)
        return joined

    def _publish(self) -> None:
        """Write the state of each weight as views of the flat state."""
        self._seen = dict(self.optimizer.state[self.flat])
        views = {k: self._views(v) for k, v in self._seen.items() if _is_flat(k, v)}
        for number, weight in enumerate(self._weights):
            own = {k: views[k][number] if k in views else v for k, v in self._seen.items()}
            self._optimizer.state[weight] = own
            self._published[number] = own


def _shaped_like(weight: Tensor, numbers: Tensor) -> Tensor:
    """Return a view of numbers [n] in a weight's shape; a matrix stored by column stays so.

    Gradients of maps of sparse features are made by column, and are copied faster in this order.
    """
    if weight.dim() == 2 and not weight.is_contiguous() and weight.t().is_contiguous():
        return numbers.view(weight.shape[::-1]).t()
    return numbers.view(weight.shape)


def can_be_flat(optimizer: Optimizer) -> bool:
    """Whether an optimizer can be stepped by ``FlatStep``.

    It has one group, of weights of one type on one device, and a class of torch that treats each
    number of a weight by itself.
    """
    kinds = {(weight.dtype, weight.device) for weight in _trained(optimizer)}
    is_plain = type(optimizer) in _ELEMENTWISE and len(optimizer.param_groups) == 1
    return is_plain and len(kinds) == 1


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [w for group in optimizer.param_groups for w in group["params"] if w.requires_grad]


def _is_flat(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name != _SHARED
