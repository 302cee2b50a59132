"""Reads and validates the environment variables that torchrun sets for each rank.

torch itself does not validate them, and waits for minutes at a wrong address. Variables left over
from another job, or set wrongly by hand, raise ``InputError``, like a wrong flag.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

from gnnpipe.errors import InputError

MOST_RANKS = 1 << 20
HINT = "torchrun sets it; unset it to train in one process"


def launched_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks, 1 without torchrun; ``InputError`` if it is not a number.

    >>> launched_world_size({}), launched_world_size({"WORLD_SIZE": "4"})
    (1, 4)
    """
    return _whole(environment, "WORLD_SIZE", 1, MOST_RANKS, missing=1)


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank, 0 without torchrun."""
    return _whole(environment, "RANK", 0, MOST_RANKS, missing=0)


def launched_local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank on its machine, 0 without torchrun."""
    return _whole(environment, "LOCAL_RANK", 0, MOST_RANKS, missing=0)


def keep_ranks(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of a launch of the first ``count`` ranks, of which this is one.

    Later runs of this process then wait for these ranks only.

    >>> variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    >>> keep_ranks(2, variables)
    >>> variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]
    ('2', '2')
    """
    first_here = launched_rank(environment) - launched_local_rank(environment)
    environment["WORLD_SIZE"] = str(count)
    if here := environment.get("LOCAL_WORLD_SIZE"):
        environment["LOCAL_WORLD_SIZE"] = str(min(int(here), count - first_here))


def check_rendezvous(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ``InputError`` unless the variables give this rank's number and a known address."""
    _whole(environment, "RANK", 0, launched_world_size(environment) - 1)
    launched_local_rank(environment)
    host = environment.get("MASTER_ADDR", "")
    port = _whole(environment, "MASTER_PORT", 1, 65_535)
    if not host:
        raise InputError("MASTER_ADDR '': is empty; try 127.0.0.1, or start with torchrun")
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"MASTER_ADDR {host!r}: is an unknown host ({error}); try its IP address"
        ) from None


def use_loopback() -> None:
    """Let gloo listen on the loopback interface only, if all ranks are on this machine.

    By default gloo listens on the interface of the host's name, which may be a public network. A
    ``GLOO_SOCKET_IFNAME`` in the environment takes precedence.
    """
    all_here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if all_here and "GLOO_SOCKET_IFNAME" not in os.environ:
        names = [name for _, name in socket.if_nameindex()]
        if "lo" in names:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def disable_flight_recorder() -> None:
    """Switch off torch's flight recorder, which keeps records of the last 2,000 collectives.

    The small records outlive many epochs and split free blocks of the heap between large tensors
    (docs/adr/0018). Call this before the first collective, on CPUs. A buffer size in the
    environment takes precedence.
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
