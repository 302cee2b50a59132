"""Weights of forward and backward by policy, and what backward reads of them, op by op."""

import hashlib

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GATConv

from gnnpipe.capture.stage.step_calls import normalise
from gnnpipe.graph.blocks import Block
from gnnpipe.models.gat_attention import attend
from gnnpipe.models.sparse_input_linear import FeatureTable, feature_linear
from gnnpipe.ops.bf16_matmul import linear
from gnnpipe.ops.hashed_dropout import Mask
from gnnpipe.ops.norm_relu import NormReluOptions, gcnii_mix, norm_relu
from gnnpipe.optim.weight_policies import WEIGHT_POLICIES, StageSteps

ROWS, WIDTH = 7, 5


def parameter(*shape, seed=0):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.2)


def digest(weights):
    return hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in weights)).hexdigest()


class Pipeline:
    """A stage that makes ``gap`` steps between forward and backward, every gradient given."""

    def __init__(
        self, name, gap, passes=9, every=1, kind=torch.optim.Adam, ahead=0, is_skipped=None
    ):
        self.weights = [parameter(3, 2), parameter(4, seed=1)]
        self.optimizer = kind(self.weights, lr=0.1)
        self.is_skipped = is_skipped or (lambda position: False)
        self.order = one_f_one_b(ahead or gap * every + 1, passes, every)
        self.policy = WEIGHT_POLICIES[name](
            StageSteps(self.optimizer, gaps_of(self.order), depth=5)
        )
        self.real = [self.now()]
        """Real weights by version."""
        self.seen = {}
        """Weights in the parameters, by action."""
        self.random = torch.Generator().manual_seed(2)

    def now(self):
        return [w.detach().clone() for w in self.weights]

    def run(self):
        for action in self.order:
            kind, position = action
            if kind == "step" and self.is_skipped(position):
                self.policy.skipped()
                self.real.append(self.now())
                continue
            if kind == "step":
                for w in self.weights:
                    w.grad = torch.randn(w.shape, generator=self.random)
                self.optimizer.step()
                self.policy.stepped()
                self.optimizer.zero_grad()
                self.real.append(self.now())
                continue
            before = digest(self.weights)
            is_forward = kind == "F"
            context = self.policy.for_forward if is_forward else self.policy.for_backward
            with context(position):
                self.seen[action] = self.now()
            assert digest(self.weights) == before
        return self


def one_f_one_b(ahead, passes, every=1):
    """Actions of a stage with up to ``ahead`` chunks between forward and backward."""
    order = []
    for position in range(passes + ahead):
        if position < passes:
            order.append(("F", position))
        back = position - ahead + 1
        if 0 <= back < passes:
            order.append(("B", back))
            if (back + 1) % every == 0:
                order.append(("step", back))
    return order


def gaps_of(order):
    """Number of steps between F and B of each position."""
    steps, first, gaps = 0, {}, {}
    for kind, position in order:
        if kind == "step":
            steps += 1
        elif kind == "F":
            first[position] = steps
        else:
            gaps[position] = steps - first[position]
    return [gaps[position] for position in range(len(gaps))]


def versions(order):
    """Number of steps before each action."""
    steps, found = 0, {}
    for action in order:
        steps += action[0] == "step"
        found[action] = steps
    return found


def is_same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_latest_uses_the_weights_as_they_are(gap):
    line = Pipeline("latest", gap).run()
    before = versions(line.order)
    assert all(is_same(seen, line.real[before[action]]) for action, seen in line.seen.items())


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_stash_goes_back_with_the_weights_of_forward(gap, every):
    line = Pipeline("stash", gap, every=every, passes=10).run()
    before = versions(line.order)
    assert max(gaps_of(line.order)) == gap
    for position in range(10):
        forward = line.real[before["F", position]]
        assert is_same(line.seen["F", position], forward)
        assert is_same(line.seen["B", position], forward)


def test_stash_holds_the_versions_between_forward_and_backward():
    line = Pipeline("stash", 3, passes=12)
    most = 0
    for action in line.order:
        line.order, rest = [action], line.order
        line.run()
        line.order = rest
        most = max(most, len(line.policy._stashed))
    assert most == 4
    assert not line.policy._stashed


@pytest.mark.parametrize(("gap", "every"), [(0, 1), (1, 1), (1, 3), (0, 2)])
def test_2bw_uses_the_weights_one_step_before_those_that_the_gradient_changes(gap, every):
    line = Pipeline("2bw", gap, every=every, passes=12).run()
    for position in range(12):
        version = max(position // every - 1, 0)
        assert is_same(line.seen["F", position], line.real[version]), position
        assert is_same(line.seen["B", position], line.real[version]), position


@pytest.mark.parametrize("policy", ["stash", "2bw"])
def test_backward_has_the_weights_of_forward_behind_skipped_steps(policy):
    assert WEIGHT_POLICIES[policy].keeps_forward_weights
    line = Pipeline(policy, 1, passes=12, is_skipped=lambda position: position % 3 == 1).run()
    for position in range(12):
        assert is_same(line.seen["F", position], line.seen["B", position]), position


def test_xpipe_predicts_anew_behind_a_skipped_step():
    """With a step behind every chunk it is ``predict``."""
    of = [
        Pipeline(name, 2, passes=12, is_skipped=lambda position: position == 4).run()
        for name in ("xpipe", "predict")
    ]
    assert of[0].seen.keys() == of[1].seen.keys()
    assert all(is_same(of[0].seen[action], of[1].seen[action]) for action in of[0].seen)


def by_adam(line, version, steps):
    """Weights after ``version`` steps, moved by Adam's rule; from the gradients drawn again."""
    weights, random = [w.clone() for w in line.real[0]], torch.Generator().manual_seed(2)
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for _ in range(version):
        for i, w in enumerate(weights):
            grad = torch.randn(w.shape, generator=random)
            m[i], v[i] = 0.9 * m[i] + 0.1 * grad, 0.999 * v[i] + 0.001 * grad**2
    found = []
    for i, w in enumerate(line.real[version]):
        if version:
            mean, square = m[i] / (1 - 0.9**version), v[i] / (1 - 0.999**version)
            w = w - steps * 0.1 * mean / (square.sqrt() + 1e-8)
        found.append(w)
    return found


def is_close(a, b):
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["predict", "xpipe"])
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_predict_goes_forward_with_predicted_weights_and_back_with_real_ones(name, gap):
    line = Pipeline(name, gap).run()
    before = versions(line.order)
    for position, steps in enumerate(gaps_of(line.order)):
        version = before["F", position]
        forward = line.seen["F", position]
        assert is_close(forward, by_adam(line, version, steps))
        assert is_same(forward, line.real[version]) == (steps == 0 or version == 0)
        assert is_same(line.seen["B", position], line.real[before["B", position]])


@pytest.mark.parametrize("gap", [0, 2])
def test_spectrain_predicts_both_for_the_same_step(gap):
    line = Pipeline("spectrain", gap).run()  # the sixth stage: two steps further
    before = versions(line.order)
    for position, steps in enumerate(gaps_of(line.order)):
        forward = by_adam(line, before["F", position], steps + 2)
        assert is_close(line.seen["F", position], forward)
        assert is_close(line.seen["B", position], by_adam(line, before["B", position], 2))


def test_xpipe_predicts_once_for_all_chunks_of_a_step():
    line = Pipeline("xpipe", 1, every=3, passes=12, ahead=2).run()
    gaps = gaps_of(line.order)
    before = versions(line.order)
    assert {1, 0} == set(gaps[3:])  # within a step, later chunks come after the step before
    for first in (3, 6, 9):
        expected = by_adam(line, before["F", first], gaps[first])
        for position in range(first, first + 3):
            assert is_close(line.seen["F", position], expected)


def test_plain_sgd_is_predicted_from_its_last_gradient_and_forgotten_at_a_flush():
    line = Pipeline("predict", 1, kind=torch.optim.SGD).run()
    before = versions(line.order)
    w0, w1 = line.real[2], line.real[3]
    assert before["F", 4] == 3
    expected = [2 * b - a for a, b in zip(w0, w1, strict=True)]
    assert is_close(line.seen["F", 4], expected)
    line.policy.flush()
    with line.policy.for_forward(4):
        assert is_same(line.now(), line.real[-1])


@pytest.mark.parametrize("name", ["stash", "2bw", "predict", "spectrain", "xpipe"])
@pytest.mark.parametrize("passes", [2, 9])
def test_a_flush_leaves_nothing_that_a_new_policy_would_not_have(name, passes):
    line = Pipeline(name, 1, passes).run()
    line.policy.flush()
    first = Pipeline(name, 1, passes)
    first.weights, first.optimizer = line.weights, line.optimizer
    first.policy = WEIGHT_POLICIES[name](StageSteps(line.optimizer, gaps_of(line.order), depth=5))
    state = [w.detach().clone() for w in line.weights]
    optimizer_state = {
        w: {k: v.clone() for k, v in s.items()} for w, s in line.optimizer.state.items()
    }
    first.random.manual_seed(4)
    first.run()
    for w, value in zip(line.weights, state, strict=True):
        w.data.copy_(value)
        for key, kept in optimizer_state[w].items():
            line.optimizer.state[w][key].copy_(kept)
    line.random.manual_seed(4)
    line.seen = {}
    line.run()
    assert all(is_same(line.seen[action], seen) for action, seen in first.seen.items())


@pytest.mark.parametrize("name", ["predict", "2bw", "stash"])
def test_the_real_weights_come_back_after_an_error(name):
    line = Pipeline(name, 1).run()
    before = digest(line.weights)
    for context in (line.policy.for_forward, line.policy.for_backward):
        with pytest.raises(ZeroDivisionError), context(5):
            _ = 1 / 0
        assert digest(line.weights) == before


def test_a_stage_without_weights():
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    for name in WEIGHT_POLICIES:
        policy = WEIGHT_POLICIES[name](StageSteps(optimizer, [1, 1], depth=2))
        with policy.for_forward(0):
            optimizer.step()
        policy.stepped()
        with policy.for_backward(0):
            policy.flush()


def test_the_coming_learning_rates_are_used():
    line = Pipeline("predict", 1)
    line.run()
    rates = {0: [0.3], 1: [0.7]}
    policy = WEIGHT_POLICIES["predict"](StageSteps(line.optimizer, [2], rates.__getitem__))
    real = line.now()
    with policy.for_forward(0):
        predicted = line.now()
    default = WEIGHT_POLICIES["predict"](StageSteps(line.optimizer, [1]))
    with default.for_forward(0):
        one = line.now()
    for a, b, c in zip(real, one, predicted, strict=True):
        torch.testing.assert_close(
            a + 10 * (b - a), c, rtol=1e-4, atol=1e-5
        )  # 0.3 + 0.7 is ten times 0.1


# What backward reads, op by op.


def layer_norm():
    norm = nn.LayerNorm(WIDTH)
    norm.weight, norm.bias = parameter(WIDTH), parameter(WIDTH, seed=1)
    return norm


def mask():
    kept = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)) < 0.6
    return Mask(kept.to(torch.int8), 1 / 0.6)


def of_linear():
    weight, bias = parameter(WIDTH, WIDTH), parameter(WIDTH, seed=1)
    return [weight, bias], lambda x: F.linear(x, weight, bias)


def of_matmul():
    weight = parameter(WIDTH, 3)
    return [weight], lambda x: (x @ weight) @ weight.t()


def of_batched_matmul():
    weight = parameter(2, WIDTH, 3)
    return [weight], lambda x: torch.einsum("rf,hfd->rhd", x, weight)


def of_elementwise():
    scale, slope = parameter(WIDTH), parameter(1, seed=1)
    return [scale, slope], lambda x: F.prelu(x * scale, slope)


def of_layer_norm():
    norm, weight = layer_norm(), parameter(WIDTH, WIDTH, seed=2)
    return [norm.weight, norm.bias, weight], lambda x: norm(F.linear(x, weight)).relu()


def of_norm_relu():
    norm, bias = layer_norm(), parameter(WIDTH, seed=3)
    first, second = parameter(WIDTH, WIDTH, seed=4), parameter(WIDTH, WIDTH, seed=5)
    options = NormReluOptions(mask=mask())
    weights = [norm.weight, norm.bias, bias, first, second]
    return weights, lambda x: norm_relu(norm, bias, x, first, x.sin(), second, options=options)


def of_gcnii_mix():
    norm, weight = layer_norm(), parameter(WIDTH, WIDTH, seed=4)
    first = torch.ones(ROWS, WIDTH)
    options = NormReluOptions(mask=mask())
    return [norm.weight, norm.bias, weight], lambda x: gcnii_mix(
        x, first, weight, norm, 0.1, 0.3, options
    )


def of_rounded_linear():
    weight = parameter(WIDTH, WIDTH)
    return [weight], lambda x: linear(x, weight, None, is_rounded=True)


def of_feature_linear():
    x = sp.random_array((ROWS, 6), density=0.5, rng=np.random.default_rng(0), dtype=np.float32)
    table = FeatureTable(sp.csr_array(x), torch.float32, torch.device("cpu"))
    weight, second = parameter(WIDTH, 6), parameter(WIDTH, WIDTH, seed=1)
    return [weight, second], lambda x: F.linear(x + feature_linear(table.rows(), weight), second)


def of_attention():
    conv = GATConv(WIDTH, 3, heads=2)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1], [0, 1, 2, 3, 4, 5, 6, 1, 0]])
    nothing = torch.empty(0, dtype=torch.int64)
    block = Block(edges, nothing, nothing.bool()[:, None], (ROWS, ROWS), is_fused=True)
    return list(conv.parameters()), lambda x: attend(conv, x, None, block)


def of_normalise():
    weight, bias = parameter(WIDTH), parameter(WIDTH, seed=1)
    mean, variance = torch.zeros(1, WIDTH), torch.ones(1, WIDTH)
    return [weight, bias], lambda x: normalise(x, mean, variance, weight, bias, 1e-5)


OPS = {name[3:]: make for name, make in list(globals().items()) if name.startswith("of_")}


def gradients(y, x, weights):
    upstream = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    x.grad = None
    for w in weights:
        w.grad = None
    y.backward(upstream)
    return [x.grad.clone(), *(w.grad.clone() for w in weights)]


def oracle(make, forward, backward):
    """Gradients with the saved tensors of forward, parameters exchanged for those of backward."""
    weights, function = make()
    for w, value in zip(weights, forward, strict=True):
        w.data.copy_(value)
    kept = [value.clone(memory_format=torch.preserve_format) for value in backward]

    def pack(tensor):
        for number, w in enumerate(weights):
            if tensor.untyped_storage().data_ptr() == w.untyped_storage().data_ptr():
                return number, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        number, *view = packed
        return kept[number].as_strided(*view)

    x = inputs()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = function(x)
    return gradients(y, x, weights)


def inputs():
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9))
    return x.requires_grad_()


def stepped(optimizer, weights, seed):
    for w in weights:
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


@pytest.mark.parametrize("name", ["latest", "stash", "2bw", "predict", "spectrain", "xpipe"])
@pytest.mark.parametrize("op", sorted(OPS))
def test_backward_of_every_op_reads_the_weights_of_the_policy(op, name):
    """With a step between forward and backward, which autograd alone would refuse."""
    weights, function = OPS[op]()
    optimizer = torch.optim.Adam(weights, lr=0.3, fused=True)
    stepped(optimizer, weights, 1)
    stepped(optimizer, weights, 2)
    policy = WEIGHT_POLICIES[name](StageSteps(optimizer, [1], depth=2))
    x = inputs()
    with policy.for_forward(0):
        forward = [w.detach().clone() for w in weights]
        y = function(x)
    stepped(optimizer, weights, 3)
    policy.stepped()
    with policy.for_backward(0):
        backward = [w.detach().clone() for w in weights]
        found = gradients(y, x, weights)
    assert is_same(forward, backward) == (name in ("stash", "2bw"))
    expected = oracle(OPS[op], forward, backward)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_weights_of_backward_matter():
    """The test above would see another version."""
    make = OPS["linear"]
    forward = [w.detach() for w in make()[0]]
    other = [2 * w for w in forward]
    a, b = oracle(make, forward, forward)[0], oracle(make, forward, other)[0]
    assert not torch.allclose(a, b)


def test_a_step_that_the_policy_is_not_told_of_is_refused_by_autograd():
    weights, function = of_linear()
    optimizer = torch.optim.Adam(weights, lr=0.3)
    policy = WEIGHT_POLICIES["predict"](StageSteps(optimizer, [1]))
    x = inputs()
    with policy.for_forward(0):
        y = function(x)
    stepped(optimizer, weights, 3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(y, x, weights)
