"""The page of ``time_to_accuracy.py``: a table for each number of ranks and link, and curves."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
Row = dict[str, Any]
Place = tuple[int, int]
"""Ranks and Mbit/s."""

FULL = ("full batch, tuned", "gnnpipe full batch, tuned", "graph parallel, tuned")
DEFAULT = ("full batch, default", "graph parallel, default")
SHOWN = {
    "async": "async",
    "full batch, tuned": "PyG full batch, tuned",
    "full batch, default": "PyG full batch, default",
    "gnnpipe full batch, tuned": "gnnpipe full batch, tuned",
    "graph parallel, tuned": "graph parallel, tuned",
    "graph parallel, default": "graph parallel, default",
    "pipeline, tuned": "pipeline, fill-drain, tuned",
    "NeighborLoader": "NeighborLoader",
    "ClusterLoader": "ClusterLoader",
}
"""Contenders in the order of the columns."""


@dataclass(frozen=True)
class Case:
    """The runs of a graph and a model on some ranks, and those on one process, of one seed."""

    rows: list[Row]
    alone: list[Row]

    def best(self, contender: str) -> Row | None:
        """Returns the run that was first at the target, else the one that came nearest."""
        found = [r for r in self.rows if r["contender"] == contender]
        there = [r for r in found if r["reached"]]
        if there:
            return min(there, key=lambda r: r["reached"]["seconds"])
        return max(found, key=lambda r: max(r["val"], default=0.0), default=None)

    def gain(self, *others: str) -> tuple[float, bool] | None:
        """Returns how many times faster async is than the fastest of ``others``.

        The second value is true if none of them reached the target in its time, so that the first
        one is a lower bound. ``None``: nothing to compare.
        """
        ours = self.best("async")
        if ours is None or not ours["reached"]:
            return None
        runs = [r for r in (*self.rows, *self.alone) if r["contender"] in others and r["seconds"]]
        if not runs:
            return None
        seconds = ours["reached"]["seconds"]
        there = [r["reached"]["seconds"] for r in runs if r["reached"]]
        if there:
            return min(there) / seconds, False
        return min(r["seconds"][-1] for r in runs) / seconds, True


def cases(rows: list[Row], place: Place, model: str) -> dict[str, Case]:
    """Returns the cases of a place by graph, of seed 0 (and of others as 'graph, seed 1')."""
    found: dict[str, Case] = {}
    of_model = [r for r in rows if r["model"] == model]
    for row in of_model:
        if (row["ranks"], row["mbit"]) != place:
            continue
        same = [r for r in of_model if (r["graph"], r["seed"]) == (row["graph"], row["seed"])]
        name = row["graph"] + (f", seed {row['seed']}" if row["seed"] else "")
        here = [r for r in same if (r["ranks"], r["mbit"]) == place]
        found[name] = Case(here, [r for r in same if r["ranks"] == 1 and place[0] > 1])
    return found


def cell_text(row: Row | None) -> str:
    """Returns seconds, epochs and megabytes until the target, or how far the run came."""
    if row is None:
        return ""
    if not row["seconds"]:
        return "not run"
    there = row["reached"]
    if not there:
        return f"not in {row['seconds'][-1]:.1f} s ({max(row['val']):.3f})"
    text = f"{there['seconds']:.2f} s, {there['epochs']:.3g} ep."
    return text + (f", {there['bytes'] / 1e6:.1f} MB" if row["ranks"] > 1 else "")


def gain_text(gain: tuple[float, bool] | None) -> str:
    """Returns the factor; '>' marks a lower bound."""
    return "" if gain is None else f"{'> ' * gain[1]}{gain[0]:.1f}"


def table(rows: list[Row], place: Place, model: str) -> list[str]:
    """Returns the table of a model in a place."""
    found = cases(rows, place, model)
    names = {r["contender"] for case in found.values() for r in case.rows}
    shown = [name for name in SHOWN if name in names]
    head = ["graph", "target", *(SHOWN[name] for name in shown)]
    head += ["full batch, tuned / async", "default / async"]
    head += ["NeighborLoader / async", "ClusterLoader / async"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, case in found.items():
        tuned = [r for r in (*case.rows, *case.alone) if r["contender"] == FULL[0]]
        cells = [name, f"{max(tuned[0]['val']) - 0.005:.3f}" if tuned else ""]
        cells += [cell_text(case.best(contender)) for contender in shown]
        for others in (FULL, DEFAULT, ("NeighborLoader",), ("ClusterLoader",)):
            cells.append(gain_text(case.gain(*others)))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def summary(rows: list[Row], place: Place, model: str) -> str:
    """Returns on how many graphs async is faster, and by how much."""
    found = list(cases(rows, place, model).values())
    words = []
    for least, others, name in (
        (2.0, FULL, "the fastest tuned full batch"),
        (3.0, DEFAULT, "the default full batch"),
        (1.0, ("NeighborLoader",), "NeighborLoader"),
        (1.0, ("ClusterLoader",), "ClusterLoader"),
    ):
        gains = [gain for case in found if (gain := case.gain(*others))]
        reached = sum(gain[0] >= least for gain in gains)
        claim = "faster than" if least == 1 else f"at least {least:g} times as fast as"
        words.append(f"{claim} {name} on {reached} of {len(found)}")
    return f"Async is {'; '.join(words)}."


def set_up_lines(rows: list[Row]) -> list[str]:
    """Returns the table of the seconds of set-up and of the fastest settings."""
    lines = [
        "## Set-up, and the settings that are counted",
        "",
        "Set-up comes before the first epoch and is not part of the times above: METIS, operators, "
        "and of ClusterLoader with one part a batch all its batches. The common renumbering of the "
        "peers' graph is not part of it.",
        "",
        "| graph | model | ranks | Mbit/s | contender | set-up, s | setting | others tried |",
        "|" + "---|" * 8,
    ]
    for place in sorted({(r["ranks"], r["mbit"]) for r in rows}):
        for model in sorted({r["model"] for r in rows}):
            for name, case in cases(rows, place, model).items():
                for contender in SHOWN:
                    row = case.best(contender)
                    if row is None:
                        continue
                    setting = {k: v for k, v in row["setting"].items() if k != "kind"}
                    tried = sum(r["contender"] == contender for r in case.rows) - 1
                    cells = [name, model, *map(str, place), contender, f"{row['set_up_s']:.2f}"]
                    cells += [json.dumps(setting).strip("{}").replace('"', ""), str(tried)]
                    lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def draw(rows: list[Row], model: str) -> str:
    """Draws validation accuracy over seconds and epochs on one process; returns the line."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "gnnpipe"  # the same ids each time
    import matplotlib.pyplot as plt

    found = cases(rows, (1, 0), model)
    figure, axes = plt.subplots(len(found), 2, figsize=(9, 2.4 * len(found)), squeeze=False)
    for line, (name, case) in zip(axes, found.items(), strict=True):
        tuned = case.best(FULL[0])
        for axis, key in zip(line, ("seconds", "epochs"), strict=True):
            for contender in SHOWN:
                row = case.best(contender)
                if row is not None and row["seconds"]:
                    axis.plot(row[key], row["val"], lw=1, ms=2, marker=".", label=SHOWN[contender])
            if tuned is not None:
                axis.axhline(max(tuned["val"]) - 0.005, color="black", lw=0.8, ls="--")
            axis.set_xscale("log")
            axis.set_xlabel(key, fontsize=7)
            axis.set_ylabel(f"{name}, validation accuracy", fontsize=7)
            axis.tick_params(labelsize=6)
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    name = f"time_to_accuracy_{model}.svg"
    figure.savefig(FOLDER / name, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return f"![validation accuracy over seconds and epochs, {model}]({name})"


METHOD = """\
One thread a process; 2 ranks are network namespaces of this machine. Models: 4 layers of 64, \
dropout 0.5, Adam. Splits, drawn with the seed: 10/20/70 of pubmed, amazon_photo and \
coauthor_cs, 60/20/20 of squirrel (symmetrised) and debian_deps. **Target**: the best validation \
accuracy of PyG's tuned full batch with the same seed, less 0.5 points. A time is the training \
time until the first evaluation at the target; the clock stops in evaluations, which are exact \
on the whole graph for all. Full batch and async are evaluated after every epoch (async on 2 \
ranks after every second, since an evaluation drains its pipeline), samplers as soon as training \
took twice the time of an evaluation. Bytes: counted by gnnpipe; of the samplers' gradients by \
the closed form of a ring.

**Contenders.** *Full batch, tuned*: of the rates and schedules tried by \
`scripts/chunk_accuracy.py`, those that are the first at the target; *default*: Adam, 0.01, \
constant. *Async*: `--schedule async` with defaults (a step a chunk, cosine), 32 or 16 chunks, \
100, 50 or 25 epochs. Peers have torch CSR products with kept transposed matrices, sparse \
features where the graph has them, METIS's order of the vertices, fused Adam and gnnpipe's heap, \
which is faster than PyG's convolutions on an `edge_index` \
([an epoch on one device](single_speed.md)). \
*NeighborLoader*: PyG's, with the sampling operator of torch_sparse 0.6.18, \
compiled alone (pyg_lib cannot be had for this torch) and \
on one process a worker that draws batches on the second core; each layer computes only the rows \
that the next one reads, and GCN's sampled edges are weighted so that the sum is unbiased. \
*ClusterLoader*: PyG's, on METIS parts. On 2 ranks the samplers hold the whole graph on each \
rank, divide the training vertices or the parts, and average gradients after each batch. A \
contender with several settings is counted by its fastest one; a setting was ended when another \
one had been faster. "not in t s (a)": ended after t seconds at validation accuracy a. / async: \
how many times longer; > where the other one did not get there; of full batch the fastest of PyG \
and gnnpipe on one process and of graph parallelism."""


def write_page(rows: list[Row]) -> None:
    """Writes the page and its figures."""
    rows = [row for row in rows if not row["failed"]]
    if not rows:
        raise SystemExit("no runs yet; python scripts/time_to_accuracy.py run")
    dates, versions = sorted(r["date"] for r in rows), sorted({r["commit"] for r in rows})
    lines = [
        "# Time to accuracy",
        "",
        "This page measures how long training takes until a validation accuracy is reached.",
        "",
        f"`scripts/time_to_accuracy.py`, {dates[0]} to {dates[-1]}, commit {', '.join(versions)}, "
        f"a machine of {os.cpu_count()} cores. {METHOD}",
        "",
    ]
    models = sorted({row["model"] for row in rows})
    for ranks, mbit in sorted({(r["ranks"], r["mbit"]) for r in rows}, key=_in_order):
        where = "One process" if ranks == 1 else f"{ranks} ranks"
        if ranks > 1:
            where += f", links of {mbit} Mbit/s" if mbit else ", links without a limit"
        lines += [f"## {where}", ""]
        for model in models:
            if cases(rows, (ranks, mbit), model):
                lines += [f"### {model.upper()}", "", summary(rows, (ranks, mbit), model), ""]
                lines += table(rows, (ranks, mbit), model)
    lines += ["## Curves on one process", ""]
    for model in models:
        if cases(rows, (1, 0), model):
            lines += [draw(rows, model), ""]
    lines += set_up_lines(rows)
    (FOLDER / "time_to_accuracy.md").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")


def _in_order(place: Place) -> tuple[int, bool, int]:
    return place[0], bool(place[1]), place[1]
