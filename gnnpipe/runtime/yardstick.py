"""A fixed piece of work, whose time tells how fast the cores are just now.

Cores of a rented machine share their socket with strangers: within a minute they become a third
slower and quick again. A profile keeps what the yardstick took beside the steps that it measured; a
run that is predicted by it takes the yardstick anew. Half of it is a product of matrices, half
reads rows here and there, as an epoch does: over 150 epochs of GCN on one such machine the two
together changed as the epochs did (slope 1.0; either alone .7 or 1.5).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["yardstick_time_s"]

SIDE = 512
"""Of the matrices."""
ROWS, WIDTH, BLOCK = 1 << 17, 64, 1 << 12
"""32 MiB: more than lies near a core."""
BLOCKS = 16
REPEATS = 15
"""Some 0.1 s."""


def yardstick_time_s(device: torch.device) -> float:
    """Seconds, of this rank; 0 where it tells nothing: on GPUs."""
    if device.type != "cpu":
        return 0.0
    generator = torch.Generator().manual_seed(0)
    matrix = torch.rand((SIDE, SIDE), generator=generator)
    table = torch.ones((ROWS, WIDTH))
    places = torch.randint(0, ROWS, (BLOCKS, BLOCK), generator=generator)
    product, rows = torch.empty_like(matrix), torch.empty((BLOCK, WIDTH))

    def multiply() -> None:
        torch.mm(matrix, matrix, out=product)

    def read() -> None:
        for block in places:
            torch.index_select(table, 0, block, out=rows)

    return _typical_s(multiply) + _typical_s(read)


def _typical_s(work: Callable[[], object]) -> float:
    # As steps are: with one thread without what other programs take.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(REPEATS):
        start_s = clock()
        work()
        times.append(clock() - start_s)
    return statistics.median(times)
