r"""Weight policies: the weights of forward and backward in an asynchronous program.

Between forward and backward of a chunk, its stage makes g optimizer steps: the version gap, derived
by ``schedule.check``. W_v are the weights after v steps; forward comes after v of them. P(W, n) is
the prediction, made from W, of the weights n steps later.

| policy    | forward          | backward       | versions held |
| --------- | ---------------- | -------------- | ------------- |
| latest    | W_v              | W_v+g          | 1             |
| stash     | W_v              | W_v            | g + 1         |
| 2bw       | W_v+g-1          | W_v+g-1        | 3             |
| predict   | P(W_v, g)        | W_v+g          | 2             |
| xpipe     | P(W_v, g)        | W_v+g          | 3             |
| spectrain | P(W_v, g + h)    | P(W_v+g, h)    | 2             |

- latest corrects nothing: forward and backward use different weights.
- stash is PipeDream's weight stashing (arXiv 1806.03377): consistent, but old.
- 2bw (PipeDream-2BW, arXiv 2006.09503) uses on all stages the weights of one step before the last.
- predict is PipeOptim (arXiv 2312.00839): forward with the weights that backward is predicted to
  find, by the optimizer's own rule (``predicted_step``).
- xpipe, like XPipe (arXiv 1911.04610): the first chunk of each step predicts, for all its chunks.
  With a step behind every chunk this is ``predict``.
- spectrain (SpecTrain, arXiv 1809.02839) predicts for backward too, h steps: half the number of
  stages before this one. The direction is the optimizer's, not a smoothed gradient of its own.

Other weights are copied into the memory of the parameters, and the real ones copied back. To
exchange ``parameter.data`` would mix versions: ``F.linear`` saves a view of the memory that the
weight has in forward, LayerNorm saves the parameter. With copies, both find in backward what is in
the parameter then. A tensor that forward computes from weights alone (a normalised weight, a copy
in bf16) is an activation: autograd saves the value of forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gnnpipe.optim.predicted_step import Rates, StepPrediction
from gnnpipe.registry import Registry


@dataclass(frozen=True, eq=False)
class StageSteps:
    """Optimizer steps of a stage in an asynchronous program."""

    optimizer: Optimizer
    gaps: Sequence[int]
    """By position, number of steps between forward and backward, in the longest program."""
    rates: Rates | None = None
    """Learning rates of the coming steps; ``None``: those of the optimizer's groups now."""
    depth: int = 0
    """Number of stages before this one, on the longest path."""


class Latest:
    """Policy without correction; base of the other policies.

    The executor opens a context for each pass (``runtime.executor.WeightPolicy``). In an open
    context the parameters may hold other weights; when it ends, the same bits as before.
    """

    predicts_steps: ClassVar[bool] = False
    """Whether the policy predicts optimizer steps, by the rule of the optimizer."""
    keeps_forward_weights: ClassVar[bool] = False
    """Whether backward of a chunk has the weights of its forward."""

    @staticmethod
    def copies_held(gap: int) -> int:
        """Return the most copies of the weights that are held beside the parameters.

        One is that of the real weights while the parameters hold others. ``gap``: the largest
        version gap of the stage.
        """
        return 0

    def __init__(self, steps: StageSteps) -> None:
        self._gaps = steps.gaps
        self._weights: list[Tensor] = [
            weight for group in steps.optimizer.param_groups for weight in group["params"]
        ]
        self._version = 0
        """Number of steps of the program since the last flush."""
        self._counters: tuple[int, ...] = ()
        """Autograd's counts of the changes of the weights, at the last pass."""
        self._spare: list[list[Tensor]] = []
        """Memory for copies of the weights, kept: blocks of the heap that come and go among those
        of chunks leave holes."""

    def begin(self, gaps: Sequence[int]) -> None:
        """Begin a program; ``gaps``: by position, steps between forward and backward."""
        self._gaps = gaps

    def for_forward(self, position: int) -> AbstractContextManager[None]:
        """Return the context of forward at a position of the program."""
        self._counters = tuple(weight._version for weight in self._weights)
        return self._forward(position)

    def for_backward(self, position: int) -> AbstractContextManager[None]:
        """Return the context of backward at a position of the program."""
        return self._backward(position)

    def stepped(self) -> None:
        """Note an optimizer step, while the parameters still have its gradients.

        Autograd refuses backward of a chunk whose weights were changed after its forward, which is
        meant here. So its counts of changes are set back.
        """
        self._version += 1
        if self._counters:
            torch._C._autograd._unsafe_set_version_counter(tuple(self._weights), self._counters)

    def skipped(self) -> None:
        """Note a step of the program that did not change the weights. Version gaps count it."""
        self._version += 1

    def flush(self) -> None:
        """Forget all versions but the current one: no chunk is between forward and backward."""
        self._version, self._counters = 0, ()

    def _forward(self, position: int) -> AbstractContextManager[None]:
        return nullcontext()

    def _backward(self, position: int) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def _changed(self, change: Callable[[], None]) -> Iterator[None]:
        """Context that begins with a change of the weights in place, and takes it back."""
        real = self._copies()
        try:
            change()
            yield
        finally:
            self._fill(real)
            self._spare.append(real)

    def _holding(self, weights: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Context in which the parameters hold ``weights``."""
        return self._changed(lambda: self._fill(weights))

    def _copies(self) -> list[Tensor]:
        """Return copies of the weights, in spare memory if there is some."""
        copies = self._spare.pop() if self._spare else self._made()
        if copies:
            torch._foreach_copy_(copies, [weight.detach() for weight in self._weights])
        return copies

    def _made(self) -> list[Tensor]:
        """Return new memory for copies of the weights."""
        return [torch.empty_like(weight, requires_grad=False) for weight in self._weights]

    def _fill(self, weights: Sequence[Tensor]) -> None:
        """Copy ``weights`` into the memory of the parameters, unseen by autograd."""
        if self._weights:
            torch._foreach_copy_([own.data for own in self._weights], list(weights))


class Stash(Latest):
    """PipeDream's weight stashing: backward with the weights of the chunk's forward."""

    keeps_forward_weights = True

    @staticmethod
    def copies_held(gap: int) -> int:
        """Return the most copies of the weights that are held beside the parameters."""
        return gap + 2 if gap else 0

    def __init__(self, steps: StageSteps) -> None:
        super().__init__(steps)
        self._stashed: dict[int, list[Tensor]] = {}
        """Weights by version, of the chunks between forward and backward."""
        self._versions: dict[int, int] = {}
        """Versions of these chunks, by position."""

    def flush(self) -> None:
        """Forget all versions but the current one."""
        super().flush()
        self._spare += self._stashed.values()
        self._stashed.clear()
        self._versions.clear()

    def _forward(self, position: int) -> AbstractContextManager[None]:
        if self._gaps[position]:
            self._versions[position] = self._version
            if self._version not in self._stashed:
                self._stashed[self._version] = self._copies()
        return nullcontext()

    @contextmanager
    def _backward(self, position: int) -> Iterator[None]:
        version = self._versions.pop(position, self._version)
        is_other = version != self._version
        with self._holding(self._stashed[version]) if is_other else nullcontext():
            yield
        if version in self._stashed and version not in self._versions.values():
            self._spare.append(self._stashed.pop(version))


class DoubleBuffered(Latest):
    """PipeDream-2BW: forward and backward with the weights of one step before the last.

    The version gaps are at most 1 (checked by ``setup.by_chunk``).
    """

    keeps_forward_weights = True

    @staticmethod
    def copies_held(gap: int) -> int:
        """Return the most copies of the weights that are held beside the parameters."""
        return 2

    def __init__(self, steps: StageSteps) -> None:
        super().__init__(steps)
        self._newest: list[Tensor] | None = None
        self._previous: list[Tensor] | None = None

    def flush(self) -> None:
        """Forget all versions but the current one."""
        super().flush()
        self._spare += [copies for copies in (self._newest, self._previous) if copies is not None]
        self._newest = self._previous = None

    def stepped(self) -> None:
        """Note an optimizer step."""
        super().stepped()
        self._advance()

    def skipped(self) -> None:
        """Note a step that did not change the weights: two versions are equal."""
        super().skipped()
        self._advance()

    def _advance(self) -> None:
        if self._previous is not None:
            self._spare.append(self._previous)
        self._previous, self._newest = self._newest, self._copies()

    def _forward(self, position: int) -> AbstractContextManager[None]:
        if self._newest is None:
            self._newest = self._copies()
        return nullcontext() if self._gaps[position] else self._backward(position)

    def _backward(self, position: int) -> AbstractContextManager[None]:
        if self._previous is None or self._newest is None:
            return nullcontext()
        return self._exchanged(self._previous, self._newest)

    @contextmanager
    def _exchanged(self, previous: list[Tensor], newest: list[Tensor]) -> Iterator[None]:
        """Context in which the parameters hold ``previous``; then ``newest``, the real ones."""
        try:
            self._fill(previous)
            yield
        finally:
            self._fill(newest)


class Predict(Latest):
    """PipeOptim: forward with the weights that are predicted for backward."""

    predicts_steps = True

    @staticmethod
    def copies_held(gap: int) -> int:
        """Return the most copies of the weights that are held beside the parameters."""
        return 1 if gap else 0

    def __init__(self, steps: StageSteps) -> None:
        super().__init__(steps)
        self._prediction = StepPrediction(steps.optimizer, steps.rates)

    def stepped(self) -> None:
        """Note an optimizer step, while the parameters still have its gradients."""
        super().stepped()
        self._prediction.stepped()

    def flush(self) -> None:
        """Forget the last gradients, which no checkpoint holds; resuming gives the same bits."""
        super().flush()
        self._prediction.forget()

    def _forward(self, position: int) -> AbstractContextManager[None]:
        return self._predicted(self._gaps[position])

    def _predicted(self, steps: int) -> AbstractContextManager[None]:
        """Context in which the parameters hold the weights predicted for ``steps`` steps later."""
        return self._changed(lambda: self._prediction.apply(steps)) if steps else nullcontext()


class SpecTrain(Predict):
    """SpecTrain: forward and backward with weights predicted for the same later step."""

    @staticmethod
    def copies_held(gap: int) -> int:
        """Return the most copies of the weights that are held beside the parameters."""
        return 1

    def __init__(self, steps: StageSteps) -> None:
        super().__init__(steps)
        self._further = steps.depth // 2

    def _forward(self, position: int) -> AbstractContextManager[None]:
        return self._predicted(self._gaps[position] + self._further)

    def _backward(self, position: int) -> AbstractContextManager[None]:
        return self._predicted(self._further)


class XPipe(Predict):
    """Like XPipe: the first chunk of a step predicts the weights for all chunks of the step."""

    @staticmethod
    def copies_held(gap: int) -> int:
        """Return the most copies of the weights that are held beside the parameters."""
        return 2 if gap else 0

    def __init__(self, steps: StageSteps) -> None:
        super().__init__(steps)
        self._target = -1
        """Version that is predicted."""
        self._guess: list[Tensor] | None = None

    def flush(self) -> None:
        """Forget the last gradients and the prediction."""
        super().flush()
        self._drop_guess()

    def _forward(self, position: int) -> AbstractContextManager[None]:
        gap = self._gaps[position]
        target = self._version + gap
        if target != self._target:
            if not gap:
                return nullcontext()
            self._drop_guess()
            with self._predicted(gap):
                self._target, self._guess = target, self._copies()
        assert self._guess is not None
        return self._holding(self._guess)

    def _drop_guess(self) -> None:
        if self._guess is not None:
            self._spare.append(self._guess)
        self._target, self._guess = -1, None


WEIGHT_POLICIES: Registry[type[Latest]] = Registry("weight policy")
"""Weight policies by the name in a flag."""

WEIGHT_POLICIES.add("latest", Latest)
WEIGHT_POLICIES.add("stash", Stash)
WEIGHT_POLICIES.add("2bw", DoubleBuffered)
WEIGHT_POLICIES.add("predict", Predict)
WEIGHT_POLICIES.add("spectrain", SpecTrain)
WEIGHT_POLICIES.add("xpipe", XPipe)
