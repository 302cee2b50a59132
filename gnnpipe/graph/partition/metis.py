"""Partitioner ``metis``: METIS k-way, which keeps neighbours together."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from gnnpipe.errors import InputError
from gnnpipe.graph.partition.runs import parts_of_runs
from gnnpipe.graph.partition.task import PARTITIONERS, Objective, PartitionTask, Parts


def metis_version() -> str:
    """The library that runs METIS, with its version where that is known."""
    try:
        return f"pymetis {version('pymetis')}"
    except ImportError:
        return "metis"


def metis(task: PartitionTask) -> Parts:
    """The part of each vertex by METIS k-way, int32 [N].

    Objective ``ROWS`` takes about ten times as long as ``EDGES`` and allows 6 % of imbalance; the
    parts read 9 to 20 % fewer rows from each other. Shards, which send these rows, use it; chunks,
    whose edges between each other are stale, use ``EDGES``.
    """
    parts, n = task.parts, len(task.work)
    if parts == 1:
        return np.zeros(n, dtype=np.int32)
    # No edges to keep together, or no room to do so.
    if task.adjacency.nnz == 0 or n < 2 * parts:
        return parts_of_runs(task)
    options: dict[str, int] = {}
    if task.objective is Objective.ROWS:
        tries = 32_000_000 // (task.adjacency.nnz * parts)  # a few seconds at most
        options = {"objtype": 1, "ufactor": 60, "niter": 30, "ncuts": max(1, min(10, tries))}
    part = np.asarray(_call_pymetis(task, options), dtype=np.int32)
    return _with_least(part, task)


def _call_pymetis(task: PartitionTask, options: dict[str, int]) -> Sequence[int]:
    """METIS by pymetis, else by the ``metis`` wrapper around a METIS library of the machine."""
    try:
        import pymetis
    except ImportError:
        return _call_wrapper(task, options)
    width = pymetis.zero_copy_dtype()
    # + 1: METIS draws from C's rand, for which the seeds 0 and 1 are the same
    chosen = pymetis.Options(seed=(task.seed + 1) % 2**31, **options)
    indptr, indices = task.adjacency.indptr, task.adjacency.indices
    part: Sequence[int] = pymetis.part_graph(
        task.parts,
        pymetis.CSRAdjacency(indptr.astype(width), indices.astype(width)),
        vweights=task.work.astype(width),
        tpwgts=_targets(task),
        recursive=False,
        options=chosen,
    )[1]
    return part


def _call_wrapper(task: PartitionTask, options: dict[str, int]) -> Sequence[int]:
    try:
        import metis
    except (ImportError, RuntimeError, OSError):  # absent, or without a library to wrap
        raise InputError(
            "--partitioner 'metis': METIS is not installed; try `pip install pymetis`, or "
            "--partitioner range"
        ) from None
    number = metis.idx_t
    arrays = (task.adjacency.indptr, task.adjacency.indices, task.work)
    lists = [(number * len(a))(*a.tolist()) for a in arrays]
    graph = metis.METIS_Graph(number(len(task.work)), number(1), *lists, None, None)
    # Only the objective is passed on: METIS 5.2 renumbered the options behind it (the wrapper's
    # "seed" would set the number of tries), so here the seed has no effect.
    chosen: dict[str, object] = {"objtype": "vol"} if options else {}
    if task.shares is not None:
        chosen["tpwgts"] = _targets(task)
    part: Sequence[int] = metis.part_graph(graph, task.parts, **chosen)[1]
    return part


def _targets(task: PartitionTask) -> list[float] | None:
    """METIS target weights [parts], which sum to 1 up to rounding; ``None``: equal."""
    if task.shares is None:
        return None
    total = sum(task.shares)
    return [share / total for share in task.shares]


def _with_least(part: Parts, task: PartitionTask) -> Parts:
    """``part`` [N] with at least ``task.least`` vertices in every part.

    METIS may leave a part empty, or with one hub and nothing else. A part that is too small takes
    the lightest vertices of the part that has the most, which moves next to no work.
    """
    part = part.copy()
    count = np.bincount(part, minlength=task.parts)
    for small in np.flatnonzero(count < task.least):
        while count[small] < task.least:
            donor = int(count.argmax())
            moved = int(min(task.least - count[small], count[donor] - task.least))
            members = np.flatnonzero(part == donor)
            part[members[np.argsort(task.work[members], kind="stable")[:moved]]] = small
            count[small] += moved
            count[donor] -= moved
    return part


PARTITIONERS.add("metis", metis)
