"""Files that a reader opens to follow an embedding from its chunk to the loss.

    python scripts/follow_embedding.py [--chunks 4] [--staleness auto] [--epoch 3] [--backward]

Trains a GCN of two layers on the embedded graph in one process and notes every function of the
package that runs in the forward actions of one epoch, the loss included (``--backward``: in the
whole epoch). Prints each file with its lines, the functions that ran and their lines, and the sums.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gnnpipe import TrainConfig
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.executor import Executor
from gnnpipe.schedule import Action, ActionKind
from gnnpipe.setup.build import build_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.train.evaluate import train_epoch

ROOT = Path(__file__).resolve().parents[1]


def lines_of(code: CodeType) -> int:
    """Lines of a function that hold code."""
    return len({line for _, _, line in code.co_lines() if line is not None})


class Noted:
    """Functions of the package that ran, by file."""

    def __init__(self) -> None:
        self.by_file: dict[str, set[CodeType]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call (``sys.setprofile``)."""
        path = frame.f_code.co_filename
        if event == "call" and "/gnnpipe/" in path and not frame.f_code.co_name.startswith("<"):
            self.by_file[path].add(frame.f_code)


def followed(chunks: int, staleness: str, epoch: int, backward: bool) -> Noted:
    """What ran in one epoch."""
    config = TrainConfig(
        chunks=chunks, staleness=staleness, epochs=epoch + 1, out="off", cache_dir="off"
    )
    mesh, noted = Mesh.alone(), Noted()
    prepared = prepare(config, mesh)
    rank_runtime = build_rank(prepared, mesh)

    def run(number: int) -> None:
        order = prepared.chunk_order(number)
        train_epoch(rank_runtime, mesh, prepared.program_of(number), order, number)

    for number in range(epoch):
        run(number)
    plain = {name: getattr(Executor, name) for name in ("_forward", "_backward")}
    methods = sys.modules["gnnpipe.runtime.executor"].__dict__["_METHODS"]

    def watched(executor: Executor, action: Action) -> None:
        sys.setprofile(noted)
        try:
            plain["_forward"](executor, action)
        finally:
            sys.setprofile(None)

    if backward:
        sys.setprofile(noted)
        run(epoch)
        sys.setprofile(None)
    else:
        methods[ActionKind.FORWARD] = watched
        run(epoch)
    return noted


def main() -> None:
    """Print the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--staleness", default="auto")
    parser.add_argument("--epoch", type=int, default=3)
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    noted = followed(options.chunks, options.staleness, options.epoch, options.backward)
    files = all_lines = functions = own_lines = 0
    for path, codes in sorted(noted.by_file.items()):
        length = len(Path(path).read_text(encoding="utf-8").splitlines())
        own = sum(map(lines_of, codes))
        name = path[path.rindex("/gnnpipe/") + 1 :]
        names = ", ".join(sorted({code.co_name for code in codes}))
        print(f"{name}: {length} lines; ran {own} lines of {names}")
        files, all_lines = files + 1, all_lines + length
        functions, own_lines = functions + len(codes), own_lines + own
    print(f"{files} files with {all_lines} lines; {functions} functions with {own_lines} lines ran")


if __name__ == "__main__":
    main()
