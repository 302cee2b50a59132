"""Buckets of the gradient sum: same bits and bytes; each starts after its last weight."""

from itertools import pairwise

import pytest
from helpers import quick_config, run_ranks, small_graph
from stage_dags import plan_of_runs

from gnnpipe import Trainer
from gnnpipe.plan import buckets, gradient_buckets, gradient_steps
from gnnpipe.plan.model_graph import ModelGraph, Op
from gnnpipe.runtime.comm.mesh import Mesh


def layer(index, weights, parameters=100):
    before = (f"x{index - 1}",) if index else ()
    return Op(
        name=f"op{index}",
        inputs=before,
        outputs={f"x{index}": 8},
        num_parameters=parameters,
        flops_per_row=0,
        push_width=8,
        weights=weights,
    )


def stack(*weights):
    return ModelGraph("drawn", 8, 8, tuple(layer(i, names) for i, names in enumerate(weights)))


def test_gradient_is_complete_after_the_first_step_that_uses_a_weight():
    model = stack(("a",), ("b",), ("b", "c"), ("d",))
    assert gradient_steps(model, range(4)) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert gradient_steps(model, range(1, 3)) == {"b": 0, "c": 1}


def plan_of(model, shards, *cuts):
    return plan_of_runs(tuple(pairwise([0, *cuts, model.num_ops])), shards, 1)


def test_buckets_are_filled_from_the_last_step(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 400)  # of two shards each sends half
    model = stack(*((name,) for name in "abcdefg"))
    # Of 400 bytes each, two make a bucket; what is left goes with the first step.
    assert gradient_buckets(model, plan_of(model, 2), 4) == [(0, 1, 3, 5)]
    assert gradient_buckets(model, plan_of(model, 2, 3), 4) == [(0, 1), (0, 2)]
    assert gradient_buckets(model, plan_of(model, 1), 4) == [(0,)]
    # A first step without weights has no bucket of its own.
    model = ModelGraph("drawn", 8, 8, (layer(0, (), 0), *map(layer, (1, 2), ("a", "b"))))
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    assert gradient_buckets(model, plan_of(model, 2), 4) == [(0, 2)]


def losses_of(shapes, bucket_bytes):
    """By shape: losses, counted bytes, bytes by formula, and sums in the program."""
    stages, shards, chunks = shapes
    buckets.BUCKET_BYTES = bucket_bytes
    mesh = Mesh.join(stages, shards)
    found = []
    for model in ("gcn", "gat", "sage"):
        for staleness in ("auto", "exact"):
            config = quick_config(
                model=model,
                layers=5,
                hidden=8,
                stages=stages,
                shards=shards,
                chunks=chunks,
                staleness=staleness,
                epochs=4,
            )
            trainer = Trainer(config, graph=small_graph(), world=mesh)
            result = trainer.fit()
            actions = trainer._setup()[1].program.stages[-1]
            sums = sum(a.kind == "REDUCE_GRAD" for a in actions)
            found.append(
                (
                    [row.loss for row in result.history],
                    result.comm_bytes_per_epoch,
                    result.comm_bytes_closed_form,
                    sums,
                )
            )
    return found


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 3, 4), (2, 2, 3)])
def test_buckets_change_neither_bits_nor_bytes(shape):
    ranks = shape[0] * shape[1]
    one = run_ranks(losses_of, ranks, shape, 1 << 30)[0]
    several = run_ranks(losses_of, ranks, shape, 1)[0]
    for a, b in zip(one, several, strict=True):
        assert a[0] == b[0]
        assert a[1] == a[2] == b[1] == b[2]
        assert a[3] == 1
        assert b[3] >= 2
