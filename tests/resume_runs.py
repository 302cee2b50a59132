"""A small run that tests stop and resume, and its rows of metrics.csv."""

import csv
from pathlib import Path

from gnnpipe import TrainConfig

EPOCHS = 9


def config(out, **settings):
    return TrainConfig(
        **{
            "model": "gcnii",
            "layers": 4,
            "hidden": 8,
            "chunks": 4,
            "epochs": EPOCHS,
            "lr": 0.05,
            "dropout": 0.5,
            "eval_every": 2,
            "cache_dir": "off",
            "quiet": True,
            "out": str(out),
        }
        | settings
    )


def table(out):
    with open(Path(out) / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    return [{k: v for k, v in r.items() if not k.endswith("_time_s")} for r in rows]
