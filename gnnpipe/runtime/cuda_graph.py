"""Epochs of one GPU as a CUDA graph, where starting the kernels is what takes the time.

On some ten thousand vertices a GPU is done with a kernel before the next one is started: Python,
autograd and the driver take their time for each, and an epoch has a hundred and more. So forward
and backward are gone through once, recorded, and from then on repeated as a whole: the kernels are
the same, and so are the numbers. What changes from epoch to epoch stays outside: dropout masks are
made in front of it, where a pass begins (``models.dropout``), and the optimizer's step comes
behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from gnnpipe.ops import triton
from gnnpipe.runtime.executor import Executor
from gnnpipe.schedule import Action, ActionKind

__all__ = ["CudaGraphExecutor", "Replay"]

T = TypeVar("T")

_WARM_UP = 2
"""Epochs in front of the one that is timed: kernels are built in the first, and from the second on
masks lie where they stay."""
_SHARE = 0.5
"""Of an epoch's time. If its kernels are started in less, it is the GPU that is waited for."""
_ROOM = 2
"""So many times what an epoch takes, one after the other, must be free: a graph keeps some."""


class Replay(Generic[T]):
    """One piece of work that starts the same kernels each time, and leaves gradients behind."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._parameters, self._device = list(parameters), device
        self._what: object = None
        self._times = 0
        self._is_off = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: T
        self._grads: list[Tensor | None] = []

    @property
    def is_recorded(self) -> bool:
        """It is a graph by now."""
        return self._graph is not None

    def run(self, what: object, work: Callable[[], T]) -> T:
        """Do the work, which is known by ``what``, and give what it returned.

        In a replay these are the tensors of the recording, with new numbers in them.
        """
        if what != self._what:
            self._what, self._times, self._graph = what, 0, None
        self._times += 1
        if self._is_off or self._times <= _WARM_UP:
            return work()
        if self._times == _WARM_UP + 1:
            found, self._is_off = self._timed(work)
            return found
        if self._graph is None and not self._record(work):
            return work()
        assert self._graph is not None
        self._graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return self._found

    def _timed(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Do it; whether the GPU is what takes the time, or has too little memory."""
        before = self._taken_bytes()
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        found = work()
        started = time.perf_counter()
        torch.cuda.synchronize(self._device)
        is_long = started - start < _SHARE * (time.perf_counter() - start)
        free, _ = torch.cuda.mem_get_info(self._device)
        return found, is_long or free < _ROOM * (self._taken_bytes() - before)

    def _taken_bytes(self) -> int:
        """Of all that was ever taken, given back or not: no peak, which others may have left."""
        return int(torch.cuda.memory_stats(self._device)["allocated_bytes.all.allocated"])

    def _record(self, work: Callable[[], T]) -> bool:
        """Whether it could be: not if something looks at numbers, which takes a wait."""
        try:
            self._graph, self._found = triton.captured(work, self._device)
        except Exception:  # what is wrong with the work itself comes up again without a graph
            self._is_off = True
            for parameter in self._parameters:
                parameter.grad = None
            return False
        self._grads = [parameter.grad for parameter in self._parameters]
        return True


class CudaGraphExecutor(Executor):
    """Of a GPU by itself with one chunk, whose piece ``is_cuda_graph_safe``."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._replay: Replay[dict[int, dict[str, Tensor]]] = Replay(
            self.stage.stage_module.parameters(), self.mesh.device
        )

    @property
    def is_recorded(self) -> bool:
        """Epochs are repeated by now."""
        return self._replay.is_recorded

    def _walk(
        self,
        actions: Sequence[Action],
        epoch: int,
        run: Mapping[ActionKind, Callable[[Executor, Action], None]],
    ) -> None:
        work = tuple(action for action in actions if action.kind is not ActionKind.STEP)
        if len(work) == len(actions) or self.stage.watch is not None:
            super()._walk(actions, epoch, run)
            return
        walk = super()._walk

        def precomputed() -> dict[int, dict[str, Tensor]]:
            walk(work, epoch, run)
            return dict(self._results)

        self._results = dict(self._replay.run(work, precomputed))
        walk(actions[len(work) :], epoch, run)
