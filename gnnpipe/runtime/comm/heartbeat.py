"""Detects a rank that no longer responds, and reports what every rank was doing.

A process that dies closes its connections, and gloo reports this to its peers at once. A stopped
process, or a process behind a cut network, closes nothing: gloo would wait as long as a slow epoch
may take. So every rank writes a heartbeat to torch's store once a second, with the current action
of its program. When a rank is silent for too long, the other ranks exit with the reason. torchrun
then ends the silent rank. A stopped rank that wakes up finds the others gone, and exits as well.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from gnnpipe.runtime.comm.mesh import Mesh

SILENCE_SHARE = 1 / 8
"""Allowed silence as a share of ``World.timeout_s``: 15 s by default."""

BEAT_S = 1.0
"""Seconds between two heartbeats."""
OVER = "over"
"""Heartbeat of a rank that has left the ``with`` block."""


class Heartbeat:
    """Watches the other ranks inside a ``with`` block; does nothing without other ranks."""

    def __init__(
        self, mesh: Mesh, silence_s: float, doing: Callable[[], str], lost: Callable[[str], None]
    ) -> None:
        """Prepare the heartbeat of one rank.

        Args:
            mesh: The ranks.
            silence_s: Seconds without a heartbeat after which a rank counts as lost.
            doing: Returns the current action of this rank.
            lost: Called with the reason before this process ends. The process ends from a thread
                of the heartbeat, because the main thread may wait in gloo.
        """
        self._mesh, self._silence_s = mesh, silence_s
        self._doing, self._lost = doing, lost
        self._over = threading.Event()
        self._reached_s = 0.0
        """Time of the last answer of the store."""
        self._seen: dict[int, tuple[str, float]] = {}
        """Last heartbeat of each other rank, and when it was read."""
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Heartbeat:
        if self._mesh.world_size > 1:
            now = time.monotonic()
            others = set(range(self._mesh.world_size)) - {self._mesh.rank}
            self._reached_s, self._seen = now, dict.fromkeys(others, ("", now))
            store = dist.distributed_c10d._get_default_store()
            beat = threading.Thread(target=self._beat, args=(store,), name="beat", daemon=True)
            watch = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._threads = [beat, watch]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=2 * BEAT_S)

    def _beat(self, store: Store) -> None:
        """Write this rank's heartbeats and read the heartbeats of the other ranks."""
        number, is_over = 0, False
        while not is_over:
            is_over = self._over.wait(BEAT_S if number else 0.0)
            number += 1
            try:
                if number == 1:
                    # Every run of these processes has its own keys.
                    run = store.add(f"beat/{self._mesh.rank}", 1)
                doing = OVER if is_over else self._doing()
                store.set(f"beat/{run}/{self._mesh.rank}", f"{number} {doing}")
                for rank, (sign, _) in self._seen.items():
                    if store.check([f"beat/{run}/{rank}"]):
                        new = store.get(f"beat/{run}/{rank}").decode()
                        if new != sign:
                            self._seen[rank] = new, time.monotonic()
                self._reached_s = time.monotonic()
            except Exception:
                # Rank 0, which hosts the store, has ended; the watch thread reports the silence.
                return

    def _watch(self) -> None:
        """End this process when another rank, or the store, is silent for too long."""
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if now - self._reached_s > self._silence_s:
                self._end(
                    f"no word from the other ranks for {self._silence_s:g} s: is the network cut? "
                    f"Here: {self._doing()}"
                )
            signs = {rank: sign.partition(" ")[2] for rank, (sign, _) in self._seen.items()}
            for rank, (_, at) in list(self._seen.items()):
                if now - at > self._silence_s and signs[rank] != OVER:
                    last = signs.pop(rank) or "no word so far"
                    others = "; ".join([self._doing(), *filter(None, signs.values())])
                    self._end(
                        f"rank {rank} has been silent for {self._silence_s:g} s (stopped, or its "
                        f"network cut). Last known: {last}. The others: {others}"
                    )

    def _end(self, reason: str) -> None:
        self._lost(reason)
        os._exit(1)
