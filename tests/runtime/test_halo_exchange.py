"""All-to-alls between real shards, small and large: received rows and process groups used."""

import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks

from gnnpipe.runtime.comm import shard_group
from gnnpipe.runtime.comm.halo_exchange import sum_over_shards
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.comm.shard_group import MeshShards

COUNTS = [[1, 2, 0], [0, 3, 4], [0, 5, 0]]
"""Rows that shard a (first) sends to shard b."""


def exchanged(large):
    mesh = Mesh.join(1, 3, "cpu", timeout_s=30.0)
    if large is not None:
        shard_group.LARGE, mesh = large, replace(mesh, links={})
    rank, groups = mesh.rank, []
    plain = dist.all_to_all_single

    def noted(*args, group, **more):
        groups.append(group)
        return plain(*args, group=group, **more)

    dist.all_to_all_single = noted
    ins, outs = COUNTS[rank], [row[rank] for row in COUNTS]
    data = torch.cat([torch.full((n, 2), 10.0 * rank + b) for b, n in enumerate(ins)])
    rooms = [torch.empty(sum(outs), 2) for _ in range(2)]
    under_way = [MeshShards(mesh).all_to_all(room, data, outs, ins, 72) for room in rooms]
    found = [transfer.wait().tolist() for transfer in under_way]
    numbers = torch.arange(7.0) * 10**rank
    sent_bytes = sum_over_shards(numbers, mesh)
    ways = [group is mesh.down_group for group in groups]
    return found, ways, numbers.tolist(), sent_bytes


@pytest.mark.parametrize("large", [1, 1 << 18, None])
def test_every_shard_gets_its_rows(large):
    """Over gloo, or (None) through shared memory."""
    results = run_ranks(exchanged, 3, large)
    for rank, (found, ways, total, _) in enumerate(results):
        expected = [[10.0 * a + rank] * 2 for a in range(3) for _ in range(COUNTS[a][rank])]
        assert found == [expected, expected]
        # Large ones go up and down over connections of their own (adr 0021).
        assert ways == {1: [False, True] * 4, 1 << 18: [False] * 4, None: []}[large]
        assert total == [111.0 * i for i in range(7)]
    # 2 (G - 1) n numbers over all shards.
    assert sum(sent_bytes for *_, sent_bytes in results) == 2 * 2 * 7 * 4


def test_wait_raises_the_error_of_the_start_thread():
    def fails():
        raise ConnectionError("gone")

    start_thread = Mesh.alone().start_thread
    faulty, good = start_thread.start(fails), start_thread.start(list)
    good.wait()
    with pytest.raises(ConnectionError, match="gone"):
        faulty.wait()
    start_thread.close()
    start_thread.start(list).wait()
    start_thread.close()


def recorded(setting):
    if setting is not None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = setting
    mesh = Mesh.join(1, 2, "cpu", timeout_s=30.0)
    sum_over_shards(torch.arange(7.0), mesh)
    kept = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    return len(kept.get("entries", ())), os.environ["TORCH_FR_BUFFER_SIZE"]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="this torch cannot tell"
)
@pytest.mark.parametrize("setting", [None, "50"])
def test_flight_recorder_is_off_unless_set(setting):
    """Its records would fragment the heap."""
    for entries, size in run_ranks(recorded, 2, setting):
        assert (entries > 0) == (setting is not None)
        assert size == (setting or "0")
