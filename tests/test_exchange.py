"""All-to-alls between real shards: what arrives, and that every receive is posted before a send."""

import torch
import torch.distributed as dist
from helpers import run_ranks

from gnnpipe.runtime.exchange import Arrival, sum_over_shards
from gnnpipe.runtime.mesh import Mesh

COUNTS = [[1, 2, 0], [0, 3, 4], [0, 5, 0]]
"""Rows that shard a (first) sends to shard b."""


def exchanged():
    mesh = Mesh.join(1, 3, "cpu", timeout_s=30.0)
    rank = mesh.rank
    asked = []
    plain = dist.batch_isend_irecv

    def noted(steps):
        asked.append([step.op is dist.irecv for step in steps])
        return plain(steps)

    dist.batch_isend_irecv = noted
    data = [torch.full((n, 2), 10.0 * rank + b) for b, n in enumerate(COUNTS[rank])]
    rooms = [[torch.empty(COUNTS[a][rank], 2) for a in range(3)] for _ in range(2)]
    under_way = [Arrival(room, data, mesh) for room in rooms]
    found = [[part.tolist() for part in arrival.wait()] for arrival in under_way]
    numbers = torch.arange(7.0) * 10**rank
    sent_bytes = sum_over_shards(numbers, mesh)
    return found, asked, numbers.tolist(), sent_bytes


def test_every_shard_gets_its_rows_and_posts_receives_first():
    results = run_ranks(exchanged, 3)
    for rank, (found, asked, total, _) in enumerate(results):
        expected = [[[10.0 * a + rank] * 2] * COUNTS[a][rank] for a in range(3)]
        assert found == [expected, expected]
        # A send in front would keep the other direction of its link waiting (adr 0021).
        assert asked
        assert all(steps == sorted(steps, reverse=True) for steps in asked)
        assert total == [111.0 * i for i in range(7)]
    # 2 (G - 1) n numbers over all shards.
    assert sum(sent_bytes for *_, sent_bytes in results) == 2 * 2 * 7 * 4
