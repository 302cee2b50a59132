"""When adding devices stops paying, by the DAG model of S-SGD (arXiv 1805.03812).

python scripts/ssgd.py    # writes docs/benchmarks/ssgd.md

Computed by gnnpipe's simulator from parameters that are stated here; nothing is measured. Speed-up
is N t(1) / t(N): each device takes samples of its own, so N devices do N times the work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from ssgd_model import VARIANTS, AllReduce, LayerTimes, Training, ssgd_tasks  # noqa: E402

from gnnpipe.perf import simulate  # noqa: E402
from gnnpipe.perf.what_if import critical_shares  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks" / "ssgd.md"

DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SAMPLES = 32
"""On each device, images of 3 x 224 x 224."""
OPERATIONS_PER_S = 10e12
"""Two to a multiply-add; what a device reaches, not what its sheet says."""
READ_BYTES, READ_BYTES_PER_S = 110_000, 1e9
"""Of an image on disk, and of the disk of each device."""
COPY_BYTES, COPY_BYTES_PER_S = 3 * 224 * 224 * 4, 12e9
UPDATE_BYTES_PER_S = 500e9
"""Memory of a device; SGD with momentum reads and writes 5 numbers for a weight."""
ADD_BYTES_PER_S = 100e9
LINKS = {
    "10 Gbit/s, 50 us": AllReduce(50e-6, 1.25e9, ADD_BYTES_PER_S),
    "100 Gbit/s, 10 us": AllReduce(10e-6, 12.5e9, ADD_BYTES_PER_S),
    "1,200 Gbit/s, 5 us": AllReduce(5e-6, 150e9, ADD_BYTES_PER_S),
}
PAYS = 1.5
"""A doubling of the devices pays if it makes the speed-up so many times as large."""


@dataclass(frozen=True)
class Shape:
    """A layer by its weights, and multiply-adds for one image."""

    weights: int
    multiply_adds: int


def convolution(size: int, wide_in: int, wide_out: int, side: int) -> Shape:
    """``size`` x ``size``, giving ``side`` x ``side`` values of each channel."""
    weights = size * size * wide_in * wide_out
    return Shape(weights, weights * side * side)


def vgg16() -> list[Shape]:
    """13 convolutions of 3 x 3 and three dense layers (arXiv 1409.1556, D)."""
    wide, side, layers = 3, 224, []
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(convolution(3, wide, width, side))
            wide = width
        side //= 2
    for wide_in, wide_out in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        layers.append(convolution(1, wide_in, wide_out, 1))
    return layers


def resnet50() -> list[Shape]:
    """One convolution of 7 x 7, 16 bottlenecks and a dense layer (arXiv 1512.03385).

    The stride is in the 3 x 3 convolution of a bottleneck, as torchvision has it.
    """
    layers, wide, side = [convolution(7, 3, 64, 112)], 64, 56
    for group, count in enumerate((3, 4, 6, 3)):
        width = 64 << group
        for block in range(count):
            out = side // 2 if group and not block else side
            layers += [convolution(1, wide, width, side), convolution(3, width, width, out)]
            layers.append(convolution(1, width, 4 * width, out))
            if not block:
                layers.append(convolution(1, wide, 4 * width, out))
            wide, side = 4 * width, out
    return [*layers, convolution(1, 2048, 1000, 1)]


MODELS = {"VGG-16": vgg16, "ResNet-50": resnet50}


def training_of(shapes: list[Shape], all_reduce: AllReduce) -> Training:
    """Backward does twice the work of forward."""
    layers = []
    for shape in shapes:
        time_s = 2 * shape.multiply_adds * SAMPLES / OPERATIONS_PER_S
        layers.append(LayerTimes(time_s, 2 * time_s, 4 * shape.weights))
    weights = sum(shape.weights for shape in shapes)
    return Training(
        layers,
        SAMPLES * READ_BYTES / READ_BYTES_PER_S,
        SAMPLES * COPY_BYTES / COPY_BYTES_PER_S,
        5 * 4 * weights / UPDATE_BYTES_PER_S,
        all_reduce,
    )


def simulated_s(training: Training, variant: str, devices: int) -> float:
    """What a second iteration adds to the makespan."""
    one, two = (simulate(ssgd_tasks(training, variant, devices, i)).makespan_s for i in (1, 2))
    return two - one


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    link: str
    variant: str
    one_s: float
    speedups: tuple[float, ...]
    """By number of devices."""
    rules: str
    """What has the largest share of the critical path of one iteration on the most devices."""

    @property
    def pays(self) -> str:
        """From how many devices on there is a gain, and up to how many a doubling pays."""
        first = next((n for n, s in zip(DEVICES, self.speedups, strict=True) if s > 1), None)
        if first is None:
            return "never"
        grown = [b / a for a, b in pairwise(self.speedups)]
        last = max((n for n, g in zip(DEVICES[1:], grown, strict=True) if g >= PAYS), default=1)
        return f"{first} to {last}{' or more' if last == DEVICES[-1] else ''}"


def results(time_s: Callable[[Training, str, int], float] = simulated_s) -> Iterator[Row]:
    """All rows; ``time_s`` of an iteration on so many devices."""
    for model, shapes in MODELS.items():
        for link, all_reduce in LINKS.items():
            training = training_of(shapes(), all_reduce)
            for variant in VARIANTS:
                times_s = [time_s(training, variant, n) for n in DEVICES]
                speedups = tuple(n * times_s[0] / t for n, t in zip(DEVICES, times_s, strict=True))
                timeline = simulate(ssgd_tasks(training, variant, DEVICES[-1], 1))
                place, share = next(iter(critical_shares(timeline).items()))
                rules = f"{place.split(' of ')[0]} {share:.0%}"
                yield Row(model, link, variant, times_s[0], speedups, rules)


def page(rows: Iterator[Row]) -> str:
    """docs/benchmarks/ssgd.md."""
    lines = [
        "# When adding devices stops paying",
        "",
        "Computed by `scripts/ssgd.py` with gnnpipe's simulator, by the DAG model of S-SGD (arXiv "
        "1805.03812). **Nothing here is measured.** Speed-up N t(1) / t(N): every device takes "
        "samples of its own, and the gradients of each layer are added up over all of them.",
        "",
        f"Stated: {SAMPLES} images of 3 x 224 x 224 on each device; a device reaches "
        f"{OPERATIONS_PER_S / 1e12:.0f} TFLOP/s, backward is twice forward; an image is "
        f"{READ_BYTES // 1000} kB on a disk of {READ_BYTES_PER_S / 1e9:.0f} GB/s per device and is "
        f"copied at {COPY_BYTES_PER_S / 1e9:.0f} GB/s; SGD with momentum moves 20 bytes a weight "
        f"at {UPDATE_BYTES_PER_S / 1e9:.0f} GB/s; gradients are added at "
        f"{ADD_BYTES_PER_S / 1e9:.0f} GB/s. Layers from the shapes of the models, without biases "
        "and norms. An all-reduce over n devices of M bytes takes 2 n alpha + 2 (n-1)/n M beta + "
        "(n-1)/n M gamma; bandwidth 1/beta and latency alpha stand in the table.",
        "",
        "Pays: from the least number of devices that are faster than one, to the largest that have "
        f"at least {PAYS} times the speed-up of half as many (of those in the table). Rules: what "
        f"has the largest part of the critical path of one iteration on {DEVICES[-1]} devices.",
        "",
        "| model | links | variant | t(1), ms | "
        + " | ".join(f"{n}" for n in DEVICES[1:])
        + " | pays | rules |",
        "|---" * (len(DEVICES) + 5) + "|",
    ]
    for row in rows:
        speedups = " | ".join(f"{s:.1f}" for s in row.speedups[1:])
        lines.append(
            f"| {row.model} | {row.link} | {row.variant} | {1e3 * row.one_s:.0f} | {speedups} | "
            f"{row.pays} | {row.rules} |"
        )
    lines += [
        "",
        "The latency term 2 n alpha is paid for every layer: it grows with the devices while "
        "all other terms stay, so the speed-up has a ceiling of t(1) / (2 alpha x layers), and "
        "models of many small layers meet it first. Wait-free backward hides the all-reduces "
        "only as far as backward is long.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = page(results())
    PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
