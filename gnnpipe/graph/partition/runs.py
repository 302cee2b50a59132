"""Partitioners ``range`` and ``random``: runs of vertices in the given or in a random order.

They serve graphs whose order is already good, and show the gain of METIS.
"""

from __future__ import annotations

import numpy as np

from gnnpipe.graph.graph import IntArray
from gnnpipe.graph.partition.task import PARTITIONERS, PartitionTask, Parts


def parts_of_runs(task: PartitionTask, work: IntArray | None = None) -> Parts:
    """The part of each vertex when the vertices are split into runs of the given work shares.

    ``work`` [N]: the work of the vertices in another order than that of ``task``.
    """
    work = task.work if work is None else work
    n, parts = len(work), task.parts
    total = np.cumsum(work)
    middle = total - work / 2  # a vertex belongs to the run that holds the middle of its work
    if task.shares is None:
        ends = total[-1] * np.arange(1, parts) / parts
    else:
        ends = total[-1] * np.cumsum(task.shares)[:-1]
    starts = np.searchsorted(middle, ends)
    steps = np.arange(1, parts) * task.least
    starts = np.maximum.accumulate(np.maximum(starts - steps, 0)) + steps
    starts = np.minimum(starts, n - steps[::-1])
    bounds = np.concatenate([[0], starts, [n]])
    return np.repeat(np.arange(parts, dtype=np.int32), np.diff(bounds))


def _random(task: PartitionTask) -> Parts:
    order = np.random.default_rng(task.seed).permutation(len(task.work))
    part = np.empty(len(order), dtype=np.int32)
    part[order] = parts_of_runs(task, task.work[order])
    return part


PARTITIONERS.add("range", parts_of_runs)
PARTITIONERS.add("random", _random)
