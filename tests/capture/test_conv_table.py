"""The page of supported convolutions."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_table_of_convolutions_is_what_the_script_writes():
    script = Path(__file__).resolve().parents[2] / "scripts" / "conv_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], timeout=120, check=False)
    assert done.returncode == 0, "python scripts/conv_table.py"
