"""The heap keeps freed memory while a run trains, unless the user has chosen settings."""

import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest
from helpers import quick_config, small_graph
from torch.nn.functional import cross_entropy

from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.heap import HEAP_SETTINGS
from gnnpipe.runtime import memory_use
from gnnpipe.tools import doctor

HELD = """
import resource, sys
from contextlib import nullcontext
import numpy as np
from gnnpipe.heap import held_heap

def epoch():  # several sizes, all freed at its end
    return [np.ones(size) for size in (3 << 20, 1 << 18, 5 << 20, 1 << 20) * 3]

def faults(turns):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(turns):
        epoch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

print("start", resident())
with held_heap() if sys.argv[1] == "held" else nullcontext():
    epoch()
    print("faults", faults(3))
    print("inside", resident())
print("after", resident())
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(3 << 17)  # 3 MiB: after the first, what was freed is handed out again
print("later", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
many = [np.ones(1 << 17) for _ in range(200)]
full = resident()
del many
print("returned", full - resident())
"""


NESTED = """
from gnnpipe import heap
calls = []
heap._glibc = lambda name: lambda *values: calls.append((name, *values))
with heap.held_heap():
    with heap.held_heap():
        pass
    print(len([c for c in calls if c[0] == "malloc_trim"]), calls[-1][2] in heap._HELD.values())
print(len([c for c in calls if c[0] == "malloc_trim"]))
"""


def test_an_inner_block_does_not_end_the_outer_one():
    kept = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    words = [sys.executable, "-c", NESTED]
    done = subprocess.run(words, env=kept, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "1"]


def measure(tmp_path, kind, **environment):
    """The numbers that ``HELD`` prints, without our own settings of the heap."""
    script = tmp_path / "script.py"
    script.write_text(HELD)
    kept = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-u", str(script), kind],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=kept | environment,
    )
    return {name: int(n) for name, n in map(str.split, done.stdout.splitlines())}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept_inside_the_block_and_returned_after(tmp_path):
    one_turn = 3 * (9 << 20) * 8  # bytes, rounded down
    held, free = (measure(tmp_path, kind) for kind in ("held", "free"))
    assert held["faults"] < free["faults"] / 20  # else zeroed pages in every turn
    assert held["inside"] > held["start"] + one_turn
    assert held["after"] < held["start"] + one_turn / 10
    assert held["later"] < 20 * (3 << 20) / 4096 / 4
    assert held["returned"] > 100 << 20  # of 200 MiB, by itself


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(
    "setting",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
    ],
)
def test_settings_of_the_user_stay(setting, tmp_path):
    found = measure(tmp_path, "held", **setting)
    assert found["inside"] < found["start"] + (32 << 20)


def fails(logits, y):
    """Fails in training, but not in the check on a few rows before."""
    if len(y) > 10:
        raise RuntimeError("on purpose")
    return cross_entropy(logits, y, reduction="sum")


@pytest.mark.parametrize("loss", [None, fails])
def test_fit_holds_the_heap_while_it_trains(loss, monkeypatch):
    seen = []

    @contextmanager
    def held():
        seen.append("held")
        try:
            yield
        finally:
            seen.append("freed")

    monkeypatch.setattr(memory_use, "held_heap", held)
    graph = small_graph(n=60)
    trainer = Trainer(quick_config(epochs=2, device="cpu"), graph=graph, loss_fn=loss)
    with nullcontext() if loss is None else pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit()
    assert seen == ["held", "freed"] * 2, "for the prediction, and for the epochs"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_doctor_tells_how_to_save_more(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_round_trips", lambda: iter(()))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert main(["doctor"]) == 0
    assert f"export GLIBC_TUNABLES={HEAP_SETTINGS}" in capsys.readouterr().out
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert main(["doctor"]) == 0
    assert "heap: set by the environment" in capsys.readouterr().out
