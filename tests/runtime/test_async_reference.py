"""The reference of asynchronous training, against loops that are written out."""

import pytest
import torch
import torch.nn.functional as F
from async_reference import POLICIES, AsyncReference, RefStage, dense_chunks, gaps_of, one_f_one_b

N, WIDTH, CLASSES, K = 12, 4, 3, 3


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem():
    matrix = (draw(N, N, seed=1) > 0.7).double() + torch.eye(N, dtype=torch.float64)
    matrix = matrix / matrix.sum(1, keepdim=True)
    parts = [torch.arange(c, N, K) for c in range(K)]
    y = torch.arange(N) % CLASSES
    return matrix, parts, dense_chunks({"mean": matrix}, parts, x=draw(N, WIDTH, seed=2), y=y)


def mask(one):
    """A dropout mask of the pass."""
    drawn = torch.Generator().manual_seed(100 * one.epoch + one.index)
    kept = torch.rand(len(one.chunk.rows), WIDTH, generator=drawn, dtype=torch.float64) < 0.7
    return kept / 0.7


def first(values, weights, one):
    x = one.chunk.data["x"] if "x" not in values else values["x"]
    h = one.aggregate("mean", "h0", F.linear(x, weights["w0"]))
    return {"h": h.relu() * mask(one)}


def second(values, weights, one):
    out = F.linear(one.aggregate("mean", "h1", values["h"] * weights["s1"]), weights["w1"])
    return {"loss": F.cross_entropy(out, one.chunk.data["y"])}


def both(values, weights, one):
    return second(first(values, weights, one), weights, one)


FIRST = {"w0": draw(WIDTH, WIDTH, seed=3)}
SECOND = {"w1": draw(CLASSES, WIDTH, seed=4), "s1": draw(WIDTH, seed=5)}
WALK = [(epoch, c) for epoch in range(4) for c in (0, 2, 1)]


def adam(weights):
    return torch.optim.Adam(weights, lr=0.05)


def two_stages(policy, optimizer=adam, every=1):
    stages = [RefStage(first, FIRST), RefStage(second, SECOND, {"h": 0})]
    reference = AsyncReference(stages, problem()[2], policy, optimizer)
    reference.run(one_f_one_b([1, 0], len(WALK), every), WALK)
    return reference


def weights_of(reference):
    return {name: w.detach() for stage in reference.stages for name, w in stage.weights.items()}


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, **tolerance)


def by_hand(delay, goes_back_with):
    """Chunk by chunk in a loop, on the whole matrix; the first stage's forward is ``delay`` old.

    ``goes_back_with``: "forward", the weights of forward, or "now".
    """
    matrix, parts, chunks = problem()
    weights = {n: w.clone().requires_grad_() for n, w in (FIRST | SECOND).items()}
    optimizer = torch.optim.Adam(list(weights.values()), lr=0.05)
    tables = [torch.zeros(N, WIDTH, dtype=torch.float64) for _ in range(2)]
    history = [{n: w.detach().clone() for n, w in weights.items()}]
    for t, (epoch, c) in enumerate(WALK):
        rows, data = parts[c], chunks[c].data
        kept = mask(type("Pass", (), {"epoch": epoch, "index": c, "chunk": chunks[c]}))
        old = history[max(t - delay, 0)]["w0"]

        def layer(number, h, rows=rows):
            read = tables[number].clone().index_copy(0, rows, h)
            tables[number][rows] = h.detach()
            return matrix[rows] @ read

        made = layer(0, F.linear(data["x"], old)).relu() * kept
        h = made.detach().requires_grad_()
        out = F.linear(layer(1, h * weights["s1"]), weights["w1"])
        F.cross_entropy(out, data["y"]).backward()
        # By hand: x needs no gradient, so the product with w0 goes back without w0.
        upstream = h.grad * kept * (made > 0)
        inside = matrix[rows][:, rows]
        weights["w0"].grad = (inside.t() @ upstream).t() @ data["x"]
        optimizer.step()
        optimizer.zero_grad()
        history.append({n: w.detach().clone() for n, w in weights.items()})
    return history[-1]


def test_one_stage_is_a_loop_over_chunks_under_every_policy():
    expected = by_hand(0, "now")
    for policy in POLICIES:
        if policy == "2bw":  # one step old on every stage
            continue
        reference = AsyncReference([RefStage(both, FIRST | SECOND)], problem()[2], policy, adam)
        reference.run(one_f_one_b([0], len(WALK)), WALK)
        assert_same(weights_of(reference), expected)


@pytest.mark.parametrize("policy", ["latest", "stash"])
def test_two_stages_are_a_loop_with_older_weights_in_the_first_forward(policy):
    assert_same(weights_of(two_stages(policy)), by_hand(1, policy))


def test_policies_differ_and_a_step_behind_all_passes_makes_them_equal():
    found = {policy: weights_of(two_stages(policy)) for policy in POLICIES}
    found.pop("xpipe")  # as predict with a step behind every pass
    found.pop("latest")  # the first stage goes back without its weights: as stash
    found.pop("spectrain")  # half a stage before the second is none: as predict
    values = [weights["w1"] for weights in found.values()]
    assert not any(torch.allclose(a, b) for i, a in enumerate(values) for b in values[:i])
    last = {p: weights_of(two_stages(p, every=len(WALK))) for p in POLICIES}
    for weights in last.values():
        assert_same(weights, last["stash"])


def test_orders_and_gaps():
    chain = one_f_one_b([2, 1, 0], 5)
    assert chain[2][:4] == [("F", 0), ("B", 0), ("S", 0), ("F", 1)]
    assert chain[0][:6] == [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("S", 0), ("F", 3)]
    assert [list(gaps_of(order).values()) for order in chain] == [
        [0, 1, 2, 2, 2],
        [0, 1, 1, 1, 1],
        [0, 0, 0, 0, 0],
    ]
