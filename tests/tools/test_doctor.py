"""``gnnpipe doctor``: quiet where all is well, and a remedy beside each fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnnpipe.cli.main import main
from gnnpipe.tools import doctor
from gnnpipe.tools.collective_check import round_trip

ROOT = Path(__file__).resolve().parents[2]


def faults(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAULT")]


@pytest.fixture
def quick(monkeypatch):
    """Without the two processes, which take seconds."""
    monkeypatch.setattr(doctor, "_round_trips", lambda: iter(()))


@pytest.mark.slow
def test_a_sound_machine(capsys):
    """This one, or no test of several ranks would pass either."""
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ok     gloo: 2 processes sum a number in " in out
    assert f"ok     torch: {torch.__version__}" in out
    assert "ok     METIS: pymetis" in out
    assert out.splitlines()[-1] == "nothing is wrong"


@pytest.mark.slow
def test_under_torchrun_only_the_environment_is_a_fault():
    """Two processes connect although torchrun's variables are set."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*torchrun, "--nproc-per-node", "1", "-m", "gnnpipe", "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert "ok     gloo: 2 processes sum a number in " in done.stdout
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT")]
    assert [fault.split(":")[0] for fault in faults] == ["FAULT  environment"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_nccl(capsys):
    assert main(["doctor"]) == 0
    assert "ok     NCCL: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_wrong_interface_and_the_remedy(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    assert main(["doctor"]) == 1
    (fault,) = faults(capsys)
    assert fault.startswith("FAULT  gloo: ")
    assert "try: unset GLOO_SOCKET_IFNAME (it is 'no-such0')" in fault


def test_two_processes_have_a_time_limit():
    took_s, fault = round_trip("cpu", 2, 0.2)
    assert fault == "no answer within 0.2 s"
    assert took_s == 0.2


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        ({"no_such_package": "2"}, ["no_such_package: cannot be imported", "pip install"]),
        ({"numpy": "99.1"}, ["numpy: ", "is too old", "pip install 'numpy>=99.1'"]),
    ],
)
def test_packages_that_are_missing_or_too_old(needed, words, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED", needed)
    assert main(["doctor"]) == 1
    (fault,) = faults(capsys)
    for word in words:
        assert word in fault


def test_a_torch_that_cannot_be_imported(tmp_path):
    """Nothing that doctor itself needs may import torch first."""
    (tmp_path / "torch.py").write_text("raise OSError('libc10.so: cannot open')\n")
    done = subprocess.run(
        [sys.executable, "-m", "gnnpipe", "doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "FAULT  torch: cannot be imported (OSError: libc10.so: cannot open)" in done.stdout
    assert done.stderr == ""


def test_folders(capsys, tmp_path, monkeypatch, quick):
    (tmp_path / "file").touch()
    words = ["--cache-dir", str(tmp_path / "file" / "cache"), "--out", "/proc/run"]
    assert main(["doctor", *words]) == 1
    out, cache = faults(capsys)
    assert out.startswith("FAULT  --out: '/proc/run' cannot be written")
    assert cache.startswith("FAULT  --cache-dir: --cache-dir")
    assert all(fault.endswith("try: another folder") for fault in (out, cache))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert main(["doctor", "--out", "a\0b"]) == 2


def test_too_little_memory_and_disk(capsys, monkeypatch, quick):
    monkeypatch.setattr(doctor, "LEAST_BYTES", 1 << 60)
    assert main(["doctor"]) == 1
    found = faults(capsys)
    assert [line.split(":")[0] for line in found] == [
        "FAULT  memory",
        "FAULT  --out",
        "FAULT  --cache-dir",
        "FAULT  --data-dir",
    ]
    assert all("; try: " in line for line in found)


def test_what_another_job_has_left(capsys, monkeypatch, quick):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert main(["doctor"]) == 1
    world, threads = faults(capsys)
    assert "WORLD_SIZE" in world
    assert "unset" in world
    assert "OMP_NUM_THREADS: 'many'; try: export OMP_NUM_THREADS=1" in threads


def test_more_threads_than_cpus(capsys, monkeypatch, quick):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert main(["doctor"]) == 1
    (fault,) = faults(capsys)
    assert "torch runs 4096 threads; try: export OMP_NUM_THREADS=" in fault


def test_a_metis_that_does_not_work(capsys, monkeypatch, quick):
    from gnnpipe.graph.partition import metis

    def broken(*_):
        raise OSError("no METIS here")

    monkeypatch.setattr(metis, "_call_pymetis", broken)
    assert main(["doctor"]) == 1
    (fault,) = faults(capsys)
    assert "METIS: does not work (no METIS here); try: pip install pymetis" in fault
