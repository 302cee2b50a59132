"""GNNPipe's own figures: the simulator knows who wins, and by how much."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT.parent / "shared" / "gnnpipe_measured.csv"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gnnpipe_figures

    yield gnnpipe_figures
    for name in ("gnnpipe_figures", "gnnpipe_costs"):
        sys.modules.pop(name)


@pytest.mark.slow
@pytest.mark.skipif(not LOGS.is_file(), reason="needs the logs in ../shared")
def test_who_wins_and_by_how_much(script):
    fit = script.fitted()
    # Even with nothing fitted to an epoch's time.
    for some in (fit, script.replace(fit, encoder_s=0.0)):
        right, near = script.tally(list(script.results(some)))
        assert right == 16
        assert near >= 12
    assert script.page(fit) == script.PAGE.read_text(encoding="utf-8")


@pytest.mark.skipif(not LOGS.is_file(), reason="needs the logs in ../shared")
@pytest.mark.parametrize("method", ["graph", "pipeline", "hybrid"])
def test_what_is_sent_is_what_the_logs_say(script, method):
    from gnnpipe.perf.unroll import program_tasks
    from gnnpipe.schedule import training_program

    for graph, model in script.CASES:
        costs = script.LoggedCosts(graph, model, method, script.Fit(0.0, (0, 0), (0, 0)), True)
        tasks = program_tasks(training_program(costs.dag()), costs)
        sent = {"SEND": 0, "EXCHANGE": 0}
        for what in tasks.what:
            if what.kind[:-2] in sent:
                sent[what.kind[:-2]] += what.size_bytes / 2**30
        logged = script.logs()[graph, model, method]
        assert sent["SEND"] == pytest.approx(logged["vol:Layer-level"], rel=0.01, abs=1e-3)
        assert sent["EXCHANGE"] == pytest.approx(logged["vol:Graph-level"], rel=0.01)


def test_the_page_claims_what_its_table_shows():
    text = (ROOT / "docs" / "benchmarks" / "gnnpipe_figures.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:squirrel|flickr|reddit|physics) .*$", text, re.MULTILINE)
    assert len(rows) == 16
    right = sum("(wrong)" not in row for row in rows)
    near = sum(", off" not in row for row in rows)
    assert f"right in {right} of 16" in text
    assert f"measured ratio in {near}.**" in text
