"""Asynchronous runs on ranks: resumed to the bit, and steps whose gradients are not finite."""

import json
import math
import os
import signal

import pytest
import torch
from helpers import run_ranks, small_graph, struck_rows
from resume_runs import config, table

from gnnpipe import Trainer
from gnnpipe.errors import StoppedError
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.stage import Stage

RUN = {
    "stages": 2, "chunks": 4, "schedule": "async", "eval_every": 2, "checkpoint_every": 3,
    "lr_schedule": "cosine", "clip_norm": 0.5,
}  # fmt: skip
"""Flushes come after epochs 2, 3, 4, 6, 8 and 9."""


def trained(out, settings):
    result = Trainer(config(out, **settings), small_graph()).fit()
    return [row.loss for row in result.history]


def stopped(out, settings, epoch):
    """Stops the run at the flush of the epoch, and goes on with it."""
    from gnnpipe.train import loop

    real = loop.train_epochs

    def train(rank_runtime, mesh, program, order, number, *more):
        if mesh.rank == 1 and number + 1 <= epoch <= number + program.epochs:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(rank_runtime, mesh, program, order, number, *more)

    loop.train_epochs = train
    with pytest.raises(StoppedError, match=f"stopped after epoch {epoch} "):
        Trainer(config(out, **settings), small_graph()).fit()
    loop.train_epochs = real


def gone_on_with(out):
    Trainer(resumed_config(out), small_graph(), resume=out).fit()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "more"),
    [
        (1, {}),
        (2, {}),
        (1, {"weights": "stash"}),
        (2, {"weights": "stash"}),
        (1, {"passes_ahead": 3}),
        (1, {"optimizer": "AdamW", "weight_decay": 0.01}),
        (1, {"optimizer": "SGD"}),
        (1, {"optimizer": "SGD", "momentum": 0.9, "weight_decay": 0.01}),
        (1, {"optimizer": "RMSprop"}),
    ],
)
def test_stopped_at_a_flush_and_gone_on_with_is_the_same_to_the_bit(shards, more, tmp_path):
    settings = RUN | {"shards": shards} | more
    whole, out = str(tmp_path / "whole"), str(tmp_path / "out")
    run_ranks(trained, 2 * shards, whole, settings)
    run_ranks(stopped, 2 * shards, out, settings, 6)
    assert len(table(out)) == 6
    run_ranks(gone_on_with, 2 * shards, out)
    assert table(out) == table(whole)
    weights = [torch.load(f"{o}/model.pt", weights_only=True) for o in (out, whole)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])


def killed(out, settings, victim, number):
    """A rank kills itself in a backward pass (from 0), between two flushes."""
    backward, passes = Stage.backward, []

    def struck(self, *arguments):
        if os.environ["RANK"] == str(victim) and len(passes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        passes.append(1)
        return backward(self, *arguments)

    Stage.backward = struck
    Trainer(config(out, **settings), small_graph()).fit()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "victim", "number", "more"),
    [(1, 0, 18, {}), (1, 1, 23, {"weights": "stash"}), (2, 3, 21, {})],
)
def test_killed_within_an_epoch_and_gone_on_with_is_the_same_to_the_bit(
    shards, victim, number, more, tmp_path
):
    settings = RUN | {"shards": shards} | more
    whole, out = str(tmp_path / "whole"), str(tmp_path / "out")
    run_ranks(trained, 2 * shards, whole, settings)
    with pytest.raises(AssertionError, match=r"LostRankError.* newest checkpoint is epoch-000003"):
        run_ranks(killed, 2 * shards, out, settings, victim, number, timeout_s=60)
    assert len(table(out)) == 4  # of a flush behind the checkpoint
    run_ranks(gone_on_with, 2 * shards, out)
    assert table(out) == table(whole)
    weights = [torch.load(f"{o}/model.pt", weights_only=True) for o in (out, whole)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def with_fault(out, on_nan):
    """The rows that the third layer pushes in one chunk of one epoch are NaN."""
    passes = []

    def strikes(layer, rows):
        is_due = layer == 2 and rows.training and rows.epoch == 2 and not passes
        passes.extend([1] * is_due)
        return is_due

    settings = {k: v for k, v in RUN.items() if k != "clip_norm"}
    try:
        trainer = Trainer(config(out, **settings, on_nan=on_nan), small_graph())
        with struck_rows(strikes):
            result = trainer.fit()
    except FloatingPointError as error:
        return str(error)
    finite = all(torch.isfinite(p).all() for p in trainer.model.parameters())
    return [row.loss for row in result.history], finite


@pytest.mark.slow
def test_a_fault_is_told_at_the_flush_and_its_steps_are_skipped(tmp_path):
    for found in run_ranks(with_fault, 2, str(tmp_path / "stop"), "stop"):
        assert "epoch 3: the loss is nan" in found
    for losses, is_finite in run_ranks(with_fault, 2, str(tmp_path / "skip"), "skip"):
        assert is_finite
        assert math.isnan(losses[2])
        # Faults are taken out of the tables at the flush.
        assert all(map(math.isfinite, losses[:2] + losses[3:]))


@pytest.mark.slow
def test_a_checkpoint_loads_under_another_shape(tmp_path):
    out = str(tmp_path / "run")
    run_ranks(trained, 2, out, RUN | {"epochs": 4})
    Trainer(resumed_config(out, {"stages": 1, "epochs": 6}), small_graph(), resume=out).fit()
    assert len(table(out)) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"steps_every": 2}, {"schedule": "1f1b", "steps_every": 2}]
)
def test_bytes_equal_the_closed_form_with_a_sum_of_gradients_for_each_step(settings, tmp_path):
    out = tmp_path / "run"
    run_ranks(trained, 4, str(out), {**RUN, "shards": 2} | settings)
    result = json.loads((out / "result.json").read_text())
    assert result["comm_bytes_per_epoch"] == result["comm_bytes_closed_form"]


def test_a_run_of_one_chunk_without_tables_goes_on_in_chunks(tmp_path):
    """No further epoch is exact: the tables fill as in a new run, and every epoch has its steps."""
    out = str(tmp_path / "run")
    trained(out, {"chunks": 1, "epochs": 2, "checkpoint_every": 2})
    more = {"chunks": 4, "schedule": "async", "epochs": 6}
    result = Trainer(resumed_config(out, more), small_graph(), resume=out).fit()
    assert len(result.history) == len(table(out)) == 6
    assert result.exact_epochs == 2  # those of one chunk


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "async"])
def test_other_optimizer_steps_than_before_are_told_of(schedule, tmp_path, capsys):
    out = tmp_path / "run"
    trained(out, {"chunks": 4, "schedule": "async", "epochs": 3, "checkpoint_every": 3})
    changes = {"schedule": schedule, "epochs": 4, "quiet": False}
    Trainer(resumed_config(out, changes), small_graph(), resume=out).fit()
    printed = capsys.readouterr().out
    said = [line for line in printed.splitlines() if "differ" in line and "before" in line]
    now = {"fill-drain": "1 an epoch", "1f1b": "1 an epoch", "async": ""}[schedule]
    expected = (
        f"optimizer steps differ from before: {now}; before: 4 an epoch with --schedule async: "
        "from here on the run trains in another way"
    )
    assert said == ([expected] if now else [])
