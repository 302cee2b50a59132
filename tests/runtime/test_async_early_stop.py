"""Early stopping and the best weights of asynchronous runs on real ranks."""

import pytest
import torch
from helpers import run_ranks, small_graph
from resume_runs import config

from gnnpipe import Trainer

EPOCHS, EVERY, PATIENCE = 40, 2, 6
RUN = {
    "model": "gcn", "layers": 4, "chunks": 6, "schedule": "async", "eval_every": EVERY,
    "epochs": EPOCHS, "lr": 0.1,
}  # fmt: skip


def stopped(out, **settings):
    """Validation metric by epoch, and number of the best epoch."""
    trainer = Trainer(config(out, **RUN, patience=PATIENCE, **settings), small_graph())
    result = trainer.fit()
    found = {row.epoch: row.scores.val_metric for row in result.history if row.scores is not None}
    return found, result.history[-1].epoch, result.best_epoch


def short(out, epochs, **settings):
    """As many epochs of a run of 40: fit(epochs) keeps the rates of the config."""
    Trainer(config(out, **RUN, **settings), small_graph()).fit(epochs)


def end_by_hand(scores):
    """Last and best epoch of a run with these validation metrics."""
    best = 0
    for epoch, score in scores.items():
        if best == 0 or score > scores[best]:
            best = epoch
        if epoch - best >= PATIENCE:
            return epoch, best
    return EPOCHS, best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "shards", "more"),
    [(2, 1, {}), (4, 1, {"lr_schedule": "constant"}), (2, 2, {"weights": "stash"})],
)
def test_patience_is_counted_at_flushes_and_the_best_weights_are_those_of_a_shorter_run(
    stages, shards, more, tmp_path
):
    ranks, shape = stages * shards, {"stages": stages, "shards": shards, **more}
    out, other = str(tmp_path / "run"), str(tmp_path / "short")
    every = run_ranks(run, ranks, stopped, (out,), shape, timeout_s=100)
    scores, last, best = every[0]
    assert all(found == every[0] for found in every)
    assert (last, best) == end_by_hand(scores)
    assert 0 < best < last < EPOCHS
    assert list(scores) == list(range(EVERY, last + 1, EVERY))
    run_ranks(run, ranks, short, (other, best), shape, timeout_s=100)
    weights = [torch.load(f"{folder}/model.pt", weights_only=True) for folder in (out, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def run(function, arguments, settings):
    return function(*arguments, **settings)
