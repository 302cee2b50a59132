"""Write ``golden.json`` from the program as it is:   .venv/bin/python tests/golden/make_golden.py

Run it only in a commit that changes the values on purpose, and say there what changed and why.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[i]) for i in (0, 1, 2)]

from cases import CASES, key_of, read, run_case, run_cases, write  # noqa: E402
from helpers import run_ranks  # noqa: E402


def main() -> None:
    """Run every case and say which values differ from the kept ones."""
    found = {}
    for shape, group in groupby(CASES, key=lambda case: case[1]):
        ranks, cases = shape[0] * shape[1], list(group)
        if ranks == 1:
            found |= {key_of(*case): run_case(*case) for case in cases}
        else:
            found |= run_ranks(run_cases, ranks, cases)[0]
        print(f"{shape}: {len(cases)} cases")
    try:
        before = read()
    except FileNotFoundError:
        before = {}
    for key in found.keys() & before.keys():
        for part, value in found[key].items():
            if value != before[key][part]:
                print(f"{key}: {part} differs")
    write(found)


if __name__ == "__main__":
    main()
