"""``scripts/setup.sh`` leaves a .venv alone that it has not made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_venv_of_ones_own_is_left_alone(tmp_path):
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    mine = tmp_path / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    command = ["bash", str(tmp_path / "scripts" / "setup.sh")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert ".venv is there, and not made by this script; move it away, or do without" in done.stderr
    assert list(mine.parent.iterdir()) == [mine]
