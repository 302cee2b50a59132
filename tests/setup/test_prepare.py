"""Digest of a graph (a run is resumed with the same graph only); how chunks are cut, and told."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import carrying, quick_config, small_graph
from hetero_models import hetero_data
from torch_geometric.nn import GraphSAGE

from gnnpipe import Graph
from gnnpipe.errors import InputError
from gnnpipe.graph.chunking import make_chunking
from gnnpipe.run.summary import SMALL_CHUNK, head_lines
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepare import prepare


class Rows(torch.nn.Module):
    """Reads nothing but features."""

    def forward(self, x, edge_index):
        return x[:, :3]


class TypedRows(torch.nn.Module):
    def forward(self, x_dict, edge_index_dict):
        return {name: x[:, :3] for name, x in x_dict.items()}


def digest(graph, model=None):
    return prepare(quick_config(), World.alone(), graph, model or Rows()).digest


@pytest.mark.filterwarnings("ignore:graph 'small'")
def test_the_same_values_under_another_name_are_another_graph():
    graph = carrying(small_graph(), "edge_weight")
    weight = graph.edge_weight
    others = [
        replace(graph, edge_weight=None, edge_attr=weight[:, None]),
        replace(graph, edge_weight=None, derived={"edge_weight__0": weight}),
        replace(graph, edge_weight=weight + 1),
        replace(graph, edge_weight=None),
    ]
    assert len({digest(one) for one in (graph, *others)}) == 5
    assert digest(graph) == digest(carrying(small_graph(), "edge_weight"))


def test_graphs_without_edge_data_keep_the_digest_of_older_checkpoints():
    graph, found = small_graph(), 0
    masks = graph.train_mask, graph.val_mask, graph.test_mask
    for array in (graph.indptr, graph.indices, graph.y, *masks, graph.x):
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
    assert digest(graph) == f"{found:08x}"


def test_names_of_types_and_relations_count():
    data = hetero_data(subjects=False)
    graph = Graph.from_pyg(data)
    types = graph.types
    renamed = [(a, f"{name}s", b) for a, name, b in types.relations]
    other = replace(graph, types=replace(types, relations=tuple(renamed)))
    assert digest(graph, TypedRows()) != digest(other, TypedRows())


@pytest.mark.parametrize(
    ("settings", "partitioner"),
    [
        ({"schedule": "async"}, "mixed"),
        ({"schedule": "1f1b", "steps_every": 2}, "mixed"),
        ({"schedule": "1f1b"}, "metis"),
        ({"schedule": "async", "steps_every": 4}, "metis"),
        ({}, "metis"),
    ],
    ids=["async", "some chunks a step", "one step", "one step, async", "fill-drain"],
)
def test_chunks_are_mixed_if_the_optimizer_steps_several_times_an_epoch(settings, partitioner):
    graph = small_graph(n=300)
    config = quick_config(chunks=4, **settings)
    found = prepare(config, World.alone(), graph, Rows()).chunking
    settings = {"partitioner": partitioner, "seed": 0, "shards": 1, "cache_dir": "off"}
    expected = make_chunking(graph, chunks=4, **settings)
    of_vertex = [cut.chunk_of_row()[cut.inverse] for cut in (found, expected)]
    assert np.array_equal(*of_vertex)


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({"schedule": "async", "hidden": 8}, True),
        ({"schedule": "async", "hidden": SMALL_CHUNK // 75}, True),
        ({"schedule": "async", "hidden": SMALL_CHUNK // 75 + 1}, False),
        ({"hidden": 8}, False),
    ],
    ids=["small", "just small", "large", "fill-drain"],
)
def test_chunks_that_are_too_small_for_steps_of_their_own_are_told(settings, is_said):
    config = quick_config(chunks=4, layers=2, **settings)
    prepared = prepare(config, World.alone(), small_graph(n=300), None)
    assert any("starting its operations" in line for line in head_lines(prepared)) == is_said


def told(module, **settings):
    return head_lines(prepare(quick_config(**settings), World.alone(), small_graph(), module))[1]


def test_only_a_model_of_the_config_is_told_with_its_settings():
    assert told(None, layers=2).startswith("model gcn: 2 layers x ")
    module = GraphSAGE(7, 5, num_layers=3, out_channels=3)
    assert told(module, layers=2).startswith("model GraphSAGE: ")
    with pytest.raises(InputError, match="--model-args 'heads=2': no effect on a model that is"):
        told(module, model_args="heads=2")
