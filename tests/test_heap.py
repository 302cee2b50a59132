"""A command that trains starts itself once more, with settings of the heap, and just once."""

import os
import subprocess
import sys

import pytest

from gnnpipe.heap import HEAP_SETTINGS

SCRIPT = """
import os
print(os.getpid(), os.environ.get("GLIBC_TUNABLES", "none"), flush=True)
from gnnpipe.heap import settle_heap
settle_heap()
import sys
print(os.getpid(), sys.argv[1:], flush=True)
"""


def ran(tmp_path, words, **environment):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-u", str(script), *words],
        capture_output=True, text=True, check=True, timeout=60, env=kept | environment,
    )  # fmt: skip
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
        (["info"], {}), ([], {}), (["--help"], {}),
        (["train"], {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}),
        (["train"], {"GLIBC_TUNABLES": ""}),
        (["train"], {"LD_PRELOAD": "libno-such-malloc.so"}),
    ],
)  # fmt: skip
def test_what_is_left_alone(words, environment, tmp_path):
    found = ran(tmp_path, words, **environment)
    assert len(found) == 2
    assert found[1].endswith(f" {words}")
