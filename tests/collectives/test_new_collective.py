"""Collectives that are registered here, as a user's own file would, in a run by a plan of theirs.

``RingSum`` has one phase and leaves the sum to ``torch.distributed``; ``OneByOne`` sends rows pair
by pair.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks, small_graph

from gnnpipe.collectives import (
    ROW_EXCHANGES,
    SHARD_SUMS,
    Collectives,
    LinkUse,
    OrderedSum,
    RowExchange,
    ShardSum,
)
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan
from gnnpipe.planner import GivenPlan


class RingSum(ShardSum):
    phases = 1

    def start(self, group, flat):
        summed = flat.clone()  # the result may be in other memory
        work = dist.all_reduce(summed, group=group.process_group, async_op=True)
        sent = self.sent_bytes(group.shards, flat.nbytes)
        return Started([work], summed, sent // group.shards)

    def sent_bytes(self, shards, size_bytes):
        return 2 * (shards - 1) * size_bytes

    def link_use(self, shards, size_bytes):
        return LinkUse(2 * (shards - 1), 2 * (shards - 1) * size_bytes / shards)


class OneByOne(RowExchange):
    """Sends and receives of each pair of shards."""

    def start(self, group, out, data, receive_counts, send_counts, largest_bytes):
        ranks = dist.get_process_group_ranks(group.process_group)
        works, sent = [], 0
        parts = zip(torch.split(out, receive_counts), torch.split(data, send_counts), strict=True)
        for shard, (into, rows) in enumerate(parts):
            if shard == group.shard:
                continue
            if len(into):
                works.append(dist.irecv(into, ranks[shard], group.process_group))
            if len(rows):
                works.append(dist.isend(rows.contiguous(), ranks[shard], group.process_group))
                sent += rows.nbytes
        return Started(works, out, sent)

    def sent_bytes(self, shards, row_bytes):
        return row_bytes

    def link_use(self, shards, row_bytes):
        return LinkUse(shards - 1, row_bytes)


class Started:
    def __init__(self, works, result, sent_bytes):
        self._works, self._result, self.sent_bytes = works, result, sent_bytes

    def proceed(self):
        pass

    def wait(self):
        for work in self._works:
            work.wait()
        return self._result


SHARD_SUMS.add("ring", RingSum())
ROW_EXCHANGES.add("one-by-one", OneByOne())
OWN = Collectives("one-by-one", "ring")


def trained(chunks):
    """Largest difference to one autograd graph, sent bytes and their closed form; on every rank."""
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.setup.build import build_rank
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.train.evaluate import train_epoch
    from gnnpipe.verification.comparison import compare_epochs

    mesh = Mesh.join(1, 2)
    config = TrainConfig(
        model="gcn",
        layers=4,
        hidden=8,
        shards=2,
        chunks=chunks,
        dtype="float64",
        epochs=3,
        cache_dir="off",
    )
    plan = prepare(config, mesh, small_graph()).plan
    plan = Plan.from_json(replace(plan, collectives=OWN).to_json())
    prepared = prepare(config, mesh, small_graph(), planner=GivenPlan(plan))
    mesh = Mesh.of(mesh, plan.placement, plan.collectives)
    difference = max(c.largest for c in compare_epochs(small_graph(), prepared, mesh, 3))
    rank_runtime = build_rank(prepared, mesh)
    train_epoch(rank_runtime, mesh, prepared.program_of(0), prepared.chunk_order(0), 0)
    counted = rank_runtime.executor.epoch_bytes
    sent = int(mesh.sum([float(counted.graph + counted.gradient)])[0])
    return difference, sent, prepared.volume.graph + prepared.volume.gradient


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_run_with_collectives_of_its_own(chunks):
    for difference, sent, closed_form in run_ranks(trained, 2, chunks):
        assert difference < 1e-9
        assert sent == closed_form


def test_a_plan_keeps_the_names_and_an_unknown_one_is_refused():
    from gnnpipe.runtime.comm.world import World
    from gnnpipe.setup.prepare import prepare

    config = TrainConfig(dataset="karate", hidden=8, cache_dir="off", out="off")
    plan = prepare(config, World.alone()).plan
    assert Plan.from_json(replace(plan, collectives=OWN).to_json()).collectives == OWN
    unknown = replace(plan, collectives=Collectives(shard_sum="rings"))
    with pytest.raises(InputError, match=r"plan: shard_sum 'rings'.*did you mean 'ring'"):
        prepare(config, World.alone(), planner=GivenPlan(unknown))


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_what_all_shards_send_is_what_each_link_carries(shards):
    total = OrderedSum().sent_bytes(shards, 64 * shards)
    assert total == shards * OrderedSum().link_use(shards, 64 * shards).sent_bytes
