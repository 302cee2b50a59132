"""What it is worth to walk one chunk in blocks of rows, on one device.

python scripts/blocks_speed.py    # writes docs/benchmarks/blocks.md

One thread. The same epoch with all rows at once and block by block, by two processes that take
turns; with the pages that each had to be given by the system, and its peak memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fidelity import commit  # noqa: E402
from single_speed import Contender, brief  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "blocks.md"
GRAPHS = {
    "debian": "debian",
    "coauthor_physics": "coauthor_physics",
    "ego_twitter": "ego_twitter",
    "planted, 200,000 vertices": "synthetic:planted:n=200000,degree=20,classes=50,features=64",
}
MODELS = (("gcn", 3), ("sage", 3), ("gcnii", 4))
WIDTH, REPEATS, WARM_UP = 128, 5, 3


def main() -> None:
    lines = [
        "# One chunk in blocks of rows",
        "",
        f"`python scripts/blocks_speed.py`, commit {commit()}, {time.strftime('%Y-%m-%d')}, one "
        f"thread, F = {WIDTH}. Milliseconds of an epoch, median of {REPEATS} (least to most); the "
        "two take turns. Peak: of the whole process, MiB. Rows of debian and coauthor_physics stay "
        "under the border of 32 MiB: there both are the same program, and the ratio is the noise.",
        "",
        "| graph | model | all rows at once | peak | in blocks | peak | at once / in blocks |",
        "|---|---|---|---|---|---|---|",
    ]
    for graph, dataset in GRAPHS.items():
        for model, layers in MODELS:
            cell = [dataset, model, str(layers), str(WIDTH)]
            both = [Contender(sys.executable, name, cell) for name in ("whole", "ours")]
            for one in both:
                one.start()
            for _ in range(WARM_UP + REPEATS):
                for one in both:
                    one.turn()
            whole, blocks = (one.end() for one in both)
            ratio = statistics.median(whole["seconds"]) / statistics.median(blocks["seconds"])
            lines.append(
                f"| {graph} | {model} {layers} | {brief(whole)} | {whole['peak_mib']:.0f} | "
                f"{brief(blocks)} | {blocks['peak_mib']:.0f} | {ratio:.2f} |"
            )
            print(lines[-1], flush=True)
    # What was measured by hand stays.
    _, mark, rest = PAGE.read_text().partition("\n## Attention") if PAGE.exists() else ("",) * 3
    PAGE.write_text("\n".join(lines) + "\n" + mark + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
