"""All kernels give the same product; ``--kernel measured`` takes the fastest."""

import importlib.util
import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import TrainConfig, Trainer
from gnnpipe.errors import InputError
from gnnpipe.graph.csr import RowCSR
from gnnpipe.ops import spmm

CPU = torch.device("cpu")
HERE = [
    name
    for name in spmm.KERNELS
    if name != "triton"  # tests/ops/test_triton.py
    and (name != "torch-sparse" or importlib.util.find_spec("torch_sparse"))
]


def matrix(seed=0, rows=50, columns=40):
    """A matrix with empty rows at both ends and in between."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((rows, columns)) * (rng.random((rows, columns)) < 0.2)
    dense[[0, 7, rows - 1]] = 0
    return sp.csr_array(dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HERE)
def test_products(name, dtype):
    a = matrix()
    rows = RowCSR.from_scipy(a, dtype, CPU, spmm.kernel_named(name, dtype, CPU))
    dense = torch.randn(40, 6, dtype=dtype)
    truth = torch.from_numpy(a.toarray()).to(dtype) @ dense
    for start, stop in ((0, 50), (0, 1), (5, 23), (23, 23), (49, 50)):
        torch.testing.assert_close(rows.matmul(dense, start, stop), truth[start:stop])
    chosen = torch.tensor([8, 7, 30])
    torch.testing.assert_close(rows.select(chosen).matmul(dense), truth[chosen])
    assert rows.select(chosen).kernel is rows.kernel


def losses(kernel, shape=(1, 1, 3)):
    stages, shards, chunks = shape
    config = quick_config(
        model="gcnii",
        layers=3,
        hidden=8,
        kernel=kernel,
        stages=stages,
        shards=shards,
        chunks=chunks,
    )
    result = Trainer(config, graph=small_graph(directed=True)).fit()
    return [row.loss for row in result.history]


@pytest.mark.parametrize("name", [*HERE, "measured"])
def test_training(name):
    assert losses(name) == pytest.approx(losses("auto"), rel=1e-11)


def fastest_is_csr(shape):
    """Each rank would measure another kernel; all take that of rank 0."""
    import torch.distributed as dist

    from gnnpipe.setup import build

    used = []
    csr = spmm.KERNELS["csr"]
    build.kernel_named = lambda name, *_: used.append(name) or csr
    build.time_kernels = lambda *_: (
        {"csr": 1.0, "embedding-bag": 2.0} if dist.get_rank() == 0 else {"embedding-bag": 1.0}
    )
    losses("measured", shape)
    return used


def test_all_ranks_take_what_rank_0_measures():
    assert run_ranks(fastest_is_csr, 2, (1, 2, 3)) == [["csr"], ["csr"]]


def test_failing_kernels_are_not_timed():
    a = matrix()
    args = [torch.from_numpy(x) for x in (a.indptr, a.indices)]
    times = spmm.time_kernels(*args, torch.from_numpy(a.data).to(torch.bfloat16), 40, 8)
    assert "embedding-bag" in times
    assert "csr" not in times  # torch 2.13 on a CPU has none for bf16


@pytest.mark.skipif("torch-sparse" in HERE, reason="torch_sparse is installed")
def test_error_for_a_missing_package_before_the_graph_is_read():
    config = TrainConfig(dataset="no-such-graph", kernel="torch-sparse", out="off")
    with pytest.raises(InputError, match=r"--kernel torch-sparse: .* is not installed; try"):
        Trainer(config).fit()


def test_broken_package_is_refused_and_not_timed(tmp_path, monkeypatch):
    """A package built for another torch: its library cannot be loaded."""
    (tmp_path / "torch_sparse.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch_sparse", raising=False)
    with pytest.raises(InputError, match=r"--kernel torch-sparse: .*undefined symbol"):
        losses("torch-sparse")
    assert losses("measured") == pytest.approx(losses("auto"), rel=1e-11)


def test_kernels_that_do_not_take_bf16_are_refused():
    config = TrainConfig(dataset="no-such-graph", kernel="csr", comm_dtype="bf16", out="off")
    with pytest.raises(InputError, match="--kernel csr: does not work on cpu with bfloat16 rows"):
        Trainer(config).fit()


def test_a_kernel_for_gpus_is_refused_on_a_cpu():
    config = TrainConfig(dataset="no-such-graph", kernel="triton", device="cpu", out="off")
    with pytest.raises(InputError, match=r"--kernel triton: .* on cpu .*on GPUs only.*; try"):
        Trainer(config).fit()
