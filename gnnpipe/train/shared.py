"""Which aggregations of a prepared run share a table with their gradients."""

from __future__ import annotations

from gnnpipe.plan import shared_tables
from gnnpipe.setup.prepare import Prepared

__all__ = ["shared_of"]


def shared_of(prepared: Prepared) -> frozenset[str]:
    """Names of their ops (see ``plan.shared_tables``)."""
    return shared_tables(
        prepared.model_graph, prepared.plan, prepared.once, prepared.asked.ops,
        prepared.row_dtype != prepared.dtype,
    )  # fmt: skip
