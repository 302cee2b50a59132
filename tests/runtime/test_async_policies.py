"""Asynchronous runs against ``async_reference``: weight decay, clipping, a DAG with dropout."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from async_gcn import stages_of
from async_reference import (
    POLICIES,
    AsyncReference,
    RefStage,
    dense_chunks,
    one_f_one_b,
    step_means,
)
from helpers import quick_config, run_ranks, small_graph
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe.optim.lr_schedule import LearningRate
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epochs
from gnnpipe.verification.reference import learning_rate
from gnnpipe.verification.reference_dropout import drop

CHUNKS, SEED, LAYERS = 6, 0, 4
HIDDEN = 6
"""Fewer than the sparse features, so that each of four stages of the GCN has a product."""
SPANS = (2, 1)
"""Epochs between flushes."""
OPTIMIZERS = {
    "Adam": {"lr": 0.02},
    "AdamW": {"lr": 0.02, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "weight_decay": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9},
    "RMSprop": {"lr": 0.01, "weight_decay": 0.05},
}


def optimizer_of(name):
    kind = torch.optim.SGD if name == "momentum" else getattr(torch.optim, name)
    return lambda weights: kind(weights, **OPTIMIZERS[name])


@cache
def matrices():
    """The graph's matrices of GCN and of the mean of SAGE, dense."""
    graph = small_graph(40, directed=True, sparse=True)
    n = graph.num_vertices
    a = torch.zeros(n, n, dtype=torch.float64)
    source, target = torch.from_numpy(graph.edge_index).long()
    a[target, source] = 1.0
    looped = a + torch.eye(n, dtype=torch.float64)
    root = looped.sum(1).rsqrt()
    return {"gcn": root[:, None] * looped * root, "mean": a / a.sum(1).clamp(min=1)[:, None]}


def dropped(x, one, site, probability=0.5):
    """Rows x [C, F] after the dropout of a site, whose mask is that of all vertices."""
    whole = torch.ones(len(matrices()["gcn"]), x.shape[1], dtype=x.dtype)
    return x * drop(whole, probability, SEED, one.epoch, site)[one.chunk.rows]


def loss_of(logits, one):
    """Sum over the chunk's training vertices, by the number of all."""
    data = one.chunk.data
    rows = data["train"]
    total = F.cross_entropy(logits[rows], data["y"][rows], reduction="sum")
    return total / data["all_train"][0]


# Two branches on stages of their own, and a join.


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.ModuleList(nn.Linear(7, HIDDEN) for _ in range(2))
        self.left, self.right = pyg.GCNConv(HIDDEN, HIDDEN), pyg.SAGEConv(HIDDEN, HIDDEN)
        self.join, self.last = pyg.GCNConv(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x, edge_index):
        a = self.left(self.first[0](x), edge_index).tanh()
        a = F.dropout(a, 0.5, self.training)
        b = self.right(self.first[1](x), edge_index).tanh()
        b = F.dropout(b, 0.5, self.training)
        return self.last(self.join(a + b, edge_index).tanh())


def left(values, weights, one):
    h = F.linear(one.chunk.data["x"], weights["first.0.weight"], weights["first.0.bias"])
    h = F.linear(one.aggregate("gcn", "left", h), weights["left.lin.weight"])
    return {"a": dropped((h + weights["left.bias"]).tanh(), one, 0)}


def right(values, weights, one):
    h = F.linear(one.chunk.data["x"], weights["first.1.weight"], weights["first.1.bias"])
    neighbours = one.aggregate("mean", "right", h)
    found = F.linear(neighbours, weights["right.lin_l.weight"], weights["right.lin_l.bias"])
    return {"b": dropped((found + F.linear(h, weights["right.lin_r.weight"])).tanh(), one, 1)}


def join(values, weights, one):
    h = one.aggregate("gcn", "join", values["a"] + values["b"])
    h = (F.linear(h, weights["join.lin.weight"]) + weights["join.bias"]).tanh()
    return {"loss": loss_of(F.linear(h, weights["last.weight"], weights["last.bias"]), one)}


def joined_stages(state, stages):
    parts = [("first.0", "left"), ("first.1", "right"), ("join", "last")]
    weights = [{n: w for n, w in state.items() if n.startswith(part)} for part in parts]
    return [
        RefStage(left, weights[0]),
        RefStage(right, weights[1]),
        RefStage(join, weights[2], {"a": 0, "b": 1}),
    ]


class Branches:
    """Planner with each branch on a rank, and the join on a third."""

    def num_ranks(self, shape):
        return 3

    def plan(self, request):
        reads = {op.name: op.inputs for op in request.model.ops}

        def behind(name):
            return {name}.union(*map(behind, reads[name]))

        pairs = [[behind(n) for n in op.inputs] for op in request.model.ops if len(op.inputs) == 2]
        branches = next([a, b] for a, b in pairs if not a & b)
        rest = reads.keys() - branches[0] - branches[1]
        stages = [
            tuple(i for i, op in enumerate(request.model.ops) if op.name in names)
            for names in (*branches, rest)
        ]
        made = tuple(StagePlan.even(ops, (rank,)) for rank, ops in enumerate(stages))
        return Plan(made, CHUNKS, "async")


def reference_of(prepared, stages, depths, policy, optimizer, every):
    """The reference, and a function that trains epochs and returns their losses."""
    graph = small_graph(40, directed=True, sparse=True)
    perm = torch.from_numpy(prepared.chunking.perm)
    chunk_of = torch.from_numpy(prepared.chunking.chunk_of_row().astype("int64"))
    parts = [perm[chunk_of == c] for c in range(CHUNKS)]
    train = torch.from_numpy(graph.train_mask)
    x = torch.from_numpy(graph.x.toarray()).double()
    data = {
        "x": x,
        "aggregated": matrices()["gcn"] @ x,
        "y": torch.from_numpy(graph.y),
        "train": train,
        "all_train": train.sum().expand(len(train)),
    }
    chunks = dense_chunks(matrices(), parts, **data)
    reference = AsyncReference(stages, chunks, policy, optimizer_of(optimizer))
    counts = [int(train[rows].sum()) for rows in parts]

    def train_span(epoch, epochs):
        walk = [(e, c) for e in range(epoch, epoch + epochs) for c in prepared.chunk_order(e)]
        reference.scale_of = step_means(walk, every, counts)
        reference.run(one_f_one_b(depths, len(walk), every), walk)
        losses = [reference.losses[p] for p in range(len(walk))]
        return [sum(losses[e * CHUNKS : (e + 1) * CHUNKS]) for e in range(epochs)]

    return reference, train_span


def clip(weights, most):
    """Clip the norm of a stage's gradients."""
    grads = [w.grad for w in weights.values()]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    if norm > most:
        for g in grads:
            g *= most / norm


def difference(stages, policy, optimizer="Adam", every=1, dag=False, shards=1, **further):
    """Largest difference of losses and weights from the reference; runs on every rank."""
    mesh = Mesh.join(stages, shards)
    config = quick_config(
        model="gcn",
        layers=LAYERS,
        dropout=0.5,
        seed=SEED,
        stages=stages,
        shards=shards,
        chunks=CHUNKS,
        schedule="async",
        steps_every=every,
        weights=policy,
        lr_schedule="cosine",
        eval_every=SPANS[0],
        epochs=sum(SPANS),
        optimizer="SGD" if optimizer == "momentum" else optimizer,
        **({"hidden": HIDDEN} | OPTIMIZERS[optimizer] | further),
    )
    model = (Joined(), Branches()) if dag else ()
    prepared = prepare(config, mesh, small_graph(40, directed=True, sparse=True), *model)
    state = {n: p.detach().clone() for n, p in prepared.model.module.named_parameters()}
    runtime = build_rank(prepared, mesh)
    depths = [1, 1, 0] if dag else list(reversed(range(stages)))
    made = joined_stages(state, 3) if dag else stages_of(prepared, dropped, loss_of)
    has_none = any(not stage.weights for stage in made)
    assert has_none == (config.hidden != HIDDEN and stages > 1)
    reference, train_span = reference_of(prepared, made, depths, policy, optimizer, every)
    if config.clip_norm:
        reference.before_step = lambda k: clip(reference.stages[k].weights, config.clip_norm)
    steps = CHUNKS // every
    reference.rate = lambda step: learning_rate(config, step // steps) / math.sqrt(steps)
    rates = LearningRate(runtime.executor.optimizer, config, steps=steps)
    found, epoch = [], 0
    for span in SPANS:
        program = prepared.program_over(span)
        order = [c for e in range(epoch, epoch + span) for c in prepared.chunk_order(e)]
        if runtime.rates is not None:
            runtime.rates.begin(rates.coming(span), steps)
        losses = train_epochs(runtime, mesh, program, order, epoch, lambda: rates.step(None))
        rates.step(None)
        expected = train_span(epoch, span)
        found += [abs(a - b) for a, b in zip(losses, expected, strict=True)]
        epoch += span
    expected = {n: w.detach() for stage in reference.stages for n, w in stage.weights.items()}
    own = {n: p.detach().clone() for n, p in runtime.executor.stage.stage_module.named_parameters()}
    for part in mesh.gather(own):
        for name, value in part.items():
            found.append(float((value - expected[name]).abs().max()))
    assert runtime.executor.has_stepped
    return max(found)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "2bw"])
def test_one_rank(policy):
    """No weights are old, so no policy changes anything; 2bw is not used either."""
    assert difference(1, policy) < 1e-9


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [("predict", "AdamW"), ("predict", "SGD"), ("spectrain", "RMSprop"), ("xpipe", "momentum")],
)
def test_four_stages_with_weight_decay_and_momentum(policy, optimizer):
    assert max(run_ranks(difference, 4, 4, policy, optimizer)) < 1e-9


def wide(policy, optimizer):
    return difference(4, policy, optimizer, hidden=8)


@pytest.mark.parametrize(("policy", "optimizer"), [("predict", "AdamW"), ("stash", "SGD")])
def test_a_stage_without_weights(policy, optimizer):
    """Features are not wider than the layer, whose stage only aggregates."""
    assert max(run_ranks(wide, 4, policy, optimizer)) < 1e-9


def test_xpipe_with_several_chunks_a_step():
    assert max(run_ranks(difference, 2, 2, "xpipe", "Adam", 3)) < 1e-9


@pytest.mark.parametrize("policy", ["latest", "2bw", "predict", "spectrain"])
def test_a_dag_of_three_stages_with_dropout(policy):
    assert max(run_ranks(difference, 3, 3, policy, "Adam", 1, True)) < 1e-9


def clipped():
    return difference(2, "predict", "momentum", clip_norm=0.01)


def test_each_stage_clips_its_own_gradients():
    assert max(run_ranks(clipped, 2)) < 1e-9


def recomputed(policy):
    return difference(2, policy, recompute=True)


def test_recomputation_with_stash_sees_the_weights_of_forward():
    assert max(run_ranks(recomputed, 2, "stash")) < 1e-9
