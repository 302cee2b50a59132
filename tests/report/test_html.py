"""`gnnpipe report`: every section of a real run's page, interrupted runs, pictures, bad folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import pytest
from page_runs import change_result, hostile_words, trained_run

from gnnpipe.cli.main import main
from gnnpipe.output import human_bytes
from gnnpipe.perf import Span, Trace, read_trace
from gnnpipe.report.gantt import MOST_SPANS, critical_words, gantt, shown
from gnnpipe.report.html import page
from gnnpipe.report.run import read_run
from gnnpipe.report.svg import MOST_POINTS, Line, line_chart
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.memory_estimate import memory_by_rank
from gnnpipe.setup.prepare import prepare


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("page") / "run", predicted=True)


@pytest.fixture
def run(made, tmp_path):
    """A folder of the test's own."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def section(text, name):
    return re.search(rf'<section id="{name}">(.*?)</section>', text, flags=re.S)[1]


def test_every_section_of_a_real_run(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    text = (run / "report.html").read_text(encoding="utf-8")
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))

    assert f"loss {result['loss']:.4f}" in text
    curves = section(text, "curves")
    assert curves.count("<polyline") == 4  # loss; train, val and test
    assert curves.count('data-tip="loss\nepoch ') == 2
    drift = section(text, "drift")
    # Drift, moved and missed; the first layer pushes no rows.
    assert drift.count("<polyline") == 2 * 3

    timeline = section(text, "timeline")
    trace = read_trace(run / "trace.json")
    assert timeline.count('class="span') == len(trace.measured) + len(trace.predicted)
    assert timeline.index("predicted") < timeline.index("measured")
    assert "Critical path, measured: " in timeline
    assert "Critical path, predicted: " in timeline

    time = section(text, "time")
    assert all(word in time for word in ("compute", "bubble", "imbalance", "exposed graph"))
    memory = section(text, "memory")
    peak, held = result["peak_memory_bytes"][0], result["memory_before_bytes"][0]
    assert 0 < held <= peak
    estimate = sum(result["memory_estimate_bytes"][0].values())
    assert f"rank 0: {human_bytes(peak - held)} of {human_bytes(estimate)} (" in memory
    assert human_bytes(held + estimate) in memory
    sent = section(text, "bytes")
    assert sent.count("<td>equal</td>") == 5
    chunks = section(text, "chunks")
    assert f"{result['cut']['chunk_cut_edges']:,} (" in chunks
    assert f"{result['cut']['chunk_balance']:.2f}" in chunks
    assert "0F0" in section(text, "settings")
    assert "karate" in section(text, "settings")


def test_the_page_asks_for_nothing_and_only_its_own_script_may_run(run):
    text = page(read_run(run))
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    assert text.count("<script") == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


def test_the_result_holds_estimate_and_cut(run):
    from gnnpipe import TrainConfig

    values = TrainConfig.read_toml(str(run / "config.toml"))
    prepared = prepare(TrainConfig.from_dict(values), Mesh.alone())
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert [sum(m.values()) for m in result["memory_estimate_bytes"]] == [
        m.total for m in memory_by_rank(prepared)
    ]
    assert result["cut"]["halo_share"] == prepared.quality.halo_share


def test_a_chart_without_a_prediction(run):
    os.remove(run / "trace.json")
    assert "No trace.json" in section(page(read_run(run)), "timeline")


def test_an_interrupted_run_still_has_a_page(run):
    os.remove(run / "result.json")
    os.remove(run / "trace.json")
    with open(run / "metrics.csv", "a", encoding="utf-8") as file:
        file.write("3,0.5")  # a line that was being written
    text = page(read_run(run))
    assert "it was interrupted or is still running" in text
    assert "first 2 epochs" in text
    assert section(text, "curves").count("<polyline") == 4
    for name in ("time", "memory", "bytes", "chunks"):
        assert "no result.json yet" in section(text, name)


def test_a_run_before_its_first_epoch(run):
    for name in ("result.json", "trace.json", "metrics.csv"):
        os.remove(run / name)
    text = page(read_run(run))
    assert "No epoch has been trained yet" in section(text, "curves")
    assert "not yet" in section(text, "drift")


def test_words_of_the_folder_are_escaped(run):
    text = page(read_run(hostile_words(run)))
    assert text.count("<script") == 1
    assert "<img" not in text
    assert "&lt;script&gt;window.ran" in text
    # No quote of theirs ends an attribute of ours.
    assert "onerror='" not in text


def test_what_utf8_cannot_hold_is_replaced(run):
    change_result(run, dataset="\ud800 graph")
    assert main(["report", str(run)]) == 0
    assert b"? graph" in (run / "report.html").read_bytes()


def test_bytes_that_differ_are_said(run):
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    formula = result["comm_bytes_closed_form"]
    change_result(run, comm_bytes_closed_form=formula | {"graph": 8, "total": 8})
    sent = section(page(read_run(run)), "bytes")
    assert sent.count("NOT EQUAL") == 2
    assert "counted bytes differ from the closed form" in sent


def test_only_the_longest_spans_are_drawn():
    count = MOST_SPANS // 2 + 500
    spans = [
        Span(rank, "F", float(i), i + 0.5 + (i % 7) / 100 + rank, i)
        for rank in (0, 1)
        for i in range(count)
    ]
    drawn = shown(spans)
    assert len(drawn) == MOST_SPANS
    assert drawn == sorted(drawn, key=lambda s: (s.rank, s.start_s))
    for rank in (0, 1):  # every rank keeps its row, whoever has the longer spans
        mine = [s.end_s - s.start_s for s in drawn if s.rank == rank]
        left_out = [s.end_s - s.start_s for s in set(spans) - set(drawn) if s.rank == rank]
        assert len(mine) == MOST_SPANS // 2
        assert max(left_out) <= min(mine)
    assert gantt(Trace(measured=tuple(spans))).count("<rect") == MOST_SPANS


def test_long_curves_keep_their_last_epoch():
    count = 10 * MOST_POINTS
    epochs = [float(i) for i in range(1, count + 1)]
    chart = line_chart("loss", epochs, [Line("loss", [1 / e for e in epochs])])
    assert chart.count("<circle") <= MOST_POINTS
    assert f"epoch {count:g}" in chart


@pytest.mark.parametrize(
    "values", [[0.5, 0.5], [0.0, 0.0], [None, 1e-300], [-1e299, 1e299], [0.0, 5e-324]]
)
def test_flat_and_extreme_curves_have_places(values):
    chart = line_chart("x", [1.0, 2.0], [Line("x", values)])
    assert "nan" not in chart
    assert "inf" not in chart
    assert "<polyline" in chart


def test_the_critical_path_in_words():
    spans = (
        Span(0, "F", 0.0, 4.0, 0, 0, is_critical=True),
        Span(0, "WAIT", 0.0, 1.0, 0, 0),
        Span(1, "WAIT", 3.0, 4.0, 0, 1, is_critical=True),
        Span(1, "B", 4.0, 10.0, 0, 1, is_critical=True),
        Span(1, "F", 0.0, 3.0, 0, 1),
    )
    # 3 s of its own, 1 s on the wire, 6 s back.
    assert critical_words(spans) == (
        "60% backward of stage 1, 30% forward of stage 0, 10% on the wire to stage 1"
    )
    assert critical_words(spans[1:2]) == ""
    both = [
        Span(r, "EXCHANGE_F", 10.0, 20.0, 0, 0, is_critical=True, lane="shards") for r in (0, 1)
    ]
    assert critical_words((*spans, *both)).startswith("50% exchange in stage 0, 30% backward")


def replace_text(name, text):
    return lambda run: (run / name).write_text(text, encoding="utf-8")


def change(name, **values):
    def spoil(run):
        path = run / name
        found = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(found | values), encoding="utf-8")

    return spoil


def forget(field):
    def spoil(run):
        path = run / "result.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        del found[field]
        path.write_text(json.dumps(found), encoding="utf-8")

    return spoil


def file_in_its_place(run):
    shutil.rmtree(run)
    run.write_text("no folder")


BAD = {
    "a file": (file_in_its_place, "is a file; give the folder"),
    "no folder": (lambda run: shutil.rmtree(run), "no such folder"),
    "no run": (lambda run: os.remove(run / "config.toml"), "no config.toml"),
    "no plan": (lambda run: os.remove(run / "plan.json"), "plan.json"),
    "TOML that is none": (replace_text("config.toml", "= ="), "config.toml"),
    "deep TOML": (replace_text("config.toml", "a = " + "[" * 100_000), "config.toml"),
    "no text": (lambda run: (run / "config.toml").write_bytes(b"\xff\xfe"), "config.toml"),
    "a plan of words": (replace_text("plan.json", "[]"), "plan.json"),
    "another plan": (change("plan.json", stages=[[1, 2]]), "stages[0] [1, 2]: must be an object"),
    "metrics without loss": (replace_text("metrics.csv", "epoch\n1\n"), "metrics.csv"),
    "words for a loss": (replace_text("metrics.csv", "epoch,loss\n1,low\n"), "loss 'low'"),
    "no loss": (replace_text("metrics.csv", "epoch,loss\n1,\n"), "without a loss"),
    "an epoch of a half": (replace_text("metrics.csv", "epoch,loss\n0.5,1\n"), "epoch 0.5"),
    "an epoch past all": (replace_text("metrics.csv", "epoch,loss\n1e17,1\n"), "epoch 1e+17"),
    "a short line": (replace_text("metrics.csv", "epoch,loss\n1\n2,0.5\n"), "line 2"),
    "a column twice": (replace_text("metrics.csv", "epoch,loss,loss\n1,1,1\n"), "one loss"),
    "a cell of a megabyte": (
        replace_text("metrics.csv", "epoch,loss\n1," + "9" * 1_000_000),
        "metrics.csv",
    ),
    "a result that is a list": (replace_text("result.json", "[]"), "result.json"),
    "half a result": (replace_text("result.json", '{"loss": '), "result.json"),
    "a deep result": (replace_text("result.json", "[" * 100_000), "result.json"),
    "a huge number": (change("result.json", loss=10**400), "loss"),
    "no number": (change("result.json", loss=float("nan")), "loss"),
    "a loss in words": (change("result.json", loss="<b>"), "loss '<b>'"),
    "shares that are numbers": (change("result.json", time_shares=[1]), "time_shares 0"),
    "a share in words": (change("result.json", time_shares=[{"compute_s": "x"}]), "compute_s"),
    "memory of no list": (change("result.json", peak_memory_bytes={}), "peak_memory_bytes"),
    "no cut": (forget("cut"), "no cut"),
    "no estimate": (forget("memory_estimate_bytes"), "no memory_estimate_bytes"),
    "bytes below 0": (change("result.json", comm_bytes_per_epoch={"pipeline": -1}), "pipeline -1"),
    "a trace of words": (replace_text("trace.json", "trace"), "trace.json"),
    "a folder for a file": (
        lambda run: [os.remove(run / "metrics.csv"), (run / "metrics.csv").mkdir()],
        "not a regular file",
    ),
    "a pipe that never ends": (
        lambda run: [os.remove(run / "program.txt"), os.mkfifo(run / "program.txt")],
        "not a regular file",
    ),
    "a device": (
        lambda run: [os.remove(run / "trace.json"), (run / "trace.json").symlink_to("/dev/zero")],
        "not a regular file",
    ),
    "a file past all sizes": (lambda run: os.truncate(run / "result.json", 300 << 20), "more than"),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_a_bad_folder_is_refused_in_one_line(run, capsys, spoil, words):
    spoil(run)
    capsys.readouterr()
    assert main(["report", str(run)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gnnpipe: error: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert not (run / "report.html").exists()


def test_save_elsewhere_and_again(run, tmp_path, capsys):
    target = tmp_path / "page.html"
    for _ in range(2):  # a page of ours may be replaced
        assert main(["report", str(run), "--save", str(target)]) == 0
    assert target.exists()
    assert not (run / "report.html").exists()


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("model.pt", "not a page of gnnpipe"),
        ("", "give a file"),
        ("none/page.html", "cannot be"),
        (".", "not a page of gnnpipe"),
        ("plan.json/page.html", "cannot be"),
    ],
)
def test_a_page_replaces_nothing_else(run, capsys, target, words):
    held = contents(run)
    save = str(run / target) if target else ""
    assert main(["report", str(run), "--save", save, "--png"]) == 2
    assert words in capsys.readouterr().err
    assert contents(run) == held


def test_pictures_for_a_paper(run, capsys):
    pytest.importorskip("matplotlib")
    assert main(["report", str(run), "--png"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names == [
        str(run / n) for n in ("report.html", "report-curves.png", "report-timeline.png")
    ]
    for name in names[1:]:
        with open(name, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    for name in ("result.json", "trace.json"):
        os.remove(run / name)
    assert main(["report", str(run), "--png"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_links_in_the_folder_lead_nowhere(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept.txt"
    kept.write_text("mine", encoding="utf-8")
    (run / "report.html").symlink_to(tmp_path / "made-elsewhere.html")
    (run / "report-curves.png").symlink_to(kept)
    assert main(["report", str(run), "--png"]) == 0
    assert kept.read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "made-elsewhere.html").exists()
    assert not (run / "report.html").is_symlink()


def test_pictures_without_matplotlib(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(run), "--png"]) == 2
    assert "gnnpipe[plots]" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_several_ranks(tmp_path):
    from helpers import run_ranks

    run_ranks(train_on_four, 4, str(tmp_path / "run"))
    text = page(read_run(tmp_path / "run"))
    timeline = section(text, "timeline")
    assert [f"rank {rank}</div>" in timeline for rank in range(4)] == [True] * 4
    assert section(text, "memory").count(": peak") >= 4
    assert section(text, "time").count("rank 3") >= 1


def train_on_four(folder):
    trained_run(folder, stages=2, shards=2)
