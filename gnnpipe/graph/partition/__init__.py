"""Partitioners: each splits the vertices into parts of given work that share few edges.

Every file of this folder is imported here and registers its partitioners in ``PARTITIONERS``, so a
new partitioner is one new file. Code outside of gnnpipe calls ``PARTITIONERS.add`` before a run.
"""

from importlib import import_module
from pkgutil import iter_modules

from gnnpipe.graph.partition.task import (
    METIS_BASED,
    PARTITIONERS,
    Objective,
    Partitioner,
    PartitionTask,
    Parts,
    symmetric_pattern,
    vertex_work,
)

__all__ = [
    "METIS_BASED",
    "PARTITIONERS",
    "Objective",
    "PartitionTask",
    "Partitioner",
    "Parts",
    "symmetric_pattern",
    "vertex_work",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
