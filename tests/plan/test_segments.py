"""Segments of steps for recomputation: what is kept, and how often steps run."""

import math

import pytest

from gnnpipe.plan import Segments


@pytest.mark.parametrize("every", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("num_steps", [1, 2, 8, 9, 10, 64, 1002])
def test_starts_and_kept_inputs(num_steps, every):
    found = Segments(num_steps, every)
    starts = [found.start(step) for step in range(num_steps)]
    assert all(start <= step < start + every for step, start in enumerate(starts))
    assert list(found.kept) == [step for step in range(num_steps) if found.is_kept(step)]
    assert set(found.kept) <= set(starts)
    assert found.kept[0] == 0


def test_inputs_kept_by_1002_steps():
    """Without levels of n = 16 steps 63 inputs would be kept; with two levels 8 and 8."""
    found = Segments(1002, 16)
    assert (len(found.kept), found.outer // 16, found.passes_again) == (8, 8, 2)


def test_one_level_up_to_as_many_segments_as_steps_in_one():
    assert (Segments(1024, 32).outer, Segments(1024, 32).passes_again) == (32, 1)
    assert (Segments(1025, 32).outer, Segments(1025, 32).passes_again) == (32 * 6, 2)
    assert (Segments(1024, 1).outer, Segments(1024, 1).passes_again) == (1, 1)


@pytest.mark.parametrize("every", [2, 5, 16])
def test_inputs_grow_with_the_root(every):
    for num_steps in (100, 1000, 10000):
        found = Segments(num_steps, every)
        held = len(found.kept) + found.outer // every
        assert held <= max(every + 1, 2 * math.ceil(math.sqrt(num_steps / every)) + 1)
