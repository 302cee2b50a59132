"""Ways of the rows: training equals one device, and bytes the closed form."""

from dataclasses import dataclass, replace

import hetero_models
import pyg_models
import pytest
import torch
from helpers import quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.utils import dropout_edge

from gnnpipe import Graph
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan, RowWay
from gnnpipe.planner import GivenPlan

EPOCHS, WIDTH, VERTICES = 3, 7, 120
THIRDS, SIXTHS = (1 / 3, 2 / 3), (1 / 6, 1 / 6, 2 / 3)
BUILT_IN, RECORDED = ("gcn", "sage", "gcnii", "gat"), ("branches", "arxiv", "hetero")
SHAPES = [(THIRDS, 1, 1), (SIXTHS, 1, 1), (THIRDS, 2, 4)]


@dataclass
class Found:
    what: str
    difference: float
    counted: dict
    formula: dict
    expected: int
    """Bytes of the rows, counted here."""
    ways: dict


def made(name):
    """The graph, the module of the user if there is one, and the settings of a model."""
    if name in BUILT_IN:
        settings = {"model": name, "layers": 4, "hidden": WIDTH}
        if name == "gat":
            settings |= {"hidden": WIDTH + 1, "model_args": "heads=2"}
        return small_graph(n=VERTICES), None, settings
    torch.manual_seed(0)
    if name == "hetero":
        data = hetero_models.hetero_data(subjects=False)
        return Graph.from_pyg(data), hetero_models.to_hetero(), {}
    return small_graph(n=VERTICES), pyg_models.MODELS[name](), {}


def trained(names, shares, stages, chunks, way, staleness="exact"):
    """What training gives by model; runs on every rank. ``shares``: of every stage."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    mesh, found = Mesh.join(stages, len(shares)), []
    shape = {"stages": stages, "shards": len(shares), "chunks": chunks}
    for name in names:
        graph, module, settings = made(name)
        config = quick_config(**settings, **shape, epochs=EPOCHS, staleness=staleness)
        # With stale rows every other op, so that a matrix is read in two ways.
        every = 1 if staleness == "exact" else 2
        plan = planned(prepare(config, mesh, graph, module), shares, way, every)
        prepared = prepare(config, mesh, graph, module, GivenPlan(plan))
        difference = max(c.largest for c in compare_epochs(graph, prepared, mesh, EPOCHS))
        alone = replace(config, **dict.fromkeys(shape, 1), staleness="auto")
        result = Trainer(alone, graph, made(name)[1], plan=plan, world=mesh).fit()
        counted, formula = result.comm_bytes_per_epoch, result.comm_bytes_closed_form
        bytes_here = expected_bytes(prepared, way)
        found.append(Found(name, difference, counted, formula, bytes_here, plan.ways))
    return found


def planned(prepared, shares, way, every=1):
    """The plan with other shares, and ``way`` for each op that can use it, or ``every`` second."""
    ops = prepared.model_graph.ops
    ways = {i: way for i, op in enumerate(ops) if op.aggregates and not op.reason_against(way)}
    ways = dict(list(ways.items())[::every])
    stages = tuple(replace(stage, shares=shares) for stage in prepared.plan.stages)
    plan = replace(prepared.plan, stages=stages, ways=ways)
    assert Plan.from_json(plan.to_json()) == plan
    return plan


def expected_bytes(prepared, way):
    """Bytes of the rows that travel in this way, counted number by number.

    By columns a number moves if the rank that owns its row has not its column; after the product,
    if the rank with the column does not own the row. Otherwise each row goes to all other ranks.
    Backward moves as many.
    """
    plan, graph, total = prepared.plan, prepared.graph, 0
    owner = prepared.chunking.shard_of_row()
    for stage in plan.stages:
        ends = [sum(stage.shares[: g + 1]) for g in range(stage.shards)]
        for i in set(stage.ops) & set(plan.ways):
            op = prepared.model_graph.ops[i]
            holder = [
                next(g for g, end in enumerate(ends) if column < round(op.push_width * end))
                for column in range(op.push_width)
            ]
            is_pushed, is_read = graph.row_types[op.pushed_type], graph.row_types[op.vertex_type]
            if op.name in prepared.loss_rows.ops:
                is_read = prepared.loss_row_mask
            for row, shard in enumerate(owner):
                moves = sum(shard != other for other in holder)
                times = int(is_pushed[row]) + int(is_read[row])
                if way is RowWay.GATHER:
                    moves, times = (stage.shards - 1) * op.push_width, int(is_pushed[row])
                total += 2 * 8 * moves * times
    return total


def assert_equal(found, way):
    for one in found:
        assert one.difference < 1e-9, one
        assert one.counted == one.formula, one
        has_rest = way is RowWay.COLUMNS and one.what in ("gat", "branches")
        assert one.ways or one.what == "gat", one
        if way is not RowWay.HALO and not has_rest:
            assert one.counted["graph"] == one.expected, one


@pytest.mark.parametrize("way", list(RowWay))
@pytest.mark.parametrize(("shares", "stages", "chunks"), SHAPES)
def test_built_in_models_equal_one_device(shares, stages, chunks, way):
    ranks = stages * len(shares)
    assert_equal(run_ranks(trained, ranks, BUILT_IN, shares, stages, chunks, way)[0], way)


@pytest.mark.parametrize("way", list(RowWay))
@pytest.mark.parametrize(("shares", "stages", "chunks"), SHAPES)
def test_recorded_models_equal_one_device(shares, stages, chunks, way):
    ranks = stages * len(shares)
    assert_equal(run_ranks(trained, ranks, RECORDED, shares, stages, chunks, way)[0], way)


@pytest.mark.parametrize("staleness", ["auto", "paper"])
def test_gathered_rows_may_be_stale(staleness):
    """Aggregations over one matrix, of which some are gathered, are forecast apart."""
    names, way = ("gcn", "gat"), RowWay.GATHER
    found = run_ranks(trained, 2, names, THIRDS, 1, 4, way, staleness)[0]
    for one in found:
        assert one.difference < 1e-9, one
        assert one.counted == one.formula, one


def held(shares, chunks):
    """Bytes of matrices and tables on this rank, counted and estimated."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.build import build_rank
    from gnnpipe.setup.memory_estimate import memory_of_rank
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.train.evaluate import train_epoch

    # All layers push 48 columns, which divide by three.
    graph = small_graph(n=600, features=48, classes=48)
    mesh = Mesh.join(1, len(shares))
    config = quick_config(
        **{"layers": 4, "hidden": 48, "chunks": chunks, "shards": len(shares)}, staleness="exact"
    )
    plan = planned(prepare(config, mesh, graph), shares, RowWay.COLUMNS)
    prepared = prepare(config, mesh, graph, planner=GivenPlan(plan))
    runtime = build_rank(prepared, mesh)
    train_epoch(runtime, mesh, prepared.program, prepared.chunk_order(0), 0)
    tables, matrices = {}, {}
    for history in runtime.executor.stage.histories.values():
        operator = history.operator
        tables |= {id(t): t.nbytes for t in (history.table, history._grads)}
        for matrix in (operator.forward, operator.transposed):
            parts = matrix.indptr, matrix.indices, matrix.values
            matrices |= {part.data_ptr(): part.nbytes for part in parts}
    said = memory_of_rank(prepared, 0, mesh.shard)
    return sum(tables.values()), said.history, sum(matrices.values()), said.structure


@pytest.mark.parametrize("chunks", [1, 3])
def test_memory_is_estimated(chunks):
    """Not equal: a share of the columns is rounded up, and some pointers are not counted here."""
    for tables, history, matrices, structure in run_ranks(held, 2, THIRDS, chunks):
        assert history == pytest.approx(tables, rel=0.02)
        assert structure == pytest.approx(matrices, rel=0.1)


class Thinned(nn.Module):
    """Some of the edges, others in every epoch; evaluation has a sample, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = pyg.GCNConv(7, 8), pyg.SAGEConv(8, 3)

    def forward(self, x, edge_index):
        edge_index, _ = dropout_edge(edge_index, p=0.7, training=True)
        return self.last(self.first(x, edge_index).relu(), edge_index)


def thinned(way):
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    mesh, graph = Mesh.join(1, 2), small_graph(n=80)
    try:
        prepared = prepare(quick_config(shards=2, row_way=way), mesh, graph, Thinned())
        return max(c.largest for c in compare_epochs(graph, prepared, mesh, EPOCHS))
    except InputError as error:
        return str(error)


def test_edges_of_an_epoch_may_read_any_row():
    assert "--row-way gather" in run_ranks(thinned, 2, "halo")[0]
    for way in ("gather", "columns"):
        assert run_ranks(thinned, 2, way)[0] < 1e-9


def with_settings(way, settings):
    """Losses, accuracy and bytes of each of some settings, on every rank."""
    from gnnpipe import Trainer

    found = []
    for changes in settings:
        given = {"layers": 3, "hidden": WIDTH, "shards": 2, "row_way": way}
        config = quick_config(**given | changes)
        result = Trainer(config, small_graph(n=VERTICES)).fit()
        scores = [row.loss for row in result.history] + [result.train_acc, result.val_acc]
        found.append((scores, result.comm_bytes_per_epoch, result.comm_bytes_closed_form))
    return found


SETTINGS = {
    "labels": {"label_inputs": 0.5, "label_iterations": 1, "dropout": 0.3},
    "bf16": {"comm_dtype": "bf16", "model": "sage"},
    "recompute": {"recompute": True, "model": "gcnii", "chunks": 3, "staleness": "exact"},
}


@pytest.mark.parametrize("way", ["gather", "columns"])
def test_other_settings_train_as_by_halo(way):
    each = list(SETTINGS.values())
    by_halo, by_way = (run_ranks(with_settings, 2, one, each)[0] for one in ("halo", way))
    for name, halo, (scores, counted, formula) in zip(SETTINGS, by_halo, by_way, strict=True):
        assert scores == pytest.approx(halo[0], rel=0.02 if name == "bf16" else 1e-9), name
        assert counted == formula, name
