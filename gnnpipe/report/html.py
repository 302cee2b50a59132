"""The page: one file that asks for nothing from outside, a section for each question.

All words from the folder go through ``escape``. A content security policy names the page's own
script by its hash, so that even a word that slipped through could not run, and nothing could be
fetched or sent.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from gnnpipe.report.gantt import MOST_SPANS, critical_words, gantt
from gnnpipe.report.run import Run
from gnnpipe.report.sections import bytes_section, chunks_section, memory_section, time_section
from gnnpipe.report.svg import MOST_POINTS, Line, escape, line_chart

__all__ = ["MARK", "page"]

MARK = "<!doctype html><!-- made by gnnpipe report -->"
"""How every page begins."""

MOST_LAYERS = 8
"""Curves in one chart of the drift."""
MOST_PROGRAM = 20_000
"""Characters of program.txt."""

NOT_YET = '<p class="note">A run writes this at its end; this one has no result.json yet.</p>'

TITLES = {
    "curves": "Loss and accuracy",
    "drift": "Staleness",
    "timeline": "Timeline of one epoch",
    "time": "Where the time goes",
    "memory": "Memory",
    "bytes": "Bytes sent",
    "chunks": "Chunks and shards",
    "settings": "Settings and program",
}


def page(run: Run) -> str:
    """The whole page of a run as HTML."""
    script = resources.files("gnnpipe.report").joinpath("page.js").read_text(encoding="utf-8")
    style = resources.files("gnnpipe.report").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'; img-src data:"
    )
    result = run.result
    bodies = {
        "curves": _curves(run),
        "drift": _drift(run),
        "timeline": _timeline(run),
        "time": time_section(result) if result else NOT_YET,
        "memory": memory_section(result) if result else NOT_YET,
        "bytes": bytes_section(result) if result else NOT_YET,
        "chunks": chunks_section(result) if result else NOT_YET,
        "settings": _settings(run),
    }
    sections = "".join(
        f'<section id="{name}"><h2>{TITLES[name]}</h2>{body}</section>'
        for name, body in bodies.items()
    )
    name = escape(run.path.resolve().name)
    return (
        f'{MARK}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{name} - gnnpipe</title><style>{style}</style></head><body>"
        f'<h1>{name}</h1>{_summary(run)}{sections}<div id="tip" role="status" hidden></div>'
        f"<script>{script}</script></body></html>\n"
    )


def _table(rows: list[tuple[str, str]]) -> str:
    """Two columns: what, and what of it."""
    cells = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
    return f'<div class="table"><table>{cells}</table></div>'


def _summary(run: Run) -> str:
    plan, result = run.plan, run.result
    chunks = run.config.get("chunks", plan.chunks)
    shape = f"{plan.num_stages} x {plan.shards} x {chunks}, schedule {plan.schedule}"
    if chunks != plan.chunks:
        shape += f", in {plan.chunks} block{'s' * (plan.chunks > 1)} of rows"
    rows = [
        ("graph", str(run.config.get("dataset", "?"))),
        ("model", f"{run.config.get('model', '?')}, {run.config.get('layers', '?')} layers"),
        ("stages x shards x chunks", shape),
        ("epochs", f"{run.epochs:,}"),
    ]
    if result is None:
        return _table(rows) + (
            '<p class="warning">This run has no result.json: it was interrupted or still goes on. '
            f"What follows is of its first {run.epochs:,} epochs; what a run writes at its end is "
            "missing.</p>"
        )
    rows[0] = ("graph", result.text("dataset"))
    metric = result.text("metric")
    rows += [
        (
            "reads",
            "exact: none is stale"
            if result.flag("exact")
            else f"{result.number('stale_reads'):.1%} of the edges stale; "
            f"{result.whole('exact_epochs')} of {result.whole('epochs')} epochs exact",
        ),
        (
            "last epoch",
            f"loss {result.number('loss'):.4f}, {metric} "
            + ", ".join(
                f"{part} {_score(result.perhaps(part + '_metric'))}"
                for part in ("train", "val", "test")
            ),
        ),
        (
            "best validation",
            f"{_score(result.perhaps('best_val_metric'))} at epoch "
            f"{result.whole('best_epoch')}: test "
            f"{_score(result.perhaps('test_metric_at_best_val'))}",
        ),
        ("an epoch takes", f"{result.number('epoch_time_s'):.4g} s"),
    ]
    return _table(rows)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _curves(run: Run) -> str:
    epochs = run.metrics.get("epoch", ())
    if not epochs:
        return '<p class="note">No epoch has been trained yet.</p>'
    charts = [line_chart("Training loss", epochs, [Line("loss", run.metrics["loss"])])]
    for kind, title in (("acc", "Accuracy"), ("metric", "The run's own metric")):
        columns = {part: run.metrics.get(f"{part}_{kind}", ()) for part in ("train", "val", "test")}
        if kind == "metric" and all(
            columns[part] == run.metrics.get(f"{part}_acc", ()) for part in columns
        ):
            continue  # it is accuracy
        lines = [Line(part, values) for part, values in columns.items() if values]
        charts.append(line_chart(title, epochs, lines))
    few = f"; {MOST_POINTS} epochs of each curve are drawn" if len(epochs) > MOST_POINTS else ""
    note = f'<p class="note">Loss with dropout, over the train vertices; scores exact{few}.</p>'
    return f'<div class="charts">{"".join(charts)}</div>{note}'


def _drift(run: Run) -> str:
    charts = []
    for prefix, title in (
        ("drift_", "Drift: stale rows against those pushed, relative"),
        ("moved_", "Moved: pilot rows by the change of weights"),
        ("missed_", "Missed: what the forecast left of it"),
    ):
        columns = run.columns(prefix)
        if not columns:
            continue
        every = -(-len(columns) // MOST_LAYERS)
        lines = [Line(f"layer {i}", columns[i][1]) for i in range(0, len(columns), every)]
        charts.append(line_chart(title, run.metrics["epoch"], lines))
    if not any(charts):
        return '<p class="note">Nothing is read stale in this run, or not yet.</p>'
    note = (
        '<p class="note">Gaps are exact epochs: nothing in them was stale. With dropout the drift '
        "stays near 1 (100 %) whatever the weights do, for every epoch draws its noise anew; moved "
        "and missed are without it.</p>"
    )
    return f'<div class="charts">{"".join(charts)}</div>{note}'


def _timeline(run: Run) -> str:
    chart = gantt(run.trace)
    if not chart:
        return '<p class="note">No trace.json: it is written at the end of a run on CPUs.</p>'
    out = [
        '<p><label>wider <input id="wide" type="range" min="1" max="40" value="1"></label></p>',
        chart,
    ]
    for name in ("predicted", "measured"):
        spans = getattr(run.trace, name)
        words = critical_words(spans)
        if words:
            out.append(f"<p>Critical path, {name}: {escape(words)}.</p>")
        if len(spans) > MOST_SPANS:
            out.append(
                f'<p class="note">{name}: of {len(spans):,} spans the longest of each row.</p>'
            )
    out.append(
        '<p class="note">Point at a bar or tap it. A colour is a chunk, light forward and dark '
        "backward; dark grey is work about no chunk, pale grey is waiting; the critical path is "
        "outlined.</p>"
    )
    return "".join(out)


def _settings(run: Run) -> str:
    settings = _table([(name, str(value)) for name, value in run.config.items()])
    program = f"<pre>{escape(run.program[:MOST_PROGRAM])}</pre>"
    if len(run.program) > MOST_PROGRAM:
        program += f'<p class="note">Its first {MOST_PROGRAM:,} characters.</p>'
    return (
        f"<details><summary>config.toml</summary>{settings}</details>"
        f"<details><summary>program.txt</summary>{program}</details>"
    )
