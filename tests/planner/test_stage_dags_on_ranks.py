"""Stages that form a DAG, each with its own ranks and shares, train as one device does."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import plain_pyg_losses, pyg_data, quick_config, run_ranks, small_graph
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.plan import Plan, StageDag, StagePlan
from gnnpipe.planner import GivenPlan
from gnnpipe.run.resume import resumed_config

# Not found by conftest.py behind hypothesis' decorator: these tests start several ranks.
pytestmark = pytest.mark.slow

FEATURES, HIDDEN, CLASSES, EPOCHS = 7, 6, 3, 3


class Branched(nn.Module):
    """A DAG of layers; every layer reads one or two earlier values, or the features."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.reads = [
            draw.sample(range(-1, i), min(draw.choice([1, 1, 2]), i + 1)) for i in range(6)
        ]
        kinds = [draw.choice(["gcn", "sage", "linear"]) for _ in self.reads]
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            _layer(kind, sum(FEATURES if i < 0 else HIDDEN for i in reads))
            for kind, reads in zip(kinds, self.reads, strict=True)
        )
        read = {i for reads in self.reads for i in reads}
        self.ends = [i for i in range(len(self.reads)) if i not in read]
        self.last = nn.Linear(HIDDEN * len(self.ends), CLASSES)

    def forward(self, x, edge_index):
        values = {-1: x}
        for i, (layer, reads) in enumerate(zip(self.layers, self.reads, strict=True)):
            joined = torch.cat([values[j] for j in reads], dim=1)
            needs_edges = not isinstance(layer, nn.Linear)
            values[i] = F.elu(layer(joined, edge_index) if needs_edges else layer(joined))
        return self.last(torch.cat([values[i] for i in self.ends], dim=1))


def _layer(kind, width):
    if kind == "linear":
        return nn.Linear(width, HIDDEN)
    return (pyg.GCNConv if kind == "gcn" else pyg.SAGEConv)(width, HIDDEN)


def drawn_plan(model_graph, ranks, chunks, seed):
    """Runs of a random topological order of the ops, on random numbers of ranks and shares."""
    draw = random.Random(seed)
    maker = {value: i for i, op in enumerate(model_graph.ops) for value in op.outputs}
    left, order = set(range(model_graph.num_ops)), []
    while left:
        ready = [
            i
            for i in sorted(left)
            if not any(maker[v] in left - {i} for v in model_graph.ops[i].inputs)
        ]
        order.append(draw.choice(ready))
        left.remove(order[-1])
    stages = draw.randint(min(2, len(order)), min(ranks, len(order)))
    ends = sorted(draw.sample(range(1, len(order)), stages - 1))
    counts = [1] * stages
    for _ in range(ranks - stages):
        counts[draw.randrange(stages)] += 1
    numbers, made = draw.sample(range(ranks), ranks), []
    for start, stop, count in zip([0, *ends], [*ends, len(order)], counts, strict=True):
        parts = [draw.choice([1, 1, 2]) for _ in range(count)]
        shares = tuple(part / sum(parts) for part in parts)
        own = tuple(sorted(numbers[:count]))
        numbers = numbers[count:]
        made.append(StagePlan(tuple(sorted(order[start:stop])), own, shares))
    return Plan(tuple(made), chunks, "layer-sync" if chunks > 1 else "fill-drain")


@dataclass
class Found:
    difference: float
    losses: list
    counted: dict
    formula: dict
    expected: dict
    plan: str


def trained(seeds, ranks, chunks, staleness="exact"):
    """The difference to one autograd graph, and bytes, of random plans of random models."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.runtime.comm.world import World
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    world, graph, found = World.meet(ranks, "cpu"), small_graph(n=60), []
    for seed in seeds:
        config = quick_config(
            chunks=chunks, dtype="float64", epochs=EPOCHS, staleness=staleness, lr=0.01
        )
        model = Branched(seed).double()
        model_graph = _described(config, graph, model)
        plan = drawn_plan(model_graph, ranks, chunks, seed)
        if staleness != "exact":
            plan = replace(plan, schedule="fill-drain")
        planner = GivenPlan(Plan.from_json(plan.to_json()))
        prepared = prepare(config, world, graph, model, planner)
        mesh = Mesh.of(world, plan.placement)
        differences = compare_epochs(graph, prepared, mesh, EPOCHS)
        trainer = Trainer(config, graph, Branched(seed).double(), plan=plan, world=world)
        result = trainer.fit()
        found.append(
            Found(
                max(c.largest for c in differences),
                [row.loss for row in result.history],
                result.comm_bytes_per_epoch,
                result.comm_bytes_closed_form,
                _expected_bytes(prepared),
                plan.to_json(),
            )
        )
    return found


def _described(config, graph, model):
    from gnnpipe.runtime.comm.world import World
    from gnnpipe.setup.prepare import prepare

    return prepare(replace(config, chunks=1), World.alone(), graph, model).model_graph


def _expected_bytes(prepared):
    """Counted pair by pair: rows read across shards, and rows that change their owner."""
    graph, plan, model = prepared.graph, prepared.plan, prepared.model_graph
    n, chunking = graph.num_vertices, prepared.chunking
    part = chunking.shard_of_row()
    target, source = np.repeat(np.arange(n), graph.degrees), graph.indices
    rows = weights = 0
    for stage, bounds in zip(plan.stages, plan.split.bounds, strict=True):
        shard = np.searchsorted(bounds, part, side="right")
        crossing = {(int(s), int(shard[t])) for s, t in zip(source, target, strict=True)}
        m = sum(int(shard[s]) != reader for s, reader in crossing)
        ops = model.select(stage.ops)
        rows += 2 * m * sum(op.push_width for op in ops) * 8
        weights += 2 * (stage.shards - 1) * sum(op.num_parameters for op in ops) * 8
    widths = sum(sum(t.widths.values()) for t in StageDag.of(plan, model).transfers)
    return {"pipeline": 2 * n * widths * 8, "graph": rows, "gradient": weights}


def plain_losses(seed):
    data = pyg_data(small_graph(n=60))
    data.x = data.x.double()
    return plain_pyg_losses(Branched(seed).double(), data, (data.x, data.edge_index), EPOCHS)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (3, 1), (3, 4), (4, 1), (4, 3)])
@given(seeds=st.lists(st.integers(0, 10**6), min_size=4, max_size=4))
@settings(max_examples=2, deadline=None, phases=[Phase.generate])
def test_a_random_dag_of_stages_equals_one_device(ranks, chunks, seeds):
    for seed, one in zip(seeds, run_ranks(trained, ranks, seeds, ranks, chunks)[0], strict=True):
        assert one.difference < 1e-9, (seed, one.plan)
        assert one.losses == pytest.approx(plain_losses(seed), rel=1e-9), (seed, one.plan)
        assert one.counted == one.formula, (seed, one.plan)
        assert one.counted == one.expected | {"control": 0, "total": sum(one.expected.values())}


@given(seeds=st.lists(st.integers(0, 10**6), min_size=3, max_size=3))
@settings(max_examples=2, deadline=None, phases=[Phase.generate])
@pytest.mark.parametrize("staleness", ["auto", "paper", "none"])
def test_stale_epochs_of_a_random_dag_equal_one_device(staleness, seeds):
    found = run_ranks(trained, 3, seeds, 3, 4, staleness)[0]
    for seed, one in zip(seeds, found, strict=True):
        assert one.difference < 1e-9, (seed, one.plan)
        assert one.counted == one.formula, (seed, one.plan)


class Towers(nn.Module):
    """Two branches of two layers, which a last layer joins."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.ModuleList([pyg.GCNConv(FEATURES, HIDDEN), pyg.GCNConv(HIDDEN, HIDDEN)])
        self.right = nn.ModuleList([pyg.SAGEConv(FEATURES, HIDDEN), pyg.SAGEConv(HIDDEN, HIDDEN)])
        self.last = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x, edge_index):
        ends = []
        for branch in (self.left, self.right):
            h = x
            for layer in branch:
                h = F.elu(layer(h, edge_index))
            ends.append(h)
        return self.last(torch.cat(ends, dim=1))


def ops_of_towers():
    """The ops of the left branch, of the right one, and of what follows the join."""
    config, graph = quick_config(chunks=1), small_graph(n=60)
    ops, place = _described(config, graph, Towers()).ops, {}
    found = {"left": [], "right": [], "last": []}
    for i, op in enumerate(ops):
        reads = {place[value] for value in op.inputs}
        own = {name.split(".")[0] for name in op.weights} or reads or {"unknown"}
        where = own.pop() if len(own) == 1 else "last"
        place |= dict.fromkeys(op.outputs, where)
        found[where].append(i)
    return [tuple(ops) for ops in found.values()]


def resumed(folder, plans, chunks):
    """Trains 6 epochs under the first plan and 6 more under the second; on every rank."""
    config = quick_config(
        chunks=chunks, epochs=6, lr=0.01, out=folder, checkpoint_every=6, eval_every=3
    )
    from gnnpipe.runtime.comm.world import World

    world = World.meet(3, "cpu")
    given = {"graph": small_graph(n=60), "world": world}
    Trainer(config, model=Towers().double(), plan=plans[0], **given).fit()
    again = replace(resumed_config(folder, {"epochs": 12}), plan="uniform")
    trainer = Trainer(again, model=Towers().double(), plan=plans[1], resume=folder, **given)
    result = trainer.fit()
    trainer.save_predictions(f"{folder}.npy")
    return result


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_run_goes_on_under_another_dag(chunks, tmp_path):
    """Also evaluation, predictions, the trace and the memory estimate of unlike stages."""
    left, right, last = ops_of_towers()
    together = tuple(sorted(left + right))
    plans = [
        (StagePlan(together, (1, 2), (0.6, 0.4)), StagePlan(last, (0,), (1.0,))),
        (StagePlan.even(left, (0,)), StagePlan.even(right, (1,)), StagePlan.even(last, (2,))),
    ]
    plans = [Plan(stages, chunks, "layer-sync") for stages in plans]
    model_graph = _described(quick_config(), small_graph(n=60), Towers())
    ends = {(t.source, t.target) for t in StageDag.of(plans[1], model_graph).transfers}
    assert ends == {(0, 2), (1, 2)}
    folder = str(tmp_path / "run")
    results = run_ranks(resumed, 3, folder, plans, chunks)
    config = quick_config(chunks=1, epochs=12, lr=0.01, eval_every=3)
    trainer = Trainer(config, small_graph(n=60), Towers().double())
    alone = trainer.fit()
    trainer.save_predictions(tmp_path / "alone.npy")
    for result in results:
        assert [r.loss for r in result.history] == pytest.approx(
            [r.loss for r in alone.history], rel=1e-9
        )
        assert result.test_acc == alone.test_acc
        assert len(result.memory_estimate_bytes) == 3
    assert {span.rank for span in results[0].timeline} == {0, 1, 2}
    found, expected = np.load(f"{folder}.npy"), np.load(tmp_path / "alone.npy")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
