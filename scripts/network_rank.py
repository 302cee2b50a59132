"""One rank of a contender of ``network_speed.py``: trains an epoch for each line read.

python scripts/network_rank.py CONFIG_JSON

Every rank answers ``ready``; after each ``go`` all train one epoch. When their input ends, rank 0
answers with a line of JSON: epoch times, time shares of every rank, bytes sent and by closed form.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict, astuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import graph_parallel
    import torch
    from peers import load

    from gnnpipe import TrainConfig
    from gnnpipe.perf import time_shares
    from gnnpipe.profiling.links import receive_bandwidth
    from gnnpipe.run.epoch_times import gather_epoch
    from gnnpipe.runtime.comm.mesh import Mesh
    from gnnpipe.runtime.memory_use import peak_bytes, reset_peak
    from gnnpipe.setup.build import build_rank
    from gnnpipe.setup.prepare import prepare
    from gnnpipe.train.evaluate import train_epoch

    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    if settings.pop("is_best", False):
        graph_parallel.give_everything()
        settings["partitioner"] = graph_parallel.PARTITIONER
    graph = load(settings.pop("graph"))
    config = TrainConfig(**settings, out="off", quiet=True, device="cpu", timeout_s=600.0)
    mesh = Mesh.join(config.stages, config.shards, config.device, config.timeout_s)
    with mesh.on_own_cores():
        prepared = prepare(config, mesh, graph)
        reset_peak(mesh.device)
        rank_runtime = build_rank(prepared, mesh)
        speeds = mesh.gather(receive_bandwidth(mesh))
        print("ready", file=answers, flush=True)
        times, shares = [], []
        for epoch, _ in enumerate(sys.stdin):
            order = prepared.chunk_order(epoch)
            start = time.perf_counter()
            train_epoch(rank_runtime, mesh, prepared.program_of(epoch), order, epoch)
            times.append(time.perf_counter() - start)
            while len(mesh.recorder.epochs) > 1:
                mesh.recorder.epochs.popleft()
            spans = gather_epoch(mesh, 1)
            shares.append([asdict(share) for share in time_shares(spans, mesh.placement, speeds)])
            print(times[-1], file=answers, flush=True)
        counted = [
            int(v) for v in mesh.sum([float(v) for v in astuple(rank_runtime.executor.epoch_bytes)])
        ]
        found = {
            "seconds": times,
            "shares": shares,
            "sent": sum(counted),
            "closed_form": prepared.volume.total,
            "by_axis": counted,
            "crossings_per_vertex": prepared.quality.crossings_per_vertex,
            "peak": mesh.gather(peak_bytes(mesh.device)),
            "stale": 0.0 if prepared.program.is_exact else 1.0,
        }
        print(json.dumps(found), file=answers, flush=True)
    mesh.leave()


if __name__ == "__main__":
    main()
