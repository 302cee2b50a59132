"""An epoch on one GPU against PyG on the same card; the sparse product against its memory.

python scripts/gpu_speed.py run [--graphs A B] [--models M] [--layers 3 16] [--repeats 15]
python scripts/gpu_speed.py report     # writes docs/benchmarks/gpu_speed.md, .csv and .png

The contenders of a cell are built in one process and take turns, an epoch each (forward, loss,
backward, Adam; dropout 0.5), with the GPU waited for before and behind it. PyG runs with its
default edge_index (normalised once), with a torch CSR adjacency, with ``even`` (what gnnpipe has:
the transposed matrix kept for backward, sparse features through the first Linear, our order of the
vertices) and with ``replayed`` (even, and the whole epoch replayed as one CUDA graph, of which
gnnpipe replays all but masks and Adam). PyG's ``EdgeIndex`` can be asked for; torch_sparse has no
wheel for this torch. A machine that was sent a copy of the files is told their commit in
GNNPIPE_COMMIT.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import peers  # noqa: E402
from benchmark_files import bars, read_rows, write_csv  # noqa: E402
from fidelity import commit  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "gpu_speed.md"
DATA = Path(os.environ.get("GPU_DATA", ROOT / "docs" / "benchmarks" / "data" / "gpu_speed.jsonl"))
GRAPHS = {
    "squirrel": "squirrel",
    "planted, degree 80": "synthetic:planted:n=30000,degree=80,classes=20,features=128",
    "debian": "debian",
    "coauthor_physics": "coauthor_physics",
    "ego_twitter": "ego_twitter",
    "cnr_2000": "cnr_2000",
    "planted, 1 M": "synthetic:planted:n=1000000,degree=20,classes=20,features=128",
}
FORMS = ("edge_index", "csr", "even", "replayed")
WARM_UP, SLOW_S, SLOW_TURNS = 6, 1.0, 9


def waited(work: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def contender(
    name: str, graph: Any, model: str, layers: int, width: int
) -> tuple[peers.Epoch, Any]:
    """An epoch, and ours' executor."""
    import torch

    if name == "ours":
        epoch, rank_runtime = peers.ours(graph, model, layers, width)
        return epoch, rank_runtime.executor
    form = name.partition(":")[2]
    torch.set_default_device("cuda")
    try:
        if form in ("even", "replayed"):
            epoch = peers.with_pyg_evened(
                graph, model, layers, width, peers.STEPS.index("order") + 1
            )
            return (epoch if form == "even" else replayed(epoch)), None
        return peers.with_pyg(graph, model, layers, width, form), None
    finally:
        torch.set_default_device(None)


def replayed(epoch: peers.Epoch) -> peers.Epoch:
    """The epoch as one CUDA graph, after a few epochs on a stream beside (torch's own recipe)."""
    import torch

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            epoch()
    torch.cuda.current_stream().wait_stream(beside)
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        epoch()

    def again(whole: Any = whole, epoch: peers.Epoch = epoch) -> None:
        """Hold ``epoch`` as well: the graph reads the memory of its tensors."""
        whole.replay()

    return again


def measure(
    graph: Any, model: str, layers: int, width: int, names: list[str], repeats: int
) -> dict[str, Any]:
    import torch

    running, times, failed, executor = {}, {name: [] for name in names}, {}, None
    for name in names:
        try:
            running[name], made = contender(name, graph, model, layers, width)
            executor = executor or made
            for _ in range(WARM_UP):
                waited(running[name])
        except (RuntimeError, TypeError, ValueError) as error:  # out of memory, or not supported
            running.pop(name, None)
            failed[name] = str(error).splitlines()[0][:90]
            torch.cuda.empty_cache()
    for turn in range(repeats):
        for name, epoch in running.items():
            if turn < SLOW_TURNS or min(times[name]) < SLOW_S:
                times[name].append(waited(epoch))
    found: dict[str, Any] = {name: {"seconds": times[name]} for name in running}
    if "ours" in found:  # as a CUDA graph
        found["ours"]["is_repeated"] = getattr(executor, "is_recorded", False)
    return found | {name: {"failed": why} for name, why in failed.items()}


def products(graph: Any, width: int) -> dict[str, float]:
    """Seconds of one product with the graph's matrix by kernel, and bytes that it must move."""
    from gnnpipe.ops.spmm import time_kernels

    histories = peers.ours(graph, "gcn", 3, width)[1].executor.stage.histories
    matrix = next(iter(histories.values())).operator.forward
    args = matrix.indptr, matrix.indices, matrix.values, matrix.num_columns, width
    entries, rows = len(matrix.indices), matrix.num_rows
    size = entries * (4 * width + 8) + 4 * rows * width
    return {**time_kernels(*args), "bytes": float(size), "entries": float(entries)}


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy within the card's memory."""
    import torch

    source = torch.empty(1 << 28, device="cuda").uniform_()
    target = torch.empty_like(source)
    best = min(waited(lambda: target.copy_(source)) for _ in range(10))
    return 2.0 * source.nbytes / best


def run(args: argparse.Namespace) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    DATA.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": os.environ.get("GNNPIPE_COMMIT") or commit(),
        "date": time.strftime("%Y-%m-%d"),
        "copy": copy_rate(),
    }
    for graph_name in args.graphs:
        graph = peers.load(GRAPHS[graph_name])
        for width in args.widths:
            write(
                {
                    "cell": f"{graph_name}|product||{width}",
                    **about,
                    "results": products(graph, width),
                }
            )
            for model in args.models:
                for layers in args.layers:
                    names = ["ours", *(f"pyg:{form}" for form in args.forms)]
                    found = measure(graph, model, layers, width, names, args.repeats)
                    write(
                        {
                            "cell": f"{graph_name}|{model}|{layers}|{width}",
                            **about,
                            "results": found,
                        }
                    )
                    torch.cuda.empty_cache()


def write(row: dict[str, Any]) -> None:
    with DATA.open("a") as file:
        file.write(json.dumps(row) + "\n")
    short = {
        k: f"{1e3 * statistics.median(v['seconds']):.2f}" if "seconds" in v else v["failed"]
        for k, v in row["results"].items()
        if isinstance(v, dict)
    }
    print(row["cell"], short or row["results"], flush=True)


def report(args: argparse.Namespace) -> None:
    rows = read_rows(DATA)
    last = rows[-1]
    epochs = [row for row in rows if row["cell"].split("|")[1] != "product"]
    names = list(dict.fromkeys(name for row in epochs for name in row["results"]))
    lines = [
        "# An epoch on one GPU, beside PyG",
        "",
        f"`scripts/gpu_speed.py`, commit {last['commit']}, {last['date']}; one {last['card']}, "
        f"torch {last['torch']}. {args.note}".rstrip(),
        "",
        "Contenders are in one process and take turns, an epoch each (forward, loss, backward, "
        "Adam, dropout 0.5), the GPU waited for in front and behind. Milliseconds, median "
        "(least-most); F = 128, float32, no TF32. What PyG gets: `edge_index`: its default, "
        "normalised once; `csr`: a torch CSR adjacency; `even`: also what gnnpipe has (the "
        "transposed matrix kept for backward, sparse features through the first Linear, "
        "gnnpipe's order of the vertices); `replayed`: `even`, and the whole epoch replayed as "
        "one CUDA graph (gnnpipe replays all but masks and Adam). torch_sparse has no wheel for "
        "this torch. Last "
        "columns: PyG's `csr` over ours, and the best of PyG over ours; *not replayed*: ours "
        "was not replayed as a CUDA graph.",
        "",
        "| graph | model | layers | " + " | ".join(names) + " | csr / ours | best / ours |",
        "|---|---|---|" + "---|" * (len(names) + 2),
    ]
    table, groups, ratios = [], {}, []
    for row in epochs:
        graph, model, layers, _ = row["cell"].split("|")
        ms = {
            k: [1e3 * t for t in v["seconds"]] for k, v in row["results"].items() if "seconds" in v
        }
        mine = statistics.median(ms["ours"])
        best = min(statistics.median(v) for k, v in ms.items() if k != "ours") / mine
        csr = statistics.median(ms["pyg:csr"]) / mine if "pyg:csr" in ms else float("nan")
        ratios.append((csr, best))
        apart = "" if row["results"]["ours"]["is_repeated"] else ", not replayed"
        cells = [
            f"{statistics.median(ms[n]):.2f} ({min(ms[n]):.2f}-{max(ms[n]):.2f})"
            if n in ms
            else row["results"][n]["failed"]
            for n in names
        ]
        found = f"{csr:.2f} | {best:.2f}{apart}"
        lines.append(f"| {graph} | {model} | {layers} | {' | '.join(cells)} | {found} |")
        groups[f"{model} {layers} {graph}"] = {"csr": csr, "the best of PyG": best}
        table.append(
            {
                "graph": graph,
                "model": model,
                "layers": layers,
                "csr_ratio": round(csr, 3),
                "best_ratio": round(best, 3),
                **{f"{n}_ms": round(statistics.median(v), 3) for n, v in ms.items()},
            }
        )
    lines += [
        "",
        *(
            f"- {name}: median {statistics.median(found):.2f} times ours, from {min(found):.2f} to "
            f"{max(found):.2f}, in {len(found)} cells."
            for name, found in zip(
                ("PyG with a CSR matrix", "The best of PyG"), zip(*ratios, strict=True), strict=True
            )
        ),
        "",
        bars("gpu_speed", groups, "PyG's epoch over ours", aim=1.0),
        "",
        "## The sparse product",
        "",
        f"The card copies {last['copy'] / 1e9:.0f} GB/s, read and written. A product must read a "
        "neighbour's row, an index and a weight for each entry, and write the rows; more than the "
        "card's rate is what its cache saves (METIS order).",
        "",
        "| graph | entries | triton us | csr us | embedding_bag us | triton GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        graph, what, _, _ = row["cell"].split("|")
        if what == "product":
            found = row["results"]
            us = [f"{1e6 * found[k]:.0f}" for k in ("triton", "csr", "embedding-bag")]
            rate = found["bytes"] / found["triton"] / 1e9
            lines.append(f"| {graph} | {found['entries']:.0f} | {' | '.join(us)} | {rate:.0f} |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_csv("gpu_speed", table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("run")
    one.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    one.add_argument("--models", nargs="+", default=["gcn", "sage", "gcnii"])
    one.add_argument("--layers", nargs="+", type=int, default=[3, 16])
    one.add_argument("--widths", nargs="+", type=int, default=[128])
    one.add_argument("--forms", nargs="+", default=list(FORMS))
    one.add_argument("--repeats", type=int, default=15)
    one.set_defaults(call=run)
    two = actions.add_parser("report")
    two.add_argument("--note", default="", help="what else is to be known")
    two.set_defaults(call=report)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
