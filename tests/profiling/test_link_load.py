"""What messages take from ranks that compute: of the thread that computes, and of others."""

import threading
import time

import pytest
import torch
from helpers import run_ranks

from gnnpipe.profiling import links
from gnnpipe.runtime.comm.mesh import Mesh

BURNT_S = 0.004


def burn():
    start_s = time.thread_time()
    while time.thread_time() - start_s < BURNT_S:
        pass


class Done:
    def wait(self):
        pass


class Joined:
    def __init__(self):
        self._thread = threading.Thread(target=burn)
        self._thread.start()

    def wait(self):
        self._thread.join()


def in_this_thread(size_bytes):
    burn()
    return (Done(),)


def in_another_thread(size_bytes):
    return (Joined(),)


def test_whose_time_it_was():
    torch.set_num_threads(1)
    found = links._loads_by_size(Mesh.alone(), in_this_thread, 5, True)[0]
    assert 0.8 * BURNT_S < found.own_s < 2 * BURNT_S
    assert found.other_s < 0.2 * BURNT_S
    found = links._loads_by_size(Mesh.alone(), in_another_thread, 5, True)[0]
    assert 0.8 * BURNT_S < found.other_s < 2 * BURNT_S
    assert found.own_s < 0.5 * BURNT_S


def loads(stages, shards):
    torch.set_num_threads(1)
    mesh = Mesh.join(stages, shards)
    found = [links.message_load(mesh, (0, 1), 3)]
    if shards > 1:
        found.append(links.exchange_load(mesh, 3))
    mesh.leave()
    return found


@pytest.mark.slow
def test_every_rank_knows_the_load_and_none_is_below_nothing():
    for shape in ((3, 1), (1, 2)):
        ranks = run_ranks(loads, shape[0] * shape[1], *shape)
        assert all(found == ranks[0] for found in ranks), "also those that took no part"
        for by_size in ranks[0]:
            assert len(by_size) == len(links.LOAD_SIZES)
            assert all(load.own_s >= 0 and load.other_s >= 0 for load in by_size)
            assert by_size[-1].own_s + by_size[-1].other_s > 0, "half a MiB is not for nothing"
