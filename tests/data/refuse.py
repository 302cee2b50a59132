"""How every reader must refuse: an ``InputError`` of one line that matches."""

from __future__ import annotations

import pytest

from gnnpipe.data.load import load_graph
from gnnpipe.errors import InputError


def refused(message, dataset, **arguments):
    """The text with which ``load_graph`` refuses."""
    with pytest.raises(InputError, match=message) as caught:
        load_graph(str(dataset), **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
