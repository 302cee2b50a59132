"""Writes docs/reference.md and docs/reference/python.md from the definitions in the package.

python scripts/make_reference.py            # write the pages
python scripts/make_reference.py --check    # exit code 1 if one is out of date
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import typing
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
PYTHON_PAGE = ROOT / "docs" / "reference" / "python.md"
sys.path.insert(0, str(ROOT))

import gnnpipe  # noqa: E402
from gnnpipe.cli.commands import COMMANDS, DATA_SHEETS, VERIFY_DEFAULTS  # noqa: E402
from gnnpipe.config import TrainConfig  # noqa: E402
from gnnpipe.config.fields import flag, scalar_type  # noqa: E402
from gnnpipe.run.metrics_csv import EpochRow  # noqa: E402
from gnnpipe.run.result import RunResult  # noqa: E402
from gnnpipe.verification.comparison import TOLERANCE  # noqa: E402

HEAD = """# Reference

This page lists every command, flag and output file of gnnpipe. `scripts/make_reference.py` writes
it from the code. See also [how PyG's convolutions run](reference/convolutions.md), the
[glossary](reference/glossary.md) and the [datasets](../datasets/README.md).

## Commands

| command | what it does |
|---|---|
{commands}

All commands except `predict`, `report`, `compare` and `doctor` take `--config FILE` (TOML) and
every setting below. Flags override the file, and the file overrides the defaults.

* `info --list` lists the built-in datasets.
* `train --seeds N` trains N times, with seeds `--seed`, `--seed` + 1, ..., each in a folder of its
  own (`seed-0`, ...), and writes `summary.json` with means and standard deviations.
* `train --resume DIR` continues a run ([how](how-to/checkpoint-and-resume.md)).
* `verify --tolerance X` sets the largest relative difference that counts as equal (default
  {tolerance}). These defaults of `verify` differ from those of `train`: {verify}.
* `train --plan auto --cluster FILE` plans for the devices and links of a TOML file, one device for
  each rank ([how](how-to/let-it-plan.md)).
* `profile --save FILE` writes the profile, and `--save-cluster FILE` the speeds of the ranks and
  the links between them, for `--cluster`. `profile` takes neither `--stages` nor `--shards`: a
  profile serves any number of ranks. `--hardware DEVICE:LINK` uses data sheets instead of
  measuring: {sheets}.
* `simulate` needs `--profile FILE` or `--hardware`. `--cluster FILE` (TOML) gives devices and
  links, `--shape vertices=..,edges=..,features=..,classes=..` replaces the dataset, and
  `--json FILE` also writes the result.
* `predict RUN --out FILE.npy` writes the logits of a run's model; `--dataset` names another graph
  ([how](how-to/use-trained-weights.md)).
* `report RUN` writes RUN/report.html, or `--save FILE`; `--png` also writes pictures.

## Settings

Every setting is a flag, a TOML key and an argument of `TrainConfig`: `--snapshot-every 5`,
`snapshot_every = 5`, `TrainConfig(snapshot_every=5)`. The flag leaves out a unit in the name:
`timeout_s` is `--timeout`. A boolean flag also has the form `--no-...`, which turns it off. An
empty default is explained in the last column.
"""

FILES = """## The run folder

A run writes its files into the folder `--out`, or into a new folder below `runs/`. With
`--out off` it writes none.

| file | written | content |
|---|---|---|
| `config.toml` | before the first epoch | every setting that has a value |
| `config-before-1.toml` | on `--resume` | the earlier config.toml, if it changed |
| `plan.json` | before the first epoch | stages, chunks, schedule and collectives (`--plan`) |
| `program.txt` | before the first epoch | actions of each stage, such as `0F2` or `1RECV_F0<0` |
| `metrics.csv` | one row per epoch | see below |
| `result.json` | at the end | see below |
| `trace.json` | at the end, on CPUs | timeline of one epoch as Chrome trace events, for Perfetto |
| `model.pt` | at the end | a `state_dict` of all stages ([use it](how-to/use-trained-weights.md)) |
| `checkpoints/epoch-000120/` | during training | all that `--resume` needs |
| `logs/rank-0.txt` | during training | a log of every rank: start, end and errors |

The partition (which vertex is in which chunk) is not in the folder. It is computed again from the
graph, the seed and the partitioner; another version of METIS may give another partition.

## metrics.csv

| column | meaning |
|---|---|
"""

CELLS = {
    "epoch": "counted from 1",
    "loss": "mean over the training vertices, with dropout, before the optimizer step of the epoch",
    "train_acc": "accuracy on the training vertices, by an exact evaluation after the step; empty "
    "if the epoch was not evaluated",
    "val_acc": "the same on the validation vertices",
    "test_acc": "the same on the test vertices",
    "train_metric": "metric of the run (named by `metric` in result.json) on the training vertices",
    "val_metric": "the same on the validation vertices",
    "test_metric": "the same on the test vertices",
    "lr": "learning rate of the optimizer step",
    "epoch_time_s": "seconds of training in the epoch, without evaluation",
    "eval_time_s": "seconds of evaluation; empty if there was none",
}

SEEDS = """
## summary.json

Written by `train --seeds N` beside the run folders, and updated after every run: `seeds`;
`metric`; `mean` and `deviation` (sample standard deviation; null for a single run) of the numbers
in result.json; `runs`, the numbers of each run by seed. A mean is null if some run does not have
the number.
"""

STALE_CELLS = {
    "stale_reads": "share of the edges that read a stale row; 0 in an exact epoch. This column "
    "and the following exist only if the run has stale reads",
    "drift_0, drift_1, ...": "by layer that pushes rows: relative difference between the rows "
    "pushed in the epoch and the stale rows that were read (Frobenius norms over a sample); most "
    "of it is dropout. Empty in an exact epoch",
    "moved_0, ...": "by layer, with a forecast: relative change of the probe rows by the "
    "optimizer step",
    "missed_0, ...": "by layer, with a forecast: relative error of the forecast on other rows "
    "(estimated by generalised cross-validation)",
}

RESULTS = {
    "dataset": "name of the graph",
    "model": "--model",
    "world_size": "ranks, S * G",
    "exact": "true if no epoch had a stale read",
    "loss": "training loss of the last epoch",
    "train_acc": "training accuracy of the last epoch",
    "val_acc": "validation accuracy of the last epoch; null if the split has no validation "
    "vertices",
    "test_acc": "test accuracy of the last epoch",
    "best_val_acc": "validation accuracy of the best epoch by the validation metric",
    "test_acc_at_best_val": "test accuracy of the best epoch",
    "best_epoch": "best epoch by the validation metric; of equal ones the earliest",
    "train_metric": "value of this metric in the last epoch, on the training vertices",
    "val_metric": "the same on the validation vertices",
    "test_metric": "the same on the test vertices",
    "best_val_metric": "best value of the validation metric among the evaluated epochs",
    "test_metric_at_best_val": "test metric of the best epoch",
    "comm_bytes_per_epoch": "bytes sent in the last epoch by all ranks: pipeline, graph, gradient, "
    "control (for the forecast of stale rows), total",
    "comm_bytes_closed_form": "the same bytes by the [closed form](explanation/bytes.md)",
    "versions": "versions of gnnpipe, python, torch, torch_geometric, numpy, scipy",
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
    commands = "\n".join(f"| `gnnpipe {name}` | {c.help} |" for name, c in COMMANDS.items())
    tolerance = ", ".join(f"{size:g} in {name}" for name, size in TOLERANCE.items())
    lines = [
        HEAD.format(
            commands=commands, verify=verify, tolerance=tolerance, sheets=DATA_SHEETS
        ).rstrip(),
        *settings(),
        "",
        FILES.rstrip(),
    ]
    nothing = EpochRow(1, 0.0, None, 0.0, 0.0, 0.0).cells()
    lines += [f"| `{name}` | {CELLS[name]} |" for name in nothing]
    lines += [f"| `{name}` | {text} |" for name, text in STALE_CELLS.items()]
    lines += ["", "## result.json", "", "| field | meaning |", "|---|---|"]
    meanings = {f.name: flag(f.name) for f in dataclasses.fields(TrainConfig)}
    meanings |= docs_below_fields(RunResult) | RESULTS
    lines += [
        f"| `{f.name}` | {meanings[f.name]} |"
        for f in dataclasses.fields(RunResult)
        if f.name not in ("history", "timeline", "predicted_timeline", "path")
    ]
    lines += ["", SEEDS.strip()]
    return "\n".join(lines) + "\n"


PYTHON_HEAD = """# Python reference

This page lists the classes and functions that `import gnnpipe` offers, with their methods and
properties, from the docstrings; `scripts/make_reference.py` writes it. The arguments of
`TrainConfig` are the [settings](../reference.md#settings); the fields of `RunResult` are those of
[result.json](../reference.md#the-run-folder).
"""


def python_page() -> str:
    """The page of the public names of the package."""
    lines = [PYTHON_HEAD]
    for name in sorted(gnnpipe.__all__, key=lambda n: (n[0].islower(), n)):
        if name.startswith("_"):
            continue
        thing = getattr(gnnpipe, name)
        lines += [f"## {name}", "", *documented(name, thing)]
        for inner, member in vars(thing).items() if inspect.isclass(thing) else ():
            function = getattr(member, "__func__", member)
            if inner.startswith("_"):
                continue
            if isinstance(member, property | functools.cached_property):
                lines += [
                    f"### {name}.{inner}",
                    "",
                    "```text",
                    inspect.getdoc(member) or "",
                    "```",
                    "",
                ]
            if not inspect.isfunction(function):
                continue
            lines += [f"### {name}.{inner}", "", *documented(inner, getattr(thing, inner))]
    return "\n".join(lines).rstrip() + "\n"


def documented(name: str, thing: typing.Any) -> list[str]:
    """Signature and docstring as lines of markdown."""
    texts = [inspect.getdoc(thing) or ""]
    is_class = inspect.isclass(thing)
    is_plain = is_class and not (dataclasses.is_dataclass(thing) or issubclass(thing, Exception))
    if is_plain:
        texts.append(inspect.getdoc(thing.__init__) or "")
    if is_plain or not is_class:
        call = inspect.signature(thing)
        given = [p for p in call.parameters.values() if p.name != "self"]
        parts = [
            f"{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {p.default!r}")
            for p in given
        ]
        returned = (
            ""
            if call.return_annotation in (call.empty, "None")
            else f" -> {call.return_annotation}"
        )
        texts.insert(0, f"{name}({', '.join(parts)}){returned}")
    body = "\n\n".join(text for text in texts if text).replace("``", "`")
    return ["```text", *body.split("\n"), "```", ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        pages = {PAGE: page(), PYTHON_PAGE: python_page()}
        same = all(p.exists() and p.read_text(encoding="utf-8") == t for p, t in pages.items())
        print("up to date" if same else "out of date: run python scripts/make_reference.py")
        return 0 if same else 1
    PAGE.write_text(page(), encoding="utf-8")
    PYTHON_PAGE.write_text(python_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
