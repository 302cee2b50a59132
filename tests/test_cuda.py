"""Runs on a GPU are those on the processor, where there is a GPU: the CPU's path has all tests."""

import pytest
import torch
from capture import test_buffers, test_edge_work, test_vertex_sums, test_whole_model
from helpers import quick_config, small_graph
from torch import nn
from torch_geometric.nn import GATv2Conv, GraphSAGE

from gnnpipe import Trainer
from gnnpipe.ops.spmm import KERNELS
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epoch

GPU = "cuda"

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices"),
    pytest.mark.filterwarnings("ignore:--matmul-dtype bf16"),
]


def losses(device, module=None, **settings):
    """Of each epoch; dropout is a hash of the vertex, so it is the same on every device."""
    torch.manual_seed(0)
    given = {"layers": 3, "hidden": 8, "dropout": 0.5, "epochs": 6, "eval_every": 2} | settings
    model = None if module is None else module().to(torch.float64)
    graph = small_graph(sparse=given.pop("sparse", False))
    result = Trainer(quick_config(device=device, **given), graph=graph, model=model).fit()
    return [row.loss for row in result.history] + [result.test_acc]


def assert_same(rel=1e-9, **settings):
    assert losses(GPU, **settings) == pytest.approx(losses("cpu", **settings), rel=rel)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"chunks": 5},
        {"chunks": 5, "staleness": "exact"},
        {"chunks": 5, "staleness": "paper", "snapshot_every": 2},
    ],
)
@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii", "resgcn", "gat"])
def test_built_in_models(model, shape, sparse):
    assert_same(model=model, sparse=sparse, **shape)


@pytest.mark.parametrize(
    ("model", "settings", "wanted"),
    [(m, {}, True) for m in ("gcn", "sage", "gcnii", "resgcn")]
    + [
        ("gcn", {"recompute": True, "dropout": 0.0}, True),
        ("gat", {}, None),
        ("gcn", {"recompute": True}, None),
        ("gcn", {"chunks": 5}, None),
    ],
)
def test_epochs_of_one_chunk_are_recorded(model, settings, wanted):
    """And not only done as before, which gives the same numbers."""
    given = {"model": model, "layers": 3, "hidden": 8, "dropout": 0.5} | settings
    config = quick_config(device=GPU, out="off", **given)
    mesh = Mesh.join(1, 1, GPU)
    prepared = prepare(config, mesh, small_graph())
    rank_runtime = build_rank(prepared, mesh)
    for epoch in range(6):
        order = prepared.chunk_order(epoch)
        train_epoch(rank_runtime, mesh, prepared.program_of(epoch), order, epoch)
    assert getattr(rank_runtime.executor, "is_recorded", None) == wanted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_gpu_is_the_one_that_is_used():
    wanted = losses("cpu")
    torch.cuda.set_device(1)
    try:
        assert Mesh.join(1, 1, GPU).device.index == 1
        assert losses(GPU) == pytest.approx(wanted, rel=1e-9)
    finally:
        torch.cuda.set_device(0)


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k not in ("auto", "torch-sparse")])
def test_every_kernel(kernel, chunks):
    assert losses(GPU, kernel=kernel, chunks=chunks) == pytest.approx(
        losses("cpu", chunks=chunks), rel=1e-9
    )


class Scaled(nn.Module):
    """With a weight of no dimension."""

    def __init__(self):
        super().__init__()
        self.body, self.scale = GraphSAGE(7, 8, 2, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, x, edge_index):
        return self.body(x, edge_index) * self.scale


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.ASGD])
def test_other_optimizers_and_a_resume(kind, tmp_path):
    found = {}
    for device in ("cpu", GPU):
        torch.manual_seed(0)
        out, model = str(tmp_path / f"{device} run"), Scaled().double()
        given = {"epochs": 4, "checkpoint_every": 2, "device": device, "out": out}
        parts = {"optimizer": lambda m: kind(m.parameters(), lr=0.02)}
        Trainer(quick_config(**given), small_graph(), model, **parts).fit()
        again = resumed_config(out, {"epochs": 6})
        result = Trainer(again, small_graph(), Scaled().double(), resume=out, **parts).fit()
        found[device] = [row.loss for row in result.history]
    assert found[GPU] == pytest.approx(found["cpu"], rel=1e-9)


@pytest.mark.parametrize("chunks", [1, 5])
def test_recompute(chunks):
    assert_same(model="gcnii", recompute=True, chunks=chunks)


@pytest.mark.parametrize("settings", [{"comm_dtype": "bf16"}, {"matmul_dtype": "bf16"}])
def test_numbers_of_fewer_bits(settings):
    """What lies near the middle of two is rounded to either side."""
    assert_same(rel=0.02, dtype="float32", chunks=5, epochs=3, **settings)


class Own(nn.Module):
    """Attention with messages, on blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GATv2Conv(7, 4, heads=2), GATv2Conv(8, 3)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize(
    "module", [Own, lambda: GraphSAGE(7, 8, 3, 3, dropout=0.5, norm="BatchNorm")]
)
def test_models_of_the_users_own(module, chunks):
    assert_same(module=module, chunks=chunks)


RECORDED = [
    *test_edge_work.MODELS,
    *test_edge_work.RANDOM,
    *test_buffers.MODELS,
    *test_vertex_sums.MODELS.values(),
]


@pytest.mark.filterwarnings("ignore:.*can be accelerated via the 'torch-scatter'")
@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("module", RECORDED)
def test_recorded_models(module, chunks):
    """Work on edges, also random; assigned buffers; sums over vertices."""
    assert_same(module=module, chunks=chunks, staleness="exact")


class AllPairs(test_whole_model.Two):
    """Attention over all vertices, which runs as it is; without dropout, which torch draws."""

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        return self.second((x @ x.t()).softmax(dim=1) @ x, edge_index)


def test_a_model_that_runs_as_it_is():
    assert_same(module=AllPairs)


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("iterations", [0, 2])
def test_label_inputs(iterations, chunks):
    given = {"label_inputs": 0.4, "label_iterations": iterations, "staleness": "exact"}
    assert_same(model="sage", chunks=chunks, **given)


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize(("first", "second"), [(GPU, "cpu"), ("cpu", GPU), (GPU, GPU)])
def test_a_run_goes_on_where_the_other_device_stopped(tmp_path, first, second, chunks):
    whole = losses("cpu", chunks=chunks)
    graph, out = small_graph(), str(tmp_path / "run")
    common = {"layers": 3, "hidden": 8, "dropout": 0.5, "eval_every": 2, "chunks": chunks}
    config = quick_config(**common, epochs=4, out=out, checkpoint_every=2, device=first)
    Trainer(config, graph=graph).fit()
    again = resumed_config(out, {"epochs": 6, "device": second})
    result = Trainer(again, graph=graph, resume=out).fit()
    assert [row.loss for row in result.history][-1] == pytest.approx(whole[5], rel=1e-9)
