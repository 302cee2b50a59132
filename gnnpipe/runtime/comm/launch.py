"""What torchrun (or a script in its place) says of this process in the environment, checked.

torch believes these variables, and waits for minutes at an address where nobody is. Left over from
another job, or set by hand with a slip, they are bad input like any flag.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from gnnpipe.errors import InputError

__all__ = [
    "check_meeting",
    "keep_no_record",
    "launched_local_rank",
    "launched_world_size",
    "stay_on_loopback",
]

MOST_RANKS = 1 << 20
HINT = "torchrun sets it; unset it to train in one process"


def launched_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks that torchrun (or the like) started; 1 without it. ``InputError`` if it is no number.

    >>> launched_world_size({}), launched_world_size({"WORLD_SIZE": "4"})
    (1, 4)
    """
    return _whole(environment, "WORLD_SIZE", 1, MOST_RANKS, missing=1)


def launched_local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Number of this rank among those of its machine; 0 if nobody says."""
    return _whole(environment, "LOCAL_RANK", 0, MOST_RANKS, missing=0)


def check_meeting(environment: Mapping[str, str] = os.environ) -> None:
    """``InputError`` if the variables do not tell where the ranks meet, and which one this is."""
    _whole(environment, "RANK", 0, launched_world_size(environment) - 1)
    launched_local_rank(environment)
    host = environment.get("MASTER_ADDR", "")
    port = _whole(environment, "MASTER_PORT", 1, 65_535)
    if not host:
        raise InputError("MASTER_ADDR '': names no machine; try 127.0.0.1, or start with torchrun")
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"MASTER_ADDR {host!r}: is no machine that is known here ({error}); try its IP address"
        ) from None


def stay_on_loopback() -> None:
    """Let gloo listen on the loopback alone if all ranks are on this machine.

    Else it listens where the host's name leads to, which may be a network. Whoever sets
    ``GLOO_SOCKET_IFNAME`` has chosen.
    """
    all_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if all_here and "GLOO_SOCKET_IFNAME" not in os.environ:
        names = [name for _, name in socket.if_nameindex()]
        if "lo" in names:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def keep_no_record() -> None:
    """Let torch not keep a record of the last 2,000 collectives, which nothing here asks for.

    On CPUs, before the first one. The record of each is a few dozen bytes that outlive many epochs;
    they come to lie between the rows of an epoch, and what was one hole in the heap is two from
    then on, both too small (docs/adr/0018). Whoever sets one of the two has chosen.
    """
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & set(os.environ):
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def _whole(
    environment: Mapping[str, str], name: str, low: int, high: int, missing: int | None = None
) -> int:
    text = environment.get(name)
    if text is None and missing is not None:
        return missing
    is_whole = text is not None and text.isascii() and text.isdecimal() and len(text) < 10
    if text is None or not is_whole or not low <= int(text) <= high:
        shown = "(not set)" if text is None else repr(text)
        raise InputError(f"{name} {shown}: must be a whole number in {low}..{high}; {HINT}")
    return int(text)
