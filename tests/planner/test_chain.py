"""Cuts of a chain into stages, beside all cuts that there are."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.planner.chain import LEAST_GAIN, cut_chain


def time_of(runs, costs, speeds, hops, chunks):
    """Of a pipeline: (K - 1) x the slowest stage or message + the sum of all."""
    stages = [sum(costs[a:b]) / speed for (a, b), speed in zip(runs, speeds, strict=True)]
    messages = [hops[a - 1] for a, _ in runs if a]
    return (chunks - 1) * max([*stages, *messages]) + sum(stages) + sum(messages)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.floats(0.1, 5), min_size=4, max_size=8),
    speeds=st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=4),
    chunks=st.sampled_from([1, 4, 32]),
    hop=st.floats(0, 8),
)
def test_cuts_are_as_good_as_the_best(costs, speeds, chunks, hop):
    cuts = range(1, len(costs))
    hops = [hop] * len(cuts)
    prefixes = [np.cumsum([0.0, *costs]) / speed for speed in speeds]
    found = cut_chain(prefixes, cuts, hops, chunks)
    every = (
        tuple(pairwise((0, *chosen, len(costs)))) for chosen in combinations(cuts, len(speeds) - 1)
    )
    best = min(time_of(runs, costs, speeds, hops, chunks) for runs in every)
    slack = 1.05 if len(set(speeds)) > 1 else 1
    assert time_of(found, costs, speeds, hops, chunks) <= best * slack / (1 - LEAST_GAIN) + 1e-6


def test_slow_messages_leave_the_layers_to_the_fast_devices():
    """Each message takes as long as 12 layers: a slow device gets one of them."""
    prefix = np.arange(33.0)
    runs = cut_chain([2 * prefix, prefix, prefix, prefix], range(1, 32), [12.0] * 31, 16)
    assert runs[0] == (0, 1)
    assert max(b - a for a, b in runs) <= 12
    # Equal devices get equal numbers, though others would be as good.
    runs = cut_chain([prefix] * 4, range(1, 32), [12.0] * 31, 16)
    assert [b - a for a, b in runs] == [8, 8, 8, 8]


def test_of_equal_cuts_the_narrow_one_is_taken():
    prefix = np.arange(5.0)
    assert cut_chain([prefix, prefix], [1, 2, 3], [0.0, 0.1, 0.0], 1) in (
        ((0, 1), (1, 4)),
        ((0, 3), (3, 4)),
    )


def test_many_cuts_are_thinned_out():
    prefix = np.arange(2001.0)
    runs = cut_chain([prefix] * 3, range(1, 2000), [0.0] * 1999, 8)
    assert max(b - a for a, b in runs) == pytest.approx(2000 / 3, rel=0.02)
