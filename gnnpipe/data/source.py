"""Data sources: each reads the data sets of one kind by name, and is one file of this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gnnpipe.graph.graph import Graph

__all__ = ["SOURCES", "DataRequest", "Source", "add_source"]


@dataclass(frozen=True)
class DataRequest:
    """A data set to be read, and how; the fields are those of ``TrainConfig``."""

    dataset: str
    data_dir: str = ""
    """Folder of downloaded data sets; '' is ~/.cache/gnnpipe/datasets."""
    split: str = "given"
    """'given' for the data set's own split, or percentages such as '60/20/20'."""
    seed: int = 0
    """Of the split by percentages."""
    symmetrize: bool = False
    """Add the reverse of every edge."""
    needs_labels: bool = True
    """False for link prediction: a data set without labels will do."""


@dataclass(frozen=True)
class Source:
    """A kind of data sets that are read by name (``--dataset``)."""

    handles: Callable[[str], bool]
    """Whether a name belongs to this source. Raises ``InputError`` on a name that is nearly one."""
    read: Callable[[DataRequest], Graph]
    """Returns the data set; raises ``InputError``."""
    listing: tuple[tuple[str, str], ...]
    """(name or pattern of names, a few words of help), for `gnnpipe info --list`."""
    names: tuple[str, ...] = ()
    """Names that an error may suggest instead of a misspelt one."""


SOURCES: list[Source] = []


def add_source(source: Source) -> Source:
    """Register ``source``; it goes before the sources registered earlier."""
    SOURCES.insert(0, source)
    return source
