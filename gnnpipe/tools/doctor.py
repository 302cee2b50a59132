"""``gnnpipe doctor`` checks this machine for everything a run needs, and names remedies.

Each check repeats a run's work in small: partition a graph, sum a number over two processes, write
a file. torch itself may be broken, so each check imports torch only where needed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gnnpipe.config.fields import check_text
from gnnpipe.errors import InputError
from gnnpipe.files import check_folder
from gnnpipe.heap import HEAP_SETTINGS, has_own_settings
from gnnpipe.machine import free_bytes, memory_bytes
from gnnpipe.runtime.comm.cpu_affinity import usable_cores
from gnnpipe.version import __version__

NEEDED = {
    "torch": "2.8",
    "torch_geometric": "2.6",
    "numpy": "1.26",
    "scipy": "1.11",
    "rich": "13",
    "pooch": "1.8",
}
"""Required packages and their lowest versions, as in pyproject.toml."""

FOLDERS = {
    "--out": ("run folders", "runs"),
    "--cache-dir": ("cached partitions", "~/.cache/gnnpipe"),
    "--data-dir": ("downloaded datasets", "~/.cache/gnnpipe/datasets"),
}
"""Contents and default of the folder that each flag sets."""

LIMIT_S = 60.0
"""Time limit for two processes to connect and sum a number, including the import of torch."""

LEAST_BYTES = 1 << 30
"""Memory and disk space below which nearly every run fails."""

HEAP_HINT = (
    "runs keep freed memory while they train. On CPUs a setting of the heap saves memory with some "
    "models, most of all with attention, at the same speed; type before the command: "
    f"export GLIBC_TUNABLES={HEAP_SETTINGS}"
)


@dataclass(frozen=True)
class Finding:
    """Result of one check: a subject, its state, and a remedy if the state is a fault."""

    subject: str
    state: str
    remedy: str = ""

    def text(self) -> str:
        """Return the line that the command prints."""
        if not self.remedy:
            return f"ok     {self.subject}: {self.state}"
        return f"FAULT  {self.subject}: {self.state}; try: {self.remedy}"


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of ``gnnpipe doctor`` to its parser."""
    for flag, (contents, default) in FOLDERS.items():
        command.add_argument(flag, metavar="DIR", help=f"folder of {contents} (default {default})")


def doctor(options: argparse.Namespace) -> int:
    """Print every finding; return 1 if one is a fault, else 0."""
    folders = {}
    for flag, (_, default) in FOLDERS.items():
        given = getattr(options, flag.strip("-").replace("-", "_")) or default
        check_text(flag, given)
        folders[flag] = given
    faults = 0
    for finding in examine(folders):
        print(finding.text(), flush=True)
        faults += bool(finding.remedy)
    print(f"{faults} fault{'s' * (faults != 1)}" if faults else "nothing is wrong", flush=True)
    return 1 if faults else 0


def examine(folders: dict[str, str]) -> Iterator[Finding]:
    """Yield the findings of all checks; ``folders`` maps each flag of ``FOLDERS`` to a path."""
    yield Finding("gnnpipe", f"{__version__}, Python {platform.python_version()}")
    broken = False
    for package, least in NEEDED.items():
        finding = _package(package, least)
        broken |= bool(finding.remedy)
        yield finding
    checks: list[Callable[[], Iterator[Finding]]] = [_environment, _memory, _heap]
    if not broken:
        checks += [_devices, _back_ends, _round_trips]
    for check in checks:
        yield from check()
    for flag, folder in folders.items():
        yield _disk(flag, folder)


def _package(name: str, least: str) -> Finding:
    remedy = f"pip install '{name}>={least}'"
    try:
        found = str(importlib.import_module(name).__dict__.get("__version__") or version(name))
    except Exception as error:  # a package built for another torch fails in many ways
        why = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        return Finding(name, f"cannot be imported ({why})", remedy)
    if _numbers(found) < _numbers(least):
        return Finding(name, f"{found} is too old", remedy)
    return Finding(name, found)


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)[:2]]


def _environment() -> Iterator[Finding]:
    left = [n for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if n in os.environ]
    if left:
        yield Finding(
            "environment",
            f"{', '.join(left)} set, as if torchrun had started this",
            f"unset {' '.join(left)}",
        )
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and not (threads.isdecimal() and int(threads)):
        yield Finding("OMP_NUM_THREADS", repr(threads), "export OMP_NUM_THREADS=1, or unset it")


def _memory() -> Iterator[Finding]:
    free, total = free_bytes(), memory_bytes()
    is_short = free < LEAST_BYTES
    remedy = "end other programs, or take a larger machine" if is_short else ""
    yield Finding("memory", f"{_gib(free)} free of {_gib(total)}", remedy)


def _heap() -> Iterator[Finding]:
    if sys.platform == "linux":
        yield Finding("heap", "set by the environment" if has_own_settings() else HEAP_HINT)


def _devices() -> Iterator[Finding]:
    import torch

    usable = len(usable_cores())
    threads = torch.get_num_threads()
    found = f"{usable} CPU{'s' * (usable != 1)}, torch runs {threads} thread{'s' * (threads != 1)}"
    remedy = f"export OMP_NUM_THREADS={usable}" if threads > usable else ""
    yield Finding("CPU", found, remedy)
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            yield Finding(f"GPU {number}", f"{facts.name}, {_gib(facts.total_memory)}")
    elif Path("/proc/driver/nvidia").exists():
        built = torch.version.cuda
        found = f"torch {torch.__version__} finds none, although an NVIDIA driver is installed"
        remedy = (
            f"install a driver for CUDA {built}, or name a GPU in CUDA_VISIBLE_DEVICES"
            if built
            else "install a torch built for CUDA (pytorch.org shows the command)"
        )
        yield Finding("GPU", found, remedy)
    else:
        yield Finding("GPU", "none; runs use the CPU")


def _back_ends() -> Iterator[Finding]:
    import numpy as np
    import scipy.sparse as sp
    import torch

    from gnnpipe.graph.partition import PARTITIONERS, PartitionTask
    from gnnpipe.graph.partition.metis import metis_version
    from gnnpipe.ops.spmm import kernel_named

    ring = np.arange(64)
    ends = np.append(ring, (ring + 1) % 64), np.append((ring + 1) % 64, ring)
    adjacency = sp.csr_array((np.ones(128), ends), shape=(64, 64))
    try:
        work = np.ones(64, dtype=np.int64)
        part = PARTITIONERS["metis"](PartitionTask(adjacency, work, 4))
        yield Finding("METIS", f"{metis_version()} cuts a ring into {len(set(part.tolist()))}")
    except Exception as error:  # a wrong C library raises errors of many types
        why = " ".join(str(error).split())[:120]
        yield Finding(
            "METIS", f"does not work ({why})", "pip install pymetis, or --partitioner range"
        )
    try:
        kernel_named("torch-sparse", torch.float32, torch.device("cpu"))
        yield Finding("torch_sparse", "works (--kernel torch-sparse)")
    except InputError as error:
        if "not installed" in str(error):
            yield Finding("torch_sparse", "not installed; only --kernel torch-sparse needs it")
        else:
            yield Finding(
                "torch_sparse",
                str(error).partition(": ")[2],
                "pip uninstall torch_sparse, or install one built for this torch",
            )


def _round_trips() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from gnnpipe.tools.collective_check import round_trip

    if not (dist.is_available() and dist.is_gloo_available()):
        yield Finding("gloo", "not in this torch", "install a torch from pytorch.org or PyPI")
        return
    took_s, fault = round_trip("cpu", 2, LIMIT_S)
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    remedy = (
        f"unset GLOO_SOCKET_IFNAME (it is {name!r})"
        if name
        else "allow connections to 127.0.0.1 (firewall, container settings)"
    )
    found = fault or f"2 processes sum a number in {1000 * took_s:.1f} ms"
    yield Finding("gloo", found, remedy if fault else "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        ranks = min(2, gpus)
        took_s, fault = round_trip("cuda", ranks, LIMIT_S)
        found = fault or f"{ranks} process{'es' * (ranks > 1)} in {1000 * took_s:.1f} ms"
        remedy = "run with NCCL_DEBUG=INFO for the cause; --device cpu needs no NCCL"
        yield Finding("NCCL", found, remedy if fault else "")


def _disk(flag: str, folder: str) -> Finding:
    path = Path(os.path.expanduser(folder))
    try:
        check_folder(flag, folder, path)
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except InputError as error:
        return Finding(flag, str(error).partition("; ")[0], "another folder")
    except OSError as error:
        return Finding(flag, f"{folder!r} cannot be written ({error.strerror})", "another folder")
    remedy = "another disk, or free some space" if free < LEAST_BYTES else ""
    return Finding(flag, f"{folder!r} has {_gib(free)} free", remedy)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
