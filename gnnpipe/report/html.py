"""HTML page of a run: one file that loads nothing from outside.

All texts from the run folder are passed through ``escape``. In addition a content security policy
allows only the script of the page, by its hash, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from gnnpipe.report.gantt import MOST_SPANS, critical_words, gantt
from gnnpipe.report.run import Run
from gnnpipe.report.sections import bytes_section, chunks_section, memory_section, time_section
from gnnpipe.report.svg import MOST_POINTS, Line, escape, line_chart

MARK = "<!doctype html><!-- made by gnnpipe report -->"
"""First line of every page."""

MOST_LAYERS = 8
"""Limit of curves in one chart by layer."""
MOST_PROGRAM = 20_000
"""Limit of characters shown of program.txt."""

NOT_YET = '<p class="note">Written at the end of a run; there is no result.json yet.</p>'

TITLES = {
    "curves": "Loss and accuracy",
    "drift": "Staleness",
    "timeline": "Timeline of one epoch",
    "time": "Where the time goes",
    "memory": "Memory",
    "bytes": "Bytes sent",
    "chunks": "Partition",
    "settings": "Settings and program",
}


def page(run: Run) -> str:
    """Return the page of a run as HTML."""
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
    """Return a table with a heading and a text in each row."""
    cells = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
    return f'<div class="table"><table>{cells}</table></div>'


def _summary(run: Run) -> str:
    plan, result = run.plan, run.result
    shape = f"{plan.num_stages} x {plan.shards} x {plan.chunks}, schedule {plan.schedule}"
    rows = [
        ("graph", str(run.config.get("dataset", "?"))),
        ("model", f"{run.config.get('model', '?')}, {run.config.get('layers', '?')} layers"),
        ("stages x shards x chunks", shape),
        ("epochs", f"{run.epochs:,}"),
    ]
    if result is None:
        return _table(rows) + (
            '<p class="warning">This run has no result.json: it was interrupted or is still '
            f"running. The page shows its first {run.epochs:,} epochs; what a run writes at its "
            "end is missing.</p>"
        )
    rows[0] = ("graph", result.text("dataset"))
    metric = result.text("metric")
    rows += [
        (
            "staleness",
            "exact: no stale reads"
            if result.flag("exact")
            else f"{result.number('stale_reads'):.1%} of the edges read stale rows; "
            f"{result.whole('exact_epochs')} of {result.whole('epochs')} epochs exact",
        ),
        (
            "last epoch",
            f"loss {result.number('loss'):.4f}, {metric} "
            + ", ".join(
                f"{part} {_score(result.optional_number(part + '_metric'))}"
                for part in ("train", "val", "test")
            ),
        ),
        (
            "best validation",
            f"{_score(result.optional_number('best_val_metric'))} at epoch "
            f"{result.whole('best_epoch')}: test "
            f"{_score(result.optional_number('test_metric_at_best_val'))}",
        ),
        ("epoch time", f"{result.number('epoch_time_s'):.4g} s"),
    ]
    return _table(rows)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _curves(run: Run) -> str:
    epochs = run.metrics.get("epoch", ())
    if not epochs:
        return '<p class="note">No epoch has been trained yet.</p>'
    charts = [line_chart("Training loss", epochs, [Line("loss", run.metrics["loss"])])]
    for kind, title in (("acc", "Accuracy"), ("metric", "Metric of the run")):
        columns = {part: run.metrics.get(f"{part}_{kind}", ()) for part in ("train", "val", "test")}
        if kind == "metric" and all(
            columns[part] == run.metrics.get(f"{part}_acc", ()) for part in columns
        ):
            continue  # the metric is accuracy
        lines = [Line(part, values) for part, values in columns.items() if values]
        charts.append(line_chart(title, epochs, lines))
    limit = f" At most {MOST_POINTS} epochs of a curve are drawn." * (len(epochs) > MOST_POINTS)
    note = f'<p class="note">Loss: training, with dropout. Scores: exact evaluation.{limit}</p>'
    return f'<div class="charts">{"".join(charts)}</div>{note}'


def _drift(run: Run) -> str:
    charts = []
    for prefix, title in (
        ("drift_", "Drift: relative error of stale rows"),
        ("moved_", "Moved: relative change of probe rows by the optimizer step"),
        ("missed_", "Missed: relative error of the forecast"),
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
        '<p class="note">Gaps are exact epochs, in which nothing is stale. With dropout the drift '
        "stays near 1 (100 %), because every epoch draws a new dropout mask; moved and missed are "
        "measured without dropout.</p>"
    )
    return f'<div class="charts">{"".join(charts)}</div>{note}'


def _timeline(run: Run) -> str:
    chart = gantt(run.trace)
    if not chart:
        return '<p class="note">No trace.json: a run writes it at its end, on CPUs only.</p>'
    out = [
        '<p><label>width <input id="wide" type="range" min="1" max="40" value="1"></label></p>',
        chart,
    ]
    for name in ("predicted", "measured"):
        spans = getattr(run.trace, name)
        words = critical_words(spans)
        if words:
            out.append(f"<p>Critical path, {name}: {escape(words)}.</p>")
        if len(spans) > MOST_SPANS:
            out.append(
                f'<p class="note">{name}: only the longest of {len(spans):,} spans are drawn.</p>'
            )
    out.append(
        '<p class="note">Point at a bar or tap it for details. Each chunk has a colour, light for '
        "forward and dark for backward; dark grey: work that belongs to no chunk; pale grey: "
        "waiting; outlined: the critical path.</p>"
    )
    return "".join(out)


def _settings(run: Run) -> str:
    settings = _table([(name, str(value)) for name, value in run.config.items()])
    program = f"<pre>{escape(run.program[:MOST_PROGRAM])}</pre>"
    if len(run.program) > MOST_PROGRAM:
        program += f'<p class="note">The first {MOST_PROGRAM:,} characters.</p>'
    return (
        f"<details><summary>config.toml</summary>{settings}</details>"
        f"<details><summary>program.txt</summary>{program}</details>"
    )
