"""Epochs with an optimizer step after each chunk, against fill-drain with one step an epoch.

python scripts/chunk_steps.py run [--minutes 10]   # goes on where it was interrupted
python scripts/chunk_steps.py report               # docs/benchmarks/chunk_steps.md
python scripts/chunk_steps.py run --tiny --data /tmp/rows.jsonl    # a trial of the script

A cell is a graph, a model and a number of ranks, each rank a stage of its own. One launch of the
ranks trains fill-drain, ``async``, and ``async`` with two passes ahead in turns, ten epochs each:
``async`` flushes after ten. A first turn does not count. Every turn is a row of
docs/benchmarks/data/chunk_steps.jsonl. In the cells "slow passes" every pass also sleeps, 4 ms
forward and 8 ms backward, as if each rank had a device of its own; their epochs are nearly all
sleep, so they show the bubble and not the speed. The simulated part needs no data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_files import read_rows  # noqa: E402
from fidelity import commit  # noqa: E402

from gnnpipe.perf import simulate  # noqa: E402
from gnnpipe.perf.profiled_costs import ProfiledCosts  # noqa: E402
from gnnpipe.perf.unroll import program_tasks  # noqa: E402
from gnnpipe.plan import Placement, Plan, StageDag, StagePlan, Transfer  # noqa: E402
from gnnpipe.schedule import training_program  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "chunk_steps.md"
DATA = ROOT / "docs" / "benchmarks" / "data" / "chunk_steps.jsonl"
GRAPHS = ROOT.parent / "shared" / "data"
CHUNKS, EPOCHS, TURNS = 32, 10, 3
PLAIN, ASYNC, AHEAD = "fill-drain", "async", "async, 2 ahead"
WAYS: dict[str, tuple[str, int]] = {PLAIN: ("fill-drain", 1), ASYNC: ("async", 1)}
WAYS[AHEAD] = ("async", 2)
"""--schedule and --passes-ahead."""
SLOW = "slow passes"
SLEEP_S = {"F": 0.004, "B": 0.008}
MODELS = {"gcn": ("gcn", 4, 64), "gcnii": ("gcnii", 16, 128), SLOW: ("gcn", 4, 16)}
"""Model, layers and width."""
CELLS = [
    *[(graph, "gcn", ranks) for graph in ("pubmed", "amazon_photo") for ranks in (2, 4)],
    *[("cora", SLOW, ranks) for ranks in (4, 2)],
    *[("amazon_photo", "gcnii", ranks) for ranks in (2, 4)],
    *[("coauthor_cs", "gcn", ranks) for ranks in (2, 4)],
    *[("pubmed", "gcnii", ranks) for ranks in (2, 4)],
]
TINY = [("cora", "gcn", 2), ("cora", SLOW, 2)]
MESSAGES = (0.0, 1 / 18, 1 / 6, 1 / 2)
"""Times of a message, in passes of a chunk (forward and backward of one stage)."""
EPOCH_LIMIT, BUBBLE_LIMIT = 1.05, 0.5

Row = dict[str, Any]


class UniformCosts:
    """Passes of one time on every stage, with one rank each; messages of another time."""

    def __init__(self, message_s: float) -> None:
        self._message_s = message_s

    def step_s(self, way: str, *_: int) -> float:
        """Forward takes one third of a pass; there is one step."""
        return 1 / 3 if way == "F" else 2 / 3

    def begin_s(self, *_: int) -> float:
        """No work that is not of a chunk, no time of a step, and no all-reduce."""
        return 0.0

    finish_s = update_s = sync_s = begin_s

    def message_pairs(self, *_: int) -> list[tuple[int, int]]:
        """One rank to one rank."""
        return [(0, 0)]

    def message_bytes(self, *_: object) -> int:
        """Sizes are not counted."""
        return 1

    def message_s(self, *_: int) -> float:
        """The same for all links."""
        return self._message_s

    def link(self, source: int, target: int) -> str:
        """A link of its own for each direction."""
        return f"{source} to {target}"

    def port_s(self, _: float) -> float:
        """No ports."""
        return 0.0


def bubble(stages: int, way: tuple[str, int], message_s: float) -> float:
    """Returns the largest idle share of a stage between two flushes, simulated."""
    schedule, ahead = way
    ranks = Placement.grid(stages, 1).stages
    parts = tuple(StagePlan.even((s,), group) for s, group in enumerate(ranks))
    transfers = tuple(Transfer(s, s + 1, {"x": 1}) for s in range(stages - 1))
    dag = StageDag(Plan(parts, CHUNKS, schedule), (1,) * stages, transfers)
    epochs = EPOCHS if schedule == "async" else 1
    program = training_program(dag, epochs=epochs, passes_ahead=ahead)
    costs = cast(ProfiledCosts, UniformCosts(message_s))
    timeline = simulate(program_tasks(program, costs))
    return max(timeline.bubble_s()[:stages]) / timeline.makespan_s


def slow_passes() -> None:
    """Makes every forward and backward of this process sleep besides."""
    from gnnpipe.runtime import executor
    from gnnpipe.schedule import ActionKind

    def longer(inner: Callable[..., None], more_s: float) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            inner(*arguments)
            time.sleep(more_s)

        return run

    methods = executor._METHODS
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        methods[kind] = longer(methods[kind], SLEEP_S[kind])


def rank_main(cell: tuple[str, str, int], turns: int, data: Path, graphs: Path) -> None:
    """Trains in all ways in turns, on every rank; rank 0 writes the rows."""
    from gnnpipe import TrainConfig, Trainer
    from gnnpipe.runtime.comm.mesh import Mesh

    graph, name, ranks = cell
    model, layers, hidden = MODELS[name]
    if name == SLOW:
        slow_passes()
    mesh = Mesh.join(ranks, 1)
    trainers = {}
    for way, (schedule, ahead) in WAYS.items():
        config = TrainConfig(
            dataset=str(graphs / f"{graph}.npz"),
            split="60/20/20",
            model=model,
            layers=layers,
            hidden=hidden,
            stages=ranks,
            chunks=CHUNKS,
            schedule=schedule,
            passes_ahead=ahead,
            staleness="none",
            lr_schedule="constant",
            epochs=EPOCHS,
            eval_every=0,
            device="cpu",
            out="off",
            quiet=True,
        )
        trainers[way] = Trainer(config, world=mesh)
    for turn in range(-1, turns):
        row: Row = {"cell": list(cell), "turn": turn}
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            row[way] = measured(trainers[way].fit(EPOCHS))
        if mesh.rank == 0 and turn >= 0:
            row |= {"commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}
            row["load"] = os.getloadavg()[0]
            with data.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            ratios = (f"{row[way]['epoch_s'] / row[PLAIN]['epoch_s']:.3f}" for way in WAYS)
            print(f"{cell} turn {turn}:", *ratios, flush=True)


def measured(result: Any) -> Row:
    """Returns epoch time, idle share over all ranks, and time in optimizer steps per epoch."""
    shares = result.time_shares
    flushed = sum(span.kind == "STEP" for span in result.timeline if span.rank == 0)
    epochs = flushed / CHUNKS if flushed > 1 else 1
    steps = [s.end_s - s.start_s for s in result.timeline if s.kind == "STEP"]
    return {
        "epoch_s": statistics.median(row.epoch_time_s for row in result.history[-EPOCHS:]),
        "bubble": sum(s.bubble_s for s in shares) / sum(s.epoch_s for s in shares),
        "steps_s": sum(steps) / len(shares) / epochs,
    }


def run(cells: list[tuple[str, str, int]], minutes: float, data: Path, graphs: Path) -> None:
    """Measures the cells that lack turns, until the time is over."""
    data.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * minutes
    for cell in cells:
        missing = TURNS - sum(tuple(row["cell"]) == cell for row in read_rows(data))
        left_s = end_s - time.monotonic()
        if missing <= 0:
            continue
        if left_s < 20:
            print("the time is over; run again for the rest")
            return
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += [f"--nproc-per-node={cell[2]}", str(Path(__file__)), "rank"]
        words += ["--cell", json.dumps(cell), "--turns", str(missing), "--data", str(data)]
        words += ["--graphs", str(graphs)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as errors:
            ranks = subprocess.Popen(words, env=env, stderr=errors)
            try:
                code = ranks.wait(left_s)
            except subprocess.TimeoutExpired:
                ranks.terminate()  # torchrun then ends its ranks
                ranks.wait(60)
                print(f"{cell}: the time is over; run again for the rest")
                return
            if code:
                errors.seek(0)
                raise SystemExit(f"{cell}: the ranks ended with {code}\n{errors.read()[-2000:]}")


def simulated_lines() -> list[str]:
    """The table of simulated idle shares."""
    ways = {PLAIN: WAYS[PLAIN], "1f1b": ("1f1b", 1), ASYNC: WAYS[ASYNC], AHEAD: WAYS[AHEAD]}
    lines = [
        "## Simulated",
        "",
        f"Idle share of the idlest stage between two flushes, K = {CHUNKS}, equal passes, of which "
        "forward takes a third. A message takes a share of a pass and leaves under compute, "
        "if the order of the passes lets it. `async` runs 10 epochs; its limit is 2 % with free "
        "messages and S = 4.",
        "",
        "| S | message | " + " | ".join(ways) + " |",
        "|---|---|" + "---|" * len(ways),
    ]
    for stages in (4, 8):
        for message in MESSAGES:
            found = [f"{bubble(stages, way, message):.1%}" for way in ways.values()]
            label = "free" if not message else f"1/{round(1 / message)} of a pass"
            lines.append(f"| {stages} | {label} | " + " | ".join(found) + " |")
    return lines


def spread(values: list[float], form: str) -> str:
    """Median and range of values."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def measured_lines(rows: list[Row]) -> list[str]:
    """The tables of measured cells, with how many keep the limits."""
    fast, idle = [], []
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    halves: dict[str, list[float]] = {way: [] for way in WAYS}
    for cell in CELLS:
        of = [row for row in rows if tuple(row["cell"]) == cell]
        if not of:
            continue
        graph, name, ranks = cell
        model, layers, hidden = MODELS[name]
        label = f"| {graph} | {model} {layers} x {hidden} | {ranks} | {len(of)} | "
        shares = {w: statistics.median(row[w]["bubble"] for row in of) for w in WAYS}
        if name == SLOW:
            for way in WAYS:
                halves[way].append(shares[way] / shares[PLAIN])
            idle.append(label + " | ".join(f"{shares[way]:.1%}" for way in WAYS) + " |")
            continue
        plain_s = statistics.median(row[PLAIN]["epoch_s"] for row in of)
        steps = (statistics.median(1e3 * row[way]["steps_s"] for row in of) for way in WAYS)
        times = []
        for way in (ASYNC, AHEAD):
            found = [row[way]["epoch_s"] / row[PLAIN]["epoch_s"] for row in of]
            ratios[way].append(statistics.median(found))
            times.append(spread(found, ".2f"))
        fast.append(
            f"{label}{plain_s:.3f} | {' | '.join(times)} | "
            f"{' / '.join(f'{step:.1f}' for step in steps)} | "
            f"{' / '.join(f'{share:.1%}' for share in shares.values())} |"
        )

    def kept(found: dict[str, list[float]], limit: float) -> str:
        number = len(found[ASYNC])
        counts = [
            f"{sum(one <= limit for one in found[way])} of {number}" for way in (ASYNC, AHEAD)
        ]
        return f"{counts[0]} cells (with two passes ahead {counts[1]})"

    return [
        "## Measured",
        "",
        f"Epoch time over that of fill-drain with `--staleness none`, at most {EPOCH_LIMIT} in "
        f"{kept(ratios, EPOCH_LIMIT)}. A ratio is that of one turn, median (least to most); times "
        "are medians of the turns. Steps: time in optimizer steps per epoch and rank, in the order "
        "of the columns before; of fill-drain with the wait for all ranks. Idle: waiting for other "
        "stages, over all ranks; with 4 ranks on fewer cores much of it is waiting for a core.",
        "",
        "| graph | model | ranks | turns | fill-drain, s | async | async, 2 ahead | steps, ms | "
        "idle |",
        "|---|---|---|---|---|---|---|---|---|",
        *fast,
        "",
        f"Idle share with slow passes, at most half of fill-drain's in {kept(halves, BUBBLE_LIMIT)}"
        ":",
        "",
        "| graph | model | ranks | turns | fill-drain | async | async, 2 ahead |",
        "|---|---|---|---|---|---|---|",
        *idle,
    ]


def report(data: Path) -> None:
    """Writes the page."""
    rows = read_rows(data)
    if not rows:
        raise SystemExit(f"{data}: nothing yet; python scripts/chunk_steps.py run")
    dates, versions = sorted(r["date"] for r in rows), sorted({r["commit"] for r in rows})
    loads = [row["load"] for row in rows]
    lines = [
        "# A step after each chunk, against one step an epoch",
        "",
        "This page compares the idle time and the epoch time of `--schedule async` with those of "
        "fill-drain.",
        "",
        f"`scripts/chunk_steps.py`, {dates[0]} to {dates[-1]}, commit {', '.join(versions)}, one "
        f"machine of {os.cpu_count()} cores, a rank of one thread for each stage; load of the "
        f"machine {min(loads):.1f} to {max(loads):.1f}. {EPOCHS} epochs a turn, from flush to "
        "flush.",
        "",
        *simulated_lines(),
        "",
        *measured_lines(rows),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["run", "report", "rank"])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--graphs", type=Path, default=GRAPHS, help="folder of the .npz files")
    parser.add_argument("--cell", type=json.loads)
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parser.parse_args()
    if given.command == "rank":
        rank_main(tuple(given.cell), given.turns, given.data, given.graphs)
    elif given.command == "run":
        run(TINY if given.tiny else CELLS, given.minutes, given.data, given.graphs)
    else:
        report(given.data)


if __name__ == "__main__":
    main()
