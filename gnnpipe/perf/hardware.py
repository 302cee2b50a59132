"""Profiles of hardware that is not at hand, from data sheets; their source is 'by hand'.

A roofline model (Williams, Waterman and Patterson, CACM 2009): an op takes as long as its
computation at the device's speed or its traffic at the memory's bandwidth, whichever is longer. All
kernels are assumed to reach half of both, and to take a fixed time to launch. Such a profile shows
what limits a run, and which of two very different shapes is faster. The times themselves are rough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes, Profile, op_kind
from gnnpipe.perf.volume import FORECAST_RANK
from gnnpipe.plan import ModelGraph, Op
from gnnpipe.registry import nearest

SHARE = 0.5
"""Share of a data sheet's speed and bandwidth that kernels reach (assumed)."""
LAUNCH_S = 5e-6
"""Time to launch a kernel (assumed)."""
KERNELS = {"before": 5, "after": 8, "forecast": 60, "carry": 3, "begin": 3, "update": 2}
"""Kernels that a part launches (assumed from the torch ops that it calls)."""
EDGE_PASSES = 8
"""Passes over the numbers kept per edge, each way (assumed from ``models.gat_attention``)."""


@dataclass(frozen=True)
class DeviceSheet:
    """Data sheet of a device."""

    flops_per_s: float
    """float32, without tensor cores."""
    bf16_flops_per_s: float
    """bfloat16, with tensor cores, of dense matrices."""
    memory_bytes_per_s: float
    memory_bytes: int
    source: str


@dataclass(frozen=True)
class LinkSheet:
    """Standard or data sheet of a link; the latency is assumed."""

    bandwidth_bytes_per_s: float
    """One way."""
    latency_s: float
    source: str


DEVICES = {
    # V100 and P100 have no instructions for bfloat16: the speed of float32.
    "v100": DeviceSheet(15.7e12, 15.7e12, 0.9e12, 16 * 10**9, "NVIDIA V100 data sheet, SXM2 16 GB"),
    "p100": DeviceSheet(10.6e12, 10.6e12, 0.732e12, 16 * 10**9, "NVIDIA P100 data sheet, SXM2"),
    "a100": DeviceSheet(19.5e12, 312e12, 2.039e12, 80 * 10**9, "NVIDIA A100 data sheet, SXM 80 GB"),
    "h100": DeviceSheet(67e12, 989e12, 3.35e12, 80 * 10**9, "NVIDIA H100 data sheet, SXM 80 GB"),
}
LINKS = {
    "nvlink3": LinkSheet(300e9, 10e-6, "NVIDIA A100 data sheet: 600 GB/s both ways"),
    "nvlink4": LinkSheet(450e9, 10e-6, "NVIDIA H100 data sheet: 900 GB/s both ways"),
    "10gbe": LinkSheet(1.25e9, 50e-6, "IEEE 802.3ae: 10 Gbit/s"),
    "100gbe": LinkSheet(12.5e9, 50e-6, "IEEE 802.3ba: 100 Gbit/s"),
}


def hardware_memory_bytes(name: str) -> int:
    """Return the memory of the device in ``name``, 'DEVICE:LINK'; ``InputError`` if unknown."""
    return _sheets(name)[0].memory_bytes


def _sheets(name: str) -> tuple[DeviceSheet, LinkSheet]:
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


def hardware_profile(name: str, model: ModelGraph, config: TrainConfig) -> Profile:
    """Return a profile of ``name``, 'DEVICE:LINK', for a model's ops; ``InputError`` if unknown."""
    sheet, link = _sheets(name)
    number_bytes = 8 if config.dtype == "float64" else 4
    row_bytes = 2 if config.comm_dtype == "bf16" else number_bytes
    flops_per_s = sheet.bf16_flops_per_s if config.matmul_dtype == "bf16" else sheet.flops_per_s
    # float64 runs at half the speed of float32 on these devices.
    speed = SHARE * flops_per_s * 4 / number_bytes
    roof = _Roof(sheet, speed, number_bytes, row_bytes)

    def times_of(op: Op) -> OpTimes:
        times = roof.op_times(op)
        return times.recomputing(op.is_linear) if config.recompute else times

    number_s = roof.moved_s(number_bytes)
    compute = ComputeTimes(
        ranks=1,
        ops={op_kind(op): times_of(op) for op in model.ops},
        begin=Affine(KERNELS["begin"] * LAUNCH_S, number_s),
        # Reads weight, gradient and two moments; writes all but the gradient.
        update=Affine(KERNELS["update"] * LAUNCH_S, 7 * number_s),
        boundary_per_number_s=2 * roof.moved_s(row_bytes),
    )
    times = LinkTimes(link.latency_s, link.bandwidth_bytes_per_s, 0.0)
    return Profile(
        machine=name,
        source="by hand",
        note=f"{sheet.source}; {link.source}; assumed: {SHARE:.0%} of its speed and memory's, "
        f"{LAUNCH_S * 1e6:g} us a kernel, {link.latency_s * 1e6:g} us a message",
        device="cuda",
        dtype=config.dtype,
        comm_dtype=config.comm_dtype,
        matmul_dtype=config.matmul_dtype,
        kernel="auto",
        recompute=config.recompute,
        threads=1,
        compute=(compute,),
        message=times,
        exchange=times,
        shard_sum=times,
    )


@dataclass(frozen=True)
class _Roof:
    """Costs of ops on a device by the roofline model."""

    sheet: DeviceSheet
    speed_flops_per_s: float
    """Speed of dense products."""
    number_bytes: int
    row_bytes: int

    def moved_s(self, size_bytes: float) -> float:
        return size_bytes / (SHARE * self.sheet.memory_bytes_per_s)

    def _longer(self, flops: float, numbers: float) -> float:
        return max(flops / self.speed_flops_per_s, self.moved_s(numbers * self.number_bytes))

    def _sum_times(self, op: Op) -> OpTimes:
        """Times of a sum over all vertices, for which a chunk pushes a single row of F numbers.

        Each vertex is assumed to add the outer product of two rows of sqrt(F) numbers, as in linear
        attention, and to read these two rows.
        """
        read = 2 * math.sqrt(op.push_width)
        first, then = (KERNELS[side] * LAUNCH_S for side in ("before", "after"))
        before = Affine(first, self._longer(2 * op.push_width, read))
        back = Affine(first, self._longer(4 * op.push_width, 2 * read))
        return OpTimes(
            before,
            Affine(then),
            back,
            Affine(then),
            Affine(),
            forecast=Affine(KERNELS["forecast"] * LAUNCH_S),
            carry=Affine(KERNELS["carry"] * LAUNCH_S),
            relative_error=0.0,
        )

    def op_times(self, op: Op) -> OpTimes:
        """Times of an op whose rows are read and written once by each kernel."""
        if op.is_sum:
            return self._sum_times(op)
        out, push = sum(op.outputs.values()), op.push_width
        entry_s = self._longer(op.flops_per_feature, 2) if op.reads_features else 0.0
        # The row that an edge reads, its weight and its column.
        edge_s = self.moved_s(push * self.row_bytes + self.row_bytes + 4) if push else 0.0
        kept_s = self.moved_s(EDGE_PASSES * op.kept_per_edge * self.number_bytes)
        # Backward of attention also sums rows of both ends.
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
        fitted = push if op.moves else 0
        # Two passes, with the old and the new weights, and the fit of the map.
        probe_row_s = 2 * (before_row_s + after_row_s)
        probe_row_s += self._longer(12 * fitted**2, 5 * fitted)
        return OpTimes(
            forward_before,
            forward_after,
            backward_before,
            backward_after,
            finish,
            forecast=Affine(KERNELS["forecast"] * LAUNCH_S, probe_row_s),
            carry=Affine(
                KERNELS["carry"] * LAUNCH_S,
                self._longer(4 * push * min(FORECAST_RANK, push), 3 * push),
            ),
            relative_error=0.0,
        )
