"""Data sources of the package itself: ``debian`` to train on, ``karate`` for examples.

Both work without a network. ``datasets/build_debian.py`` builds the file of ``debian``, which
``datasets/debian.md`` describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from gnnpipe.data.clean import RawGraph
from gnnpipe.data.source import Source

KARATE_NEIGHBOURS = (
    "1 2 3 4 5 6 7 8 10 11 12 13 17 19 21 31/2 3 7 13 17 19 21 30/3 7 8 9 13 27 28 32/7 12 13/"
    "6 10/6 10 16/16//30 32 33/33////33/32 33/32 33///32 33/33/32 33//32 33/25 27 29 32 33/"
    "25 27 31/31/29 33/33/31 33/32 33/32 33/32 33/33/"
)
"""Zachary (1977): for each member v, separated by "/", the friends numbered above v, from 0."""

KARATE_GROUPS = "1111333101311100310101002200200200"
"""The class of each member, one digit each."""


def _karate() -> RawGraph:
    """Zachary's karate club: 34 vertices, 156 edges, 4 classes, one-hot features.

    The classes are the groups that modularity clustering finds, as in PyG's ``KarateClub``.
    """
    pairs = [
        (v, int(w)) for v, line in enumerate(KARATE_NEIGHBOURS.split("/")) for w in line.split()
    ]
    y = np.array([int(c) for c in KARATE_GROUPS])
    return RawGraph(
        name="karate",
        edge_index=np.array(pairs).T,
        x=np.eye(len(y), dtype=np.float32),
        y=y,
        split_seed=0,
        has_one_direction=True,
    )


def _debian() -> RawGraph:
    """The packages of Debian 12 and their dependencies."""
    with _debian_file() as packed:
        above = _indptr(packed["edge_count"])
        higher = _undelta(packed["edge_step_low"], packed["edge_step_high"], above)
        words = _indptr(packed["word_count"])
        word = _undelta(packed["word_step_low"], packed["word_step_high"], words)
        y = packed["y"].astype(np.int64)
        num_words = len(packed["words"])
    n = len(y)
    lower = np.repeat(np.arange(n, dtype=np.int64), np.diff(above))
    ones = np.ones(len(word), dtype=np.float32)
    return RawGraph(
        name="debian",
        edge_index=np.stack([lower, higher]),
        x=sp.csr_array((ones, word, words), shape=(n, num_words)),
        y=y,
        split_seed=0,
        has_one_direction=True,
    )


def debian_class_names() -> list[str]:
    """The archive section behind each class of ``debian``, in order."""
    with _debian_file() as packed:
        return [str(name) for name in packed["class_names"]]


@contextmanager
def _debian_file() -> Iterator[Mapping[str, Any]]:
    path = resources.files("gnnpipe.data") / "files" / "debian.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as packed:
        yield packed


def _indptr(count: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(count, dtype=np.int64)])


def _undelta(
    low: npt.NDArray[np.uint8], high: npt.NDArray[np.uint8], indptr: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The entries of each row from the steps between them (the first from the row's start).

    Steps come as low and high bytes in two arrays: the high bytes are nearly all zero, and zip
    packs them far better apart.
    """
    total: npt.NDArray[np.int64] = np.cumsum(low + 256 * high.astype(np.int64))
    before = np.concatenate([[0], total])[indptr[:-1]]
    values: npt.NDArray[np.int64] = total - np.repeat(before, np.diff(indptr))
    return values


_READERS = {"debian": _debian, "karate": _karate}

SOURCE = Source(
    handles=_READERS.__contains__,
    read=lambda request: _READERS[request.dataset](),
    listing=(
        ("debian", "packages of Debian 12 and their dependencies (comes with gnnpipe)"),
        ("karate", "Zachary's karate club, 34 vertices (comes with gnnpipe)"),
    ),
)
