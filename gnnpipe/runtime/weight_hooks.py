"""Calls the hooks on weights once a step, with the whole gradient, as one backward pass would.

Here the gradient of a weight is a sum over chunks, shards and steps, and autograd would call a hook
(``register_hook``, ``register_post_accumulate_grad_hook``) with each part. So the hooks are taken
off the weights during a pass and called before the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor with its hooks by number, or ``None``; autograd reads the same dicts."""


class WeightHooks:
    """The hooks of a stage's weights."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._weights = list(weights)
        self._held: list[tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]] = []
        """Dicts that autograd reads, empty now, and their content."""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Context of a training pass, in which autograd calls no hook."""
        self._hold_back()
        try:
            yield
        finally:
            self._give_back()

    def _hold_back(self) -> None:
        for weight in self._weights:
            for hooks in (getattr(weight, name) for name in _HOOKS):
                if hooks:
                    self._held.append((hooks, dict(hooks)))
                    hooks.clear()

    def _give_back(self) -> None:
        for hooks, held in self._held:
            hooks.update(held)
        self._held.clear()

    @torch.no_grad()
    def call(self) -> None:
        """Calls all hooks in ``held_back``; the gradients in ``.grad`` are complete."""
        if not self._held:
            return
        self._give_back()  # first, because a hook may remove itself
        for weight in self._weights:
            before, after = (dict(getattr(weight, name) or {}) for name in _HOOKS)
            for hook in before.values() if weight.grad is not None else ():
                found = hook(weight.grad)
                weight.grad = weight.grad if found is None else found
            for hook in after.values() if weight.grad is not None else ():
                hook(weight)
        self._hold_back()
