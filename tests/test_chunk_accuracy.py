"""The accuracy benchmark of steps by chunk: its runs, and the verdicts from made-up results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gnnpipe import TrainConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import chunk_accuracy_cells as runs
import chunk_accuracy_report as report


def row(cell, test, val=0.5):
    return {"test": [0.1, test], "val": [0.1, val], "epoch": [10, 20]} | vars(cell)


def rows_of(graph, scores):
    """Finished GCN runs of all seeds by kind, and a grid whose best place is (0.03, cosine)."""
    found = {}
    for kind, test in scores.items():
        stages = 1 if kind in ("full", "sequential") else 4
        place = (0.03, "cosine") if kind == "full" else runs.CHUNKED
        for cell in runs.grid(graph, "gcn", kind, stages) if kind == "full" else []:
            found[cell.key()] = row(cell, 0.01)
        for seed, cell in enumerate(runs.seeds(graph, "gcn", kind, stages, place)):
            found[cell.key()] = row(cell, test + 0.01 * (seed - 1), 0.9)
    return found


def test_every_run_has_valid_settings_and_a_name_of_its_own():
    cells = runs.cells({})
    assert len({cell.key() for cell in cells}) == len(set(cells))
    few = [c for c in set(cells) if (c.graph, c.lr, c.seed) == ("squirrel", 0.01, 0)]
    for cell in few:
        config = TrainConfig(**cell.settings(Path("/graphs")))
        by_stages = {"full": 1, "2bw": 32 // cell.stages, "predict by S": 32 // cell.stages}
        assert config.steps_per_epoch == by_stages.get(cell.kind, 32)
        assert config.stages == cell.stages


def test_seeds_of_the_tuned_run_are_known_when_the_grid_is_complete():
    rows = {cell.key(): row(cell, 0.5, cell.lr) for cell in runs.grid("pubmed", "gcn", "full", 1)}
    wanted = {(0.03, "constant", seed) for seed in (1, 2)}

    def later(rows):
        return {(c.lr, c.schedule, c.seed) for c in runs.tuned(rows, "pubmed", "gcn", "full", 1)}

    assert wanted <= later(rows)
    del rows[next(iter(rows))]
    assert not wanted & later(rows)


def test_means_and_differences_are_those_of_the_last_epoch_in_points():
    rows = rows_of("pubmed", {"full": 0.8, "predict": 0.793, "sequential": 0.8})
    (line,) = report.lines_of(rows)
    assert line.mean("full") == pytest.approx(80.0)
    assert line.gap("predict", "full") == pytest.approx(-0.7)
    assert line.gap("predict", "stash") is None


def test_verdicts_follow_from_the_differences():
    good = {"full": 0.8, "predict": 0.80, "sequential": 0.801, "stash": 0.79}
    rows = rows_of("pubmed", good)
    text = "\n".join(report.verdicts(list(report.lines_of(rows))))
    assert text.count("holds") == 4
    assert "NOT" not in text
    # One row of two that is 1.2 points under both spoils the row's limits and the mean's.
    bad = {"full": 0.8, "predict": 0.788, "sequential": 0.80, "stash": 0.80}
    both = rows | rows_of("squirrel", bad)
    lines = report.verdicts(list(report.lines_of(both)))
    assert [("does NOT hold" in line) for line in lines] == [True, True, True, True]
    assert "-1.20 (squirrel, gcn 4, 4)" in lines[1]


def test_an_unfinished_seed_leaves_a_row_out():
    rows = rows_of("pubmed", {"full": 0.8, "predict": 0.7})
    del rows[runs.seeds("pubmed", "gcn", "predict", 4, runs.CHUNKED)[2].key()]
    assert report.verdicts(list(report.lines_of(rows))) == []


def test_a_tuned_full_batch_that_fails_with_a_seed_is_not_the_only_reference():
    rows = rows_of("pubmed", {"full": 0.7, "predict": 0.8})
    for cell in runs.seeds("pubmed", "gcn", "full", 1, runs.DEFAULT):
        rows[cell.key()] = row(cell, 0.81)
    (text,) = report.against_better(list(report.lines_of(rows)))
    assert "mean of 1 rows: -1.00" in text
