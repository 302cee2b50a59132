"""Tests run on the CPU, also on a machine with a GPU, unless `make test-gpu` runs them.

Without a GPU, kernels in Triton are run by its interpreter.
"""

import functools
import inspect
import os
from collections import Counter
from types import CodeType

import pytest

if os.environ.get("GNNPIPE_TEST_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when torch first looks for a GPU

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined


def pytest_collection_modifyitems(items):
    """Mark as slow the tests of several processes, and most cases of tests that are sampled."""
    cases = Counter()
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        known = fixtures.name2fixturedefs.values() if fixtures else ()
        functions = [getattr(item, "function", None), *(f.func for found in known for f in found)]
        test = item.nodeid.partition("[")[0]
        sampled = item.get_closest_marker("sampled")
        is_left_out = sampled is not None and cases[test] % sampled.args[0] > 0
        cases[test] += 1
        # Directly or through a fixture.
        if is_left_out or any(starts_ranks(function) for function in functions):
            item.add_marker(pytest.mark.slow)


STARTERS = {"run_ranks", "torchrun", "launch"}
"""Functions of the tests that start several processes."""


@functools.cache
def starts_ranks(function):
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    return code is not None and not STARTERS.isdisjoint(names_in(code))


def names_in(code):
    """Names that a function and the functions inside it use."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))
