"""HTML page of a run: one file that loads nothing from outside.

All texts from the run folder are passed through ``escape``. In addition a content security policy
allows only the script of the page, by its hash, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from gnnpipe.errors import InputError
from gnnpipe.files import Fields, open_plain
from gnnpipe.output import human_bytes
from gnnpipe.report.gantt import MOST_SPANS, critical_words, gantt
from gnnpipe.report.run import Run, read_run
from gnnpipe.report.svg import MOST_POINTS, Line, bars, escape, line_chart

MARK = "<!doctype html><!-- made by gnnpipe report -->"
"""First line of every page."""

MOST_LAYERS = 8
"""Limit of curves in one chart by layer."""
MOST_PROGRAM = 20_000
"""Limit of characters shown of program.txt."""

SHARES = {
    "compute": "compute_s",
    "exposed pipeline": "exposed_pipeline_s",
    "exposed graph": "exposed_graph_s",
    "bubble": "bubble_s",
    "imbalance": "imbalance_s",
}
AXES = ("pipeline", "graph", "gradient", "control", "total")
HELD = "held before"
PARTS = ("structure", "features", "history", "activations", "weights")


def write_report(folder: Path, save: str | None, with_pictures: bool) -> list[Path]:
    """Write the report of the run in ``folder`` and return the paths of the files.

    ``save``: the file of the page (``None``: report.html in ``folder``). The PNG files are written
    beside the page. Raises ``InputError`` for a folder without a run, and for an existing file
    that is not a page of gnnpipe.
    """
    if save == "":
        raise InputError("--save '': give a file, like report.html")
    target = Path(save) if save else folder / "report.html"
    run = read_run(folder)
    if not _can_replace(target):
        raise InputError(
            f"--save {str(target)!r}: exists and is not a page of gnnpipe; give a new file"
        )
    # Texts of the run may contain characters that UTF-8 cannot encode.
    files = {target: page(run).encode("utf-8", "replace")}
    if with_pictures:
        from gnnpipe.report.png import pictures

        stem = target.with_suffix("").name
        files |= {target.with_name(f"{stem}-{k}.png"): data for k, data in pictures(run).items()}
    try:
        for path, data in files.items():
            # A symbolic link in a folder from elsewhere must not redirect the write.
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:
                file.write(data)
    except OSError as error:
        raise InputError(
            f"--save {str(target)!r}: cannot be written ({error.strerror}); give another file"
        ) from None
    return list(files)


def _can_replace(path: Path) -> bool:
    """Return whether ``path`` does not exist or is a page that this module has written."""
    try:
        with open_plain(path) as file:
            return file.read(len(MARK)) == MARK.encode()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False


def page(run: Run) -> str:
    """Return the page of a run as HTML."""
    script = resources.files("gnnpipe.report").joinpath("page.js").read_text(encoding="utf-8")
    style = resources.files("gnnpipe.report").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'; img-src data:"
    )

    def at_end(section: Callable[[Fields], str]) -> str:
        if run.result is None:
            return _note("Written at the end of a run; there is no result.json yet.")
        return section(run.result)

    sections = "".join(
        f'<section id="{name}"><h2>{title}</h2>{body}</section>'
        for name, title, body in (
            ("curves", "Loss and accuracy", _curves(run)),
            ("drift", "Staleness", _drift(run)),
            ("timeline", "Timeline of one epoch", _timeline(run)),
            ("time", "Where the time goes", at_end(_time)),
            ("memory", "Memory", at_end(_memory)),
            ("bytes", "Bytes sent", at_end(_bytes)),
            ("chunks", "Partition", at_end(_chunks)),
            ("settings", "Settings and program", _settings(run)),
        )
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


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a heading and texts in each row."""
    lines = (
        f"<tr><th>{escape(head)}</th>" + "".join(f"<td>{escape(text)}</td>" for text in texts)
        for head, *texts in rows
    )
    return f'<div class="table"><table>{"</tr>".join(lines)}</tr></table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _model_text(config: Mapping[str, Any]) -> str:
    name = str(config.get("model", "?"))
    return name if ":" in name else f"{name}, {config.get('layers', '?')} layers"


def _summary(run: Run) -> str:
    plan, result = run.plan, run.result
    shape = f"{plan.num_stages} x {plan.shards_text} x {plan.chunks}, schedule {plan.schedule}"
    rows = [
        ("graph", str(run.config.get("dataset", "?"))),
        ("model", _model_text(run.config)),
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
        return _note("No epoch has been trained yet.")
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
    note = _note(f"Loss: training, with dropout. Scores: exact evaluation.{limit}")
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
        lines = [Line(f"layer {i}", columns[i]) for i in range(0, len(columns), every)]
        charts.append(line_chart(title, run.metrics["epoch"], lines))
    if not any(charts):
        return _note("Nothing is read stale in this run, or not yet.")
    note = _note(
        "Gaps are exact epochs, in which nothing is stale. With dropout the drift stays near 1 "
        "(100 %), because every epoch draws a new dropout mask; moved and missed are measured "
        "without dropout."
    )
    return f'<div class="charts">{"".join(charts)}</div>{note}'


def _timeline(run: Run) -> str:
    chart = gantt(run.trace)
    if not chart:
        return _note("No trace.json: a run writes it at its end, on CPUs only.")
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
            out.append(_note(f"{name}: only the longest of {len(spans):,} spans are drawn."))
    out.append(
        _note(
            "Point at a bar or tap it for details. Each chunk has a colour, light for forward and "
            "dark for backward; dark grey: work that belongs to no chunk; pale grey: waiting; "
            "outlined: the critical path."
        )
    )
    return "".join(out)


def _settings(run: Run) -> str:
    settings = _table([(name, str(value)) for name, value in run.config.items()])
    program = f"<pre>{escape(run.program[:MOST_PROGRAM])}</pre>"
    if len(run.program) > MOST_PROGRAM:
        program += _note(f"The first {MOST_PROGRAM:,} characters.")
    return (
        f"<details><summary>config.toml</summary>{settings}</details>"
        f"<details><summary>program.txt</summary>{program}</details>"
    )


def _time(result: Fields) -> str:
    """Return bars of how each rank spent an epoch."""
    shares = result.list_of_fields("time_shares")
    if not shares:
        return _note("Not measured: on GPUs kernels run asynchronously.")
    rows = [
        (f"rank {rank}", [(name, share.number(key)) for name, key in SHARES.items()])
        for rank, share in enumerate(shares)
    ]
    hidden = [s.number("hidden_pipeline_s") + s.number("hidden_graph_s") for s in shares]
    note = (
        "Exposed: waiting for data in transfer. Bubble: waiting for another stage. Imbalance: "
        "waiting for another shard. Communication hidden under compute, by rank: "
        + ", ".join(f"{seconds:.3g} s" for seconds in hidden[:16])
        + (" ..." if len(hidden) > 16 else ".")
    )
    late = "".join(
        _note(
            f"Rank {one.whole('rank')} is slow: it computed {one.number('slowdown'):.2f} times as "
            "long as planned, relative to the other ranks (named after epoch "
            f"{one.whole('epoch')}); with work by speed an epoch would be about "
            f"{one.number('gain'):.2f} times as fast."
        )
        for one in result.list_of_fields("stragglers")
    )
    return bars("Time of one epoch", rows, lambda v: f"{v:.4g} s") + _note(note) + late


def _memory(result: Fields) -> str:
    """Return bars of the memory peak and the estimate of every rank."""
    peaks, before = result.numbers("peak_memory_bytes"), result.numbers("memory_before_bytes")
    estimates = result.list_of_fields("memory_estimate_bytes")
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    lines = []
    for rank, (peak, held, estimate) in enumerate(zip(peaks, before, estimates, strict=False)):
        grown = max(peak - held, 0.0)
        parts = [(part, float(estimate.whole(part))) for part in PARTS]
        rows.append((f"rank {rank}: peak", [(HELD, held), ("growth in training", grown)]))
        rows.append((f"rank {rank}: estimate", [(HELD, held), *parts]))
        whole = sum(of_part for _, of_part in parts)
        ratio = f" ({grown / whole:.0%})" if whole else ""
        lines.append(f"rank {rank}: {human_bytes(grown)} of {human_bytes(whole)}{ratio}")
    few = lines[:16] + ["..."] * (len(lines) > 16)
    note = (
        f"Growth in training, compared with the estimate: {', '.join(few)}. On a CPU the peak is "
        "that of the whole process, so it may have occurred while the data was read."
    )
    return bars("Memory by rank", rows, human_bytes) + _note(note)


def _bytes(result: Fields) -> str:
    """Return a table of counted bytes and their closed form by axis."""
    counted, formula = (
        result.fields("comm_bytes_per_epoch"),
        result.fields("comm_bytes_closed_form"),
    )
    lines, same = [], True
    for axis in AXES:
        a, b = counted.whole(axis), formula.whole(axis)
        same &= a == b
        lines.append(
            f'<tr><th>{axis}</th><td class="n">{a:,}</td><td class="n">{b:,}</td>'
            f"<td>{'equal' if a == b else 'NOT EQUAL'}</td></tr>"
        )
    head = "<tr><th>axis</th><th>counted</th><th>closed form</th><th></th></tr>"
    words = "" if same else '<p class="warning">The counted bytes differ from the closed form.</p>'
    note = "Bytes sent in the last epoch by all ranks. Control: for the forecast of stale rows."
    return f'{words}<div class="table"><table>{head}{"".join(lines)}</table></div>{_note(note)}'


def _chunks(result: Fields) -> str:
    """Return a table of the edge cut, halo rows and balance of chunks and shards."""
    cut = result.fields("cut")
    rows = [("", "chunks", "shards")]
    edges, shard_edges = (
        f"{cut.whole(f'{axis}_cut_edges'):,} ({cut.number(f'{axis}_cut_share'):.1%})"
        for axis in ("chunk", "shard")
    )
    halo = f"{cut.number('halo_share'):.2f} halo rows per own row"
    crossings = f"{cut.whole('crossings'):,} (M/N {cut.number('crossings_per_vertex'):.2f})"
    rows += [
        ("number", str(cut.whole("chunks")), str(cut.whole("shards"))),
        ("edge cut", edges, shard_edges),
        ("halo (rows read from others)", halo, crossings),
        (
            "balance (largest / mean work)",
            f"{cut.number('chunk_balance'):.2f}",
            f"{cut.number('cell_balance'):.2f} (chunk and shard)",
        ),
    ]
    return _table(rows)
