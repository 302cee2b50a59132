"""Notices a rank that has fallen silent, and says what every rank was doing.

A process that dies closes its connections, and its peers learn of it at once. One that is stopped,
or behind a cut network, does not: gloo would wait for as long as a slow epoch may take. So every
rank tells the store that they met at, once a second, that it is alive and in which action; whoever
is silent for too long is lost, and so is a rank that cannot reach the store itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from gnnpipe.runtime.comm.mesh import Mesh

__all__ = ["SILENCE_SHARE", "Heartbeat"]

SILENCE_SHARE = 1 / 8
"""Of the time a rank may wait for another, how long one may be silent: 15 s by default."""

BEAT_S = 1.0

_END_BEHIND = """
import os, signal, sys, time
this, other = int(sys.argv[1]), int(sys.argv[2])
until = time.monotonic() + 10
try:
    while time.monotonic() < until:
        os.kill(this, 0)
        time.sleep(0.05)
except OSError:
    time.sleep(0.2)
try:
    os.kill(other, signal.SIGKILL)
except OSError:
    pass
"""
"""Ends process 2 once nobody knows of process 1 any more (who started it has seen its end)."""


class Heartbeat:
    """Of one rank; a context around the epochs. Without other ranks it does nothing."""

    def __init__(
        self, mesh: Mesh, silence_s: float, doing: Callable[[], str], lost: Callable[[str], None]
    ) -> None:
        """``doing``: what this rank is at, in a word.

        ``lost`` is called with the reason, then the process is ended from here: its main thread may
        never wake again.
        """
        self._mesh, self._silence_s = mesh, silence_s
        self._doing, self._lost = doing, lost
        self._over = threading.Event()
        self._reached_s = 0.0
        self._seen: dict[int, tuple[str, float]] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Heartbeat:
        if self._mesh.world_size > 1:
            now = time.monotonic()
            others = set(range(self._mesh.world_size)) - {self._mesh.rank}
            self._reached_s, self._seen = now, dict.fromkeys(others, ("", now))
            store = dist.distributed_c10d._get_default_store()
            beat = threading.Thread(target=self._beat, args=(store,), name="beat", daemon=True)
            judge = threading.Thread(target=self._judge, name="watchdog", daemon=True)
            self._threads = [beat, judge]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=2 * BEAT_S)

    def _beat(self, store: Store) -> None:
        """Say that this rank lives, hear who else does."""
        number, is_over = 0, False
        while not is_over:
            is_over = self._over.wait(BEAT_S if number else 0.0)
            number += 1
            text = "over" if is_over else self._doing()
            place = f"{number} {_machine()} {os.getpid()} {text}"
            try:
                if number == 1:
                    # Every run of these processes has names of its own.
                    run = store.add(f"beat/{self._mesh.rank}", 1)
                store.set(f"beat/{run}/{self._mesh.rank}", place)
                for rank in self._seen:
                    if store.check([f"beat/{run}/{rank}"]):
                        self._hear(rank, store.get(f"beat/{run}/{rank}").decode())
                self._reached_s = time.monotonic()
            except Exception:
                # The store has gone: its host tells why, or the judge will.
                return

    def _hear(self, rank: int, told: str) -> None:
        if self._seen[rank][0] != told:
            self._seen[rank] = told, time.monotonic()

    def _judge(self) -> None:
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if now - self._reached_s > self._silence_s:
                self._lost(
                    f"no word from the other ranks for {self._silence_s:g} s: is the network cut? "
                    f"Here: {self._doing()}"
                )
                os._exit(1)
            for rank, (told, at) in list(self._seen.items()):
                if now - at > self._silence_s and not told.endswith(" over"):
                    self._give_up(rank, told)

    def _give_up(self, rank: int, told: str) -> None:
        """End a rank of this machine that is silent, so that it cannot come back; then this one."""
        _, host, pid, doing = (told or "0 ? 0 not a word so far").split(" ", 3)
        others = [t.split(" ", 3)[3] for r, (t, _) in sorted(self._seen.items()) if r != rank and t]
        self._lost(
            f"rank {rank} has been silent for {self._silence_s:g} s (stopped, or its network cut). "
            f"Last known: {doing}. The others: {'; '.join([self._doing(), *others])}"
        )
        # torchrun takes the rank whose end it sees first for the cause: this one, which has told it
        # the reason. So the silent one is ended by a process that outlives this one.
        if host == _machine() != "?":
            with contextlib.suppress(OSError):
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _END_BEHIND, str(os.getpid()), pid],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        os._exit(1)


def _machine() -> str:
    """Where a process number means the same process: names of machines may be alike, this is not.

    '?' where there is no such thing; then nobody is ended.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "?"
