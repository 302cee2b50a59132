"""How fast lowered convolutions are, against the same module run by plain PyG, in one run.

python scripts/lowered_speed.py    # writes docs/benchmarks/lowered_speed.md

One process, one thread, K = 1: an epoch (forward, loss, backward, Adam) of an unmodified module by
``Trainer``, by plain PyG over ``edge_index``, and by plain PyG over the adjacency as a torch CSR
tensor. The three take turns, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fidelity import commit  # noqa: E402
from fidelity_cells import MAIN_GRAPHS, Cell  # noqa: E402
from torch import nn  # noqa: E402
from torch_geometric import nn as pyg  # noqa: E402

from gnnpipe import Graph, TrainConfig  # noqa: E402
from gnnpipe.data.load import load_graph  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402
from gnnpipe.setup.build import build_rank  # noqa: E402
from gnnpipe.setup.prepare import prepare  # noqa: E402
from gnnpipe.train.evaluate import train_epoch  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "lowered_speed.md"
WIDTH, LAYERS, REPEATS = 128, 4, 7

CONVS: dict[str, Callable[[int], nn.Module]] = {
    "GCNConv": lambda i: pyg.GCNConv(WIDTH, WIDTH, cached=True),
    "SAGEConv": lambda i: pyg.SAGEConv(WIDTH, WIDTH),
    "GCN2Conv": lambda i: pyg.GCN2Conv(WIDTH, 0.1, 0.5, i + 1, cached=True),
    "GINConv": lambda i: pyg.GINConv(nn.Linear(WIDTH, WIDTH)),
    "SAGEConv, BatchNorm1d": lambda i: pyg.SAGEConv(WIDTH, WIDTH),
}


class Net(nn.Module):
    """Four layers of a convolution; ``cached``, as PyG advises for one fixed graph."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(CONVS[name](i) for i in range(LAYERS))
        kind = nn.BatchNorm1d if "BatchNorm1d" in name else nn.Identity
        self.norms = nn.ModuleList(kind(WIDTH) for _ in self.convs)
        self.takes_first = name == "GCN2Conv"
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, x: Any, edge_index: Any) -> Any:
        first = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x, first, edge_index) if self.takes_first else conv(x, edge_index)
            x = norm(x).relu()
        return self.out(x)


def plain(model: nn.Module, graph: Graph, edges: Any) -> Callable[[], None]:
    """An epoch of plain PyG."""
    x, y = torch.from_numpy(graph.x), torch.from_numpy(graph.y)
    train = torch.from_numpy(graph.train_mask)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[train], y[train]).backward()
        optimizer.step()

    return epoch


def ours(model: nn.Module, graph: Graph, mesh: Mesh) -> Callable[[], None]:
    """An epoch as ``Trainer`` runs it."""
    config = TrainConfig(lr=0.001, out="off", quiet=True, cache_dir="off")
    prepared = prepare(config, mesh, graph, model)
    rank_runtime = build_rank(prepared, mesh)
    return lambda: train_epoch(rank_runtime, mesh, prepared.program, [0], 0) and None


def measure(name: str, graph: Graph, mesh: Mesh) -> list[list[float]]:
    """Seconds of every repeat: ours, plain PyG over edge_index, over a CSR tensor."""
    torch.manual_seed(0)
    model = Net(name, graph.num_classes)
    n = graph.num_vertices
    adjacency = torch.sparse_csr_tensor(
        torch.from_numpy(graph.indptr),
        torch.from_numpy(graph.indices).long(),
        torch.ones(graph.num_edges),
        size=(n, n),
    )
    epochs = [
        ours(copy.deepcopy(model), graph, mesh),
        plain(copy.deepcopy(model), graph, torch.from_numpy(graph.edge_index)),
        plain(copy.deepcopy(model), graph, adjacency),
    ]
    times: list[list[float]] = [[], [], []]
    for repeat in range(REPEATS + 2):
        for epoch, kept in zip(epochs, times, strict=True):
            start = time.perf_counter()
            epoch()
            if repeat >= 2:
                kept.append(time.perf_counter() - start)
    return times


def cell(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.0f} ({min(times) * 1e3:.0f}-{max(times) * 1e3:.0f})"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = Mesh.join(1, 1)
    lines, ratios = [], {name: ([], []) for name in CONVS}
    for dataset in MAIN_GRAPHS:
        data = Cell(dataset, "gcn", 2).settings()
        graph = load_graph(
            data["dataset"], split=data.get("split", "given"), symmetrize=data["symmetrize"]
        )
        x = np.random.default_rng(0).standard_normal((graph.num_vertices, WIDTH))
        graph = replace(graph, x=x.astype(np.float32))
        for name in CONVS:
            times = measure(name, graph, mesh)
            mine, index, csr = (statistics.median(t) for t in times)
            ratios[name][0].append(index / mine)
            ratios[name][1].append(csr / mine)
            lines.append(
                f"| {dataset} | {name} | {' | '.join(map(cell, times))} | {index / mine:.1f} | "
                f"{csr / mine:.1f} |"
            )
            print(lines[-1], flush=True)
    head = [
        "# Lowered convolutions against plain PyG",
        "",
        f"Made by `scripts/lowered_speed.py` at commit {commit()}, {time.strftime('%Y-%m-%d')}: one"
        f" process, one thread, K = 1, torch {torch.__version__}; {LAYERS} layers, {WIDTH} columns,"
        f" random dense features of {WIDTH} columns, no dropout. An epoch is forward, loss,"
        " backward and Adam. Milliseconds, median (range) of"
        f" {REPEATS} epochs; the last two columns say how many times as long plain PyG took, over"
        " `edge_index` and over a torch CSR tensor.",
        "",
        "| convolution | median over graphs: `edge_index` / ours | CSR tensor / ours |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(a):.1f} | {statistics.median(b):.1f} |"
            for name, (a, b) in ratios.items()
        ),
        "",
        "| graph | convolution | ours | PyG, `edge_index` | PyG, CSR tensor | ratio | ratio, CSR |",
        "|---|---|---|---|---|---|---|",
    ]
    PAGE.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
