"""Data sources: each reads the data sets of one kind by name, and is one file of this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gnnpipe.data.clean import RawGraph


@dataclass(frozen=True)
class DataRequest:
    """A data set to be read."""

    dataset: str
    """The name given to ``--dataset``."""
    data_dir: str = ""
    """Folder of downloaded data sets; '' is ~/.cache/gnnpipe/datasets."""
    needs_split: bool = True
    """False if the data set's own masks will not be used."""
    needs_labels: bool = True
    """False if a data set without labels is accepted: for link prediction, for predictions, and
    with the user's own loss."""
    seed: int = 0
    """Chooses one of several splits."""


@dataclass(frozen=True)
class Source:
    """A kind of data sets that are read by name (``--dataset``)."""

    handles: Callable[[str], bool]
    """Whether a name belongs to this source. Raises ``InputError`` on a name that is nearly one."""
    read: Callable[[DataRequest], RawGraph]
    """Returns the arrays as they were read: ``load_graph`` checks, splits and symmetrizes them.
    Raises ``InputError``."""
    listing: tuple[tuple[str, str], ...]
    """(name or pattern of names, a few words of help), for `gnnpipe info --list`."""
    names: tuple[str, ...] = ()
    """Names beside those in ``listing`` that an error may suggest instead of a misspelt one."""


SOURCES: list[Source] = []


def add_source(source: Source) -> Source:
    """Register ``source``; it goes before the sources registered earlier."""
    SOURCES.insert(0, source)
    return source
