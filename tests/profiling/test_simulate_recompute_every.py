"""``--recompute-every`` in the simulator: chosen by the devices' memory."""

import pytest

from gnnpipe import TrainConfig, simulate
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.profiling.scenario import GraphShape
from gnnpipe.setup.recompute_every import GROWTH

SHAPE = GraphShape(20_000, 200_000, 16, 4)


def simulated(every, memory_bytes=10**12, **given):
    config = TrainConfig(
        dataset="karate", layers=24, hidden=16, out="off", cache_dir="off", staleness="exact",
        recompute=True, recompute_every=every,
    )  # fmt: skip
    cluster = Cluster((Device(1.0, int(memory_bytes)),), Link(1e9, 0.0), {})
    return simulate(config, hardware="h100:10gbe", cluster=cluster, **given)


@pytest.mark.parametrize("given", [{}, {"shape": SHAPE}], ids=["graph", "shape"])
def test_zero_is_the_number_that_fits_on_the_devices(given):
    size = {n: simulated(n, **given).memory_bytes[0] for n in (1, 2, 4, 5)}
    assert max(size[4], size[2]) < size[5] < size[1]
    room = GROWTH * size[1] + 2
    assert simulated(0, room, **given).memory_bytes == [size[1]]
    assert simulated(0, room - 4, **given).memory_bytes == [size[5]]


def test_zero_warns_if_no_number_fits():
    size = min(simulated(n, shape=SHAPE).memory_bytes[0] for n in (2, 4))
    with pytest.warns(UserWarning, match="--recompute-every 0: no number fits into memory"):
        assert simulated(0, size + 1, shape=SHAPE).memory_bytes == [size]
