"""Runs training epochs on one GPU as a CUDA graph.

With some ten thousand vertices, a GPU finishes each kernel before Python, autograd and the driver
have launched the next. So forward and backward are recorded once as a CUDA graph, and replayed as a
whole: the same kernels, the same results. Dropout masks are drawn before the replay, at the start
of a pass (``ops.hashed_dropout``). The optimizer steps after the replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from gnnpipe.ops import triton
from gnnpipe.runtime.executor import Executor
from gnnpipe.schedule import Action, ActionKind

T = TypeVar("T")

_WARM_UP = 2
"""Epochs before the timed one: the first compiles kernels, the second allocates the masks."""
_MIN_LAUNCH_SHARE = 0.5
"""Least share of an epoch's time that launching kernels must take; below, a graph is not faster."""
_MIN_FREE = 2
"""Free memory that recording needs, relative to all allocations of an epoch."""


class Replay(Generic[T]):
    """Work that launches the same kernels each time and leaves gradients in ``parameters``."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._parameters, self._device = list(parameters), device
        self._key: object = None
        self._times = 0
        self._is_off = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T
        self._grads: list[Tensor | None] = []

    @property
    def is_recorded(self) -> bool:
        """The work has been recorded as a graph."""
        return self._graph is not None

    def run(self, key: object, work: Callable[[], T]) -> T:
        """Do the work, or replay its graph, and return its result.

        A replay returns the tensors of the recording with new values. Another ``key`` than in the
        last call means other work: the recording is dropped and a new one is made.
        """
        if key != self._key:
            self._key, self._times, self._graph = key, 0, None
        self._times += 1
        if self._is_off or self._times <= _WARM_UP:
            return work()
        if self._times == _WARM_UP + 1:
            result, is_worth_it = self._timed(work)
            self._is_off = not is_worth_it
            return result
        if self._graph is None and not self._record(work):
            return work()
        assert self._graph is not None
        self._graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return self._result

    def _timed(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Do the work, and return whether a graph would be faster and fits into memory."""
        before = self._allocated_bytes()
        torch.cuda.synchronize(self._device)
        start_s = time.perf_counter()
        result = work()
        launch_s = time.perf_counter() - start_s
        torch.cuda.synchronize(self._device)
        is_faster = launch_s >= _MIN_LAUNCH_SHARE * (time.perf_counter() - start_s)
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return result, is_faster and free_bytes >= _MIN_FREE * (self._allocated_bytes() - before)

    def _allocated_bytes(self) -> int:
        """Return the sum of all allocations so far, freed or not."""
        return int(torch.cuda.memory_stats(self._device)["allocated_bytes.all.allocated"])

    def _record(self, work: Callable[[], T]) -> bool:
        """Record the work; return ``False`` if it cannot be recorded (it waits for the GPU)."""
        try:
            self._graph, self._result = triton.captured(work, self._device)
        except Exception:  # an error of the work itself is raised again by the plain run
            self._is_off = True
            for parameter in self._parameters:
                parameter.grad = None
            return False
        self._grads = [parameter.grad for parameter in self._parameters]
        return True


class CudaGraphExecutor(Executor):
    """Executor for a single GPU with one chunk and a stage module that ``is_cuda_graph_safe``."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._replay: Replay[dict[int, dict[str, Tensor]]] = Replay(
            self.stage.stage_module.parameters(), self.mesh.device
        )

    @property
    def is_recorded(self) -> bool:
        """Epochs are replayed from now on."""
        return self._replay.is_recorded

    def _walk(self, actions: Sequence[Action], epoch: int) -> None:
        repeated = tuple(action for action in actions if action.kind is not ActionKind.STEP)
        if len(repeated) == len(actions) or self.stage.watch is not None:
            super()._walk(actions, epoch)
            return
        walk = super()._walk

        def forward_and_backward() -> dict[int, dict[str, Tensor]]:
            walk(repeated, epoch)
            return dict(self._results)

        self._results = dict(self._replay.run(repeated, forward_and_backward))
        walk(actions[len(repeated) :], epoch)
