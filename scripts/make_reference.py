"""Writes docs/reference.md from the definitions in the package.

python scripts/make_reference.py            # write the page
python scripts/make_reference.py --check    # exit code 1 if it is out of date
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
sys.path.insert(0, str(ROOT))

from gnnpipe.cli.commands import VERIFY_DEFAULTS  # noqa: E402
from gnnpipe.config import TrainConfig  # noqa: E402
from gnnpipe.config.fields import flag, scalar_type  # noqa: E402
from gnnpipe.run.metrics_csv import EpochRow  # noqa: E402
from gnnpipe.run.result import RunResult  # noqa: E402
from gnnpipe.verify.verify import TOLERANCE  # noqa: E402

HEAD = """# Reference

Made by `scripts/make_reference.py` from the code; do not edit by hand.

## Commands

| command | what it does |
|---|---|
| `gnnpipe train` | train a model; leaves a run folder |
| `gnnpipe info` | graph, cut, memory and bytes of a shape, on one process, before any training |
| `gnnpipe info --list` | the datasets known by name |
| `gnnpipe verify` | train a shape and one device, compare losses and gradients |
| `gnnpipe profile` | measure what this machine takes for a model and, with ranks, its links |
| `gnnpipe simulate` | what an epoch would take, in any shape, on devices that are not here |
| `gnnpipe report RUN` | a page of a run: RUN/report.html or `--save FILE`; `--png`: pictures too |
| `gnnpipe compare A B` | test scores of two runs, or of the seeds in two folders, side by side |
| `gnnpipe doctor` | is here what a run needs: packages, devices, back ends, ports, memory, disk |

All but `report`, `compare` and `doctor` take `--config FILE` (TOML) and every setting below.
Flags win over the file, it wins over the defaults. `train --seeds N` trains N times, from
`--seed` on, each in a folder of its own (`seed-0`, ...) beside a `summary.json` with means and
deviations. `verify` also takes `--tolerance` (default {tolerance}). Its own defaults: {verify}.
`profile` also takes `--save FILE` and no `--stages` or `--shards`: what it measures serves any
shape. `--hardware DEVICE:LINK` takes data sheets instead: of `a100` or `h100`, and of `nvlink3`,
`nvlink4`, `10gbe` or `100gbe`. `simulate` wants `--profile FILE` or `--hardware`, and also takes
`--cluster FILE` (TOML: devices and links), `--shape vertices=..,edges=..,features=..,classes=..`
in place of a dataset, and `--json FILE`.

## Settings

One definition serves the flag, the TOML key and the argument of `TrainConfig`:
`--snapshot-every 5`, `snapshot_every = 5`, `TrainConfig(snapshot_every=5)`; only the unit in a
name such as `timeout_s` is not part of its flag, `--timeout`. A yes-or-no flag has a
second form, `--no-...`.
"""

FILES = """## The run folder

`--out`, or a new folder below `runs/`. `--out off` writes none.

| file | written | what it holds |
|---|---|---|
| `config.toml` | before the first epoch | every setting that has a value of its own |
| `config-before-1.toml` | by `--resume` | what config.toml was, if it changed |
| `plan.json` | before the first epoch | stages, shards, chunks, schedule, transfers |
| `program.txt` | before the first epoch | actions of each stage, such as `0F2` or `1RECV_F0<0` |
| `metrics.csv` | a row an epoch | see below |
| `result.json` | at the end | see below |
| `trace.json` | at the end, on CPUs | one epoch as Chrome trace events, for Perfetto |
| `model.pt` | at the end | the weights of all stages, a `state_dict` |
| `checkpoints/epoch-000120/` | as it trains | all that `--resume` needs |
| `logs/rank-0.txt` | as it trains | of every rank when it began and ended, and why |

The cut (which vertex is in which chunk) is not in the folder. It is made again from the graph, the
seed and the partitioner; another version of METIS may cut otherwise.

## metrics.csv

| column | meaning |
|---|---|
"""

CELLS = {
    "epoch": "from 1",
    "loss": "mean over the train vertices, with dropout, before the epoch's optimizer step",
    "train_acc": "exact accuracy after the step; empty where the epoch was not evaluated",
    "val_acc": "same",
    "test_acc": "same",
    "train_metric": "the run's own metric (`metric` in result.json), on the train part",
    "val_metric": "same",
    "test_metric": "same",
    "lr": "learning rate of the epoch's step",
    "epoch_time_s": "training alone",
    "eval_time_s": "evaluation alone; empty where there was none",
}

SEEDS = """
## summary.json

Of `train --seeds N`, beside the folders of the runs; written anew after every run. `seeds`;
`metric`; `mean` and `deviation` (of the sample, n - 1; null for a single run) of the numbers in
result.json; `runs`, the same numbers by seed. null: a figure that some run does not have.
"""

STALE_CELLS = {
    "stale_reads": "share of the edges that were read stale; this and the next only where the "
    "shape has stale reads: 0 and empty in an exact epoch, all empty behind `--resume` with a "
    "shape that has none",
    "drift_0, drift_1, ...": "by layer: how far the rows pushed in the epoch are from what stale "
    "readers saw, relative (Frobenius norms over a sample); dropout is the larger part of it",
    "moved_0, ...": "by layer, with a forecast: how far the change of weights moved the pilot rows",
    "missed_0, ...": "by layer: what the forecast leaves of it on rows that are no pilots "
    "(generalised cross-validation)",
}

RESULTS = {
    "dataset": "name of the graph",
    "model": "--model",
    "world_size": "ranks, S * G",
    "exact": "true if no read of the program is stale",
    "loss": "training loss of the last epoch",
    "train_acc": "last epoch",
    "val_acc": "last epoch; null if the split has no such part",
    "test_acc": "last epoch",
    "best_val_acc": "of the best epoch by the validation metric (which is accuracy unless "
    "`metric` differs)",
    "test_acc_at_best_val": "test accuracy of that epoch",
    "best_epoch": "that epoch; of equals the earliest",
    "train_metric": "last epoch, as val_metric and test_metric",
    "val_metric": "last epoch",
    "test_metric": "last epoch",
    "best_val_metric": "largest among the evaluated epochs",
    "test_metric_at_best_val": "test metric of that epoch",
    "comm_bytes_per_epoch": "bytes counted in the last training epoch over all ranks: pipeline, "
    "graph, gradient, control (the forecast of stale rows), total",
    "comm_bytes_closed_form": "the same by formula",
    "versions": "gnnpipe, python, torch, torch_geometric, numpy, scipy",
}


def default_text(field: dataclasses.Field) -> str:
    if field.default is None or field.default == "":
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default}`"


def border_text(meta: typing.Mapping[str, typing.Any]) -> str:
    parts = [f"one of {', '.join(meta['choices'])}"] if meta["choices"] else []
    if meta["low"] is not None:
        parts.append(f">= {meta['low']}")
    if meta["above"] is not None:
        parts.append(f"> {meta['above']}")
    if meta["below"] is not None:
        parts.append(f"< {meta['below']}")
    return ", ".join(parts)


def settings() -> list[str]:
    hints = typing.get_type_hints(TrainConfig)
    lines, group = [], ""
    for field in dataclasses.fields(TrainConfig):
        meta = field.metadata
        if meta["group"] != group:
            group = meta["group"]
            lines += ["", f"### {group}", "", "| flag | type | default | allowed | meaning |"]
            lines.append("|---|---|---|---|---|")
        kind = scalar_type(hints[field.name]).__name__
        cells = [
            f"`{flag(field.name)}`",
            kind,
            default_text(field),
            border_text(meta),
            meta["help"].replace("|", "\\|").replace("<", "&lt;"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def docs_below_fields(kind: type) -> dict[str, str]:
    """The docstrings that stand under the fields of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    return {
        a.target.id: " ".join(b.value.value.split())
        for a, b in pairwise(body)
        if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)
    }


def page() -> str:
    verify = ", ".join(f"`--{k} {v}`" for k, v in VERIFY_DEFAULTS.items())
    tolerance = ", ".join(f"{size:g} in {name}" for name, size in TOLERANCE.items())
    lines = [
        HEAD.format(verify=verify, tolerance=tolerance).rstrip(),
        *settings(),
        "",
        FILES.rstrip(),
    ]
    nothing = EpochRow(1, 0.0, None, 0.0, 0.0, 0.0).cells()
    lines += [f"| `{name}` | {CELLS[name]} |" for name in nothing]
    lines += [f"| `{name}` | {text} |" for name, text in STALE_CELLS.items()]
    lines += ["", "## result.json", "", "| field | meaning |", "|---|---|"]
    told = {f.name: flag(f.name) for f in dataclasses.fields(TrainConfig)}
    told |= docs_below_fields(RunResult) | RESULTS
    lines += [
        f"| `{f.name}` | {told[f.name]} |"
        for f in dataclasses.fields(RunResult)
        if f.name not in ("history", "timeline", "predicted_timeline", "path")
    ]
    lines += ["", SEEDS.strip()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        print("up to date" if same else "out of date: run python scripts/make_reference.py")
        return 0 if same else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
