"""Renumber the vertices so that every chunk, and every shard's part of it, is one run of rows.

With contiguous rows a push is a slice, the aggregation of a chunk is one product with a slice of
the CSR, and which rank owns a row is a comparison. Training semantics depend on the chunks (they
decide which rows are stale) and must not depend on the number of shards; so the whole graph is
first partitioned into chunks, and each chunk then into shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.optimize import linear_sum_assignment

from gnnpipe.errors import InputError
from gnnpipe.graph.cache import content_key, folder_of, keep, recall
from gnnpipe.graph.graph import BoolArray, Features, Graph, chosen_edge_data, keep_order_of_parallel
from gnnpipe.graph.order import locality_rank, parts_of_order, resolve_order
from gnnpipe.graph.partition import (
    METIS_BASED,
    PARTITIONERS,
    Objective,
    Partitioner,
    PartitionTask,
    Parts,
    symmetric_pattern,
    vertex_work,
)
from gnnpipe.graph.partition.metis import expected_time_s, metis_version
from gnnpipe.output import report_progress

_SCHEME = 3
"""Version of the cache entries: raise it when the same settings give another chunking."""

_LEAST = 16
"""Vertices that every chunk gets where N allows: room for 16 shards, however heavy its hub."""


@dataclass(frozen=True, eq=False)
class Chunking:
    """Renumbering of N vertices in which every chunk, and in it every shard's part, is a run.

    Raises ``ValueError`` when ``perm`` is not a permutation or a cell (c, g) is empty.
    """

    perm: npt.NDArray[np.int64]
    """[N], ``perm[new row]`` = original vertex."""
    ptr: npt.NDArray[np.int64]
    """[K, G + 1], rows of (chunk c, shard g) are ``ptr[c, g]:ptr[c, g + 1]``."""

    def __post_init__(self) -> None:
        n = len(self.perm)
        if self.perm.ndim != 1 or n < 1:
            raise ValueError(f"perm has shape {self.perm.shape}, not [N]")
        if self.ptr.ndim != 2 or self.ptr.shape[0] < 1 or self.ptr.shape[1] < 2:
            raise ValueError(f"ptr has shape {self.ptr.shape}, not [K, G + 1]")
        joined = np.array_equal(self.ptr[1:, 0], self.ptr[:-1, -1])
        if not joined or self.ptr[0, 0] != 0 or self.ptr[-1, -1] != n:
            raise ValueError(f"ptr does not cover the rows 0 to {n}")
        if (self.cell_sizes < 1).any():
            raise ValueError("ptr has an empty chunk or shard")
        if self.perm.min() < 0 or self.perm.max() >= n:
            raise ValueError("perm has values out of range")
        if np.bincount(self.perm, minlength=n).max() != 1:
            raise ValueError("perm is not a permutation")

    @property
    def num_vertices(self) -> int:
        """N."""
        return len(self.perm)

    @property
    def chunks(self) -> int:
        """K."""
        return int(self.ptr.shape[0])

    @property
    def shards(self) -> int:
        """G."""
        return int(self.ptr.shape[1]) - 1

    @property
    def cell_sizes(self) -> npt.NDArray[np.int64]:
        """[K, G], rows of each (chunk, shard)."""
        return np.diff(self.ptr, axis=1)

    def rows(self, c: int, g: int) -> tuple[int, int]:
        """Start and stop of the rows of chunk ``c`` that shard ``g`` owns."""
        return int(self.ptr[c, g]), int(self.ptr[c, g + 1])

    def counts(self, chosen: BoolArray) -> npt.NDArray[np.int64]:
        """[K, G], the ``chosen`` [N] rows of each (chunk, shard)."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        return np.diff(before[self.ptr], axis=1)

    @cached_property
    def inverse(self) -> npt.NDArray[np.int64]:
        """[N], ``inverse[original vertex]`` = new row."""
        out = np.empty(self.num_vertices, dtype=np.int64)
        out[self.perm] = np.arange(self.num_vertices)
        return out

    def merged(self, bounds: Sequence[int]) -> Chunking:
        """The same rows in fewer shards: shard g has the parts ``bounds[g]:bounds[g + 1]``."""
        if list(bounds) == list(range(self.shards + 1)):
            return self
        return Chunking(self.perm, np.ascontiguousarray(self.ptr[:, list(bounds)]))

    def chunk_of_row(self) -> npt.NDArray[np.int32]:
        """[N], the chunk of each new row."""
        sizes = self.cell_sizes.sum(axis=1)
        return np.repeat(np.arange(self.chunks, dtype=np.int32), sizes)

    def shard_of_row(self) -> npt.NDArray[np.int32]:
        """[N], the shard of each new row."""
        shards = np.tile(np.arange(self.shards, dtype=np.int32), self.chunks)
        return np.repeat(shards, self.cell_sizes.ravel())


@dataclass(frozen=True)
class ShardShares:
    """Shares of the shards in the work of every chunk."""

    shares: tuple[float, ...]
    """[G], summing to 1."""
    levels: tuple[tuple[int, ...], ...] = ()
    """Coarser shards (see ``Chunking.merged``), each by the first shard of every coarser shard and
    G. The graph is cut into these first, so that they have few edges between them, too."""


def renumber(graph: Graph, chunking: Chunking) -> Graph:
    """The same graph with its vertices in the order of ``chunking``."""
    n, perm = graph.num_vertices, chunking.perm
    if len(perm) != n:
        raise ValueError(f"a chunking of {len(perm)} vertices does not fit a graph of {n}")
    if np.array_equal(perm, np.arange(n)):
        return graph
    # Of bare edges nothing need be found again.
    bare = not graph.edge_data
    numbers = np.ones(graph.num_edges, np.int8) if bare else np.arange(graph.num_edges)
    rows = sp.csr_array((numbers, graph.indices, graph.indptr), shape=(n, n))[perm]
    moved = chunking.inverse.astype(graph.indices.dtype)[rows.indices]
    a = sp.csr_array((rows.data, moved, rows.indptr), shape=(n, n))
    a.sort_indices()
    if not bare:
        keep_order_of_parallel(a)
    edge_data = chosen_edge_data(graph.edge_data, a.data)
    carried: dict[str, Any] = {}
    if graph.types is not None:
        carried["types"] = graph.types.renumbered(perm)
    if graph.pairs is not None:
        carried["pairs"] = graph.pairs.renumbered(chunking.inverse)
    x: Features = sp.csr_array(graph.x[perm]) if sp.issparse(graph.x) else graph.x[perm]
    return Graph(
        name=graph.name,
        indptr=a.indptr.astype(np.int64),
        indices=a.indices.astype(graph.indices.dtype),
        x=x,
        y=graph.y[perm],
        train_mask=graph.train_mask[perm],
        val_mask=graph.val_mask[perm],
        test_mask=graph.test_mask[perm],
        num_classes=graph.num_classes,
        adjacency=graph.adjacency,
        vertex_columns=graph.vertex_columns,
        **carried,
    ).with_edge_data(edge_data)


def make_chunking(
    graph: Graph,
    *,
    chunks: int,
    shards: int,
    partitioner: str,
    seed: int,
    order: str = "given",
    cache_dir: str = "",
    shares: ShardShares | None = None,
) -> Chunking:
    """Partition ``graph`` into K ``chunks`` and each of them into G ``shards``.

    The chunks do not depend on ``shards``, ``shares`` or ``order``.

    Args:
        graph: N vertices.
        chunks: K.
        shards: G.
        partitioner: a name of ``PARTITIONERS``.
        seed: of the partitioner.
        order: of the vertices of one chunk and shard: 'given', 'metis' or 'auto' (see
            ``resolve_order``).
        cache_dir: folder that keeps the result for the next run; '' is the default folder, 'off'
            keeps nothing. Results of partitioners from outside gnnpipe are not kept.
        shares: of the shards; ``None``: equal shares.

    Raises:
        InputError: unknown ``partitioner``; more chunks or shards than the vertices allow.
    """
    partition = PARTITIONERS[partitioner]
    n = graph.num_vertices
    check_counts(n, chunks, shards)
    order = resolve_order(order, partitioner, n)
    shares = shares or ShardShares((1 / shards,) * shards)
    request = _Request(chunks, shards, seed, order, _unequal(shares.shares, shards), shares.levels)
    if chunks == shards == 1 and request.order == "given":
        return Chunking(np.arange(n, dtype=np.int64), np.array([[0, n]], dtype=np.int64))
    is_ours = partition.__module__.startswith("gnnpipe.")
    folder = folder_of(cache_dir) if is_ours else None
    if folder is None:
        return _partition(graph, request, partition)
    key = content_key(
        request.cache_settings(partitioner), {"indptr": graph.indptr, "indices": graph.indices}
    )
    kept = _recalled(folder, key, (n, chunks, shards))
    if kept is not None:
        return kept
    made = _partition(graph, request, partition)
    keep(folder, key, {"perm": made.perm, "ptr": made.ptr})
    return made


@dataclass(frozen=True)
class _Request:
    """The arguments of ``make_chunking`` that decide the result."""

    chunks: int
    shards: int
    seed: int
    order: str
    """'given' or 'metis'."""
    shares: tuple[float, ...] | None
    """[G], or ``None`` for equal shares."""
    levels: tuple[tuple[int, ...], ...]
    """Coarser shards, cut first."""

    def share_of(self, start: int, stop: int) -> float:
        """The share of a run of parts in the work of a chunk."""
        return sum(self.shares[start:stop]) if self.shares else (stop - start) / self.shards

    def cache_settings(self, partitioner: str) -> dict[str, Any]:
        """Everything beside the graph that decides the result, the library's version included."""
        version = dict.fromkeys(METIS_BASED, metis_version())
        settings: dict[str, Any] = {
            "scheme": _SCHEME,
            "chunks": self.chunks,
            "shards": self.shards,
            "seed": self.seed,
            "order": f"{self.order} {version.get(self.order, '')}",
            "partitioner": f"{partitioner} {version.get(partitioner, '')}",
        }
        optional = {"shares": self.shares, "levels": self.levels}
        return settings | {name: value for name, value in optional.items() if value}


def _unequal(shares: tuple[float, ...], shards: int) -> tuple[float, ...] | None:
    """``shares`` if they differ; ``None`` if they are equal."""
    if len(shares) != shards or min(shares) <= 0 or not math.isclose(sum(shares), 1.0):
        raise ValueError(f"shares {shares} are not {shards} positive numbers that sum to 1")
    return None if all(math.isclose(s, shares[0]) for s in shares) else shares


def _recalled(folder: Path, key: str, shape: tuple[int, int, int]) -> Chunking | None:
    """The chunking kept under ``key`` if it is whole and has the ``shape`` (N, K, G)."""
    arrays = recall(folder, key)
    if arrays is None:
        return None
    try:
        kept = Chunking(arrays["perm"].astype(np.int64), arrays["ptr"].astype(np.int64))
    except (KeyError, ValueError):
        return None
    return kept if (kept.num_vertices, kept.chunks, kept.shards) == shape else None


def check_counts(n: int, chunks: int, shards: int) -> None:
    """``InputError`` if n vertices are too few for K chunks of G shards."""
    for name, value in (("chunks", chunks), ("shards", shards)):
        if value < 1:
            raise InputError(f"--{name} {value}: must be at least 1")
        if value > n:
            raise InputError(
                f"--{name} {value}: more {name} than vertices ({n}); try --{name} {n} or fewer"
            )
    if chunks * shards > n:
        raise InputError(
            f"--chunks {chunks} --shards {shards}: more parts ({chunks * shards}) than vertices "
            f"({n}); try --chunks {n // shards} or fewer"
        )


def _partition(graph: Graph, request: _Request, partition: Partitioner) -> Chunking:
    chunks, shards = request.chunks, request.shards
    whole = PartitionTask(
        symmetric_pattern(graph),
        vertex_work(graph),
        chunks,
        least=min(graph.num_vertices // chunks, _LEAST),
        seed=request.seed,
    )
    _report_left(whole, request, partition)
    chunk = np.zeros(len(whole.work), np.int32) if chunks == 1 else _parts(partition, whole)
    shard = _shard_of_vertex(whole, chunk, request, partition)
    cell = chunk.astype(np.int64) * shards + shard
    bounds = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=chunks * shards))])
    ptr = bounds[np.arange(chunks)[:, None] * shards + np.arange(shards + 1)]
    _report_left(whole, request, partition, chunks)
    rank = locality_rank(whole.adjacency, whole.work, request.order, request.seed)
    perm = np.lexsort((rank, cell))
    return Chunking(perm.astype(np.int64), ptr.astype(np.int64))


def _report_left(
    whole: PartitionTask, request: _Request, partition: Partitioner, done: float | None = None
) -> None:
    """Report how much METIS has still to do.

    ``done``: chunks that have been divided into shards; ``None``: the chunks are still to be found.
    """
    entries, chunks, shards = whole.adjacency.nnz, request.chunks, request.shards
    chunk_s = shard_s = order_s = 0.0
    if request.order == "metis":
        order_s = expected_time_s(entries, parts_of_order(len(whole.work)), Objective.EDGES)
    if partition in [PARTITIONERS[name] for name in METIS_BASED]:
        chunk_s = expected_time_s(entries, chunks, Objective.EDGES) * (chunks > 1)
        shard_s = expected_time_s(entries // chunks, shards, Objective.ROWS) * (shards > 1)
    total_s = chunk_s + chunks * shard_s + order_s
    if done is None:
        report_progress(left_s=total_s)
    elif total_s:
        # This machine may be slower than the estimate.
        report_progress((chunk_s + done * shard_s) / total_s)


def _parts(partition: Partitioner, task: PartitionTask) -> Parts:
    """The partitioner's answer; ``InputError`` if it is not one part for each vertex."""
    found = np.asarray(partition(task))
    name, shape = getattr(partition, "__name__", repr(partition)), task.work.shape
    fault = ""
    if found.shape != shape or found.dtype.kind not in "iu":
        fault = f"{found.dtype} {list(found.shape)}, not a whole number for each of {shape[0]}"
    elif found.min() < 0 or found.max() >= task.parts:
        fault = f"part numbers {found.min()} to {found.max()}, not 0 to {task.parts - 1} for all"
    elif (empty := np.bincount(found, minlength=task.parts) == 0).any():
        fault = f"no vertex in part {int(empty.argmax())} of {task.parts} for"
    if fault:
        raise InputError(f"--partitioner: {name} returned {fault} vertices; see Partitioner")
    return found.astype(np.int32)


def _shard_of_vertex(
    whole: PartitionTask, chunk: Parts, request: _Request, partition: Partitioner
) -> Parts:
    """The shard of each vertex, [N] in [0, G); one cut of every chunk after another."""
    shard = np.zeros(len(chunk), dtype=np.int32)
    divided = list(_divided_regions(request))
    for i, runs in enumerate(divided):
        start = runs[0][0]
        members = np.flatnonzero(shard == start)
        cut = _Cut(whole, chunk, members, runs, request, partition)
        report = partial(_report_cut, whole, request, partition, i / len(divided), len(divided))
        shard[members] = cut.shards(report)
    return shard


def _divided_regions(request: _Request) -> Iterator[list[tuple[int, int]]]:
    """Yield the runs (first part, end) of every region that is divided, level by level."""
    regions = [(0, request.shards)]
    for bounds in (*request.levels, tuple(range(request.shards + 1))):
        finer: list[tuple[int, int]] = []
        for start, stop in regions:
            runs = list(pairwise([start, *(b for b in bounds if start < b < stop), stop]))
            finer += runs
            if len(runs) > 1:
                yield runs
        regions = finer


def _report_cut(
    whole: PartitionTask,
    request: _Request,
    partition: Partitioner,
    before: float,
    cuts: int,
    done: int,
) -> None:
    """Report that one of ``cuts`` regions is divided in ``done`` chunks; ``before``: part done."""
    _report_left(whole, request, partition, before * request.chunks + done / cuts)


class _Cut:
    """The cut of a region of every chunk into runs of parts."""

    def __init__(
        self,
        whole: PartitionTask,
        chunk: Parts,
        members: npt.NDArray[np.int64],
        runs: Sequence[tuple[int, int]],
        request: _Request,
        partition: Partitioner,
    ) -> None:
        """``members``: the vertices of the region, ascending; ``runs``: first part and end."""
        is_all = len(members) == len(chunk)
        self._adjacency = whole.adjacency if is_all else whole.adjacency[members][:, members]
        self._chunk, self._work = chunk[members], whole.work[members]
        self._runs, self._request, self._partition = runs, request, partition
        shares = [request.share_of(*run) for run in runs]
        total = sum(shares)
        self._shares = _unequal(tuple(share / total for share in shares), len(runs))

    def shards(self, report: Callable[[int], None]) -> Parts:
        """The first part of the run of each member; ``report`` is called before each chunk."""
        part = self._part_of_member(report)
        if self._request.chunks > 1:
            parts_of_runs = [self._parts_of(run) for run in self._runs]
            part = _match_runs(self._adjacency, self._chunk, part, parts_of_runs)
        firsts = np.array([start for start, _ in self._runs], dtype=np.int32)
        return firsts[part]

    def _part_of_member(self, report: Callable[[int], None]) -> Parts:
        """The run of each member within its chunk."""
        part = np.zeros(len(self._chunk), dtype=np.int32)
        parts, request = len(self._runs), self._request
        for c in range(request.chunks):
            report(c)
            members = np.flatnonzero(self._chunk == c)
            if len(members) < parts:
                raise InputError(
                    f"--shards {request.shards}: chunk {c} has only {len(members)} vertices; "
                    f"try --shards {len(members)} or fewer --chunks"
                )
            a = self._adjacency
            task = PartitionTask(
                a if request.chunks == 1 else a[members][:, members],
                self._work[members],
                parts,
                self._shares,
                seed=request.seed,
                objective=Objective.ROWS,
            )
            part[members] = _parts(self._partition, task)
        return part

    def _parts_of(self, run: tuple[int, int]) -> tuple[object, ...]:
        """The shares of the parts of a run, and the coarser shards that end in it."""
        start, stop = run
        shares = [round(self._request.share_of(i, i + 1), 6) for i in range(start, stop)]
        ends = ((b - start for b in level if start < b < stop) for level in self._request.levels)
        return shares, tuple(map(tuple, ends))


def _match_runs(
    adjacency: sp.csr_array, chunk: Parts, part: Parts, parts_of_runs: Sequence[object]
) -> Parts:
    """The run of each vertex, [N]: the runs of each chunk matched to those of the others.

    Two runs of a chunk may be swapped if they consist of equal parts. Chunk after chunk takes the
    matching with the most edges to the same run in the chunks that are matched already, so that
    fewer rows cross shards: M falls by 4 % (Physics) to 13 % (Debian). In the second round, which
    brings up to 8 % of that, every chunk sees all others; more rounds change nothing.
    """
    n, runs, chunks = len(chunk), len(parts_of_runs), int(chunk.max()) + 1
    cells = chunks * runs
    cell = chunk.astype(np.int64) * runs + part
    member = sp.csr_array((np.ones(n), (np.arange(n), cell)), shape=(n, cells))
    between = (member.T @ (adjacency.astype(np.float64) @ member)).toarray()
    kinds = np.array([parts_of_runs.index(parts) for parts in parts_of_runs])
    # No number of edges is worth a run of other parts.
    penalty = np.where(kinds[:, None] == kinds, 0.0, 2 * between.sum() + 1)
    shard = np.full(cells, -1)
    for c in [*range(chunks), *range(chunks)]:
        own = slice(c * runs, (c + 1) * runs)
        shard[own] = -1
        known = np.flatnonzero(shard >= 0)
        edges = np.zeros((runs, runs))
        np.add.at(edges.T, shard[known], between[own, known].T)
        shard[own] = linear_sum_assignment(edges - penalty, maximize=True)[1]
    return np.asarray(shard[cell], dtype=np.int32)
