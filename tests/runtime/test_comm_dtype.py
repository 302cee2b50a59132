"""--comm-dtype bf16: half the bytes, the same rounding for every number of shards, small errors."""

import pytest
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.runtime.comm.mesh import Mesh

MODELS = ("gcn", "sage", "gcnii", "resgcn", "gat")


def losses_of(shape, comm_dtype, staleness="auto"):
    """Losses of each epoch, and the bytes of one, by model."""
    stages, shards, chunks = shape
    mesh = Mesh.join(stages, shards)
    found = {}
    for model in MODELS:
        config = quick_config(
            model=model,
            layers=4,
            hidden=8,
            stages=stages,
            shards=shards,
            chunks=chunks,
            dtype="float32",
            comm_dtype=comm_dtype,
            staleness=staleness,
        )
        result = Trainer(config, graph=small_graph(), world=mesh).fit()
        assert result.comm_bytes_per_epoch == result.comm_bytes_closed_form
        found[model] = [row.loss for row in result.history], result.comm_bytes_per_epoch
    return found


@pytest.mark.parametrize(
    ("ranks", "shape"), [(1, (1, 1, 1)), (1, (1, 1, 6)), (2, (1, 2, 6)), (4, (2, 2, 6))]
)
def test_losses_are_close_and_messages_half_as_large(ranks, shape):
    whole = run_ranks(losses_of, ranks, shape, "same")[0]
    half = run_ranks(losses_of, ranks, shape, "bf16")[0]
    for model in MODELS:
        (losses, sent), (rounded, fewer) = whole[model], half[model]
        assert rounded == pytest.approx(losses, rel=0.02), model
        assert rounded != losses, model
        for axis in ("pipeline", "graph"):
            assert 2 * fewer[axis] == sent[axis]
        # Weights are summed as they are, and so is what maps are fitted from. All rows are probes
        # here, and pass between stages twice, forward only.
        assert fewer["gradient"] == sent["gradient"]
        probes = sent["pipeline"] if shape[2] > 1 else 0
        assert sent["control"] - fewer["control"] == probes // 2


def movement_of(lr, comm_dtype="bf16"):
    """By epoch, the movement of each layer's rows in the forecast."""
    config = quick_config(
        model="gcnii",
        layers=4,
        hidden=8,
        stages=4,
        chunks=6,
        dtype="float32",
        lr=lr,
        comm_dtype=comm_dtype,
        staleness="auto",
    )
    return [row.staleness.moved for row in Trainer(config, graph=small_graph()).fit().history]


def test_movement_of_probe_rows_is_not_hidden_by_rounding():
    """If weights hardly change, rows hardly move on any stage."""
    still = run_ranks(movement_of, 4, 1e-30)[0]
    assert all(moved < 1e-20 for row in still[1:] for moved in row)
    exact, rounded = (run_ranks(movement_of, 4, 1e-5, kind)[0] for kind in ("same", "bf16"))
    # Rows that are rounded themselves seem to move by 2e-3 of their size.
    assert exact[1][1] < 5e-4
    for row, like in zip(rounded[1:], exact[1:], strict=True):
        assert row == pytest.approx(like, rel=0.05)


def test_rows_are_rounded_alike_on_one_shard_and_on_two():
    alone = losses_of((1, 1, 1), "bf16")
    together = run_ranks(losses_of, 2, (1, 2, 1), "bf16")[0]
    for model in MODELS:
        # The first epoch has no backward behind it, whose halo gradients are rounded on the wire.
        assert together[model][0][0] == pytest.approx(alone[model][0][0], rel=1e-6), model
        assert together[model][0] == pytest.approx(alone[model][0], rel=0.02), model
