"""A command that trains starts itself once more, with settings of the heap, and just once; in a
script, the heap holds what is freed while it trains."""

import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest
from helpers import quick_config, small_graph
from torch.nn.functional import cross_entropy

from gnnpipe import Trainer
from gnnpipe.heap import HEAP_SETTINGS
from gnnpipe.runtime import memory_use

SCRIPT = """
import os
print(os.getpid(), os.environ.get("GLIBC_TUNABLES", "none"), flush=True)
from gnnpipe.heap import settle_heap
settle_heap()
import sys
print(os.getpid(), sys.argv[1:], flush=True)
"""


def ran(tmp_path, words, text=SCRIPT, **environment):
    """The lines that a script prints, without our own settings of the heap."""
    script = tmp_path / "script.py"
    script.write_text(text)
    kept = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-u", str(script), *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=kept | environment,
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_command_that_trains_starts_once_more_as_the_same_process(tmp_path):
    words = ["train", "--dataset", "a b"]
    first, second, last = ran(tmp_path, words)
    pid = first.split()[0]
    assert first == f"{pid} none"
    assert second == f"{pid} {HEAP_SETTINGS}"
    assert last == f"{pid} {words}"


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["info"], {}),
        ([], {}),
        (["--help"], {}),
        (["train"], {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}),
        (["train"], {"GLIBC_TUNABLES": ""}),
        (["train"], {"LD_PRELOAD": "libno-such-malloc.so"}),
    ],
)
def test_what_is_left_alone(words, environment, tmp_path):
    found = ran(tmp_path, words, **environment)
    assert len(found) == 2
    assert found[1].endswith(f" {words}")


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
print("behind", resident())
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(3 << 17)  # 3 MiB: after the first, what was freed is handed out again
print("later", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
many = [np.ones(1 << 17) for _ in range(200)]
full = resident()
del many
print("returned", full - resident())
"""


def held_or_not(tmp_path, word, **environment):
    lines = ran(tmp_path, [word], HELD, **environment)
    return {name: int(n) for name, n in map(str.split, lines)}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_is_freed_meanwhile_is_held_and_then_goes_back(tmp_path):
    one_turn = 3 * (9 << 20) * 8  # bytes, and a bit
    held, free = (held_or_not(tmp_path, word) for word in ("held", "free"))
    assert held["faults"] < free["faults"] / 20  # otherwise given zeroed pages in every turn
    assert held["inside"] > held["start"] + one_turn
    assert held["behind"] < held["start"] + one_turn / 10
    assert held["later"] < 20 * (3 << 20) / 4096 / 4
    assert held["returned"] > 100 << 20  # of 200 MiB, without being asked


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(
    "setting",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
    ],
)
def test_a_users_own_settings_stay(setting, tmp_path):
    found = held_or_not(tmp_path, "held", **setting)
    assert found["inside"] < found["start"] + (32 << 20)


def fails(logits, y):
    """Not where it is tried out on a few rows."""
    if len(y) > 10:
        raise RuntimeError("of its own")
    return cross_entropy(logits, y, reduction="sum")


@pytest.mark.parametrize("loss", [None, fails])
def test_fit_holds_the_heap_for_its_epochs_and_lets_go_of_it(loss, monkeypatch):
    seen = []

    @contextmanager
    def held():
        seen.append("held")
        try:
            yield
        finally:
            seen.append("let go")

    monkeypatch.setattr(memory_use, "held_heap", held)
    graph = small_graph(n=60)
    trainer = Trainer(quick_config(epochs=2, device="cpu"), graph=graph, loss_fn=loss)
    with nullcontext() if loss is None else pytest.raises(RuntimeError, match="of its own"):
        trainer.fit()
    assert seen == ["held", "let go"]
