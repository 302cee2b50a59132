"""Sections of the page from result.json: time, memory, communication and partition."""

from __future__ import annotations

from gnnpipe.perf.memory import human_bytes
from gnnpipe.report.run import Fields
from gnnpipe.report.svg import bars, escape

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


def time_section(result: Fields) -> str:
    """Return bars of how each rank spent an epoch."""
    shares = result.list_of_fields("time_shares")
    if not shares:
        return '<p class="note">Not measured: on GPUs kernels run asynchronously.</p>'
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
    return bars("Time of one epoch", rows, lambda v: f"{v:.4g} s") + _note(note)


def memory_section(result: Fields) -> str:
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


def bytes_section(result: Fields) -> str:
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


def chunks_section(result: Fields) -> str:
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
    lines = "".join(
        f"<tr><th>{escape(a)}</th><td>{escape(b)}</td><td>{escape(c)}</td></tr>" for a, b, c in rows
    )
    return f'<div class="table"><table>{lines}</table></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
