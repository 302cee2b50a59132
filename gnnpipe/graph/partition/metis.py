"""Partitioner ``metis``: METIS k-way, which keeps neighbours together."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnpipe.errors import FailedError, InputError
from gnnpipe.graph.partition import metis_process
from gnnpipe.graph.partition.metis_process import part_graph
from gnnpipe.graph.partition.runs import parts_of_runs
from gnnpipe.graph.partition.task import PARTITIONERS, Objective, PartitionTask, Parts

LONG_NNZ = 1_000_000
"""Adjacency entries above which METIS can take longer than a second, and runs in a process of its
own, where Ctrl-C and SIGTERM end it."""


def expected_time_s(num_entries: int, parts: int, objective: Objective) -> float:
    """About how long METIS takes for an adjacency of so many entries (docs/benchmarks/order.md)."""
    factor = 10 if objective is Objective.ROWS else 1
    return 1.25e-7 * factor * num_entries * math.sqrt(parts)


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
    return _with_least(_call_pymetis(task, options), task)


def _call_pymetis(task: PartitionTask, options: dict[str, int]) -> Parts:
    """METIS by pymetis, else by the ``metis`` wrapper around a METIS library of the machine."""
    # + 1: METIS draws from C's rand, for which the seeds 0 and 1 are the same
    chosen = {"seed": (task.seed + 1) % 2**31, **options}
    is_long = task.adjacency.nnz > LONG_NNZ and bool(sys.executable)
    run = _in_process if is_long and find_spec("pymetis") is not None else part_graph
    arrays = (task.adjacency.indptr, task.adjacency.indices, task.work)
    try:
        return run(arrays, task.parts, _targets(task), chosen)
    except ImportError:
        return np.asarray(_call_wrapper(task, options), dtype=np.int32)


def _in_process(
    arrays: Sequence[npt.NDArray[Any]],
    parts: int,
    targets: Sequence[float] | None,
    options: Mapping[str, int],
) -> Parts:
    """``part_graph`` in a process of its own, which ends with this one and on any exception."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    request = {
        "arrays": [(array.dtype.str, len(array)) for array in arrays],
        "parts": parts,
        "targets": targets,
        "options": options,
        "parent": os.getpid(),
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", metis_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as to, process.stdout as back:
            try:
                with contextlib.suppress(BrokenPipeError):  # if it has failed
                    to.write(json.dumps(request).encode() + b"\n")
                    for array in arrays:
                        to.write(array.data.cast("B"))
                    to.flush()
                found = back.read()
                code = process.wait()
            finally:
                process.kill()
                process.wait()
        if code == 0:
            return np.frombuffer(found, dtype=np.int32)
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    reason = f"was ended by signal {-code} (out of memory?)" if code < 0 else f"failed: {text}"
    raise FailedError(f"--partitioner 'metis': METIS {reason}; try --partitioner range")


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
