"""Profiles of hardware that is not here, from data sheets: by hand, and marked as such.

A roofline (Williams, Waterman and Patterson, CACM 2009): what an op computes at the device's speed,
or what it moves at its memory's, whichever takes longer. Real kernels reach a part of both; here
half is assumed of all of them, and a fixed time to launch one. So such a profile tells which of two
shapes is faster when they are far apart, and what a run is bound by; it is no promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnnpipe.errors import InputError
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes, Profile, op_kind
from gnnpipe.plan import ModelGraph, Op
from gnnpipe.registry import nearest

__all__ = ["DEVICES", "LINKS", "hardware_memory_bytes", "hardware_profile"]

SHARE = 0.5
"""Of a data sheet's speed that kernels reach: an assumption."""
LAUNCH_S = 5e-6
"""Of a kernel: an assumption."""
KERNELS = {
    "before": 5,
    "after": 8,
    "forecast": 45,
    "recall": 15,
    "carry": 3,
    "begin": 3,
    "update": 2,
}
"""Launched by a part: an assumption, from the ops that it calls."""
EDGE_PASSES = 8
"""Times that what is kept of an edge is read or written, each way: an assumption, from the passes
of ``models.attention``."""


@dataclass(frozen=True)
class Sheet:
    """A device by its data sheet."""

    flops_per_s: float
    """In float32, without tensor cores."""
    bf16_flops_per_s: float
    """With them, of dense matrices."""
    memory_bytes_per_s: float
    memory_bytes: int
    source: str


@dataclass(frozen=True)
class Wire:
    """A link by its standard or data sheet; the latency is an assumption."""

    bandwidth_bytes_per_s: float
    """One way."""
    latency_s: float
    source: str


DEVICES = {
    "a100": Sheet(19.5e12, 312e12, 2.039e12, 80 * 10**9, "NVIDIA A100 data sheet, SXM 80 GB"),
    "h100": Sheet(67e12, 989e12, 3.35e12, 80 * 10**9, "NVIDIA H100 data sheet, SXM 80 GB"),
}
LINKS = {
    "nvlink3": Wire(300e9, 10e-6, "NVIDIA A100 data sheet: 600 GB/s both ways"),
    "nvlink4": Wire(450e9, 10e-6, "NVIDIA H100 data sheet: 900 GB/s both ways"),
    "10gbe": Wire(1.25e9, 50e-6, "IEEE 802.3ae: 10 Gbit/s"),
    "100gbe": Wire(12.5e9, 50e-6, "IEEE 802.3ba: 100 Gbit/s"),
}


def hardware_memory_bytes(name: str) -> int:
    """What the device of ``name``, 'DEVICE:LINK', has; ``InputError`` for another name."""
    return _sheets(name)[0].memory_bytes


def _sheets(name: str) -> tuple[Sheet, Wire]:
    device, _, link = name.partition(":")
    if device in DEVICES and not link:
        raise InputError(
            f"--hardware {name!r}: names no link; add one of {', '.join(LINKS)}, like "
            f"{device}:100gbe"
        )
    for word, known in ((device, DEVICES), (link, LINKS)):
        if word not in known:
            raise InputError(
                f"--hardware {name!r}: {nearest(word, list(known))}; give a device and a link, "
                "like h100:100gbe"
            )
    return DEVICES[device], LINKS[link]


def hardware_profile(
    name: str, model: ModelGraph, *, dtype: str, comm_dtype: str, matmul_dtype: str, recompute: bool
) -> Profile:
    """Of ``name``, 'DEVICE:LINK', for the ops of a model; ``InputError`` for another name."""
    sheet, wire = _sheets(name)
    number_bytes = 8 if dtype == "float64" else 4
    row_bytes = 2 if comm_dtype == "bf16" else number_bytes
    flops_per_s = sheet.bf16_flops_per_s if matmul_dtype == "bf16" else sheet.flops_per_s
    # In float64 these devices compute half as fast.
    speed = SHARE * flops_per_s * 4 / number_bytes
    roof = _Roof(sheet, speed, number_bytes, row_bytes, recompute)
    number_s = roof.moved_s(number_bytes)
    compute = ComputeTimes(
        ranks=1,
        ops={op_kind(op): roof.op_times(op) for op in model.ops},
        begin=Affine(KERNELS["begin"] * LAUNCH_S, number_s),
        # Weight, gradient and two moments are read, all but the gradient written.
        update=Affine(KERNELS["update"] * LAUNCH_S, 7 * number_s),
        boundary_per_number_s=2 * roof.moved_s(row_bytes),
    )
    times = LinkTimes(wire.latency_s, wire.bandwidth_bytes_per_s, 0.0)
    # Two exchanges, of which each moves at most as many bytes as there are.
    summed = LinkTimes(wire.latency_s, wire.bandwidth_bytes_per_s / 2, 0.0)
    return Profile(
        machine=name,
        source="by hand",
        note=f"{sheet.source}; {wire.source}; assumed: {SHARE:.0%} of its speed and memory's, "
        f"{LAUNCH_S * 1e6:g} us a kernel, {wire.latency_s * 1e6:g} us a message",
        device="cuda",
        dtype=dtype,
        comm_dtype=comm_dtype,
        matmul_dtype=matmul_dtype,
        kernel="auto",
        recompute=recompute,
        threads=1,
        compute=(compute,),
        message=times,
        exchange=times,
        gradient_sum=summed,
    )


@dataclass(frozen=True)
class _Roof:
    """The costs of ops on a device."""

    sheet: Sheet
    speed_flops_per_s: float
    """Of products."""
    number_bytes: int
    row_bytes: int
    recompute: bool

    def moved_s(self, size_bytes: float) -> float:
        return size_bytes / (SHARE * self.sheet.memory_bytes_per_s)

    def _longer(self, flops: float, numbers: float) -> float:
        return max(flops / self.speed_flops_per_s, self.moved_s(numbers * self.number_bytes))

    def op_times(self, op: Op) -> OpTimes:
        """Rows are read and written once for each kernel that they pass through."""
        out, push = sum(op.outputs.values()), op.push_width
        entry_s = self._longer(op.flops_per_feature, 2) if op.reads_features else 0.0
        # Of an edge the row that it reads, its weight and its column.
        edge_s = self.moved_s(push * self.row_bytes + self.row_bytes + 4) if push else 0.0
        kept_s = self.moved_s(EDGE_PASSES * op.kept_per_edge * self.number_bytes)
        # Backward of attention sums rows of both ends, too.
        back_edge_s = edge_s if op.is_linear else 3 * edge_s + kept_s
        first, then = (KERNELS[side] * LAUNCH_S for side in ("before", "after"))
        before_row_s = self._longer(0, 4 * push)
        after_row_s = self._longer(op.flops_per_row, 2 * push + 4 * out)
        back_row_s = self._longer(2 * op.flops_per_row, 3 * push + 6 * out)
        own_entry_s = 0.0 if op.aggregates else entry_s
        finish = Affine(LAUNCH_S, 0.0, 0.0, entry_s) if op.reads_features else Affine()
        forward_before = Affine(first, before_row_s, 0.0, entry_s) if push else Affine()
        forward_after = Affine(then, after_row_s, edge_s + kept_s, own_entry_s)
        backward_before = Affine(first, before_row_s, back_edge_s) if push else Affine()
        backward_after = Affine(then, back_row_s)
        if self.recompute:
            # Rows are made again, what was aggregated is not.
            backward_before = _sum(backward_before, forward_before)
            backward_after = _sum(backward_after, Affine(then, after_row_s, 0.0, own_entry_s))
        once_row_s = before_row_s + after_row_s
        fitted = push if op.moves else 0
        forecast_row_s = once_row_s + self._longer(10 * fitted**2, 4 * fitted)
        recall_row_s = once_row_s + self._longer(2 * fitted**2, fitted)
        return OpTimes(
            forward_before,
            forward_after,
            backward_before,
            backward_after,
            finish,
            forecast=Affine(KERNELS["forecast"] * LAUNCH_S, forecast_row_s),
            recall=Affine(KERNELS["recall"] * LAUNCH_S, recall_row_s),
            carry=Affine(KERNELS["carry"] * LAUNCH_S, self._longer(2 * push**2, 3 * push)),
            relative_error=0.0,
        )


def _sum(a: Affine, b: Affine) -> Affine:
    return Affine(
        a.base_s + b.base_s,
        a.per_row_s + b.per_row_s,
        a.per_edge_s + b.per_edge_s,
        a.per_entry_s + b.per_entry_s,
    )
