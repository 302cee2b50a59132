"""A few drawn inputs for every reader; ``scripts/fuzz.py`` goes on for minutes."""

from __future__ import annotations

import pytest
from fuzzing import TARGETS, attempt
from hypothesis import HealthCheck, given, settings


@pytest.mark.parametrize("name", TARGETS)
def test_only_our_own_errors(name):
    target = TARGETS[name]

    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.strategy)
    def run(drawn):
        attempt(target, drawn)

    run()
