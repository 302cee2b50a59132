"""Where there is no GPU, kernels in Triton are run by its interpreter."""

import inspect
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined


def pytest_collection_modifyitems(items):
    """Mark every test that starts several processes itself as slow."""
    for item in items:
        function = getattr(item, "function", None)
        source = inspect.getsource(function) if inspect.isfunction(function) else ""
        if "run_ranks(" in source or "torchrun" in source:
            item.add_marker(pytest.mark.slow)
