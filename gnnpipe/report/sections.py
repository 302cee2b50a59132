"""The sections that result.json fills: time, memory, bytes, and what the cut costs."""

from __future__ import annotations

from gnnpipe.report.run import Fields
from gnnpipe.report.svg import bars, escape

__all__ = ["bytes_section", "chunks_section", "memory_section", "size", "time_section"]

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


def size(value: float) -> str:
    """Bytes in the unit that fits.

    >>> size(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def time_section(result: Fields) -> str:
    """Shares of the epoch by rank."""
    shares = result.each("time_shares")
    if not shares:
        return '<p class="note">Not noted: on GPUs actions only start work.</p>'
    rows = [
        (f"rank {rank}", [(name, share.number(key)) for name, key in SHARES.items()])
        for rank, share in enumerate(shares)
    ]
    hidden = [s.number("hidden_pipeline_s") + s.number("hidden_graph_s") for s in shares]
    note = (
        "Exposed: waited for though it had been sent. Bubble: another stage had not come so far. "
        "Imbalance: another shard had not. Under compute, in no bar, went "
        + ", ".join(f"{seconds:.3g} s" for seconds in hidden[:16])
        + (" ..." if len(hidden) > 16 else "")
        + " of communication."
    )
    return bars("Seconds of one epoch", rows, lambda v: f"{v:.4g} s") + _note(note)


def memory_section(result: Fields) -> str:
    """The peak of every rank above its estimate, both on what was held before training."""
    peaks, before = result.numbers("peak_memory_bytes"), result.numbers("memory_before_bytes")
    estimates = result.each("memory_estimate_bytes")
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    lines = []
    # All three have a value for every rank; what has fewer shows fewer.
    for rank, (peak, held, estimate) in enumerate(zip(peaks, before, estimates, strict=False)):
        grown = max(peak - held, 0.0)
        parts = [(part, float(estimate.whole(part))) for part in PARTS]
        rows.append((f"rank {rank}: peak", [(HELD, held), ("grown in training", grown)]))
        rows.append((f"rank {rank}: estimate", [(HELD, held), *parts]))
        whole = sum(of_part for _, of_part in parts)
        ratio = f" ({grown / whole:.0%})" if whole else ""
        lines.append(f"rank {rank}: {size(grown)} of {size(whole)}{ratio}")
    few = lines[:16] + ["..."] * (len(lines) > 16)
    note = (
        f"Grown in training, of the estimate: {', '.join(few)}. On a CPU the peak is of the whole "
        "process since its start, so reading the data is part of it where that took more."
    )
    return bars("Memory by rank", rows, size) + _note(note)


def bytes_section(result: Fields) -> str:
    """What was counted beside the closed form, by axis."""
    counted, formula = (
        result.inside("comm_bytes_per_epoch"),
        result.inside("comm_bytes_closed_form"),
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
    words = "" if same else '<p class="warning">Counted and closed form differ.</p>'
    note = "Bytes of the last epoch over all ranks. Control: the forecast of stale rows."
    return f'{words}<div class="table"><table>{head}{"".join(lines)}</table></div>{_note(note)}'


def chunks_section(result: Fields) -> str:
    """What the cut costs: edges that cross, rows that are read elsewhere, balance."""
    cut = result.inside("cut")
    rows = [("", "chunks", "shards")]
    edges, shard_edges = (
        f"{cut.whole(f'{axis}_cut_edges'):,} ({cut.number(f'{axis}_cut_share'):.1%})"
        for axis in ("chunk", "shard")
    )
    halo = f"{cut.number('halo_share'):.2f} rows per own row"
    crossings = f"{cut.whole('crossings'):,} (M/N {cut.number('crossings_per_vertex'):.2f})"
    rows += [
        ("how many", str(cut.whole("chunks")), str(cut.whole("shards"))),
        ("edge cut", edges, shard_edges),
        ("halo: rows read from others", halo, crossings),
        (
            "balance: heaviest / mean work",
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
