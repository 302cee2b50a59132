"""Connects the ranks of one machine by shared memory.

Over a local socket, the ranks of a pair send each other an arena and the reading end of a pipe
(``shared_memory``). Neither has a name in the file system, so nothing is left behind, however a
rank ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from gnnpipe.machine import machine_key
from gnnpipe.runtime.comm.shared_memory import Arena, LinkFiles, SharedMemoryLink

_PIPE_BYTES = 1 << 20
"""Size that pipes are given where the system allows: room for 32,768 records."""

_CONNECT_S = 30.0
"""Longest wait for a rank of this machine that is known to connect."""

Gather = Callable[[Any], list[Any]]
"""Returns the argument of every rank, by rank, on every rank."""


def connect(rank: int, gather: Gather, timeout_s: float) -> dict[int, SharedMemoryLink]:
    """Connect this rank with the other ranks of its machine; every rank must call this.

    Ranks of other containers (networks) or users count as ranks of other machines. Where the system
    has no shared files, or refuses one of the connections, the machine's ranks have no links.

    Args:
        rank: Number of this rank.
        gather: Collects from all ranks.
        timeout_s: Longest wait for a message.

    Returns:
        The links by rank.
    """
    here = _location()
    with contextlib.ExitStack() as sockets:
        listener = _listener()
        address = None if listener is None else sockets.enter_context(listener).getsockname()
        everyone = gather((here, address))
        machine = [r for r, (location, _) in enumerate(everyone) if location == here]
        connections: dict[int, socket.socket] = {}
        for peer in machine[: machine.index(rank)]:
            with contextlib.suppress(OSError):  # the system refuses it
                connection = sockets.enter_context(_socket())
                _call(connection, everyone[peer][1], rank)
                connections[peer] = connection
        called = gather(list(connections))
        links: dict[int, SharedMemoryLink] = {}
        if listener is not None and all(a in called[b] for a, b in combinations(machine, 2)):
            with contextlib.suppress(OSError):
                callers = len(machine) - 1 - len(connections)
                connections |= _accept(listener, callers, sockets)
                links = _exchange(connections, timeout_s)
    counts = gather(len(links))
    if any(counts[r] < len(machine) - 1 for r in machine):
        for link in links.values():
            link.close()
        return {}
    return links


def _call(connection: socket.socket, address: bytes | None, rank: int) -> None:
    """Connect to another rank, and say which rank calls; ``OSError`` if it cannot be."""
    if address is None:
        raise OSError("the other rank has no address")
    connection.connect(address)
    if not _is_own_user(connection):
        raise OSError("the address is another user's")
    connection.sendall(str(rank).encode())


def _accept(
    listener: socket.socket, callers: int, sockets: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """Return the connections of so many ranks that have called, by rank."""
    found: dict[int, socket.socket] = {}
    while len(found) < callers:
        connection = sockets.enter_context(listener.accept()[0])
        connection.settimeout(_CONNECT_S)
        if _is_own_user(connection):
            found[int(connection.recv(16))] = connection
    return found


def _exchange(
    connections: Mapping[int, socket.socket], timeout_s: float
) -> dict[int, SharedMemoryLink]:
    """Send each rank an arena and the reading end of a pipe, and receive those of the rank."""
    with contextlib.ExitStack() as opened:
        sent: dict[int, tuple[Arena, int]] = {}
        for peer, connection in connections.items():
            arena = Arena()
            opened.callback(arena.close)
            reading, writing = os.pipe()
            opened.callback(os.close, writing)
            try:
                with contextlib.suppress(OSError):  # the pipes of this user hold too much already
                    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                socket.send_fds(connection, [b"link"], [arena.file, reading])
            finally:
                os.close(reading)
            sent[peer] = arena, writing
        received: dict[int, list[int]] = {}
        for peer, connection in connections.items():
            _, files, _, _ = socket.recv_fds(connection, 16, 2)
            for file in files:
                os.set_inheritable(file, False)
                opened.callback(os.close, file)
            if len(files) < 2:
                raise OSError("the files of the other rank did not arrive")
            received[peer] = files
        opened.pop_all()  # they stay open
    return {
        peer: SharedMemoryLink(peer, LinkFiles(*sent[peer], *received[peer]), timeout_s)
        for peer in connections
    }


def _listener() -> socket.socket | None:
    """Return a socket with an address that is no file; ``None`` where there are none."""
    if not hasattr(os, "memfd_create"):  # not Linux
        return None
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        listener = opened.enter_context(_socket())
        listener.bind(f"\0gnnpipe-{secrets.token_hex(16)}")
        listener.listen(socket.SOMAXCONN)
        opened.pop_all()  # it stays open
        return listener
    return None


def _socket() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(_CONNECT_S)
    return found


def _location() -> tuple[str, int, int]:
    """Return the machine, the network and the user of this process."""
    network = 0
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net").st_ino
    return machine_key(), network, os.getuid()


def _is_own_user(connection: socket.socket) -> bool:
    process = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", process)[1] == os.getuid())
