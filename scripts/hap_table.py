"""Unequal devices and links: HAP's search against equal shares and shares by speed, simulated.

python scripts/hap_table.py    # writes docs/benchmarks/hap.md, in some minutes

Everything is computed from data sheets and stated numbers; nothing is measured.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from hap_states import states_section  # noqa: E402

from gnnpipe.config import TrainConfig  # noqa: E402
from gnnpipe.plan.cluster import Cluster, Device, Link  # noqa: E402
from gnnpipe.planner.given_devices import Hardware  # noqa: E402
from gnnpipe.planner.hap_pipeline import Choice, Choices, GroupedPlan, GroupPlanner, best_plan  # noqa: E402
from gnnpipe.profiling.scenario import GraphShape, model_on_shape  # noqa: E402
from gnnpipe.profiling.search import workload_of_shape  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "hap.md"
LAYERS, HIDDEN = 32, 128
CHUNKS = (8, 32)
P100_SPEED, P100_MEMORY = 2.15 / 3.86, 732 / 900
NIC, INSIDE, ISLAND = Link(10.4e9 / 8, 50e-6), Link(10e9, 10e-6), Link(100e9, 10e-6)


@dataclass(frozen=True)
class Devices:
    """A cluster, with the speeds of its memories."""

    cluster: Cluster
    memory_speeds: tuple[float, ...]


def cluster_of(
    machines: list[list[tuple[float, float]]], outside: Link = NIC, inside: Link = INSIDE
) -> Devices:
    """``machines``: speed and memory speed of every device, by machine."""
    both, pairs = [], {}
    for machine in machines:
        first = len(both)
        both += machine
        ranks = range(first, len(both))
        pairs |= {(a, b): inside for a in ranks for b in ranks if a < b}
    if len(machines) == 1:
        # Equal links; with no usual link to compare with, all devices would be one machine.
        outside, pairs = inside, {}
    devices = tuple(Device(speed, 16 * 10**9) for speed, _ in both)
    return Devices(Cluster(devices, outside, pairs), tuple(memory for _, memory in both))


V100, P100, HALF = (1.0, 1.0), (P100_SPEED, P100_MEMORY), (0.5, 0.5)
CLUSTERS = {
    "2 x 8 V100 + 6 x 8 P100": cluster_of([[V100] * 8] * 2 + [[P100] * 8] * 6),
    "8 V100 + 8 P100": cluster_of([[V100] * 8, [P100] * 8]),
    "8 in one machine, one at half": cluster_of([[V100] * 7 + [HALF]]),
    "2 machines, one at half": cluster_of([[V100], [HALF]]),
    "4 machines, one at half": cluster_of([[V100]] * 3 + [[HALF]]),
    "two islands of 4, slow link": cluster_of(
        [[V100] * 4] * 2, outside=Link(0.125e9, 50e-6), inside=ISLAND
    ),
}

# (vertices, edges, features, classes, M / N on 8 shards)
GRAPHS = {
    "reddit": (232_965, 114_615_892, 602, 41, 2.61),
    "flickr": (89_250, 899_756, 500, 7, 2.15),
    "physics": (34_493, 495_924, 8415, 5, 0.99),
    "arxiv": (169_343, 2_315_598, 128, 40, 0.68),
    "products": (2_449_029, 123_718_280, 100, 47, 0.90),
}
PHYSICS_STORED = 1_142_000


def halo(on_8: float, shards: int) -> float:
    """M / N on so many shards."""
    return min(shards - 1.0, on_8 * ((shards - 1) / 7) ** 0.75)


EV = Choices(Choice.EQUAL, Choice.EQUAL, by_halo=True)
CP = Choices(Choice.BY_SPEED, Choice.BY_SPEED, by_halo=True)
HAP = Choices()
OFF = {
    "equal shares": replace(HAP, shares=Choice.EQUAL),
    "halo exchanges alone": replace(HAP, by_halo=True),
    "equal cuts": replace(HAP, cuts=Choice.EQUAL),
}
RANGES = {"graph": range(1, 2), "pipeline": range(2, LAYERS + 1)}


@dataclass(frozen=True)
class Cell:
    """The plans of one graph on one cluster, by name of the search and range of stages."""

    cluster: str
    graph: str
    plans: dict[tuple[str, str], GroupedPlan]
    ways: str

    def time_s(self, search: str, kind: str) -> float:
        """Epoch time; ``all`` takes the better of both ranges."""
        kinds = RANGES if kind == "all" else [kind]
        return min(self.plans[search, one].epoch_s for one in kinds)

    def least_gain(self, kind: str) -> float:
        """Time of the better baseline over HAP's."""
        return min(self.gain("EV", kind), self.gain("CP", kind))

    def gain(self, search: str, kind: str) -> float:
        """Time of a search over HAP's."""
        return self.time_s(search, kind) / self.time_s("HAP", kind)


def cell_of(cluster: str, graph: str) -> Cell:
    """Search one cell with every freedom."""
    vertices, edges, features, classes, on_8 = GRAPHS[graph]
    stored = PHYSICS_STORED if graph == "physics" else 0
    shape = GraphShape(vertices, edges, features, classes, on_8, stored)
    config = TrainConfig(model="gcn", layers=LAYERS, hidden=HIDDEN)
    devices = CLUSTERS[cluster]
    hardware = Hardware(sheets="v100:10gbe", cluster=devices.cluster)
    work = workload_of_shape(config, shape, model_on_shape(config, shape), hardware)
    work = replace(work, halo=lambda shards: halo(on_8, shards))
    planner = GroupPlanner(work, devices.memory_speeds)
    plans = {
        (name, kind): best_plan(planner, choices, stages, CHUNKS)
        for name, choices in {"EV": EV, "CP": CP, "HAP": HAP, **OFF}.items()
        for kind, stages in RANGES.items()
    }
    used = {
        way.value
        for stage in plans["HAP", "graph"].stages
        for way in stage.ways(planner.workload).values()
    }
    return Cell(cluster, graph, plans, ", ".join(sorted(used)))


def shape_text(plan: GroupedPlan) -> str:
    """Stages x ranks x chunks, and the layers by stage."""
    ranks = len(plan.stages[0].ranks)
    layers = [stage.ops[1] - stage.ops[0] for stage in plan.stages]
    shown = ",".join(map(str, layers[:8])) + ",..." * (len(layers) > 8)
    return f"{len(plan.stages)} x {ranks} x {plan.chunks}" + f" ({shown})" * (len(layers) > 1)


def cell_rows(cells: list[Cell]) -> Iterator[str]:
    """One row for each cell."""
    yield (
        "| cluster | graph | graph parallel: EV s | CP s | HAP s | ways | EV / HAP | CP / HAP | "
        "pipeline: EV s | CP s | HAP s | HAP's stages x ranks x chunks (layers) | EV / HAP | "
        "CP / HAP | all: EV / HAP | CP / HAP |"
    )
    yield "|---" * 16 + "|"
    for c in cells:
        times = {k: [c.time_s(s, k) for s in ("EV", "CP", "HAP")] for k in RANGES}
        graph, pipe = ([f"{t:.3g}" for t in times[k]] for k in RANGES)
        gains = {k: [f"{c.gain(s, k):.2f}" for s in ("EV", "CP")] for k in (*RANGES, "all")}
        yield (
            f"| {c.cluster} | {c.graph} | {' | '.join(graph)} | {c.ways} | "
            f"{' | '.join(gains['graph'])} | {' | '.join(pipe)} | "
            f"{shape_text(c.plans['HAP', 'pipeline'])} | {' | '.join(gains['pipeline'])} | "
            f"{' | '.join(gains['all'])} |"
        )


def summary_rows(cells: list[Cell]) -> Iterator[str]:
    """Geometric means and the best of all cells."""
    yield "| | EV / HAP: mean | best | CP / HAP: mean | best |"
    yield "|---|---|---|---|---|"
    words = {"graph": "within graph parallelism", "pipeline": "within pipelines", "all": "all"}
    for cluster in ("", *CLUSTERS):
        chosen = [c for c in cells if cluster in ("", c.cluster)]
        for kind, name in words.items():
            found = [[c.gain(s, kind) for c in chosen] for s in ("EV", "CP")]
            shown = (f"{statistics.geometric_mean(g):.2f} | {max(g):.2f}" for g in found)
            yield f"| {cluster or '**all clusters**'}, {name} | {' | '.join(shown)} |"


def off_rows(cells: list[Cell]) -> Iterator[str]:
    """The gain that each freedom is worth."""
    yield "| cluster | without | within graph parallelism | within pipelines | all |"
    yield "|---|---|---|---|---|"
    for cluster in ("", *CLUSTERS):
        chosen = [c for c in cells if cluster in ("", c.cluster)]
        for name in OFF:
            gains = [
                f"{statistics.geometric_mean(g):.2f}, {max(g):.2f}"
                for g in ([c.gain(name, kind) for c in chosen] for kind in (*RANGES, "all"))
            ]
            yield f"| {cluster or '**all clusters**'} | {name} | {' | '.join(gains)} |"


def page(cells: list[Cell], search_s: float) -> str:
    """docs/benchmarks/hap.md."""
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
    ).strip()
    best = max(c.least_gain(k) for c in cells for k in RANGES)
    every = max(c.least_gain("all") for c in cells)
    return (
        "\n".join(
            [
                "# Unequal devices: searched shares, ways and cuts",
                "",
                "This page compares plans found as in HAP (arXiv 2401.05965) with equal shares and "
                "with shares by speed, on clusters of unlike devices.",
                "",
                f"Made by `scripts/hap_table.py`; commit {commit}; {time.strftime('%Y-%m-%d')}; "
                f"{os.cpu_count()} cores ({platform.machine()}), one thread; {search_s:.0f} s of "
                "processor for all searches. **Nothing on this page is measured**: all times are "
                "those of the planner's cost formulas.",
                "",
                f"The largest gain over the better of EV and CP is {best:.2f} within graph "
                f"parallelism or pipelines, and {every:.2f} over all shapes; HAP's paper reports "
                "up to 2.41, for other models.",
                "",
                *assumptions(),
                "",
                "## Gains",
                "",
                "Time over HAP's: geometric mean and best, over the graphs.",
                "",
                *summary_rows(cells),
                "",
                "## Where the gain comes from",
                "",
                "Time with one freedom taken away over HAP's: geometric mean, largest.",
                "",
                *off_rows(cells),
                "",
                "## Cells",
                "",
                "Seconds of an epoch. Ways: how rows travel in HAP's plan in graph parallelism.",
                "",
                *cell_rows(cells),
                "",
                *states_section(),
            ]
        )
        + "\n"
    )


def assumptions() -> Iterator[str]:
    """State what the numbers rest on."""
    yield "## Assumptions"
    yield ""
    yield (
        f"- Model: GCN of {LAYERS} layers, width {HIDDEN}, float32, on graphs with the numbers of "
        "vertices, edges, features and classes of the datasets."
    )
    yield (
        "- Devices: a V100 by the roofline of its data sheet (`perf.hardware`). A P100 has "
        f"{P100_SPEED:.2f} of its speed in dense products (HAP's profile: 2.15 and 3.86 TFLOP/s) "
        f"and {P100_MEMORY:.2f} of its memory's bandwidth, which aggregations and row-wise work "
        "take. 'At half': half of both. Memory of the devices is not checked."
    )
    yield (
        f"- Links: {NIC.bandwidth_bytes_per_s * 8 / 1e9:.1f} Gbit/s for each machine, shared by"
        f" its devices, {NIC.latency_s * 1e6:.0f} us; "
        f"{INSIDE.bandwidth_bytes_per_s / 1e9:.0f} GB/s for each device inside a machine, "
        f"{INSIDE.latency_s * 1e6:.0f} us; islands: "
        f"{ISLAND.bandwidth_bytes_per_s / 1e9:.0f} GB/s inside, 1 Gbit/s between. A collective of G"
        " devices takes G - 1 latencies each way."
    )
    yield (
        "- Halo: M rows are sent to G shards, M / N = min(G - 1, m ((G - 1) / 7)^0.75), with m on "
        "8 shards from partitions by METIS or their logs: "
        + ", ".join(f"{name} {values[4]}" for name, values in GRAPHS.items())
        + ". Between two shards the rows are in proportion to the product of their shares. A row "
        "is sent once to each device that reads it. An all-gather is a ring, so each row crosses "
        "the link of a machine once."
    )
    yield (
        "- Columns: every device reads all edges (8 bytes each) and at least 32 bytes of a row; "
        "columns need not be whole numbers."
    )
    yield (
        "- Overlap: gradients of halo rows arrive while a device aggregates its own rows, and "
        "messages between stages pass while stages compute; nothing else overlaps. Sums of weight "
        "gradients are counted in full."
    )
    yield (
        "- Pipelines: an epoch takes (K - 1) times the slowest stage or message, plus the sum of "
        f"all stages and messages; K is the better of {CHUNKS[0]} and {CHUNKS[1]}. Groups have "
        "equal numbers of devices, in several orders (fast machines first, last, mixed), and every "
        "search takes the best of these and of K. How many epochs stale rows cost is not counted."
    )
    yield (
        "- EV (HAP's DP-EV): equal shares and equal cuts of the layers. CP (DP-CP): shares and "
        "layers in proportion to the speed of dense products. Both use halo exchanges alone. HAP: "
        "A* over programs that a plan can express, and shares by a linear program, in turns; "
        "layers by the time of a layer on each group."
    )


def main() -> None:
    """Search all cells, or those whose names contain a word, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    only = parser.parse_args().only
    start_s, cells = time.process_time(), []
    for cluster in CLUSTERS:
        for graph in GRAPHS:
            if only in f"{cluster} {graph}":
                cells.append(cell_of(cluster, graph))
                shown = [f"{k} {cells[-1].gain('EV', k):.2f}" for k in (*RANGES, "all")]
                took_s = time.process_time() - start_s
                print(cluster, graph, *shown, f"{took_s:.0f} s", flush=True)
    if not only:
        PAGE.write_text(page(cells, time.process_time() - start_s), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    assert all(math.isfinite(c.time_s("HAP", "all")) for c in cells)


if __name__ == "__main__":
    main()
