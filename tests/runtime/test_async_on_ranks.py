"""Asynchronous training on real ranks against ``async_reference``, with every weight policy."""

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from async_gcn import stages_of
from async_reference import AsyncReference, RefStage, dense_chunks, one_f_one_b, step_means
from helpers import quick_config, run_ranks, small_graph
from test_branches_on_ranks import Branched
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare
from gnnpipe.verification.reference_dropout import drop

CHUNKS, EPOCHS, EVERY, WIDTH, LR = 6, 5, 2, 6, 0.05
"""Flushes come after two, four and five epochs."""
OPTIMIZERS = {
    "Adam": lambda weights: torch.optim.Adam(weights, lr=LR),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=LR, momentum=0.9),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=LR, momentum=0.0),
}


def gcn_matrix(graph):
    n = graph.num_vertices
    a = torch.eye(n, dtype=torch.float64)
    source, target = (torch.from_numpy(np.asarray(e)).long() for e in graph.edge_index)
    a[target, source] = 1.0
    root = a.sum(1).rsqrt()
    return root[:, None] * a * root


def dropped(x, one, site):
    """Rows x [C, WIDTH] after the dropout of a site."""
    kept = drop(torch.ones(one.chunk.data["n"], WIDTH), 0.5, 0, one.epoch, site)
    return x * kept[one.chunk.rows].double()


def loss_of(x, one):
    data = one.chunk.data
    loss = F.cross_entropy(x[data["train"]], data["y"][data["train"]], reduction="sum")
    return loss / data["count"]


class Fork(nn.Module):
    """Two branches that a third stage joins."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.in_a, self.in_b = nn.Linear(7, WIDTH), nn.Linear(7, WIDTH)
        self.a, self.b = pyg.GCNConv(WIDTH, WIDTH), pyg.GCNConv(WIDTH, WIDTH)
        self.c, self.out = pyg.GCNConv(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        a = self.a(self.in_a(x), edge_index).tanh()
        b = self.b(self.in_b(x), edge_index).tanh()
        return self.out(self.c(a + b, edge_index).tanh())


def branch(name):
    def function(values, w, one):
        h = F.linear(one.chunk.data["x"], w[f"in_{name}.weight"], w[f"in_{name}.bias"])
        z = F.linear(one.aggregate("gcn", name, h), w[f"{name}.lin.weight"]) + w[f"{name}.bias"]
        return {name: z.tanh()}

    return function


def join(values, w, one):
    x = values["a"] + values["b"]
    x = (F.linear(one.aggregate("gcn", "c", x), w["c.lin.weight"]) + w["c.bias"]).tanh()
    return {"loss": loss_of(F.linear(x, w["out.weight"], w["out.bias"]), one)}


def fork_stages(prepared):
    """The stages of ``Fork``, with copies of its weights."""
    by_stage = [
        {n: p.detach().clone() for n, p in prepared.model.stage_module(s.ops).named_parameters()}
        for s in prepared.plan.stages
    ]
    first = "a" if "in_a.weight" in by_stage[0] else "b"
    second = {"a": "b", "b": "a"}[first]
    return [
        RefStage(branch(first), by_stage[0]),
        RefStage(branch(second), by_stage[1]),
        RefStage(join, by_stage[2], {first: 0, second: 1}),
    ]


class Skips(nn.Module):
    """Layers that all read the first embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.encode = nn.Linear(7, WIDTH)
        self.a, self.b, self.c = (pyg.GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        first = self.encode(x).tanh()
        x = self.a(first, edge_index).tanh()
        x = self.b(x + first, edge_index).tanh()
        return self.out(self.c(x + first, edge_index).tanh())


def skip_layer(name, x, w, one):
    z = F.linear(one.aggregate("gcn", name, x), w[f"{name}.lin.weight"]) + w[f"{name}.bias"]
    return z.tanh()


def skip_start(values, w, one):
    first = F.linear(one.chunk.data["x"], w["encode.weight"], w["encode.bias"]).tanh()
    return {"first": first, "a": skip_layer("a", first, w, one)}


def skip_middle(values, w, one):
    return {"b": skip_layer("b", values["a"] + values["first"], w, one)}


def skip_end(values, w, one):
    x = skip_layer("c", values["b"] + values["first"], w, one)
    return {"loss": loss_of(F.linear(x, w["out.weight"], w["out.bias"]), one)}


class SkipPlanner:
    """Planner with a layer of ``Skips`` on each of three ranks."""

    def num_ranks(self, shape):
        return 3

    def plan(self, request):
        ends = [i + 1 for i, op in enumerate(request.model.ops) if op.name in ("tanh_1", "tanh_2")]
        stages = np.split(np.arange(request.model.num_ops), ends)
        made = [StagePlan.even(tuple(map(int, s)), (rank,)) for rank, s in enumerate(stages)]
        return Plan(tuple(made), CHUNKS, "async")


def skip_stages(prepared):
    """The stages of ``Skips``; in the reference the last one reads ``first`` from stage 0."""
    assert prepared.dag.passed_on(1), "stage 1 passes the first embedding on"
    functions = (skip_start, skip_middle, skip_end)
    reads = ({}, {"a": 0, "first": 0}, {"b": 1, "first": 0})
    modules = [prepared.model.stage_module(s.ops) for s in prepared.plan.stages]
    by_stage = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in modules]
    return [RefStage(*stage) for stage in zip(functions, by_stage, reads, strict=True)]


OWN_MODELS = {
    "fork": (Fork, lambda: Branched(CHUNKS, "async"), fork_stages, [1, 1, 0]),
    "skips": (Skips, SkipPlanner, skip_stages, [2, 1, 0]),
}
"""Model, planner, stages of the reference, and distance of each stage to the last one."""


def reference_of(prepared, graph, stages, leads, policy, optimizer, every):
    """The reference, and a function that trains an epoch's passes up to a flush.

    ``leads``: by stage, forward passes before the first backward.
    """
    chunk = torch.from_numpy(prepared.chunking.chunk_of_row()[prepared.chunking.inverse])
    parts = [(chunk == c).nonzero()[:, 0] for c in range(CHUNKS)]
    data = {
        "x": torch.from_numpy(graph.x.toarray() if sp.issparse(graph.x) else graph.x).double(),
        "y": torch.from_numpy(graph.y).long(),
        "train": torch.from_numpy(graph.train_mask),
    }
    gcn = gcn_matrix(graph)
    chunks = dense_chunks({"gcn": gcn, "mean": torch.full_like(gcn, 1 / len(gcn))}, parts, **data)
    for one in chunks:
        one.data |= {"count": int(graph.train_mask.sum()), "n": graph.num_vertices}
    counts = [int(graph.train_mask[part].sum()) for part in parts]
    reference = AsyncReference(stages, chunks, policy, OPTIMIZERS[optimizer])
    steps = CHUNKS // every
    rate = LR / math.sqrt(steps)
    reference.rate = lambda step: rate * 0.5 * (1 + math.cos(math.pi * (step // steps) / EPOCHS))

    def run(first, last):
        walk = [(e, int(c)) for e in range(first, last) for c in prepared.chunk_order(e)]
        reference.scale_of = step_means(walk, every, counts)
        reference.run(one_f_one_b(leads, len(walk), every), walk)
        by_epoch = [0.0] * (last - first)
        for number, loss in reference.losses.items():
            by_epoch[number // CHUNKS] += loss
        return by_epoch

    return reference, run


def difference(stages, shards, policy, optimizer, every, own="", ahead=1):
    """Largest difference of losses and weights; runs on every rank. ``own``: key of OWN_MODELS."""
    mesh = Mesh.join(stages, shards)
    graph = small_graph(40, directed=True, sparse=True)
    shape = {"stages": stages, "shards": shards, "chunks": CHUNKS, "schedule": "async"}
    config = quick_config(
        model="gcn",
        layers=4,
        hidden=WIDTH,
        epochs=EPOCHS,
        eval_every=EVERY,
        steps_every=every,
        passes_ahead=ahead,
        lr=LR,
        lr_schedule="cosine",
        optimizer=optimizer,
        weights=policy,
        momentum=0.9 if optimizer == "SGD" else 0.0,
        **shape,
    )
    model, plan = None, None
    if own:
        model_class, planner, own_stages, own_distances = OWN_MODELS[own]
        model = model_class()
        plan = prepare(config, mesh, graph, model, planner()).plan
    trainer = Trainer(config, graph, model, world=mesh, plan=plan)
    prepared = trainer._setup()[1]
    distances = list(prepared.dag.distances)
    if own:
        ref_stages = own_stages(prepared)
        assert distances == own_distances
    else:
        ref_stages = stages_of(prepared, dropped, loss_of)
    assert prepared.program.in_flight == tuple(ahead * d + 1 for d in distances)
    leads = [ahead * d for d in distances]
    reference, run = reference_of(prepared, graph, ref_stages, leads, policy, optimizer, every)
    losses = [row.loss for row in trainer.fit().history]
    truth = [*run(0, 2), *run(2, 4), *run(4, 5)]
    found = [abs(a - b) for a, b in zip(losses, truth, strict=True)]
    trained = dict(trainer.model.named_parameters())
    for stage in reference.stages:
        for name, weight in stage.weights.items():
            found.append(float((trained[name] - weight).abs().max().detach()))
    return max(found)


POLICIES = ("latest", "stash", "predict", "spectrain", "xpipe")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "2bw"])
def test_two_stages(policy):
    assert max(run_ranks(difference, 2, 2, 1, policy, "Adam", 1)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "every"), [*((policy, 1) for policy in POLICIES), ("2bw", 3), ("predict", 2)]
)
def test_four_stages(policy, every):
    assert max(run_ranks(difference, 4, 4, 1, policy, "Adam", every)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop"])
def test_other_optimizers_predict_by_their_own_rule(optimizer):
    assert max(run_ranks(difference, 2, 2, 1, "predict", optimizer, 1)) < 1e-9


@pytest.mark.slow
def test_a_hybrid_of_stages_and_shards():
    assert max(run_ranks(difference, 4, 2, 2, "predict", "Adam", 1)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("own", OWN_MODELS)
@pytest.mark.parametrize("policy", ["predict", "stash"])
def test_a_stage_dag(policy, own):
    assert max(run_ranks(difference, 3, 3, 1, policy, "Adam", 1, own)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shards", "policy", "own", "ahead"),
    [
        (3, 1, "predict", "", 2),
        (3, 1, "stash", "", 2),
        (2, 1, "spectrain", "", 5),
        (4, 2, "predict", "", 3),
        (3, 1, "predict", "fork", 2),
        (3, 1, "predict", "skips", 2),
    ],
)
def test_more_passes_ahead(ranks, shards, policy, own, ahead):
    stages = ranks // shards
    settings = (stages, shards, policy, "Adam", 1, own, ahead)
    assert max(run_ranks(difference, ranks, *settings)) < 1e-9
