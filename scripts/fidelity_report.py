"""Pages and plots from the cells of the fidelity benchmark that are there so far."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fidelity_cells import ABLATION, Cell, tables
from scipy import stats

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
TAIL = 20
BOUNDS = {
    "main": (0.5, 1.0),
    "single": (1.0, 2.0),
    "again": (1.0, 2.0),
    "arxiv": (1.0, 1.0),
    "decay": (0.5, 1.0),
}
"""Points that auto may end under exact, set before anything was run: on the mean, and a row."""
SLACK = 0.3
"""Points that the deviation may be above twice that of exact."""
Rows = Mapping[str, Mapping[str, Any]]


def write_pages(rows: Rows, names: Collection[str]) -> None:
    """Write page and plots of each of these tables that has a finished pair; no names: of all."""
    every = tables()
    for name, title, write in (
        ("main", "Does `auto` end where `exact` ends?", pairs_page),
        ("single", "One seed: other settings, models and graphs", pairs_page),
        (
            "again",
            "Squirrel with small steps, where one seed ends far under: three seeds",
            pairs_page,
        ),
        ("arxiv", "A graph of the size of ogbn-arxiv", pairs_page),
        ("decay", "With weight decay 5e-4", pairs_page),
        ("ablation", "Technique by technique", ablation_page),
    ):
        cells = every[name]
        have = [cell for cell in cells if cell.key() in rows]
        if not have or (names and name not in names):
            continue
        lines = [f"# Fidelity. {title}", "", *made_by(rows, cells, have, name)]
        lines += write(name, rows, have)
        path = FOLDER / f"fidelity_{name}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(path)


def made_by(rows: Rows, cells: Sequence[Cell], have: Sequence[Cell], name: str) -> list[str]:
    found = [rows[cell.key()] for cell in have]
    commits = ", ".join(sorted({r["commit"] for r in found}))
    dates = ", ".join(sorted({r["date"] for r in found}))
    epochs = ", ".join(sorted({str(cell.epochs) for cell in have}))
    decays = ", ".join(sorted({f"{cell.weight_decay:g}" for cell in have}))
    machines = ", ".join(sorted({f"{r['machine']}, torch {r['torch']}" for r in found}))
    return [
        f"Made by `scripts/fidelity.py run {name}` and `report`; commits {commits}; {dates}; "
        f"{machines}, one thread. {len(have)} of {len(cells)} runs are in. Hidden 64, dropout "
        f"0.5, Adam with weight decay {decays}, {epochs} epochs; pubmed is split 10/20/70, the "
        "others as they come. Test accuracy in %; *tail* is the mean of the last 20 "
        "epochs, each of them evaluated, and *dev* their deviation. *exact* walks one chunk; "
        "*auto* K chunks, in one process: for a fixed K and seed the result does not depend on S "
        "or G, up to rounding.",
        "",
    ]


def tail(row: Mapping[str, Any]) -> list[float]:
    return [100 * v for v in row["test"][-TAIL:]]


def pairs(rows: Rows, have: Iterable[Cell]) -> dict[tuple[Any, ...], list[tuple[Any, Any]]]:
    """(auto, exact) rows of all seeds by setting, in table order."""
    found: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
    for cell in have:
        if cell.policy == "exact":
            continue
        twin = Cell(
            cell.dataset,
            cell.model,
            cell.layers,
            "exact",
            cell.seed,
            32,
            cell.lr,
            cell.epochs,
            cell.weight_decay,
        )
        if twin.key() in rows:
            setting = (cell.dataset, cell.model, cell.layers, cell.chunks, cell.lr, cell.epochs)
            found.setdefault(setting, []).append((rows[cell.key()], rows[twin.key()]))
    return found


def interval(gaps: Sequence[float]) -> str:
    """95 % confidence interval of the mean over seeds, by Student's t; '' for a single seed."""
    if len(gaps) < 2:
        return ""
    half = stats.t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
    return f"{statistics.mean(gaps) - half:+.2f} to {statistics.mean(gaps) + half:+.2f}"


def pairs_page(name: str, rows: Rows, have: Sequence[Cell]) -> list[str]:
    lines = [
        "| graph | model | K | lr | epochs | seeds | exact, last | auto, last | difference | "
        "by seed | 95 % interval | exact, tail | auto, tail | difference | dev exact | dev auto | "
        "exact epochs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    last_gaps, tail_gaps, wide, outside = [], [], [], []
    on_mean, of_row = BOUNDS[name]
    extra_edges, extra_rows, exact_shares = [], [], []
    found = pairs(rows, have)
    for (graph, model, layers, chunks, lr, epochs), both in found.items():
        ends = [(tail(a), tail(e)) for a, e in both]
        last = [statistics.mean(side[-1] for side in column) for column in zip(*ends, strict=True)]
        mean = [statistics.mean(map(statistics.mean, c)) for c in zip(*ends, strict=True)]
        dev = [statistics.mean(map(statistics.pstdev, c)) for c in zip(*ends, strict=True)]
        last_gaps.append(last[0] - last[1])
        tail_gaps.append(mean[0] - mean[1])
        wide.append(dev[0] - 2 * dev[1])
        if last_gaps[-1] < -of_row or wide[-1] > SLACK:
            what = f"{last_gaps[-1]:+.2f}" if last_gaps[-1] < -of_row else "deviation"
            where = f"{graph} {model} {layers}, K = {chunks}, lr {lr:g}, {epochs} epochs"
            outside.append(f"{where} ({what})")
        seeds = " ".join(f"{a[-1] - e[-1]:+.2f}" for a, e in ends) if len(ends) > 1 else ""
        extra_edges += [a["extra_edges"] for a, _ in both]
        extra_rows += [a["extra_rows"] for a, _ in both]
        walked = [round(a["exact_epochs"] * epochs) for a, _ in both if "exact_epochs" in a]
        exact_shares += [a.get("exact_epochs") for a, _ in both]
        lines.append(
            f"| {graph} | {model} {layers} | {chunks} | {lr:g} | {epochs} | {len(both)} | "
            f"{last[1]:.2f} | {last[0]:.2f} | {last_gaps[-1]:+.2f} | {seeds} | "
            f"{interval([a[-1] - e[-1] for a, e in ends])} | "
            f"{mean[1]:.2f} | {mean[0]:.2f} | {tail_gaps[-1]:+.2f} | {dev[1]:.2f} | {dev[0]:.2f} | "
            f"{' '.join(map(str, walked)) if len(walked) == len(both) else ''} |"
        )
    lines += [
        "",
        f"Mean difference: last epoch {statistics.mean(last_gaps):+.2f}, tail "
        f"{statistics.mean(tail_gaps):+.2f} points. Worst: {min(last_gaps):+.2f} and "
        f"{min(tail_gaps):+.2f}. Deviation of auto beyond twice that of exact: at most "
        f"{max(wide):+.2f} points.",
        "",
        f"Bounds set before the runs: {on_mean} points under on the mean, {of_row} in a row; a "
        f"deviation of twice exact's and {SLACK} points. Outside: {'; '.join(outside) or 'none'}.",
        "",
        f"Extra work of the forecast, mean over the runs: {statistics.mean(extra_edges):.1%} of "
        f"the SpMM's edges, {statistics.mean(extra_rows):.1%} of the rows between stages.",
    ]
    known = [share for share in exact_shares if share is not None]
    if known:
        lines += [
            "",
            "*exact epochs*: of auto, by seed; the first, and those behind a jump of the gradients "
            f"(adr 0019), on the mean {statistics.mean(known):.1%} of a run, at most "
            f"{max(known):.1%}. They take no more work or bytes, but stages hardly overlap in "
            "them.",
        ]
    if len(known) < len(exact_shares):
        lines += [
            "",
            f"{len(exact_shares) - len(known)} of {len(exact_shares)} runs of auto, those without "
            "that number, were made before there were exact epochs behind jumps.",
        ]
    curves(name, {setting: both[0] for setting, both in found.items()})
    drifts(name, {setting: both[0][0] for setting, both in found.items()})
    lines += ["", f"![Test accuracy against epoch](fidelity_{name}.svg)"]
    lines += ["", f"![Drift against epoch](fidelity_{name}_drift.svg)"]
    return lines


def ablation_page(name: str, rows: Rows, have: Sequence[Cell]) -> list[str]:
    lines = [
        "GCNII of 16 layers, K = 32, lr 0.01, seed 0: one seed, and seeds differ by points where a "
        "model hardly learns. *best* is the best TEST accuracy, and the target of a graph 99 % of "
        "that of exact. Seconds: epochs to the target times the time of an epoch in one process, "
        "where exact walks one chunk; the machine did other things too, so compare epochs. On S "
        "stages the others overlap and exact does not.",
        "",
        "| graph | policy | last | tail | dev | best | epochs to target | s to target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    graphs = list(dict.fromkeys(cell.dataset for cell in have))
    by_graph: dict[str, dict[str, Mapping[str, Any]]] = {}
    for graph in graphs:
        found = {c.policy: rows[c.key()] for c in have if c.dataset == graph}
        by_graph[graph] = found
        target = 0.99 * max(found["exact"]["test"]) if "exact" in found else None
        for policy in ABLATION:
            if policy not in found:
                continue
            row = found[policy]
            ends = tail(row)
            reached = [
                e for e, v in zip(row["epoch"], row["test"], strict=True) if target and v >= target
            ]
            when = f"{reached[0]} | {reached[0] * row['epoch_time_s']:.0f}" if reached else "- | -"
            lines.append(
                f"| {graph} | {policy} | {ends[-1]:.2f} | {statistics.mean(ends):.2f} | "
                f"{statistics.pstdev(ends):.2f} | {100 * max(row['test']):.2f} | {when} |"
            )
    figure, axes = canvas(len(graphs))
    for axis, graph in zip(axes, graphs, strict=False):
        for policy, row in by_graph[graph].items():
            axis.plot(row["epoch"], [100 * v for v in row["test"]], label=policy, lw=1)
        axis.set_title(graph, fontsize=8)
    axes[0].legend(fontsize=6)
    save(figure, f"fidelity_{name}.svg")
    return [*lines, "", f"![Test accuracy against epoch](fidelity_{name}.svg)"]


def canvas(count: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gnnpipe"  # the same file from the same data
    import matplotlib.pyplot as plt

    columns = min(3, count)
    lines = -(-count // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(3.4 * columns, 2.2 * lines), squeeze=False)
    axes = list(grid.flat)
    for axis in axes:
        axis.tick_params(which="both", labelsize=6)
    for axis in axes[count:]:
        axis.axis("off")
    return figure, axes


def save(figure: Any, name: str) -> None:
    figure.supxlabel("epoch", fontsize=7)
    figure.tight_layout()
    figure.savefig(FOLDER / name, metadata={"Date": None})


def curves(name: str, first: Mapping[tuple[Any, ...], tuple[Any, Any]]) -> None:
    figure, axes = canvas(len(first))
    for axis, (setting, (auto, exact)) in zip(axes, first.items(), strict=False):
        for row, label in ((exact, "exact"), (auto, "auto")):
            axis.plot(row["epoch"], [100 * v for v in row["test"]], label=label, lw=1)
        axis.set_title(title(setting), fontsize=7)
    axes[0].legend(fontsize=6)
    save(figure, f"fidelity_{name}.svg")


def drifts(name: str, first: Mapping[tuple[Any, ...], Any]) -> None:
    """Means over the layers of what was measured in each evaluated epoch."""
    figure, axes = canvas(len(first))
    for axis, (setting, row) in zip(axes, first.items(), strict=False):
        for key, label in (
            ("drift", "drift, dropout included"),
            ("moved", "moved by the weights"),
            ("missed", "missed by the forecast"),
        ):
            if row.get(key):
                epochs = row["epoch"][-len(row[key]) :]
                axis.semilogy(epochs, row[key], label=label, lw=1)
        axis.set_title(title(setting), fontsize=7)
    axes[0].legend(fontsize=6)
    save(figure, f"fidelity_{name}_drift.svg")


def title(setting: tuple[Any, ...]) -> str:
    graph, model, layers, chunks, lr, _ = setting
    more = "" if (chunks, lr) == (32, 0.01) else f", K {chunks}, lr {lr:g}"
    return f"{graph}, {model} {layers}{more}"
