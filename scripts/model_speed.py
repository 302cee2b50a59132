"""Speed of users' own PyG models: against plain PyG, and against an older commit.

    python scripts/model_speed.py b8d01c6 [--repeats 20] [--graphs squirrel planted]

Two tables, written to docs/benchmarks/model_speed.md. The first has models that cannot be recorded
(forward branches on a value) and run as they are; plain PyG trains the same module with the same
features, optimizer and loss. The second has recorded models, trained by the commit that is given
and by this checkout. The two sides of a cell are processes that take turns, one epoch each, with
one thread and with the heap settings of gnnpipe (``HELD``). Finished cells are kept in
docs/benchmarks/data/model_speed.jsonl and not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmark_files import read_rows

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind PYTHONPATH, which a worker gets
DATA = ROOT.parent / "shared" / "data"
PAGE = ROOT / "docs" / "benchmarks" / "model_speed.md"
RESULTS = ROOT / "docs" / "benchmarks" / "data" / "model_speed.jsonl"
HELD = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
"""Heap settings of ``gnnpipe.heap.held_heap``."""
GRAPHS = {
    "squirrel": (str(DATA / "squirrel.npz"), 2089, 5),
    "coauthor_cs": (str(DATA / "coauthor_cs.npz"), 6805, 15),
    "planted": ("synthetic:planted:n=20000,degree=20,classes=10,features=128", 128, 10),
}
"""Dataset, number of features and of classes."""
CONVS = ("GCNConv", "SAGEConv", "GATConv", "GINConv")
RECORDED_CHUNKS = (1, 4)
WARM_UP = 5


def make_module(conv: str, widths: list[int], is_recorded: bool):
    """Three layers of ``conv`` with batch norm, ReLU and dropout."""
    import torch
    from torch_geometric import nn as pyg

    def layer(inputs: int, outputs: int):
        if conv == "GINConv":
            return pyg.GINConv(torch.nn.Linear(inputs, outputs))
        return getattr(pyg, conv)(inputs, outputs)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = itertools.pairwise(widths)
            self.convs = torch.nn.ModuleList(layer(a, b) for a, b in sizes)
            self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(b) for b in widths[1:-1])

        def forward(self, x, edge_index):
            for conv, norm in zip(self.convs, self.norms, strict=False):
                x = torch.nn.functional.dropout(
                    norm(conv(x, edge_index)).relu(), 0.5, self.training
                )
            if not is_recorded and float(x.detach()[0, 0]) > 1e30:
                x = x.clamp(max=1e30)
            return self.convs[-1](x, edge_index)

    torch.manual_seed(0)
    return Net()


class Turns:
    """Makes a worker wait for its turn once an epoch, inside the loss."""

    def __init__(self, total: int) -> None:
        """``total``: number of labels of an epoch, over all calls of the loss."""
        self.total, self.seen, self.begin = total, 0, time.perf_counter()

    def __call__(self, logits, y):
        """Returns the sum of the cross entropies, after the turn has come."""
        import torch

        self.seen += len(y)
        if self.seen >= self.total:
            self.seen = 0
            print(time.perf_counter() - self.begin, flush=True)
            sys.stdin.readline()
            self.begin = time.perf_counter()
        return torch.nn.functional.cross_entropy(logits, y, reduction="sum")


def train_plain(conv: str, graph: str) -> None:
    """Trains with plain PyG."""
    import torch

    from gnnpipe.data.load import load_graph

    dataset, num_features, num_classes = GRAPHS[graph]
    data = load_graph(dataset)
    features = data.x.toarray() if hasattr(data.x, "toarray") else data.x
    x, edge_index = torch.from_numpy(features), torch.from_numpy(data.edge_index)
    y, mask = torch.from_numpy(data.y), torch.from_numpy(data.train_mask)
    module = make_module(conv, [num_features, 64, 64, num_classes], False).train()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    turns = Turns(int(mask.sum()))
    while True:
        optimizer.zero_grad()
        (turns(module(x, edge_index)[mask], y[mask]) / int(mask.sum())).backward()
        optimizer.step()


def train_gnnpipe(conv: str, graph: str, total: int, chunks: int, is_recorded: bool) -> None:
    """Trains with the gnnpipe on the path."""
    from gnnpipe import TrainConfig, Trainer

    dataset, num_features, num_classes = GRAPHS[graph]
    module = make_module(conv, [num_features, 64, 64, num_classes], is_recorded)
    config = TrainConfig(
        dataset=dataset, epochs=10**6, lr=0.01, out="off", eval_every=0, quiet=True, chunks=chunks
    )
    Trainer(config, model=module, loss_fn=Turns(total)).fit()


class Worker:
    """A process that trains one epoch at each turn."""

    def __init__(self, tree: Path, *words: str) -> None:
        """Starts a worker that imports gnnpipe from ``tree``."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "GLIBC_TUNABLES": HELD,
            "PYTHONWARNINGS": "ignore",
        }
        line = [sys.executable, str(Path(__file__).resolve()), "--worker", *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            line, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        self._wait()

    def _wait(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def turn(self) -> float:
        """Returns the seconds of one epoch."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._wait()

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def compare(
    first: tuple[Path, tuple[str, ...]], second: tuple[Path, tuple[str, ...]], repeats: int
) -> dict[str, float]:
    """Medians of both sides, and the median and the quartiles of the ratios second / first."""
    workers = [Worker(tree, *words) for tree, words in (first, second)]
    try:
        turns = [[worker.turn() for worker in workers] for _ in range(WARM_UP + repeats)][WARM_UP:]
    finally:
        for worker in workers:
            worker.end()
    ratios = [b / a for a, b in turns]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "first_ms": statistics.median(a for a, _ in turns) * 1e3,
        "second_ms": statistics.median(b for _, b in turns) * 1e3,
        "ratio": middle,
        "low": low,
        "high": high,
    }


def table(names: tuple[str, str], rows: list[tuple[str, dict[str, float]]]) -> list[str]:
    """A table of cells with the geometric mean of their ratios."""
    lines = [f"| cell | {names[0]}, ms | {names[1]}, ms | ratio (quartiles) |", "|---|---|---|---|"]
    for cell, row in rows:
        lines.append(
            f"| {cell} | {row['first_ms']:.1f} | {row['second_ms']:.1f} | "
            f"{row['ratio']:.3f} ({row['low']:.2f} to {row['high']:.2f}) |"
        )
    mean = statistics.geometric_mean(row["ratio"] for _, row in rows)
    return [*lines, "", f"Geometric mean of the ratios: {mean:.3f}."]


def git(*words: str) -> str:
    """Output of a git command in this checkout."""
    return subprocess.check_output(["git", "-C", str(ROOT), *words], text=True).strip()


def cells(graphs: list[str]) -> Iterator[tuple[str, str, int]]:
    """Convolution, graph and chunks of every cell; 0 chunks: the model runs as it is."""
    for graph in graphs:
        for conv in CONVS:
            for chunks in (0, *RECORDED_CHUNKS):
                yield conv, graph, chunks


def measure(before: str, graphs: list[str], repeats: int) -> None:
    """Run the cells that have no result in ``RESULTS``."""
    from gnnpipe.data.load import load_graph

    old, new = git("rev-parse", "--short", before), git("rev-parse", "--short", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / old
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
        subprocess.run(["git", "checkout", "-q", old], cwd=tree, check=True)
        for conv, graph, chunks in cells(graphs):
            cell = {"conv": conv, "graph": graph, "chunks": chunks}
            if any(cell.items() <= row.items() for row in read_rows(RESULTS)):
                continue
            total = str(int(load_graph(GRAPHS[graph][0]).train_mask.sum()))
            ours = ("recorded" if chunks else "whole", conv, graph, total, str(chunks or 1))
            first = (tree, ours) if chunks else (ROOT, ("plain", *ours[1:]))
            found = compare(first, (ROOT, ours), repeats)
            row = {**cell, **found, "before": old, "commit": new, "repeats": repeats}
            print(row, flush=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def page() -> str:
    """Returns the page of all finished cells."""
    rows = read_rows(RESULTS)
    whole = [(f"{row['conv']}, {row['graph']}", row) for row in rows if not row["chunks"]]
    recorded = [
        (f"{row['conv']}, {row['graph']}, K = {row['chunks']}", row)
        for row in rows
        if row["chunks"]
    ]
    old = rows[0]["before"]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    return "\n".join(
        [
            "# Speed of users' own models",
            "",
            "This page compares a user's PyG model with plain PyG and with an older commit.",
            "",
            f"Measured by `scripts/model_speed.py {old}` at {commits} on {os.cpu_count()} cores "
            f"({platform.machine()}), {time.strftime('%Y-%m-%d')}. Three layers of width 64 with "
            "batch norm, ReLU and dropout, float32; one thread. Two processes take turns, one "
            f"epoch each, {min(row['repeats'] for row in rows)} turns, with the same features, "
            "order of the vertices and heap settings; ratios of the pairs of epochs.",
            "",
            "## Models that run as they are, against plain PyG",
            "",
            *table(("plain PyG", "gnnpipe"), whole),
            "",
            f"## Recorded models, against {old}",
            "",
            *table((old, "now"), recorded),
            "",
        ]
    )


def main() -> None:
    """Run the cells and write the page; or one process of a cell (``--worker``)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", nargs="?", help="commit to compare recorded models with")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import torch

        torch.set_num_threads(1)
        kind, conv, graph, total, chunks = options.worker
        if kind == "plain":
            train_plain(conv, graph)
        else:
            train_gnnpipe(conv, graph, int(total), int(chunks), kind == "recorded")
    measure(options.before, options.graphs, options.repeats)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
