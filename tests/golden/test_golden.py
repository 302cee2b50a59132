"""Losses, bytes, programs and memory estimates are those of the kept values."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # also for the ranks, which import ``cases``

from cases import CASES, SHAPES, key_of, read, run_case, run_cases
from helpers import run_ranks

KEPT = read()
SEVERAL = [
    list(group) for shape, group in groupby(CASES, key=lambda c: c[1]) if shape[0] * shape[1] > 1
]
ALONE = [
    pytest.param(case, marks=[pytest.mark.slow] if case[2] in ("none", "paper") else [])
    for case in CASES
    if case[1][0] * case[1][1] == 1
]


def assert_as_kept(key, found):
    kept = KEPT[key]
    assert found["losses"] == pytest.approx(kept["losses"], rel=1e-10, abs=0)
    for part in ("bytes", "program", "memory"):
        assert found[part] == kept[part], f"{key}: {part}"


@pytest.mark.parametrize("case", ALONE, ids=lambda case: key_of(*case))
def test_one_rank(case):
    assert_as_kept(key_of(*case), run_case(*case))


@pytest.mark.parametrize("cases", SEVERAL, ids=lambda cases: str(cases[0][1]))
def test_several_ranks(cases):
    ranks = cases[0][1][0] * cases[0][1][1]
    for key, found in run_ranks(run_cases, ranks, cases)[0].items():
        assert_as_kept(key, found)


def test_every_case_is_kept():
    assert KEPT.keys() == {key_of(*case) for case in CASES}
    assert len(CASES) == 11 * len(SHAPES)
