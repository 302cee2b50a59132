"""The sums of gradients as tasks: there and back for every bucket, as the runtime's ``ShardSum``.

What a bucket's parts have to wait for on their way back is the place in the program where the next
bucket begins, or the step.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["BucketTasks"]


class BucketTasks:
    """Of the shards of one stage."""

    def __init__(
        self, half: Callable[[int, int, tuple[int, ...]], int], wait: Callable[..., None]
    ) -> None:
        """``half`` makes the task of one way: size in bytes, step, and the task that it follows;
        ``wait``: the shards wait for these tasks.
        """
        self._half, self._wait = half, wait
        self._gathered: list[tuple[int, int, int]] = []
        self._summed: list[int] = []

    def begin(self, size: int, step: int) -> None:
        """A bucket's parts travel to those who add them up; nothing does of one without weights."""
        self._hand_out()
        if size:
            self._gathered.append((self._half(size, step, ()), size, step))

    def finish(self) -> None:
        """All sums are there."""
        self._hand_out()
        self._wait(*self._summed)

    def _hand_out(self) -> None:
        for task, size, step in self._gathered:
            self._wait(task)
            self._summed.append(self._half(size, step, (task,)))
        self._gathered.clear()
