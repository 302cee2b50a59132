"""Small graphs, and real gloo ranks for a function."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data

from gnnpipe.capture.stage.stage_module import RecordedStageModule
from gnnpipe.config import TrainConfig
from gnnpipe.graph.graph import Graph

PRELOADED = ["torch_geometric.nn", "gnnpipe.train.trainer", "gnnpipe.verification.comparison"]
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def small_graph(n=60, degree=5, features=7, classes=3, *, seed=0, directed=False, sparse=False):
    """A random graph with a hub, an isolated vertex and some unlabelled vertices."""
    rng = np.random.default_rng(seed)
    dense = rng.random((n, n)) < degree / n
    dense[0, : n // 2] = True
    if not directed:
        dense |= dense.T
    np.fill_diagonal(dense, False)
    dense[n - 1] = dense[:, n - 1] = False
    a = sp.csr_array(dense)
    a.sort_indices()
    x = rng.standard_normal((n, features)).astype(np.float32)
    if sparse:
        x = sp.csr_array(x * (rng.random(x.shape) < 0.3), dtype=np.float32)
    y = rng.integers(0, classes, n)
    y[3] = -1
    part = rng.permutation(n) % 3
    masks = [(part == i) & (y >= 0) for i in range(3)]
    return Graph(
        "small", a.indptr.astype(np.int64), a.indices.astype(np.int32), x, y, *masks, classes
    )


def carrying(graph, name, seed=0):
    """The same vertices; every edge has a weight, attributes [4] or one of three types.

    Some edges are there twice; none if ``name`` is None.
    """
    if name is None:
        return graph
    rng = np.random.default_rng(seed)
    twice = 1 + (rng.random(graph.num_edges) < 0.2)
    counts = np.repeat(np.arange(graph.num_vertices), graph.degrees)
    per_row = np.bincount(np.repeat(counts, twice), minlength=graph.num_vertices)
    edges = int(twice.sum())
    made = {
        "edge_weight": lambda: rng.uniform(0.5, 2.0, edges).astype(np.float32),
        "edge_attr": lambda: rng.standard_normal((edges, 4)).astype(np.float32),
        "edge_type": lambda: rng.integers(0, 3, edges),
    }
    return replace(
        graph,
        indptr=np.concatenate([[0], np.cumsum(per_row)]),
        indices=np.repeat(graph.indices, twice),
        **{name: made[name]()},
    )


def quick_config(**settings):
    """Three epochs in float64, nothing written and nothing said."""
    return TrainConfig(
        **{"epochs": 3, "out": "off", "cache_dir": "off", "dtype": "float64", "quiet": True}
        | settings
    )


@contextmanager
def struck_rows(strikes):
    """Context in which the rows that an aggregation pushes are NaN where ``strikes(layer, rows)``.

    ``layer``: number of the aggregation, from 0.
    """
    step, writes = RecordedStageModule.step, RecordedStageModule.writes_output_buffer

    def struck(self, index, values, received, rows):
        pushed, values = step(self, index, values, received, rows)
        for name in pushed:
            layer = int(name.rpartition("_")[2]) if "_" in name else 0
            if strikes(layer, rows):
                pushed[name] = pushed[name] * float("nan")
        return pushed, values

    # Rows that a step makes in the history table cannot be replaced.
    RecordedStageModule.step = struck
    RecordedStageModule.writes_output_buffer = lambda self, index: False
    try:
        yield
    finally:
        RecordedStageModule.step, RecordedStageModule.writes_output_buffer = step, writes


def pyg_data(graph):
    """The graph as a PyG ``Data``, with dense features."""
    masks = {f"{part}_mask": getattr(graph, f"{part}_mask") for part in ("train", "val", "test")}
    x = graph.x.toarray() if sp.issparse(graph.x) else graph.x
    fields = {"x": x, "edge_index": graph.edge_index, "y": graph.y, **masks}
    return Data(**{name: torch.from_numpy(value) for name, value in fields.items()})


def plain_pyg_losses(model, data, arguments, epochs, lr=0.01):
    """Losses of full-batch training with Adam in plain PyG; ``arguments``: those of forward."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*arguments)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class NoDropout(TorchFunctionMode):
    """Plain PyG without dropout."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.dropout:
            return args[0]
        return func(*args, **(kwargs or {}))


def assert_all_within(found, tolerance=1e-10):
    """``found``: (difference, what it is of)."""
    largest = max(found)
    assert largest[0] <= tolerance, largest[1]


def differences_of_shapes(shapes, names, epochs, parts, **settings):
    """(largest difference, of what) by shape and name, against one autograd graph that walks the
    same chunks; runs on every rank. ``parts``: of a name, the rank and K, the graph, the model and
    further settings.
    """
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        for name in names:
            # Every rank has weights of its own; those of rank 0 must win.
            graph, model, more = parts(name, mesh.rank, chunks)
            run = quick_config(stages=stages, shards=shards, chunks=chunks, **settings | more)
            prepared = prepare(run, mesh, graph, model)
            worst = max(compare_epochs(graph, prepared, mesh, epochs), key=lambda c: c.largest)
            found.append((worst.largest, f"{name} ({stages},{shards},{chunks}) {worst}"))
    return found


def one_way_graph(n=40, seed=0):
    """Every edge leads from a low vertex to a higher one: the first shard of a run reads nobody."""
    g = small_graph(n, seed=seed)
    keep = g.edge_index[0] < g.edge_index[1]
    source, target = g.edge_index[:, keep]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=n))])
    return replace(g, indptr=indptr, indices=source.astype(np.int32))


def two_islands(n=40, seed=0):
    """Two parts without an edge between them."""
    g = small_graph(n, seed=seed)
    source, target = g.edge_index
    keep = (source < n // 2) == (target < n // 2)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target[keep], minlength=n))])
    return replace(g, indptr=indptr, indices=source[keep].astype(np.int32))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(fn, rank, world_size, port, arguments, results):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    import torch

    torch.set_num_threads(1)
    try:
        # Pickled here, as plain bytes: torch would share tensors through a process that is gone.
        results.put((rank, True, pickle.dumps(fn(*arguments))))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run_ranks(
    fn: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 240
) -> list[Any]:
    """``fn(*arguments)`` on ``world_size`` real processes; the results by rank.

    The first rank's failure fails the test with its traceback, and every process is ended.
    """
    # Forked from a server that has imported torch and nothing else happened in: a fresh process for
    # each rank, without the seconds that the import takes.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = context.Queue()
    port = free_port()
    ranks = [
        context.Process(
            target=_rank_main, args=(fn, r, world_size, port, arguments, results), daemon=True
        )
        for r in range(world_size)
    ]
    for p in ranks:
        p.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < world_size:
            rank, good, value = results.get(timeout=timeout_s)
            if not good:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            found[rank] = pickle.loads(value)
        for p in ranks:
            p.join(timeout=30)
    finally:
        for p in ranks:
            if p.is_alive():
                p.kill()
    return [found[r] for r in range(world_size)]
