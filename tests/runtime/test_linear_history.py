"""Shared table of LinearHistory: aggregated rows and their gradients in the same memory."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers import quick_config, small_graph

from gnnpipe.graph.csr import RowCSR
from gnnpipe.graph.operators import LinearOperator
from gnnpipe.ops.spmm import KERNELS, embedding_bag
from gnnpipe.perf.parts import Side
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.history.linear import LinearHistory
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import evaluate, train_epoch


def trained(epochs=3, **settings):
    """Losses, weights and scores after some epochs, and the rank's runtime."""
    config = quick_config(epochs=epochs, layers=3, hidden=16, dropout=0.3, **settings)
    mesh = Mesh.alone()
    prepared = prepare(config, mesh, small_graph(n=120, degree=3, features=20, sparse=True))
    rank_runtime = build_rank(prepared, mesh)
    losses = [
        train_epoch(rank_runtime, mesh, prepared.program_of(e), prepared.chunk_order(e), e)
        for e in range(epochs)
    ]
    weights = [p.detach().clone() for p in prepared.model.module.parameters()]
    return losses, weights, evaluate(rank_runtime, mesh), rank_runtime


def apart(monkeypatch):
    """Use two tables: rows without a recorded gradient are zero, and are multiplied too."""

    def read(self, chunk):
        self.settle()
        found = self.operator.forward.matmul(self.table, *self.into(chunk)).to(self._dtype)
        self._free_after_read()
        return found

    def clear(self):
        self._recorded = 0
        if self.layout.num_chunks > 1:
            self._grads = self.table.new_zeros(self.operator.forward.num_rows, self.table.shape[1])

    monkeypatch.setattr(LinearHistory, "read", read)
    monkeypatch.setattr(LinearHistory, "_clear_gradients", clear)
    monkeypatch.setattr(
        LinearOperator, "back", lambda self, g, low, high, _: self.transposed.matmul(g, low, high)
    )


SETTINGS = [
    {},
    {"recompute": True},
    {"staleness": "exact"},
    {"staleness": "paper"},
    {"staleness": "none", "recompute": True},
    {"comm_dtype": "bf16", "dtype": "float32"},
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn"])
def test_same_bits_as_with_two_tables(model, settings, monkeypatch):
    one = trained(model=model, chunks=5, **settings)
    apart(monkeypatch)
    two = trained(model=model, chunks=5, **settings)
    assert one[0] == two[0]
    assert one[2] == two[2]
    for mine, other in zip(one[1], two[1], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_of_chunks_that_have_not_recorded_are_not_read(settings, monkeypatch):
    clean = trained(model="sage", chunks=5, **settings)
    begin, back = LinearHistory._clear_gradients, LinearOperator.back

    def spoilt(self, grads, low, high, chunks):
        kept = grads.clone()
        for chunk in range(len(self.into_ptr) - 1):
            if not chunks >> chunk & 1:
                kept[self.into_ptr[chunk] : self.into_ptr[chunk + 1]] = torch.nan
        return back(self, kept, low, high, chunks)

    def begun(self):
        begin(self)
        if self._is_shared:
            self._grads.fill_(torch.nan)

    monkeypatch.setattr(LinearOperator, "back", spoilt)
    monkeypatch.setattr(LinearHistory, "_clear_gradients", begun)
    found = trained(model="sage", chunks=5, **settings)
    assert found[0] == clean[0]
    for mine, other in zip(found[1], clean[1], strict=True):
        assert torch.equal(mine, other)


def test_evaluation_allocates_no_gradients():
    rank_runtime = trained(model="gcn", chunks=4)[3]
    stage, seen = rank_runtime.executor.stage, []
    stage.watch = lambda *_: seen.extend(stage._scratch.values())
    evaluate(rank_runtime, Mesh.alone())
    assert {id(history) for history in seen} & {id(h) for h in stage.histories.values()} == set()
    assert seen
    assert {len(history._grads) for history in seen} == {0}
    shared = [h for h in stage.histories.values() if h._is_shared]
    assert shared
    for history in shared:
        place = history._grads[history.into(1)[0] :].data_ptr()
        assert history.read(1).data_ptr() == place


def test_which_aggregations_share_a_table():
    def numbers(**settings):
        """Which of the aggregations share one, by number."""
        config = quick_config(**{"layers": 4, "hidden": 16, "chunks": 5} | settings)
        graph = small_graph(n=120, degree=3, features=20, sparse=True)
        known = np.flatnonzero(graph.train_mask)
        few = graph.train_mask & (np.arange(120) < known[len(known) // 3])
        prepared = prepare(config, Mesh.alone(), replace(graph, train_mask=few))
        names = [op.name for op in prepared.model_graph.aggregations]
        return {names.index(name) for name in prepared.shared_tables}

    # The last one has a matrix of its own, of the rows asked for.
    assert numbers() == {0, 1, 2}
    assert numbers(layers=2) == set()
    assert numbers(layers=3) == {0, 1}
    assert numbers(chunks=1) == set()
    assert numbers(model="gat") == set()
    assert numbers(comm_dtype="bf16", dtype="float32") == set()
    # Nothing stale: nothing is cut out.
    assert numbers(layers=2, staleness="exact") == {0, 1}


def test_every_stage_by_itself():
    config = quick_config(layers=5, hidden=16, chunks=5, stages=3)
    prepared = prepare(config, Mesh.alone(), small_graph(n=120, degree=3, features=20, sparse=True))
    ops, few = prepared.model_graph.ops, prepared.loss_rows.ops
    runs = [{ops[i].name for i in stage.ops if ops[i].aggregates} for stage in prepared.plan.stages]
    assert {len(run) for run in runs} == {1, 2}
    expected = [run - few if len(run - few) > 1 else set() for run in runs]
    assert prepared.shared_tables == set().union(*expected) != set()


@pytest.mark.parametrize("staleness", ["auto", "exact"])
def test_predictions_count_live_edges(staleness):
    config = quick_config(layers=4, hidden=16, chunks=5, staleness=staleness)
    prepared = prepare(config, Mesh.alone(), small_graph(n=120, degree=3, features=20, sparse=True))
    graph, sizes = prepared.graph, chunk_sizes(prepared).stages[0]
    chunk, op = prepared.chunking.chunk_of_row(), prepared.model_graph.aggregations[1]
    crossing = (np.repeat(chunk, graph.degrees) != chunk[graph.indices]).sum()
    assert crossing > 0
    dead = 0 if staleness == "exact" else crossing / 2
    assert sizes.columns(op, Side.AFTER)[1].sum() == graph.num_edges
    assert sizes.columns(op, Side.BEFORE)[1].sum() == pytest.approx(graph.num_edges - dead, abs=5)


def operator(index=None, dtype=torch.float64):
    rng = np.random.default_rng(0)
    dense = rng.random((9, 9)) * (rng.random((9, 9)) < 0.4)
    kernel = KERNELS[index] if index else embedding_bag
    forward = RowCSR.from_scipy(sp.csr_array(dense), dtype, torch.device("cpu"), kernel)
    return dense, LinearOperator(forward, forward.transpose(), [0, 2, 2, 5, 9])


@pytest.mark.parametrize("kernel", [None, "csr"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_transposed_product_over_some_chunks(kernel, dtype):
    dense, made = operator(kernel, dtype)
    grads = torch.from_numpy(np.random.default_rng(1).random((9, 3))).to(dtype)
    ranges = ((0, 4), (4, 9), (0, 9), (3, 3))
    # One after the other: what was cut out for some is not taken for others.
    for chunks in (*range(16), 5, 10, 5):
        is_kept = np.repeat([chunks >> c & 1 for c in range(4)], np.diff(made.into_ptr)) > 0
        want = dense.T[:, is_kept] @ grads.double().numpy()[is_kept]
        for low, high in ranges:
            found = made.back(grads, low, high, chunks)
            np.testing.assert_allclose(found.numpy(), want[low:high], atol=1e-6)
            assert torch.equal(made.back(grads, low, high, chunks), found)
        assert len(made._parts) <= len(ranges)
    made.forget()
    assert not made._parts
