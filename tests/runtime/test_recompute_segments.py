"""--recompute-every n: the same bits, and exactly the inputs that ``Segments`` says are kept."""

import pytest
import torch
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import InputError, TrainConfig, Trainer
from gnnpipe.ops import norm_relu_blocks
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.stage import Stage

LAYERS, HIDDEN, ROWS = 9, 8, 61


def trained(model, shape=(1, 1, 1), every=0, mesh=None, **more):
    """Losses and weights; ``every`` 0: nothing is recomputed."""
    stages, shards, chunks = shape
    config = quick_config(
        model=model,
        layers=LAYERS,
        hidden=HIDDEN,
        stages=stages,
        shards=shards,
        chunks=chunks,
        dtype="float32",
        recompute=every > 0,
        recompute_every=max(every, 1),
        **more,
    )
    trainer = Trainer(config, graph=small_graph(ROWS, features=HIDDEN + 1, sparse=True), world=mesh)
    losses = [row.loss for row in trainer.fit().history]
    return losses, trainer.model.state_dict()


def assert_same(model, every, shape=(1, 1, 1), mesh=None, **more):
    losses, weights = trained(model, shape, 0, mesh, **more)
    again, others = trained(model, shape, every, mesh, **more)
    assert again == losses
    for name, weight in weights.items():
        assert torch.equal(others[name], weight), name


@pytest.mark.parametrize(
    ("model", "chunks", "staleness", "every"),
    [
        ("gcn", 1, "none", 2),
        ("gcnii", 1, "none", 3),
        ("gat", 1, "none", 2),
        ("sage", 1, "none", 20),
        ("gcn", 8, "none", 4),
        ("gcnii", 8, "auto", 2),
        ("resgcn", 3, "paper", 3),
        ("sage", 3, "exact", 2),
        ("gat", 3, "auto", 2),
    ],
)
def test_same_bits(model, chunks, staleness, every, monkeypatch):
    monkeypatch.setattr(norm_relu_blocks, "rows_at_once", lambda x, width: 7)
    assert_same(model, every, (1, 1, chunks), staleness=staleness, dropout=0.5)


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_same_bits_with_steps_by_chunk(schedule):
    assert_same("gcnii", 2, (1, 1, 4), schedule=schedule, dropout=0.3)


def on_ranks(shape):
    mesh = Mesh.join(shape[0], shape[1])
    for model, every in (("gcnii", 2), ("gat", 3), ("resgcn", 2)):
        assert_same(model, every, shape, mesh, dropout=0.3)
    return True


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 3), (1, 2, 1), (1, 2, 3)])
def test_same_bits_on_ranks(shape):
    assert all(run_ranks(on_ranks, 2, shape))


def inputs_held(stage):
    """Bytes of the storages that the tape of chunk 0 keeps."""
    held = {}
    for record in stage._chunks[0].tape:
        for leaf in (record.leaves or {}).values():
            held[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
        for received in record.received.values():
            storage = received.rows.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


CLASSES = 3
LOSS_ROWS = 20
"""Rows that the last step computes."""
STEPS = [*[ROWS * HIDDEN] * 8, LOSS_ROWS * CLASSES]
"""Numbers that each step but the first one reads."""


@pytest.mark.parametrize(
    ("every", "kept"), [(1, range(1, 10)), (2, [6]), (3, [6]), (4, [4, 8]), (9, [9]), (20, [])]
)
def test_bytes_kept_by_forward(every, kept, monkeypatch):
    """A GCN of 9 layers has 10 steps; each kept step but the first holds its aggregated rows.

    The last aggregation is that of the narrower logits.

    With n = 2 and n = 3 there are two levels: forward keeps the inputs of steps 0 and 6.
    """
    found = []
    seed_loss = Stage.seed_loss

    def counting(self, chunk, scale):
        found.append(inputs_held(self))
        seed_loss(self, chunk, scale)

    monkeypatch.setattr(Stage, "seed_loss", counting)
    trained("gcn", every=every)
    assert set(found) == {4 * sum(STEPS[step - 1] for step in kept)}


@pytest.mark.parametrize(("every", "runs"), [(1, 20), (2, 10 + 4 + 2 + 10), (4, 20), (20, 20)])
def test_steps_run_again(every, runs, monkeypatch):
    """Steps of an epoch: 10 forward, and again in one level (10) or in two."""
    calls = []
    compute = Stage._compute

    def counting(self, *arguments):
        calls.append(self._training)
        return compute(self, *arguments)

    monkeypatch.setattr(Stage, "_compute", counting)
    trained("gcn", every=every, epochs=1)
    assert sum(calls) == runs


def test_refused_without_recompute():
    with pytest.raises(InputError, match="--recompute-every 4: has no effect without --recompute"):
        TrainConfig(recompute_every=4)
