"""Models of up to 1,024 layers: time of the set-up, memory of the activations, four stages.

    python scripts/depth.py setup gcn 1024       # one cell; appends a line to data/depth.jsonl
    python scripts/depth.py memory gcnii 1001 fit
    python scripts/depth.py train gcnii 1001
    torchrun --nproc-per-node 4 scripts/depth.py train gcnii 1001
    python scripts/depth.py                      # writes docs/benchmarks/depth.md

Set-up: a recorded PyG model, 16 wide, on a random graph of 300 vertices, three epochs in a process
of its own. Set-up is the processor time up to the end of the first epoch minus that of an epoch,
which is the mean of the other two.

Memory: 32 wide on 2,000 vertices, one process, K = 1; the peak of the heap in the third epoch,
minus the bytes in use before it (graph, weights, moments) and the gradients of the weights.
``off``: no recomputation. A number: --recompute-every n. ``fit``: --recompute-every 0, with a limit
of memory under which the activations may take 1.5 times as much as those of 16 layers without
recomputation, by estimate.

Training: 16 wide on 300 vertices, three epochs, --staleness exact; one process with one chunk, or
four stages with four chunks, as ranks of gloo.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import in_use
import torch
from benchmark_files import FOLDER, read_rows, write_page
from fidelity import commit
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data

from gnnpipe import Callback, Graph, TrainConfig, Trainer
from gnnpipe.perf import MemoryEstimate
from gnnpipe.runtime.comm.launch import launched_world_size
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup import memory_estimate
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare
from gnnpipe.setup.recompute_every import GROWTH

DATA = FOLDER / "data" / "depth.jsonl"
EPOCHS = 3
WIDTH, VERTICES = 32, 2_000
"""Sizes of the memory cells."""
SHALLOW, LIMIT = 16, 1.5
"""Layers of the model whose activations, times the factor, are the limit of memory."""


class GCNII(nn.Module):
    """PyG's GCN2Conv, ``layers`` times."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 5)
        self.convs = nn.ModuleList(pyg.GCN2Conv(width, 0.1, 0.5, i + 1) for i in range(layers))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = x_0 = self.first(x).relu()
        for conv in self.convs:
            x = conv(x, x_0, edge_index).relu()
        return self.last(x)


class Block(nn.Module):
    """LayerNorm, ReLU and GCNConv: the half of a reversible block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), pyg.GCNConv(width, width)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(x).relu(), edge_index)


class RevGNN(nn.Module):
    """PyG's GroupAddRev of two groups, ``layers`` times."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(
            pyg.GroupAddRev(Block(width // 2), num_groups=2) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, edge_index)
        return self.last(x)


MODELS = {
    "gcn": lambda width, layers: pyg.GCN(16, width, layers, 5),
    "gcnii": GCNII,
    "revgnn": RevGNN,
    "jk-cat": lambda width, layers: pyg.GCN(16, width, layers, 5, jk="cat"),
    "jk-lstm": lambda width, layers: pyg.GCN(16, width, layers, 5, jk="lstm"),
}


def random_graph(vertices: int) -> Graph:
    """16 features, 5 classes, 5 edges a vertex and their reverses."""
    torch.manual_seed(0)
    ends = torch.randint(vertices, (2, 5 * vertices))
    part = torch.rand(vertices)
    data = Data(
        x=torch.randn(vertices, 16),
        edge_index=torch.cat([ends, ends.flip(0)], 1),
        y=torch.randint(5, (vertices,)),
        train_mask=part < 0.6,
        val_mask=(part >= 0.6) & (part < 0.8),
        test_mask=part >= 0.8,
    )
    return Graph.from_pyg(data)


class _Epochs(Callback):
    """Processor time at the end of every epoch; the most bytes in use in the last one."""

    def __init__(self, watches: bool = False) -> None:
        self.cpu_s: list[float] = []
        self.watches = watches
        self.before = self.most = 0

    @property
    def last_s(self) -> float:
        """Processor time of the last epoch; 0 on ranks without callbacks."""
        return self.cpu_s[-1] - self.cpu_s[-2] if self.cpu_s else 0.0

    def _watch(self) -> None:
        while len(self.cpu_s) < EPOCHS:
            self.most = max(self.most, in_use.in_use())
            time.sleep(10 * in_use.EVERY_S)  # reading a large heap takes time

    def on_epoch_end(self, trainer: Any, row: Any) -> None:
        self.cpu_s.append(time.process_time())
        if row.epoch == EPOCHS - 1 and self.watches:
            gc.collect()  # the set-up leaves cycles
            self.before = self.most = in_use.in_use()
            threading.Thread(target=self._watch, daemon=True).start()


def config_with(**settings: Any) -> TrainConfig:
    """The settings of all cells."""
    return TrainConfig(
        epochs=EPOCHS, lr=0.001, out="off", quiet=True, predict=False, eval_every=0, order="given",
        **settings,
    )  # fmt: skip


def trained(
    config: TrainConfig, graph: Graph, model: nn.Module, epochs: _Epochs
) -> tuple[list[float], int]:
    """The losses, and the number of steps that are recomputed together (0: none)."""
    trainer = Trainer(config, graph=graph, model=model, callbacks=[epochs])
    losses = [row.loss for row in trainer.fit().history]
    return losses, trainer._setup()[1].config.recompute_every * config.recompute


def setup_cell(name: str, layers: int) -> dict[str, Any]:
    """Processor seconds of the set-up and of an epoch."""
    graph, model, epochs = random_graph(300), MODELS[name](16, layers), _Epochs()
    begin_s = time.process_time()
    losses, _ = trained(config_with(), graph, model, epochs)
    first_s, *_, last_s = epochs.cpu_s
    epoch_s = (last_s - first_s) / (EPOCHS - 1)
    return {"setup_cpu_s": first_s - begin_s - epoch_s, "epoch_cpu_s": epoch_s, "losses": losses}


def estimate(name: str, layers: int, every: int) -> MemoryEstimate:
    """The estimate of a run of ``memory_cell``; ``every`` 0: no recomputation."""
    config = config_with(recompute=every > 0, recompute_every=max(every, 1))
    model = MODELS[name](WIDTH, layers)
    (found,) = memory_by_rank(prepare(config, Mesh.alone(), random_graph(VERTICES), model))
    return found


def memory_cell(name: str, layers: int, how: str) -> dict[str, Any]:
    """Bytes of the activations, measured and estimated."""
    if how == "fit":
        wanted = estimate(name, layers, 1)
        room = LIMIT * estimate(name, SHALLOW, 0).activations
        room += wanted.on_device - wanted.activations
        memory_estimate.memory_bytes = lambda: math.ceil(GROWTH * room)
    every = int({"fit": "0", "off": "1"}.get(how, how))
    config = config_with(recompute=how != "off", recompute_every=every)
    graph, model, epochs = random_graph(VERTICES), MODELS[name](WIDTH, layers), _Epochs(True)
    losses, every = trained(config, graph, model, epochs)
    gradients = sum(p.numel() for p in model.parameters()) * 4
    return {
        "every": every,
        "bytes": epochs.most - epochs.before - gradients,
        "estimated_bytes": estimate(name, layers, every).activations,
        "epoch_cpu_s": epochs.last_s,
        "losses": losses,
    }


def train_cell(name: str, layers: int) -> dict[str, Any]:
    """Losses of a few epochs, on one process or on four stages."""
    stages, epochs = launched_world_size(), _Epochs()
    config = config_with(
        stages=stages, chunks=4 if stages > 1 else 1, staleness="exact", partitioner="range"
    )
    losses, _ = trained(config, random_graph(300), MODELS[name](16, layers), epochs)
    return {"stages": stages, "losses": losses, "epoch_cpu_s": epochs.last_s}


def page(rows: list[dict[str, Any]]) -> str:
    """The page; of several rows of a cell the last one counts."""
    lines = [
        "# Deep models: set-up and activations",
        "",
        "Processor time of the set-up, memory of the activations, and losses of models of up to "
        "1,024 layers.",
        "",
        f"`scripts/depth.py`, commit {', '.join(dict.fromkeys(r['commit'] for r in rows))}; "
        f"{', '.join(dict.fromkeys(r['machine'] for r in rows))}, one thread, while other "
        "processes computed: processor time and bytes, no wall time.",
        "",
        *_setup_table([row for row in rows if row["what"] == "setup"]),
        "",
        *_memory_table([row for row in rows if row["what"] == "memory"]),
        "",
        *_train_table([row for row in rows if row["what"] == "train"]),
    ]
    return "\n".join(lines) + "\n"


def _setup_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = {(r["model"], r["layers"]): r for r in rows}
    depths = sorted({layers for _, layers in found})
    yield (
        "Processor seconds of the set-up, and of an epoch behind it; recorded PyG models, 16 wide, "
        "300 vertices:"
    )
    yield ""
    yield "| model | " + " | ".join(f"{n:,} layers" for n in depths) + " |"
    yield "|---|" + "---:|" * len(depths)
    for name in dict.fromkeys(model for model, _ in found):
        cells = [found.get((name, n)) for n in depths]
        texts = [f"{c['setup_cpu_s']:.1f} + {c['epoch_cpu_s']:.2f}" if c else "" for c in cells]
        yield f"| {name} | " + " | ".join(texts) + " |"


def _memory_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = {(r["model"], r["layers"], r["how"]): r for r in rows}
    row_mib = VERTICES * WIDTH * 4 / 2**20
    yield (
        f"Activations, MiB, {WIDTH} wide, {VERTICES:,} vertices (a value of every vertex: "
        f"{row_mib:.2f} MiB), one process, one chunk; *over 16 layers*: measured, over those of "
        "the same model with 16 layers without recomputation. `--recompute-every` with *fit*: "
        f"chosen by a limit of memory that leaves {LIMIT} times the activations of 16 layers:"
    )
    yield ""
    yield (
        "| model | layers | `--recompute-every` | measured | estimated | over 16 layers | "
        "epoch, processor s |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for (name, layers, how), row in sorted(found.items()):
        every = f"{row['every'] or 'off'}{', fit' * (how == 'fit')}"
        base = found[name, SHALLOW, "off"]["bytes"]
        yield (
            f"| {name} | {layers:,} | {every} | {row['bytes'] / 2**20:.1f} | "
            f"{row['estimated_bytes'] / 2**20:.1f} | {row['bytes'] / base:.2f} | "
            f"{row['epoch_cpu_s']:.1f} |"
        )


def _train_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    found = {(r["model"], r["layers"], r["stages"]): r for r in rows}
    yield (
        "Losses of three epochs, `--staleness exact`, one process with one chunk and four stages "
        "(ranks of gloo) with four chunks; processor seconds of an epoch are those of rank 0:"
    )
    yield ""
    yield "| model | layers | stages | losses | epoch, processor s |"
    yield "|---|---:|---:|---|---:|"
    for (name, layers, stages), row in sorted(found.items()):
        losses = ", ".join(f"{loss:.5f}" for loss in row["losses"])
        yield f"| {name} | {layers:,} | {stages} | {losses} | {row['epoch_cpu_s']:.1f} |"


def main() -> int:
    """One cell, or the page."""
    if len(sys.argv) <= 2:
        return write_page(FOLDER / "depth.md", page(read_rows(DATA)))
    torch.set_num_threads(1)
    what, name, layers, *more = sys.argv[1:]
    row = {"what": what, "model": name, "layers": int(layers), "commit": commit()}
    row |= {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    row |= {"how": more[0]} if more else {}
    cells = {"setup": setup_cell, "memory": memory_cell, "train": train_cell}
    row |= cells[what](name, int(layers), *more)
    if os.environ.get("RANK", "0") == "0":
        print(row)
        with DATA.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
