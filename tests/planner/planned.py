"""Searches of plans for tests: graphs given by sizes, and clusters of data sheets."""

from dataclasses import replace

from gnnpipe.config import TrainConfig
from gnnpipe.plan.cluster import Device, Link
from gnnpipe.planner.given_devices import Hardware
from gnnpipe.profiling.scenario import GraphShape, model_on_shape
from gnnpipe.profiling.search import search_space, workload_of_shape

BIG = 80 * 10**9
SLOW, FAST = Link(1.25e9, 5e-5), Link(300e9, 1e-5)
GRAPH = GraphShape(100_000, 2_000_000, 65, 16, halo=0.5, stored=2_000_000)
"""With sparse features wider than a layer, so that every layer pushes rows."""
MODELS = {}


def space_of(cluster, shape=GRAPH, **changes):
    config = TrainConfig(**{"layers": 6, "hidden": 64} | changes)
    key = shape, config
    if key not in MODELS:
        MODELS[key] = model_on_shape(replace(config, plan="auto"), shape)
    hardware = Hardware(sheets="a100:100gbe", cluster=cluster)
    return search_space(config, workload_of_shape(config, shape, MODELS[key], hardware), hardware)


def devices(*speeds, memory=BIG):
    return tuple(Device(speed, memory) for speed in speeds)
