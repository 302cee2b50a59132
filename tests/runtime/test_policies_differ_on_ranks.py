"""Weight policies on real ranks lead to other weights, which a synchronous mode would not."""

from itertools import combinations

import pytest
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.runtime.comm.mesh import Mesh

POLICIES = ("latest", "stash", "2bw", "predict", "spectrain", "xpipe")
CHUNKS = 8
SEQUENTIAL = "sequential"
"""The stages are drained before each step."""


def all_weights(stages, policies, every, **settings):
    """Trained weights by policy, in float64 and the same order of chunks; runs on every rank."""
    mesh, found = Mesh.join(stages, 1), {}
    for policy in (SEQUENTIAL, *policies):
        way = {"schedule": "async", "weights": policy}
        if policy == SEQUENTIAL:
            way = {"schedule": "1f1b"}
        run = quick_config(
            **{
                "model": "gcn", "layers": 4, "hidden": 6, "stages": stages, "chunks": CHUNKS,
                "steps_every": every, "shuffle_chunks": False, "lr": 0.05, "epochs": 4,
                "eval_every": 0, "lr_schedule": "constant", "predict": False,
            } | way | settings
        )  # fmt: skip
        trainer = Trainer(run, small_graph(40), world=mesh)
        trainer.fit()
        found[policy] = {k: v.numpy().copy() for k, v in trainer.model.state_dict().items()}
    return found


def difference(one, other):
    return max(float(abs(value - other[name]).max()) for name, value in one.items())


def to_bits(weights):
    return {name: value.tobytes() for name, value in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "every", "equal"),
    [
        # A step behind every chunk: xpipe predicts as predict does, and half of one stage is none.
        (2, 1, {("predict", "xpipe"), ("predict", "spectrain"), ("spectrain", "xpipe")}),
        (4, 1, {("predict", "xpipe")}),
        (4, 4, set()),
    ],
)
def test_each_pair_of_policies_and_sequential_steps_differ(stages, every, equal):
    policies = [p for p in POLICIES if p != "2bw" or every >= stages or stages == 2]
    found = run_ranks(all_weights, stages, stages, policies, every)[0]
    for pair in combinations(found, 2):
        apart = difference(*(found[name] for name in pair))
        assert apart == 0 if pair in equal else apart > 1e-3, (pair, apart)


def assert_all_equal(found):
    expected = to_bits(found[SEQUENTIAL])
    assert len(found) == len(POLICIES) + 1
    assert all(to_bits(weights) == expected for weights in found.values())


@pytest.mark.slow
def test_without_a_gap_all_policies_are_sequential_steps_to_the_bit():
    assert_all_equal(all_weights(1, POLICIES, 1))
    drained = run_ranks(all_weights_drained, 4)[0]
    assert_all_equal(drained)


def all_weights_drained():
    return all_weights(4, POLICIES, CHUNKS, eval_every=1)
