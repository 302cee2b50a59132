"""Ranks of one machine do not share a core while another one is free."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.runtime.comm import cpu_affinity
from gnnpipe.runtime.comm.cpu_affinity import crowding, on_own_cores, own_cores, usable_cores
from gnnpipe.runtime.comm.mesh import Mesh


def shares(monkeypatch, places, threads):
    """Cores of each rank; ``places``: machine and usable cores by rank."""
    everyone = [((host, frozenset(mine)), threads, True) for host, mine in places]
    found = []
    for rank, (host, mine) in enumerate(places):
        monkeypatch.setattr(cpu_affinity, "usable_cores", lambda mine=mine: frozenset(mine))
        monkeypatch.setattr(cpu_affinity, "machine_key", lambda host=host: host)
        found.append(set(own_cores(rank, threads, lambda said: everyone)))
    return found


def test_cores_are_divided_among_ranks(monkeypatch):
    one, other = ("a", range(6)), ("b", {1, 9})
    assert shares(monkeypatch, [one] * 2, 1) == [{0, 1, 2}, {3, 4, 5}]
    assert shares(monkeypatch, [one] * 4, 1) == [{0}, {1, 2}, {3}, {4, 5}]
    assert shares(monkeypatch, [one, other, other], 2) == [set(range(6)), {1, 9}, {1, 9}]
    assert shares(monkeypatch, [one, other, one, other], 1) == [{0, 1, 2}, {1}, {3, 4, 5}, {9}]


def test_all_cores_are_used(monkeypatch):
    assert shares(monkeypatch, [("a", range(8))] * 5, 1) == [{0}, {1, 2}, {3}, {4, 5}, {6, 7}]
    assert shares(monkeypatch, [("a", range(8))] * 3, 2) == [{0, 1}, {2, 3, 4}, {5, 6, 7}]


def test_ranks_with_many_threads_are_not_bound(monkeypatch):
    assert shares(monkeypatch, [("a", range(6))] * 7, 1) == [set(range(6))] * 7
    assert shares(monkeypatch, [("a", range(6))] * 2, 4) == [set(range(6))] * 2


def test_ranks_bound_from_outside_stay_so(monkeypatch):
    given = [("a", {0, 1}), ("a", {2, 3})]
    assert shares(monkeypatch, given, 1) == [{0, 1}, {2, 3}]


def where(stages):
    """Cores of this process before, during and after a run."""
    before = usable_cores()
    mesh = Mesh.join(stages, 1, "cpu")
    with mesh.on_own_cores():
        own = usable_cores()
        mesh.gather(None)
        threads = {
            tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")
        }
    after = usable_cores()
    mesh.leave()
    return before, own, threads, after


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core")
def test_real_ranks_have_separate_cores():
    found = run_ranks(where, 2, 2)
    before = found[0][0]
    own = [rank[1] for rank in found]
    assert not own[0] & own[1]
    assert all(len(mine) == len(before) // 2 for mine in own)
    for _, mine, threads, after in found:
        assert threads == {tuple(sorted(mine))}  # gloo's as well
        assert after == before


def failing(stages):
    """Cores during a run and after its failure."""
    config = quick_config(stages=stages, epochs=3, on_nan="stop")
    seen = []

    def broken(logits, labels):
        seen.append(usable_cores())
        return logits.sum() * float("nan")

    trainer = Trainer(config, small_graph(), loss_fn=broken)
    with pytest.raises(FloatingPointError):
        trainer.fit()
    after = usable_cores()
    trainer.close()
    return seen[:1], after


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core")
def test_a_failed_run_restores_the_cores():
    found = run_ranks(failing, 2, 2)
    assert found[1][0][0] < usable_cores(), "the last stage has the loss"
    assert all(after == usable_cores() for _, after in found)


BOUND = """
import json, os, sys
import torch
sys.path.insert(0, sys.argv[1])
from gnnpipe.runtime.comm.cpu_affinity import on_own_cores, usable_cores
def places():
    return sorted(sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task"))
torch.ones(500, 500) @ torch.ones(500, 500)
before = places()
with on_own_cores(0, 1, lambda said: [said, said]):
    within = places()
print(json.dumps([before, within, places()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core")
def test_threads_bound_by_openmp_stay_so():
    run = subprocess.run(
        [sys.executable, "-c", BOUND, str(Path(cpu_affinity.__file__).parents[3])],
        env=os.environ | {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    before, within, after = json.loads(run.stdout)
    assert before == within == after


def test_one_rank_may_use_all_cores():
    before = usable_cores()
    Trainer(quick_config(epochs=1), small_graph()).fit()
    assert usable_cores() == before


def test_crowding_of_the_fullest_machine():
    fine, full = ("a", frozenset(range(8)), 2), ("b", frozenset({3}), 1)
    assert crowding(1, lambda said: [fine, fine]) == 0.5
    assert crowding(1, lambda said: [fine, full, fine, full, full]) == 3.0
    # Each on its own share: together they have all of them.
    assert crowding(1, lambda said: [("a", frozenset({n}), 1) for n in range(4)]) == 1.0


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core")
def test_existing_threads_are_bound_too():
    before = usable_cores()
    is_over, places = threading.Event(), []

    def waiting():
        is_over.wait()
        places.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=waiting)
    thread.start()
    try:
        with on_own_cores(0, 1, lambda said: [said, said]):
            own = usable_cores()
            is_over.set()
            thread.join()
        assert places == [own]
        assert own < before
    finally:
        is_over.set()
    assert usable_cores() == before
