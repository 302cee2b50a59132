"""Losses and gradients that are not finite in single steps of asynchronous runs on real ranks."""

import math
import os
from dataclasses import replace

import pytest
import test_async_on_ranks
import torch
import torch.nn.functional as F
from async_gcn import stages_of
from helpers import quick_config, run_ranks, small_graph
from resume_runs import config, table
from test_async_on_ranks import CHUNKS, EPOCHS, EVERY, LR, WIDTH, dropped, loss_of, reference_of

from gnnpipe import Trainer
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.stage import Stage

FAULT_EPOCH = 2
"""Number of the epoch with the fault, from 0: the first one after the first flush."""
STRUCK = int(small_graph(40, directed=True, sparse=True).train_mask.nonzero()[0][1])
"""A training vertex; the fault is in its chunk. Behind the first one ReLU and dropout stop all of
the few columns, and so the NaN, too (docs/adr/0046)."""


class Faulty:
    """Cross entropy with a fault in the chunk of one vertex in one epoch."""

    def __init__(self, times=math.inf):
        self.left = times
        """Number of passes that are struck."""

    def is_struck(self, vertices, epoch):
        if epoch != FAULT_EPOCH or not self.left or not bool((vertices == STRUCK).any()):
            return False
        self.left -= 1
        return True


class InfiniteLoss(Faulty):
    """The loss is infinite, and its derivatives are finite."""

    def __call__(self, logits, labels, vertices, epoch):
        total = F.cross_entropy(logits, labels, reduction="sum")
        return total + math.inf if self.is_struck(vertices, epoch) else total


class NaNGradient(Faulty):
    """The loss is finite, and its derivatives are NaN."""

    def __call__(self, logits, labels, vertices, epoch):
        total = F.cross_entropy(logits, labels, reduction="sum")
        if self.is_struck(vertices, epoch):
            # d sqrt(x) is 1 / 0 at 0, and 0 / 0 behind a product with 0.
            total = total + ((logits * 0).sum().abs().sqrt() * 0.0)
        return total


class AdamBut(torch.optim.Adam):
    """Adam that leaves out one of its steps."""

    def __init__(self, weights, left_out):
        super().__init__(weights, lr=LR)
        self.left_out, self.count = left_out, 0

    def step(self):
        if self.count != self.left_out:
            super().step()
        self.count += 1


def difference(stages, shards, fault):
    """Largest difference of weights and of finite losses; runs on every rank."""
    mesh = Mesh.join(stages, shards)
    graph = small_graph(40, directed=True, sparse=True)
    run = quick_config(
        model="gcn", layers=4, hidden=WIDTH, epochs=EPOCHS, eval_every=EVERY, lr=LR,
        lr_schedule="cosine", stages=stages, shards=shards, chunks=CHUNKS, schedule="async",
        on_nan="skip",
    )  # fmt: skip
    trainer = Trainer(run, graph, world=mesh, loss_fn=fault())
    prepared = trainer._setup()[1]
    ref_stages = stages_of(prepared, dropped, loss_of)
    chunk = int(prepared.chunking.chunk_of_row()[prepared.chunking.inverse][STRUCK])
    left_out = FAULT_EPOCH * CHUNKS + list(prepared.chunk_order(FAULT_EPOCH)).index(chunk)
    test_async_on_ranks.OPTIMIZERS["but"] = lambda weights: AdamBut(weights, left_out)
    leads = list(prepared.dag.distances)
    reference, train = reference_of(prepared, graph, ref_stages, leads, "predict", "but", 1)
    losses = [row.loss for row in trainer.fit().history]
    assert math.isinf(losses[FAULT_EPOCH]) == (fault is InfiniteLoss)
    truth = [*train(0, 2), *train(2, 4), *train(4, 5)]
    found = [abs(a - b) for a, b in zip(losses, truth, strict=True) if math.isfinite(a)]
    trained = dict(trainer.model.named_parameters())
    for stage in reference.stages:
        for name, weight in stage.weights.items():
            found.append(float((trained[name] - weight).abs().max().detach()))
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [InfiniteLoss, NaNGradient])
@pytest.mark.parametrize(("stages", "shards"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_every_stage_skips_the_step_of_the_chunk_and_no_other(stages, shards, fault):
    found = run_ranks(difference, stages * shards, stages, shards, fault, timeout_s=60)
    assert max(found) < 1e-9


def weights_with_flushes(stages, schedule, fault):
    """Weights of a run that is drained before every step, so that nothing depends on S."""
    mesh = Mesh.join(stages, 1)
    run = quick_config(
        model="gcn", layers=4, hidden=WIDTH, epochs=EPOCHS, eval_every=1, lr=LR, stages=stages,
        chunks=CHUNKS, schedule=schedule, steps_every=CHUNKS, on_nan="skip",
        shuffle_chunks=False,  # the order of an epoch depends on the chunks in flight
    )  # fmt: skip
    trainer = Trainer(run, small_graph(40, directed=True, sparse=True), world=mesh, loss_fn=fault())
    rows = [(row.loss, row.lr) for row in trainer.fit().history]
    return rows, {k: v.numpy().tobytes() for k, v in trainer.model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [InfiniteLoss, NaNGradient])
def test_drained_before_every_step_two_ranks_equal_one_to_the_bit(fault):
    one = run_ranks(weights_with_flushes, 1, 1, "async", fault, timeout_s=60)[0]
    both = run_ranks(weights_with_flushes, 2, 2, "async", fault, timeout_s=60)
    assert both[0] == both[1] == one
    assert run_ranks(weights_with_flushes, 2, 2, "1f1b", fault, timeout_s=60)[0] == one
    assert one != run_ranks(weights_with_flushes, 1, 1, "async", Faultless, timeout_s=60)[0]


class Faultless(InfiniteLoss):
    def __init__(self):
        super().__init__(times=0)


RUN = {
    "model": "gcn", "layers": 4, "stages": 2, "chunks": CHUNKS, "schedule": "async",
    "eval_every": 2, "checkpoint_every": 2, "epochs": 6, "lr_schedule": "cosine",
}  # fmt: skip


def first_stage_strikes(patch, left):
    """One gradient of stage 0 alone is NaN in the first backward of the epoch; stage 1 steps."""
    backward = Stage.backward

    def struck(self, chunk, steps, following=None):
        epoch, found = self._chunks[chunk].epoch, backward(self, chunk, steps, following)
        if epoch == FAULT_EPOCH and left and os.environ["RANK"] == "0":
            left.pop()
            next(p for p in self.stage_module.parameters()).grad.fill_(math.nan)
        return found

    patch.setattr(Stage, "backward", struck)


def faulty_run(out, on_nan, kind, **more):
    """Rows of metrics.csv and weights, or the reason of the end."""
    with pytest.MonkeyPatch.context() as patch:
        loss_fn = {"loss": InfiniteLoss, "gradient": NaNGradient}.get(kind, Faultless)
        loss_fn = loss_fn() if loss_fn is Faultless else loss_fn(times=1)
        if kind == "stage":
            first_stage_strikes(patch, [1])
        settings = RUN | {"on_nan": on_nan} | more
        trainer = Trainer(
            config(out, **settings), small_graph(40, directed=True, sparse=True), loss_fn=loss_fn
        )
        try:
            result = trainer.fit()
        except FloatingPointError as error:
            return str(error)
    weights = {k: v.numpy().tobytes() for k, v in trainer.model.state_dict().items()}
    is_finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    return [(row.epoch, row.loss, row.lr) for row in result.history], weights, is_finite


KINDS = {
    "loss": "epoch 3: the loss is inf, first in the loss of chunk",
    "gradient": "epoch 3: gradients are NaN or infinite, first in the gradient of convs.3",
    "stage": "epoch 3: gradients are NaN or infinite, first in the gradient of convs.0",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stop_ends_the_run_at_the_flush_with_its_reason(kind, tmp_path):
    out = str(tmp_path / "run")
    reasons = run_ranks(faulty_run, 2, out, "stop", kind, timeout_s=60)
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith(KINDS[kind])
    assert len(table(out)) == FAULT_EPOCH


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_skip_goes_on_with_finite_weights(kind, tmp_path):
    found = run_ranks(faulty_run, 2, str(tmp_path / "run"), "skip", kind, timeout_s=60)
    rows, _, is_finite = found[0]
    assert found[0] == found[1]
    assert is_finite
    finite = [math.isfinite(loss) for _, loss, _ in rows]
    assert finite == [kind != "loss" or e != FAULT_EPOCH for e in range(RUN["epochs"])]


def gone_on_with(out, lr):
    run = replace(resumed_config(out), on_nan="stop", lr=lr)
    trainer = Trainer(
        run, small_graph(40, directed=True, sparse=True), loss_fn=Faultless(), resume=out
    )
    trainer.fit()
    return {k: v.numpy().tobytes() for k, v in trainer.model.state_dict().items()}


@pytest.mark.slow
def test_restore_is_to_resume_at_the_last_checkpoint_with_half_the_rate(tmp_path):
    stopped = str(tmp_path / "stopped")
    run_ranks(faulty_run, 2, stopped, "stop", "loss", timeout_s=60)
    expected = run_ranks(gone_on_with, 2, stopped, 0.025, timeout_s=60)[0]
    for kind in KINDS:
        out = str(tmp_path / kind)
        found = run_ranks(faulty_run, 2, out, "restore", kind, timeout_s=60)
        assert found[0] == found[1]
        assert found[0][1] == expected
        assert table(out) == table(stopped)


@pytest.mark.slow
def test_restore_ends_the_run_if_the_fault_stays(tmp_path):
    reasons = run_ranks(always_faulty, 2, str(tmp_path / "run"), timeout_s=60)
    assert reasons[0] == reasons[1]
    assert "restored too often" in reasons[0]


def always_faulty(out):
    trainer = Trainer(
        config(out, **RUN, on_nan="restore"),
        small_graph(40, directed=True, sparse=True),
        loss_fn=InfiniteLoss(),
    )
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit()
    return str(caught.value)
