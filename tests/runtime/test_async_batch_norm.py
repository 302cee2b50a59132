"""BatchNorm with ``--schedule async`` on real ranks, against ``async_reference``.

A mean over all vertices is an aggregation in which each chunk reads all: its own rows as they are,
and of other chunks the newest sums as constants. The variance is the mean of the squared
differences from the mean that each chunk read.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from async_reference import RefStage
from helpers import pyg_data, quick_config, run_ranks, small_graph, struck_rows
from test_async_on_ranks import CHUNKS, EPOCHS, EVERY, LR, WIDTH, loss_of, reference_of
from torch import nn
from torch_geometric import nn as pyg

from gnnpipe import Trainer
from gnnpipe.runtime.comm.mesh import Mesh

EPS, MOMENTUM = 1e-5, 0.1


class Normed(nn.Module):
    """With two stages, the first ends behind ``norm``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = pyg.GCNConv(7, WIDTH), pyg.GCNConv(WIDTH, WIDTH), pyg.GCNConv(6, 3)
        self.norm, self.other = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x, edge_index):
        x = self.norm(self.a(x, edge_index)).relu()
        x = self.other(self.b(x, edge_index)).relu()
        return self.c(x, edge_index)


def batch_norm(x, weights, one, name):
    centred = x - one.aggregate("mean", f"{name}.mean", x)
    variance = one.aggregate("mean", f"{name}.variance", centred**2)
    return centred / (variance + EPS).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def first(values, weights, one):
    x = F.linear(one.chunk.data["x"], weights["a.lin.weight"])
    x = one.aggregate("gcn", "a", x) + weights["a.bias"]
    return {"x": batch_norm(x, weights, one, "norm").relu()}


def second(values, weights, one):
    x = F.linear(one.aggregate("gcn", "b", values["x"]), weights["b.lin.weight"])
    x = batch_norm(x + weights["b.bias"], weights, one, "other").relu()
    x = F.linear(one.aggregate("gcn", "c", x), weights["c.lin.weight"]) + weights["c.bias"]
    return {"loss": loss_of(x, one)}


def both(values, weights, one):
    return second(first(values, weights, one), weights, one)


class Running:
    """Running statistics of the reference: they move before the last step of each epoch."""

    def __init__(self, reference):
        self.reference, self.found = reference, {}

    def __call__(self, k):
        if (self.reference.steps[k] + 1) % CHUNKS:
            return
        for name, table in self.reference.tables[k].items():
            what = name.partition(".")[2]
            if what:
                # The table of a mean holds the rows whose mean it is.
                now = table.mean(0) if what == "mean" else table.sum(0) / (len(table) - 1)
                old = self.found.get(name, torch.full_like(now, float(what == "variance")))
                self.found[name] = (1 - MOMENTUM) * old + MOMENTUM * now


def difference(stages, shards):
    """Largest difference of losses, weights, running statistics and predictions, and warnings."""
    mesh = Mesh.join(stages, shards)
    graph = small_graph(40, directed=True, sparse=True)
    run = quick_config(
        epochs=EPOCHS, eval_every=EVERY, lr=LR, lr_schedule="cosine", stages=stages, shards=shards,
        chunks=CHUNKS, schedule="async",
    )  # fmt: skip
    trainer = Trainer(run, graph, Normed(), world=mesh)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prepared = trainer._setup()[1]
        weights = {k: v.clone() for k, v in trainer.model.named_parameters()}
        functions = [both] if stages == 1 else [first, second]
        ref_stages = []
        for number, stage in enumerate(prepared.plan.stages):
            names = dict(prepared.model.stage_module(stage.ops).named_parameters())
            own = {name: weights[name] for name in names}
            ref_stages.append(RefStage(functions[number], own, {"x": 0} if number else {}))
        leads = list(prepared.dag.distances)
        reference, train = reference_of(prepared, graph, ref_stages, leads, "predict", "Adam", 1)
        running = reference.before_step = Running(reference)
        losses = [row.loss for row in trainer.fit().history]
        logits = trainer.predict()
    truth = [*train(0, 2), *train(2, 4), *train(4, 5)]
    found = [abs(a - b) for a, b in zip(losses, truth, strict=True)]
    trained = trainer.model.state_dict()
    for stage in reference.stages:
        for name, weight in stage.weights.items():
            found.append(float((trained[name] - weight).abs().max().detach()))
    for name, value in running.found.items():
        norm, _, what = name.partition(".")
        kept = trained[f"{norm}.running_{'mean' if what == 'mean' else 'var'}"]
        found.append(float((kept - value).abs().max()))
        assert int(trained[f"{norm}.num_batches_tracked"]) == EPOCHS
    assert len(running.found) == 4
    data = pyg_data(graph)
    evaluated = trainer.model.double().eval()(data.x.double(), data.edge_index.long())
    found.append(float((logits - evaluated).abs().max().detach()))
    return max(found), [str(one.message) for one in told]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "shards"), [(1, 1), (2, 1), (2, 2)])
def test_statistics_are_of_the_newest_rows_and_evaluation_takes_the_running_ones(stages, shards):
    found = run_ranks(difference, stages * shards, stages, shards, timeout_s=90)
    assert max(largest for largest, _ in found) < 1e-9
    warned = [any("normalises over all vertices" in text for text in told) for _, told in found]
    assert warned == [rank == 0 for rank in range(stages * shards)]


def statistics_are_finite():
    """Whether running statistics stay finite if all rows of epoch 2 are NaN in training.

    Stage 0 passes the first chunks of epoch 2 forward before its last step of epoch 1.
    """
    mesh = Mesh.join(2, 1)
    run = quick_config(
        epochs=EPOCHS, eval_every=EVERY, lr=LR, stages=2, chunks=CHUNKS, schedule="async",
        on_nan="skip",
    )  # fmt: skip
    trainer = Trainer(run, small_graph(40, directed=True, sparse=True), Normed(), world=mesh)
    with warnings.catch_warnings(), struck_rows(lambda _, rows: rows.training and rows.epoch == 1):
        warnings.simplefilter("ignore")
        losses = [row.loss for row in trainer.fit().history]
    state = trainer.model.state_dict()
    counts = {int(state[f"{norm}.num_batches_tracked"]) for norm in ("norm", "other")}
    return losses, counts, all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.slow
def test_rows_that_are_not_finite_do_not_enter_running_statistics():
    for losses, counts, are_finite in run_ranks(statistics_are_finite, 2, timeout_s=90):
        assert are_finite
        assert [math.isfinite(loss) for loss in losses] == [e != 1 for e in range(EPOCHS)]
        assert max(counts) < EPOCHS
