"""The page of supported convolutions."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_convolution_that_was_tried_trains_as_in_plain_pyg():
    """And those that are recorded do so on every shape."""
    text = (ROOT / "docs" / "reference" / "convolutions.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][3:] == ["(1,1,1)", "(1,1,4)", "(2,1,4)", "(1,2,1)"]
    ways = {name: (how, numbers) for name, how, _, *numbers in rows[1:]}
    assert len(ways) == 67
    tried = [way for way in ways.values() if way[0] != "not tried"]
    recorded = [numbers for how, numbers in tried if how != "as it is"]
    assert len(tried) >= 62
    assert len(recorded) >= 56
    assert max(float(number) for numbers in recorded for number in numbers) < 1e-8
    assert max(float(numbers[0]) for _, numbers in tried) < 1e-8


@pytest.mark.slow
def test_the_table_of_convolutions_is_what_the_script_writes():
    script = ROOT / "scripts" / "conv_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], timeout=600, check=False)
    assert done.returncode == 0, "python scripts/conv_table.py"
