"""Trains an epoch for each line read; ``compare_commits.in_turns`` starts two such processes.

python scripts/epochs_on_request.py DATASET MODEL LAYERS CHUNKS [STALENESS]

``gnnpipe`` is the one on PYTHONPATH. Answers ``ready`` and the processor seconds of the set-up,
then for each ``go`` the processor seconds of one epoch (width 128, dropout 0.5), and at the end of
its input the peak memory of the process in MiB.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

from gnnpipe import Callback, TrainConfig, Trainer


class OnRequest(Callback):
    """Waits for a line before each epoch, and ends training at the end of the input."""

    def __init__(self) -> None:
        self.start_s = 0.0

    def on_fit_start(self, trainer: object) -> None:
        """Tells the set-up time and waits for the first line."""
        print(f"ready {time.process_time():.2f}", flush=True)
        sys.stdin.readline()
        self.start_s = time.process_time()

    def on_epoch_end(self, trainer: object, row: object) -> bool:
        """Tells the time of the epoch and waits for the next line."""
        print(time.process_time() - self.start_s, flush=True)
        is_over = not sys.stdin.readline()
        self.start_s = time.process_time()
        return is_over


def main() -> None:
    """Train as the arguments say."""
    import peers
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dataset, model, layers, chunks, *rest = sys.argv[1:]
    config = TrainConfig(
        model=model,
        layers=int(layers),
        hidden=128,
        chunks=int(chunks),
        staleness=rest[0] if rest else "auto",
        epochs=1000,
        lr=0.001,
        eval_every=0,
        predict=False,
        out="off",
        quiet=True,
        cache_dir="off",
    )
    Trainer(config, graph=peers.load(dataset), callbacks=[OnRequest()]).fit()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


if __name__ == "__main__":
    main()
