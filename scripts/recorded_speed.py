"""Speed of the built-in models as recorded PyG modules against the built-in layers.

    python scripts/recorded_speed.py [--models gcn] [--graphs squirrel] [--layers 3] [--chunks 1]

Both forms train in one process, one epoch each in turns, on one thread. Prints for each cell the
median processor time of an epoch of each form, the median of the ratios of turns and the ratio of
the shortest times (recorded over built-in), the processor time of each set-up, both losses of the
first epoch, and with ``--calls`` the numbers of torch operations of an epoch. The losses are
comparable with ``--dropout 0``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import peers  # noqa: E402
import torch  # noqa: E402
from built_in_modules import MODULES, twin  # noqa: E402

from gnnpipe import Graph, TrainConfig  # noqa: E402
from gnnpipe.heap import held_heap  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402
from gnnpipe.setup.build import build_rank  # noqa: E402
from gnnpipe.setup.inputs import built_in_model  # noqa: E402
from gnnpipe.setup.prepare import prepare  # noqa: E402
from gnnpipe.train.evaluate import train_epoch  # noqa: E402

GRAPHS = ("squirrel", "debian", "coauthor_physics", "ego_twitter")


class Side:
    """One form of a model, ready to train."""

    def __init__(self, config: TrainConfig, graph: Graph, mesh: Mesh, module: Any) -> None:
        start = time.process_time()
        self.prepared = prepare(config, mesh, graph, module)
        self.runtime, self.mesh = build_rank(self.prepared, mesh), mesh
        self.setup_s = time.process_time() - start
        self.times: list[float] = []

    def epoch(self, number: int) -> float:
        """Train one epoch; return the mean loss."""
        order = list(range(self.prepared.plan.chunks))
        start = time.process_time()
        found = train_epoch(self.runtime, self.mesh, self.prepared.program, order, number)
        self.times.append(time.process_time() - start)
        return found


def calls(epoch: Callable[[], Any]) -> int:
    """Number of torch operations of an epoch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        epoch()
    return sum(event.count for event in profile.key_averages())


def measure(name: str, graph: Graph, mesh: Mesh, args: argparse.Namespace, layers: int) -> str:
    """A line of the table."""
    config = TrainConfig(
        model=name,
        layers=layers,
        hidden=args.hidden,
        dropout=args.dropout,
        heads=4 if name == "gat" else 1,
        chunks=args.chunks,
        out="off",
        quiet=True,
        cache_dir="off",
    )
    built_in = built_in_model(config, graph)
    modules = (twin(name, built_in, graph.num_features, graph.num_classes), built_in)
    sides = [Side(config, graph, mesh, module) for module in modules]
    for number in range(args.repeats + 2):
        results = [side.epoch(number) for side in sides]
        if number == 0:
            first = results
    new, old = (side.times[2:] for side in sides)
    ratio = statistics.median(a / b for a, b in zip(new, old, strict=True))
    text = f"{name:7}{layers:3}  recorded {statistics.median(new) * 1e3:7.0f} ms, built-in "
    text += f"{statistics.median(old) * 1e3:7.0f} ms, ratio {ratio:.3f}, best "
    text += f"{min(new) / min(old):.3f}; set-up {sides[0].setup_s:.2f}, {sides[1].setup_s:.2f} s; "
    text += f"losses {first}"
    if args.calls:
        text += f"; calls {[calls(lambda s=side: s.epoch(99)) for side in sides]}"
    return text


def main() -> None:
    """Run the cells."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS))
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 16])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", action="store_true", help="count torch operations")
    parser.add_argument("--data", type=Path, default=peers.SHARED, help="folder of npz files")
    args = parser.parse_args()
    peers.SHARED = args.data
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = Mesh.join(1, 1)
    for graph_name in args.graphs:
        graph = peers.load(graph_name)
        for name in args.models:
            for layers in args.layers:
                with held_heap():
                    print(graph_name, measure(name, graph, mesh, args, layers), flush=True)


if __name__ == "__main__":
    main()
