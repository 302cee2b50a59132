"""Ops, plans and losses do not depend on the order in which forward writes the branches."""

from __future__ import annotations

import copy
from dataclasses import replace

import branch_models
import hetero_models
import numpy as np
import pytest
import torch
from branch_models import MODELS, WRITINGS, RandomEdges, Towers
from helpers import plain_pyg_losses, pyg_data, quick_config, small_graph
from torch_geometric.transforms import RandomLinkSplit

from gnnpipe import Graph, Trainer
from gnnpipe.capture import capture
from gnnpipe.plan import Plan, StageDag
from gnnpipe.planner import PLANNERS, check_plan
from gnnpipe.planner.planner import Shape
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

EPOCHS = 3


def data_of(name):
    """The data as plain PyG takes it."""
    if name == "relations":
        return hetero_models.hetero_data(subjects=False)
    return pyg_data(small_graph(directed=True))


def made(name, writing, dropout=0.5):
    torch.manual_seed(3)
    return MODELS[name](writing, dropout)


class Asked:
    """The uniform planner for one rank; keeps the request."""

    num_ranks = PLANNERS["uniform"].num_ranks

    def plan(self, request):
        self.request = request
        return PLANNERS["uniform"].plan(request)


def request_of(name, writing):
    """What a planner may look at."""
    asked = Asked()
    graph = Graph.from_pyg(data_of(name))
    prepare(quick_config(), Mesh.alone(), graph, made(name, writing), asked)
    return asked.request


def without_names(model):
    """The ops, with numbers in place of the names of ops and values."""
    place = {op.name: str(i) for i, op in enumerate(model.ops)}
    return [
        replace(
            op,
            name=place[op.name],
            inputs=tuple(place[value] for value in op.inputs),
            outputs={place[value]: width for value, width in op.outputs.items()},
        )
        for op in model.ops
    ]


def transfers_of(plan, model):
    """Ends and total width of each transfer."""
    found = StageDag.of(plan, model).transfers
    return [(t.source, t.target, sum(t.widths.values())) for t in found]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_ops_and_plans(name):
    requests = [request_of(name, writing) for writing in WRITINGS]
    ops = [without_names(request.model) for request in requests]
    assert ops[1] == ops[0]
    assert ops[2] == ops[0]
    for stages in (2, 3, 4):
        shape = Shape(stages, 1, 4, is_exact=True)
        plans = [PLANNERS["uniform"].plan(replace(r, shape=shape)) for r in requests]
        assert plans[1] == plans[0]
        assert plans[2] == plans[0]
        given = Plan.from_json(plans[0].to_json())
        for request in requests:
            check_plan(given, request.model)
        transfers = [transfers_of(given, request.model) for request in requests]
        assert transfers[1] == transfers[0]
        assert transfers[2] == transfers[0]


@pytest.mark.filterwarnings("ignore:model. Assorted sums over all vertices")
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_the_same_losses_to_the_bit_with_dropout(name, chunks):
    found, states = [], []
    for writing in WRITINGS:
        run = quick_config(epochs=EPOCHS, chunks=chunks)
        trainer = Trainer(run, graph=Graph.from_pyg(data_of(name)), model=made(name, writing))
        found.append([row.loss for row in trainer.fit().history])
        states.append(trainer.model.state_dict())
    assert found[1] == found[0]
    assert found[2] == found[0]
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value)
        assert torch.equal(states[2][key], value)
    still = Trainer(run, graph=Graph.from_pyg(data_of(name)), model=made(name, WRITINGS[0], 0.0))
    assert [row.loss for row in still.fit().history] != found[0]


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_pyg(name, chunks):
    data = data_of(name)
    model = made(name, branch_models.LAYER_BY_LAYER, 0.0)
    if name == "relations":
        x = {t: v.double() for t, v in data.x_dict.items()}
        given, target = (x, data.edge_index_dict), data["paper"]
    else:
        given, target = (data.x.double(), data.edge_index), data
    truth = plain_pyg_losses(copy.deepcopy(model).double(), target, given, EPOCHS)
    run = quick_config(epochs=EPOCHS, chunks=chunks, staleness="auto" if chunks == 1 else "exact")
    found = Trainer(run, graph=Graph.from_pyg(data), model=model).fit()
    np.testing.assert_allclose([row.loss for row in found.history], truth, rtol=1e-9)


@pytest.mark.parametrize("writing", WRITINGS)
def test_random_edges_are_drawn_in_the_order_of_forward(writing):
    """``capture`` compares the recording with plain PyG, with the same random numbers."""
    torch.manual_seed(3)
    recorded = capture(RandomEdges(writing), small_graph(directed=True))
    assert recorded.edges_are_random


def test_pairs_are_scored_in_the_stage_of_the_last_rows():
    class Encoder(Towers):
        encode = Towers.forward

    data = pyg_data(small_graph())
    del data.y, data.train_mask, data.val_mask, data.test_mask
    split = RandomLinkSplit(0.1, 0.1, is_undirected=True, add_negative_train_samples=True)
    graph = Graph.from_pyg(split(data), task="links")
    found = []
    for writing in WRITINGS:
        asked = Asked()
        prepare(quick_config(), Mesh.alone(), graph, Encoder(writing, branches=2), planner=asked)
        model = asked.request.model
        assert model.ops[-1].over_pairs
        assert model.ties[-1] == (model.num_ops - 1, model.num_ops - 2)
        assert model.num_ops - 1 not in model.cuts
        found.append((without_names(model), model.cuts))
    assert found[1] == found[0]
    assert found[2] == found[0]
