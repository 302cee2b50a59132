"""Runs METIS through pymetis, in this process or as a program of its own.

pymetis holds Python's lock until METIS ends, so that signals have to wait. A process of its own can
be killed. This file imports nothing of gnnpipe or torch, so the program starts fast.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent dies."""


def part_graph(
    arrays: Sequence[Array], parts: int, targets: Sequence[float] | None, options: Mapping[str, int]
) -> npt.NDArray[np.int32]:
    """Return the part of each vertex, int32 [N]; ``ImportError`` without pymetis.

    Args:
        arrays: indptr [N + 1] and indices [E] of the adjacency, and the vertex weights [N].
        parts: Number of parts.
        targets: Share of the weight by part; ``None``: equal.
        options: Arguments of ``pymetis.Options``.
    """
    import pymetis

    width = pymetis.zero_copy_dtype()
    indptr, indices, work = (array.astype(width) for array in arrays)
    part = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(indptr, indices),
        vweights=work,
        tpwgts=targets,
        recursive=False,
        options=pymetis.Options(**options),
    )[1]
    return np.asarray(part, dtype=np.int32)


def main() -> None:
    """Read a line of JSON and the arrays from stdin, and write the parts to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends this process
    request = json.loads(sys.stdin.buffer.readline())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != request["parent"]:
            return  # it has died before the call
    # METIS itself writes messages to file 1.
    result = os.dup(1)
    os.dup2(2, 1)
    arrays = [_read(sys.stdin.buffer, kind, size) for kind, size in request["arrays"]]
    part = part_graph(arrays, request["parts"], request["targets"], request["options"])
    with open(result, "wb") as file:
        file.write(part.data)


def _read(file: IO[bytes], kind: str, size: int) -> Array:
    array = np.empty(size, dtype=kind)
    left = array.data.cast("B")
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the parent has ended")
        left = left[count:]
    return array


if __name__ == "__main__":
    main()
