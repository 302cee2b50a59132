"""Branches on stages of their own run side by side, and give the numbers of one device."""

from __future__ import annotations

import copy
from itertools import pairwise, product

import hetero_models
import numpy as np
import pytest
import torch
from branch_models import BRANCH_BY_BRANCH, HIDDEN, MODELS, Towers
from helpers import (
    assert_all_within,
    plain_pyg_losses,
    pyg_data,
    quick_config,
    run_ranks,
    small_graph,
)
from slow_ranks import EVERY, napping

from gnnpipe import Graph
from gnnpipe.plan import Placement, Plan, StagePlan
from gnnpipe.run.summary import head_lines

EPOCHS = 3
SCHEDULES = {1: "fill-drain", 4: "layer-sync"}
"""The exact schedule, by number of chunks."""


def towers(dropout=0.5):
    torch.manual_seed(3)
    return Towers(BRANCH_BY_BRANCH, dropout, branches=2)


def branches_of(model):
    """The ops of the two branches, and of what joins them."""
    reads = {op.name: set(op.inputs) for op in model.ops}

    def behind(name):
        return {name}.union(*map(behind, reads[name]))

    join = next(op for op in model.ops if len(op.inputs) == 2)
    branches = [behind(name) for name in join.inputs]
    found = [tuple(i for i, op in enumerate(model.ops) if op.name in branch) for branch in branches]
    rest = set(range(model.num_ops)) - set(found[0]) - set(found[1])
    return *found, tuple(sorted(rest))


class Branched:
    """Planner with the branches on ranks 0 and 1, and the rest on rank 2."""

    def __init__(self, chunks, schedule):
        self.chunks, self.schedule = chunks, schedule

    def num_ranks(self, shape):
        return 3

    def plan(self, request):
        stages = enumerate(branches_of(request.model))
        made = tuple(StagePlan.even(ops, (rank,)) for rank, ops in stages)
        return Plan(made, self.chunks, self.schedule)


def prepared_on(mesh, chunks, schedule, dropout=0.5):
    from gnnpipe.setup.prepare import prepare

    graph, config = small_graph(), quick_config(epochs=EPOCHS, eval_every=1)
    return graph, prepare(config, mesh, graph, towers(dropout), Branched(chunks, schedule))


def test_the_head_of_a_run_names_the_transfers():
    from gnnpipe.runtime.comm.mesh import Mesh

    _, prepared = prepared_on(Mesh.alone(), 4, "fill-drain")
    assert "stages form a DAG of depth 2: 0 -> 2, 1 -> 2" in head_lines(prepared)


def trained(chunks, folder):
    """Transfers, the largest difference to one device with dropout, and losses without dropout."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.verification.comparison import compare_epochs

    mesh = Mesh.join(3, 1)
    graph, prepared = prepared_on(mesh, chunks, SCHEDULES[chunks])
    difference = max(c.largest for c in compare_epochs(graph, prepared, mesh, EPOCHS))
    file = folder / f"plan{mesh.rank}.json"
    file.write_text(prepared.plan.to_json())
    config = quick_config(epochs=EPOCHS, eval_every=1, plan=str(file))
    result = Trainer(config, graph=graph, model=towers(0.0), world=mesh).fit()
    ends = [(t.source, t.target, sum(t.widths.values())) for t in prepared.dag.transfers]
    bytes_sent = dict(result.comm_bytes_per_epoch)
    return ends, prepared.dag.feature_stages, difference, result.history, bytes_sent


@pytest.mark.parametrize("chunks", SCHEDULES)
def test_equals_one_device(chunks, tmp_path):
    graph = small_graph()
    data = pyg_data(graph)
    given = data.x.double(), data.edge_index
    truth = plain_pyg_losses(copy.deepcopy(towers(0.0)).double(), data, given, EPOCHS)
    for ends, readers, difference, history, sent in run_ranks(trained, 3, chunks, tmp_path):
        assert ends == [(0, 2, HIDDEN), (1, 2, HIDDEN)]
        assert readers == ()  # both branches read aggregated features alone
        assert difference < 1e-9
        np.testing.assert_allclose([row.loss for row in history], truth, rtol=1e-9)
        # Of two branches, rows and their gradients in float64.
        assert sent["pipeline"] == 2 * 2 * graph.num_vertices * HIDDEN * 8


def timeline(chunks, slow):
    """The measured spans of the last epoch of a run with a slow rank."""
    from gnnpipe import Trainer
    from gnnpipe.runtime.comm.mesh import Mesh

    mesh = Mesh.join(3, 1)
    _, prepared = prepared_on(mesh, chunks, "fill-drain")
    config = quick_config(epochs=EPOCHS, eval_every=0, staleness="none")
    with napping(mesh, slow):
        trainer = Trainer(
            config, graph=small_graph(), model=towers(), world=mesh, plan=prepared.plan
        )
        return trainer.fit().timeline


def spans_of(found, rank, kind):
    return [span for span in found if span.rank == rank and span.kind == kind]


def busy(found, rank, kind):
    """Start and end of a rank's only action of a kind, without the waits at its beginning."""
    (action,) = spans_of(found, rank, kind)
    inside = [
        wait.end_s
        for wait in spans_of(found, rank, "WAIT")
        if action.start_s <= wait.start_s and wait.end_s <= action.end_s
    ]
    return max([action.start_s, *inside]), action.end_s


@pytest.mark.parametrize("kind", ["F", "B"])
def test_two_branches_overlap_in_time(kind):
    """With one chunk, stages that wait for the stage before never overlap."""
    found = run_ranks(timeline, 3, 1, EVERY)[0]
    one, other, join = (busy(found, rank, kind) for rank in range(3))
    length = min(one[1] - one[0], other[1] - other[0])
    assert min(one[1], other[1]) - max(one[0], other[0]) > 0.5 * length
    for branch in (one, other):
        apart = join[0] - branch[1] if kind == "F" else branch[0] - join[1]
        assert apart > -0.5 * length


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_branch_does_not_delay_the_sends_of_the_other(slow):
    found = run_ranks(timeline, 3, 4, slow)[0]
    forward = spans_of(found, slow, "F")
    sends = spans_of(found, 1 - slow, "SEND_F")
    assert len(sends) == 4
    assert {span.peer for span in (*sends, *spans_of(found, slow, "SEND_F"))} == {2}
    second = sorted(forward, key=lambda span: span.start_s)[1]
    assert max(span.end_s for span in sends) < second.end_s


def random_stages(model, count, rng):
    """Ops of convex stages: runs of a random topological order; None if ties leave no cuts."""
    order, waiting = [], set(range(model.num_ops - 1))
    while waiting:
        free = [op for op in waiting if waiting.isdisjoint(model.reads[op])]
        order.append(int(rng.choice(free)))
        waiting.remove(order[-1])
    order.append(model.num_ops - 1)
    place = {op: i for i, op in enumerate(order)}
    ties = [sorted((place[a], place[b])) for a, b in model.ties]
    cuts = [i for i in range(1, len(order)) if not any(a < i <= b for a, b in ties)]
    if len(cuts) < count - 1:
        return None
    chosen = sorted(rng.choice(cuts, count - 1, replace=False).tolist())
    return [tuple(sorted(order[a:b])) for a, b in pairwise([0, *chosen, len(order)])]


class RandomStages:
    """Planner with random convex stages of equal numbers of shards."""

    def __init__(self, placement, chunks, schedule, seed):
        self.placement, self.chunks, self.schedule = placement, chunks, schedule
        self.seed = seed

    def num_ranks(self, shape):
        return self.placement.num_ranks

    def plan(self, request):
        rng = np.random.default_rng(self.seed)
        stages = None
        while stages is None:
            stages = random_stages(request.model, self.placement.num_stages, rng)
        each = zip(stages, self.placement.stages, strict=True)
        made = tuple(StagePlan.even(ops, ranks) for ops, ranks in each)
        return Plan(made, self.chunks, self.schedule)


def differences(stages, shards, seeds):
    """(difference to one device, case) for random stage DAGs of each model."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.verification.comparison import compare_epochs

    mesh, found = Mesh.join(stages, shards), []
    # ``verify`` refuses the model that assigns a buffer.
    for name, seed in product((n for n in MODELS if n != "assorted"), seeds):
        hetero = hetero_models.hetero_data(subjects=False)
        graph = Graph.from_pyg(hetero) if name == "relations" else small_graph(directed=True)
        for chunks, schedule in [*SCHEDULES.items(), (4, "fill-drain")]:
            torch.manual_seed(3)
            model = MODELS[name](BRANCH_BY_BRANCH)
            planner = RandomStages(Placement.grid(stages, shards), chunks, schedule, seed)
            prepared = prepare(quick_config(epochs=EPOCHS), mesh, graph, model, planner)
            largest = max(c.largest for c in compare_epochs(graph, prepared, mesh, EPOCHS))
            ops = [stage.ops for stage in prepared.plan.stages]
            found.append((largest, f"{name}, seed {seed}, {chunks} chunks {schedule}: {ops}"))
    return found


@pytest.mark.parametrize(("stages", "shards"), [(4, 1), (2, 2)])
def test_random_stage_dags_equal_one_device(stages, shards):
    found = run_ranks(differences, 4, stages, shards, range(2), timeout_s=600)[0]
    assert_all_within(found, 1e-9)
