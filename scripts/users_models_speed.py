"""Users' own PyG models, an epoch of gnnpipe against plain PyG, in turns.

python scripts/users_models_speed.py run [--graphs G] [--models M]    # some 20 minutes for all
python scripts/users_models_speed.py report    # writes docs/benchmarks/users_models_speed.md

One process, one thread, K = 1, gnnpipe's heap settings for all. An epoch (forward, loss, backward,
Adam) of an unmodified module by ``Trainer``'s parts, by plain PyG over ``edge_index``, and by plain
PyG with what a careful user adds by hand (``users_models.even_out``), in gnnpipe's order of the
vertices. Finished cells are kept in docs/benchmarks/data/users_models_speed.jsonl (or the file that
UMS_DATA names). Graphs that are not there are left out (``peers.SHARED``).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
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

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from benchmark_files import read_rows  # noqa: E402
from compare_commits import has_graph  # noqa: E402
from fidelity import commit  # noqa: E402
from peers import load  # noqa: E402
from torch import nn  # noqa: E402
from users_models import LAYERS, MODELS, NARROW, WIDTH, even_out, with_edge_features  # noqa: E402

from gnnpipe import Graph, TrainConfig  # noqa: E402
from gnnpipe.graph.chunking import make_chunking, renumber  # noqa: E402
from gnnpipe.heap import held_heap  # noqa: E402
from gnnpipe.runtime.comm.mesh import Mesh  # noqa: E402
from gnnpipe.setup.build import build_rank  # noqa: E402
from gnnpipe.setup.prepare import prepare  # noqa: E402
from gnnpipe.train.evaluate import train_epoch  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
DATA = Path(os.environ.get("UMS_DATA", FOLDER / "data" / "users_models_speed.jsonl"))
GRAPHS = ("squirrel", "debian", "coauthor_physics", "ego_twitter")
UNTIMED, LEAST, MOST, CELL_S = 2, 3, 9, 25.0
"""Turns that do not count; least and most that do; seconds after which no turn is added."""

Epoch = Callable[[], Any]


def plain(model: nn.Module, graph: Graph, adjacency: Any) -> Epoch:
    """An epoch of plain PyG."""
    dense: Any = graph.x if not hasattr(graph.x, "toarray") else graph.x.toarray()
    x, y = torch.from_numpy(dense).float(), torch.from_numpy(graph.y).long()
    train = torch.from_numpy(graph.train_mask).nonzero().flatten()
    more = [torch.from_numpy(values) for values in graph.edge_data.values()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x, adjacency, *more)[train], y[train]).backward()
        optimizer.step()

    return epoch


def evened(model: nn.Module, graph: Graph) -> Epoch:
    """An epoch of plain PyG with everything that can be added by hand."""
    order = make_chunking(graph, chunks=1, shards=1, partitioner="metis", seed=0)
    graph = renumber(graph, order)
    return plain(model, graph, even_out(model, graph))


def ours(model: nn.Module, graph: Graph) -> Epoch:
    """An epoch as ``Trainer`` runs it."""
    config = TrainConfig(lr=0.001, out="off", quiet=True, cache_dir="off", require_capture=True)
    mesh = Mesh.join(1, 1)
    prepared = prepare(config, mesh, graph, model)
    rank_runtime = build_rank(prepared, mesh)
    return lambda: train_epoch(rank_runtime, mesh, prepared.program, [0], 0)


def measure(name: str, dataset: str) -> dict[str, list[float]]:
    """Seconds of each turn, by contender."""
    graph = load(dataset)
    if "edge features" in name:
        graph = with_edge_features(graph)
    torch.manual_seed(0)
    model = MODELS[name](graph)
    copies = [copy.deepcopy(model) for _ in range(3)]
    epochs = {
        "ours": ours(copies[0], graph),
        "edge_index": plain(copies[1], graph, torch.from_numpy(graph.edge_index)),
        "evened out": evened(copies[2], graph),
    }
    times: dict[str, list[float]] = {contender: [] for contender in epochs}
    start_s = time.perf_counter()
    for turn in range(UNTIMED + MOST):
        if turn >= UNTIMED + LEAST and time.perf_counter() - start_s > CELL_S:
            break
        for contender, epoch in epochs.items():
            turn_s = time.perf_counter()
            epoch()
            times[contender].append(time.perf_counter() - turn_s)
    return {contender: seconds[UNTIMED:] for contender, seconds in times.items()}


def run(graphs: list[str], models: list[str]) -> None:
    """Measure the cells that are not there yet."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    for dataset in filter(has_graph, graphs):
        for name in models:
            cell = {"model": name, "graph": dataset}
            if any(cell.items() <= row.items() for row in read_rows(DATA)):
                continue
            with held_heap():
                found = measure(name, dataset)
            row = cell | {"seconds": found, "commit": commit(), "date": time.strftime("%Y-%m-%d")}
            with DATA.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(line(row), flush=True)


def ratio(row: dict[str, Any], peer: str) -> float:
    """The peer's median over ours."""
    seconds = row["seconds"]
    return statistics.median(seconds[peer]) / statistics.median(seconds["ours"])


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    times = []
    for seconds in row["seconds"].values():
        low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
        times.append(f"{middle:.0f} ({low:.0f} to {high:.0f})")
    ratios = [f"{ratio(row, peer):.2f}" for peer in ("evened out", "edge_index")]
    return f"| {row['graph']} | {row['model']} | {' | '.join([*times, *ratios])} |"


def report() -> None:
    """Write the page."""
    rows = read_rows(DATA)
    if not rows:
        raise SystemExit(f"{DATA}: nothing yet; python scripts/users_models_speed.py run")
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    lines = [
        "# Users' own models against plain PyG",
        "",
        f"Measured by `scripts/users_models_speed.py`, commit {commits}, "
        f"{max(row['date'] for row in rows)}, {os.cpu_count()} cores ({platform.machine()}), torch "
        f"{torch.__version__}. {LAYERS} layers, width {WIDTH} (DeeperGCN and PNA {NARROW}); one "
        "process, one thread, K = 1; all contenders have gnnpipe's heap settings. Milliseconds of "
        "an epoch (forward, loss, backward, Adam), contenders in turns: median (least to most). "
        "*Evened out*: plain PyG in gnnpipe's order of the vertices, with sparse features "
        "multiplied by the first linear maps, and for GCN, SAGE, GIN and classic a product with a "
        "kept transpose in place of messages (`scripts/users_models.py`). Ratios: the peer's time "
        "over ours. In training gnnpipe computes the last layer of GCN and SAGE for the training "
        "vertices only (60 % of all). "
        "Attention, DeeperGCN and PNA on ego_twitter are left out: PyG's messages of two "
        "contenders do not fit into 24 GiB.",
        "",
        "| graph | model | gnnpipe | PyG, `edge_index` | PyG, evened out | evened out / gnnpipe | "
        "`edge_index` / gnnpipe |",
        "|---|---|---|---|---|---|---|",
        *map(line, rows),
        "",
    ]
    for peer in ("evened out", "edge_index"):
        ratios = [ratio(row, peer) for row in rows]
        lines.append(
            f"- {peer}: geometric mean {statistics.geometric_mean(ratios):.2f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f}, of {len(rows)} cells."
        )
    text = "\n".join(lines) + "\n"
    (FOLDER / "users_models_speed.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    """Run the cells, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.what == "run":
        run(options.graphs, options.models)
    else:
        report()


if __name__ == "__main__":
    main()
