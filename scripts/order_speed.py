"""What the order of the vertices is worth to the sparse product, on real graphs.

python scripts/order_speed.py    # writes docs/benchmarks/order.md

One process, one thread. The same product A X (A of GCN, X [N, F] float32, F = 64 and 128) with the
vertices in the order given, in random order, by degree, by reverse Cuthill-McKee, and in parts of
METIS; the orders take turns, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
import scipy.sparse as sp  # noqa: E402
import torch  # noqa: E402
from fidelity import commit  # noqa: E402
from fidelity_cells import SHARED  # noqa: E402
from scipy.sparse.csgraph import reverse_cuthill_mckee  # noqa: E402

from gnnpipe import Graph  # noqa: E402
from gnnpipe.data.load import load_graph  # noqa: E402
from gnnpipe.graph.csr import RowCSR  # noqa: E402
from gnnpipe.graph.operators import weighted_rows  # noqa: E402
from gnnpipe.graph.partition import PARTITIONERS, PartitionTask, symmetric_pattern  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "order.md"
WIDTHS, REPEATS = (64, 128), 9
PARTS = (32, 128, 512, 2048)
SYNTHETIC = (
    "synthetic:planted:n=200000,degree=20,classes=50,features=8,homophily=0.8",
    "synthetic:rmat:n=200000,degree=20,features=8",
)

Order = np.ndarray


def in_parts(adjacency: sp.csr_array, parts: int, by_degree: bool) -> Order:
    """Part after part of METIS; inside by degree, the largest first, or as given."""
    n = adjacency.shape[0]
    if n < 4 * parts:
        return np.arange(n)
    work = np.ones(n, dtype=np.int64)
    part = PARTITIONERS["metis"](PartitionTask(adjacency, work, parts, least=0))
    degree = np.diff(adjacency.indptr)
    return np.lexsort((-degree if by_degree else np.arange(n), part))


def orders() -> dict[str, Callable[[sp.csr_array], Order]]:
    found: dict[str, Callable[[sp.csr_array], Order]] = {
        "given": lambda a: np.arange(a.shape[0]),
        "random": lambda a: np.random.default_rng(0).permutation(a.shape[0]),
        "degree": lambda a: np.argsort(-np.diff(a.indptr), kind="stable"),
        "RCM": lambda a: reverse_cuthill_mckee(sp.csr_matrix(a), symmetric_mode=True),
    }
    for parts in PARTS:
        found[f"METIS {parts}"] = lambda a, parts=parts: in_parts(a, parts, by_degree=True)
    found["METIS 512, inside as given"] = lambda a: in_parts(a, 512, by_degree=False)
    return found


def graphs() -> list[Graph]:
    names = ("squirrel", "coauthor_physics", "ego_twitter", "cnr_2000")
    found = [load_graph("debian")]
    for name in names:
        path = SHARED / f"{name}.npz"
        if path.exists():
            found.append(bare(path))
    return found + [load_graph(name) for name in SYNTHETIC]


def bare(path: Path) -> Graph:
    """A graph whose features are not asked for."""
    with np.load(path, allow_pickle=False) as data:
        edges = data["edge_index"].astype(np.int64)
        n = int(max(edges.max() + 1, len(data["y"]) if "y" in data else 0))
    from torch_geometric.data import Data

    mask = torch.ones(n, dtype=torch.bool)
    data = Data(
        x=torch.zeros(n, 1),
        edge_index=torch.from_numpy(edges),
        y=torch.zeros(n).long(),
        train_mask=mask,
        val_mask=~mask,
        test_mask=~mask,
    )
    return Graph.from_pyg(data, name=path.stem, symmetrize=True)


def measure(graph: Graph) -> list[tuple[str, float, dict[int, list[float]]]]:
    """By order: seconds that it takes to find, and of every product."""
    matrix = weighted_rows(graph, "gcn")
    adjacency = symmetric_pattern(graph)
    made = []
    for name, find in orders().items():
        start = time.perf_counter()
        perm = find(adjacency)
        took = time.perf_counter() - start
        turned = sp.csr_array(matrix[perm][:, perm])
        turned.sort_indices()
        rows = RowCSR.from_scipy(turned, torch.float32, torch.device("cpu"))
        made.append((name, took, rows, {width: [] for width in WIDTHS}))
    for width in WIDTHS:
        x = torch.randn(graph.num_vertices, width)
        for repeat in range(REPEATS + 1):
            for _, _, rows, times in made:
                start = time.perf_counter()
                rows.matmul(x)
                if repeat:
                    times[width].append(time.perf_counter() - start)
    return [(name, took, times) for name, took, _, times in made]


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        "# What the order of the vertices is worth",
        "",
        f"`python scripts/order_speed.py`, commit {commit()}, {time.strftime('%Y-%m-%d')}, one "
        f"thread, torch {torch.__version__}. Milliseconds of the product A X, median of {REPEATS} "
        "(least to most); the orders take turns. `x` is the given order's median over this one's.",
        "",
    ]
    for graph in graphs():
        lines += [
            f"## {graph.name}",
            "",
            f"{graph.num_vertices:,} vertices, {graph.num_edges:,} edges.",
            "",
            "| order | found in s | F = 64 | x | F = 128 | x |",
            "|---|---|---|---|---|---|",
        ]
        found = measure(graph)
        first = {width: statistics.median(found[0][2][width]) for width in WIDTHS}
        for name, took, times in found:
            cells = [name, f"{took:.2f}"]
            for width in WIDTHS:
                one = [1e3 * t for t in times[width]]
                cells.append(f"{statistics.median(one):.1f} ({min(one):.1f}-{max(one):.1f})")
                cells.append(f"{1e3 * first[width] / statistics.median(one):.2f}")
            lines.append(f"| {' | '.join(cells)} |")
            print(graph.name, *cells, flush=True)
        lines.append("")
    PAGE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
