"""Partitioner ``mixed``: every chunk is two parts of METIS, drawn at random.

Neighbours tend to have the same class, so a part of METIS has few classes. If the optimizer steps
after each chunk, such steps undo each other; with two parts a chunk they do so less, and more edges
are cut. Cluster-GCN builds its batches of several clusters for the same reason (arXiv 1905.07953,
section 3.2; docs/adr/0055-chunks-of-two-parts.md).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gnnpipe.graph.partition.metis import metis
from gnnpipe.graph.partition.task import PARTITIONERS, Objective, PartitionTask, Parts

_LEAST = 8
"""Vertices of a part; with fewer, every chunk is one part."""


def mixed(task: PartitionTask) -> Parts:
    """The part of each vertex, int32 [N]: two of METIS's parts each.

    Shards (objective ``ROWS``) and parts of unequal shares are METIS's own.
    """
    fine = 2 * task.parts
    has_room = len(task.work) >= fine * max(_LEAST, task.least)
    if task.parts == 1 or task.shares or task.objective is Objective.ROWS or not has_room:
        return metis(task)
    drawn = np.random.default_rng(task.seed).permutation(fine) % task.parts
    return drawn.astype(np.int32)[metis(replace(task, parts=fine))]


PARTITIONERS.add("mixed", mixed)
