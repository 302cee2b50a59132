"""Tests an all-reduce between processes that connect like the ranks of a run.

A fault of the network, a firewall or a library shows here within seconds; in a run it shows only
after the graph has been read and partitioned. ``round_trip`` starts the processes, and each of them
runs this file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def round_trip(device: str, ranks: int, limit_s: float) -> tuple[float, str]:
    """Return the time of the all-reduce in seconds, and what went wrong ('': nothing).

    ``device``: 'cpu' for gloo, 'cuda' for NCCL with one GPU per rank.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shape = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # With TORCHELASTIC_*, ranks wait for a store of the torchrun around this process.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    command = [sys.executable, "-m", "gnnpipe.tools.collective_check", device, str(limit_s)]
    end = time.monotonic() + limit_s
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [
            subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=inherited | shape | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        try:
            codes = [p.wait(max(0.1, end - time.monotonic())) for p in processes]
        except subprocess.TimeoutExpired:
            return limit_s, f"no answer within {limit_s:g} s"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out.seek(0)
        err.seek(0)
        if any(codes):
            lines = [line for line in err.read().splitlines() if line.strip()]
            return 0.0, lines[-1].strip()[:200] if lines else f"exit codes {codes}"
        return max(float(line) for line in out.read().split()), ""


def _run_rank(device: str, limit_s: float) -> None:
    """Connect to the other ranks, run an all-reduce and print its time in seconds."""
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from gnnpipe.runtime.comm.launch import launched_world_size
    from gnnpipe.runtime.comm.mesh import Mesh

    ranks = launched_world_size()
    if ranks == 1:
        # A mesh of one rank does not communicate; the library itself can still be tested.
        with tempfile.TemporaryDirectory() as folder:
            store = FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1
            )
            _reduce_alone(device)
            dist.destroy_process_group()
        return
    mesh = Mesh.join(ranks, 1, device, limit_s)
    start = time.perf_counter()
    total = mesh.sum([1.0])[0]
    took_s = time.perf_counter() - start
    if total != ranks or mesh.gather(mesh.rank) != list(range(ranks)):
        raise RuntimeError(f"{ranks} ranks add up to {total}")
    mesh.leave()
    _print_time(took_s)


def _reduce_alone(device: str) -> None:
    import torch
    import torch.distributed as dist

    one = torch.ones(1, device=device)
    start = time.perf_counter()
    dist.all_reduce(one)
    if one.item() != 1:
        raise RuntimeError(f"one rank adds up to {one.item()}")
    _print_time(time.perf_counter() - start)


def _print_time(time_s: float) -> None:
    # One write for the whole line: the ranks share the file.
    os.write(sys.stdout.fileno(), f"{time_s}\n".encode())


if __name__ == "__main__":
    _run_rank(sys.argv[1], float(sys.argv[2]))
