"""The DAG model of S-SGD: the simulator gives its closed forms, exactly."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpipe.perf import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from ssgd_model import VARIANTS, AllReduce, LayerTimes, Training, iteration_s, ssgd_tasks

WHOLE = st.integers(0, 40).map(float)
# Powers of two, so that sums of times are exact.
BYTES = st.sampled_from([0, 2**10, 2**14, 2**18])
FREE = AllReduce(0.0, float("inf"), float("inf"))


@st.composite
def trainings(draw):
    layers = draw(st.lists(st.builds(LayerTimes, WHOLE, WHOLE, BYTES), min_size=1, max_size=6))
    all_reduce = AllReduce(draw(WHOLE) / 8, 2.0 ** draw(st.integers(8, 16)), 2.0**12)
    return Training(layers, draw(WHOLE), draw(WHOLE), draw(WHOLE), all_reduce)


def makespan(training, variant, devices, iterations):
    return simulate(ssgd_tasks(training, variant, devices, iterations)).makespan_s


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=60)
@given(training=trainings(), devices=st.sampled_from([1, 2, 4, 8]), iterations=st.integers(1, 5))
def test_the_closed_forms_hold(variant, training, devices, iterations):
    come = training.read_s + training.copy_s
    each = iteration_s(training, variant, devices)
    first = makespan(training, variant, devices, 1)
    # The first iteration has nothing to come in under.
    assert first == come + iteration_s(
        Training(training.layers, 0.0, 0.0, training.update_s, training.all_reduce),
        variant,
        devices,
    )
    assert makespan(training, variant, devices, iterations) == first + (iterations - 1) * each


def test_by_hand():
    # One device of two, alpha 1, no cost per byte: every all-reduce takes 2 n alpha = 4.
    training = Training(
        [LayerTimes(1.0, 2.0, 8), LayerTimes(1.0, 3.0, 8)],
        2.0,
        1.0,
        0.5,
        AllReduce(1.0, 1e300, 1e300),
    )
    assert iteration_s(training, "naive", 2) == 3 + 2 + 5 + 8 + 0.5
    assert iteration_s(training, "input overlap", 2) == 2 + 5 + 8 + 0.5
    # The all-reduce of layer 2 starts at 2 + 3 and ends at 9; that of layer 1 then ends at 13.
    assert iteration_s(training, "wait-free backward", 2) == 13 + 0.5
    slow_input = Training(training.layers, 50.0, 1.0, 0.5, training.all_reduce)
    assert iteration_s(slow_input, "wait-free backward", 2) == 51


def test_the_cost_of_an_all_reduce():
    cost = AllReduce(latency_s=0.5, bandwidth_bytes_per_s=4.0, add_bytes_per_s=8.0)
    n, size = 4, 64
    assert cost.time_s(n, size) == 2 * n * 0.5 + 2 * (n - 1) / n * size / 4 + (n - 1) / n * size / 8
    assert cost.time_s(1, size) == 0


@settings(deadline=None, max_examples=40)
@given(trainings(), st.sampled_from([1, 2, 4, 8]))
def test_each_variant_is_at_least_as_fast_as_the_one_before(training, devices):
    naive, ahead, wait_free = (iteration_s(training, variant, devices) for variant in VARIANTS)
    assert naive >= ahead >= wait_free
    assert wait_free >= sum(x.forward_s + x.backward_s for x in training.layers)


def test_the_critical_path_says_what_rules():
    layers = [LayerTimes(1.0, 2.0, 2**10)] * 3
    for all_reduce, kind in ((FREE, "B"), (AllReduce(50.0, 1e300, 1e300), "REDUCE_GRAD")):
        training = Training(layers, 0.0, 0.0, 0.0, all_reduce)
        timeline = simulate(ssgd_tasks(training, "wait-free backward", 4, 1))
        spent = {}
        for task, _ in timeline.critical_path():
            what = timeline.tasks.what[task].kind
            spent[what] = spent.get(what, 0.0) + timeline.tasks.duration_s[task]
        assert max(spent, key=spent.get) == kind


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import ssgd

    yield ssgd
    sys.modules.pop("ssgd")


def test_the_models_of_the_table_have_the_published_number_of_weights(script):
    # Without biases and norms: VGG-16 138,357,544 - 13,416, ResNet-50 25,557,032 - 54,120.
    assert sum(layer.weights for layer in script.vgg16()) == 138_344_128
    assert sum(layer.weights for layer in script.resnet50()) == 25_502_912
    # 15.5 and 4.1 thousand million multiply-adds an image.
    assert 15.4e9 < sum(layer.multiply_adds for layer in script.vgg16()) < 15.6e9
    assert 4.0e9 < sum(layer.multiply_adds for layer in script.resnet50()) < 4.2e9


def test_the_page_is_what_the_closed_forms_say(script):
    # The script simulates; so the two are compared here once more, at full size.
    written = Path(script.PAGE).read_text(encoding="utf-8")
    assert script.page(script.results(iteration_s)) == written


def test_what_pays(script):
    def row(*speedups):
        return script.Row("", "", "", 1.0, speedups, "").pays

    assert row(1, 0.8, 1.3, 2.4, 4, 5, 6, 7, 8) == "4 to 16"
    assert row(1, 2, 4, 8, 16, 32, 64, 128, 256) == "2 to 256 or more"
    assert row(1, *[0.9] * 8) == "never"
