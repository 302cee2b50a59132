"""Behind a jump of the gradients an epoch is walked exactly, on every shape alike."""

import csv
import json
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import quick_config, run_ranks, small_graph, struck_rows

from gnnpipe import Trainer
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.run.exact_epochs import ExactEpochs
from gnnpipe.run.resume import find_start, resumed_config
from gnnpipe.run.summary import result_lines
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.grad_clip import GradClip
from gnnpipe.schedule import Consistency, check
from gnnpipe.schedule.check import ProgramError
from gnnpipe.setup.prepare import prepare
from gnnpipe.train import trainer
from gnnpipe.verification.comparison import Comparison, compare_epochs, relative_difference
from gnnpipe.verification.reference import Reference

EPOCHS, FACTOR = 16, 0.9


def config(**settings):
    # Below 1, so that even short training jumps, and not in every epoch.
    return quick_config(
        **{
            "model": "gcnii",
            "layers": 4,
            "hidden": 8,
            "chunks": 6,
            "epochs": EPOCHS,
            "lr": 0.05,
            "exact_above": FACTOR,
            "predict": False,
        }
        | settings
    )


def walked_exactly(result):
    return [row.staleness.is_exact for row in result.history]


def fit(stages, shards, epochs=EPOCHS):
    trainer = Trainer(config(stages=stages, shards=shards, epochs=epochs), small_graph())
    result = trainer.fit()
    sent = result.comm_bytes_per_epoch, result.comm_bytes_closed_form
    return [row.loss for row in result.history], walked_exactly(result), *sent


def replayed(lengths):
    """What should be exact, and how long its gradients may be, from their lengths."""
    usual, expected, longest = [], [], []
    has_jumped = False
    for epoch, length in enumerate(lengths):
        is_exact = epoch == 0 or has_jumped
        enough = len(usual[-20:]) >= 5
        typical = statistics.median(usual[-20:]) if enough else math.inf
        longest.append(typical if has_jumped else 2 * typical)
        expected.append(is_exact)
        if not is_exact:
            usual.append(length)
        recent = usual[-20:]
        has_jumped = (
            not is_exact and len(recent) >= 5 and recent[-1] > FACTOR * statistics.median(recent)
        )
    return expected, longest


def test_the_epoch_behind_a_jump_is_exact_and_no_other(monkeypatch):
    lengths, stepped = [], []
    clip = GradClip.clip

    def noting(self, loss):
        good = clip(self, loss)
        lengths.append(self.norm)
        squares = [p.grad.double().square().sum() for _, p in self._named if p.grad is not None]
        stepped.append(math.sqrt(sum(squares)))
        return good

    monkeypatch.setattr(GradClip, "clip", noting)
    result = Trainer(config(lr=0.1), small_graph()).fit()  # steps so long that gradients are cut
    expected, longest = replayed(lengths)
    limited = [min(pair) for pair in zip(lengths, longest, strict=True)]
    assert stepped == pytest.approx(limited, rel=1e-6)
    assert stepped != pytest.approx(lengths, rel=1e-3)
    assert walked_exactly(result) == expected
    assert result.exact_epochs == sum(expected)
    assert 3 <= sum(expected) <= EPOCHS - 8
    reads = [row.staleness.stale_reads for row in result.history]
    assert [read == 0 for read in reads] == expected
    assert not any(map(math.isnan, result.drift))


def test_the_gradients_of_such_an_epoch_are_those_of_exact_training(monkeypatch):
    """From the same weights, with the same dropout: the length is that of one device's."""
    lengths = {}
    clip = GradClip.clip
    starts = {}

    def noting(self, loss):
        good = clip(self, loss)
        lengths.setdefault(len(starts), []).append((self.norm, loss))
        return good

    monkeypatch.setattr(GradClip, "clip", noting)
    plain = config(dropout=0.0, lr=1e-12)
    exact = walked_exactly(Trainer(plain, small_graph()).fit())
    starts["then"] = True
    Trainer(replace(plain, staleness="exact", exact_above=None), small_graph()).fit()
    # The weights stand still: every epoch of exact training is the same one.
    length, loss = lengths[1][0]
    assert exact[0]
    for is_exact, (found, its_loss) in zip(exact, lengths[0], strict=True):
        if is_exact:
            assert found == pytest.approx(length, rel=1e-6)
            assert its_loss == pytest.approx(loss, rel=1e-6)
        else:
            assert abs(found / length - 1) > 1e-3


def test_every_shape_walks_the_same_epochs_exactly():
    alone = fit(1, 1)
    assert True in alone[1][1:]
    for shape in ((2, 1), (1, 2), (2, 2)):
        for losses, exact, *_ in run_ranks(fit, shape[0] * shape[1], *shape):
            assert exact == alone[1]
            assert losses == pytest.approx(alone[0], rel=1e-9)


def beside_the_reference(stages, shards):
    """Largest difference of any epoch, and which were exact; on every rank."""
    mesh = Mesh.join(stages, shards)
    prepared = prepare(config(stages=stages, shards=shards, lr=0.1), mesh, small_graph())
    walked, walk = [], Reference.train_epoch

    def noting(self, epoch, is_exact, max_norm):
        walked.append(is_exact)
        return walk(self, epoch, is_exact, max_norm)

    Reference.train_epoch = noting
    try:
        found = compare_epochs(small_graph(), prepared, mesh, EPOCHS)
    finally:
        Reference.train_epoch = walk
    return max(c.largest for c in found), walked[::2]


def test_epochs_behind_a_jump_are_those_of_the_reference():
    alone = beside_the_reference(1, 1)
    assert 3 <= sum(alone[1]) <= EPOCHS - 8
    for shape in ((2, 1), (1, 2), (2, 2)):
        found = run_ranks(beside_the_reference, shape[0] * shape[1], *shape)[0]
        assert found[0] <= 1e-9
        assert found[1] == alone[1]
    assert alone[0] <= 1e-9


@pytest.mark.parametrize("last_is_exact", [True, False])
def test_bytes_of_the_last_epoch_are_the_closed_form(last_is_exact):
    exact = fit(1, 1)[1]
    epochs = max(e + 1 for e, is_exact in enumerate(exact) if is_exact == last_is_exact)
    _, found, sent, formula = run_ranks(fit, 4, 2, 2, epochs)[0]
    assert found[-1] == last_is_exact
    assert sent == formula
    assert (sent["control"] == 0) == last_is_exact


def skipping(stages, shards):
    """Losses of a run that skips epoch 4, and whether its bytes are the closed form."""

    def strikes(layer, rows):
        return layer == 2 and not rows.is_probe and rows.training and rows.epoch == 3

    with struck_rows(strikes):
        changes = {"on_nan": "skip", "exact_above": 0.0, "lr": 0.01, "chunks": 4, "epochs": 8}
        result = Trainer(config(stages=stages, shards=shards, **changes), small_graph()).fit()
    return [row.loss for row in result.history], (
        result.comm_bytes_per_epoch == result.comm_bytes_closed_form
    )


def test_a_skipped_epoch_is_forecast_from_mended_tables():
    alone, _ = skipping(1, 1)
    assert [math.isfinite(loss) for loss in alone] == [e != 3 for e in range(8)]
    for shape in ((2, 2), (4, 1)):
        losses, is_closed_form = run_ranks(skipping, 4, *shape)[0]
        assert is_closed_form
        assert losses == pytest.approx(alone, rel=1e-4, nan_ok=True)


def test_what_is_told_where_the_last_epoch_was_exact():
    last = fit(1, 1)[1].index(True, 1)
    result = Trainer(config(epochs=last + 1), small_graph()).fit()
    assert result.history[-1].staleness.is_exact
    (line,) = [line for line in result_lines(result) if line.startswith("stale reads: ")]
    assert "nan" not in line
    many = sum(walked_exactly(result))
    assert f"; {many} of {last + 1} epochs exact; in the last stale epoch " in line
    assert result.exact_epochs == many


def test_a_run_that_once_was_stale_is_not_exact(tmp_path):
    out = str(tmp_path / "run")
    Trainer(config(epochs=4, out=out, checkpoint_every=4), small_graph()).fit()
    changes = {"epochs": 6, "staleness": "exact", "exact_above": None}
    result = Trainer(resumed_config(out, changes), small_graph(), resume=out).fit()
    assert [row.staleness for row in result.history[4:]] == [None, None]
    assert not result.exact
    assert Trainer(config(staleness="exact", exact_above=None, epochs=2), small_graph()).fit().exact


def test_behind_a_fault_even_with_other_chunks_and_behind_a_jump_not(tmp_path, monkeypatch):
    """A resumed run walks exactly what was due, but for a jump whose length is not known."""
    out = tmp_path / "run"
    Trainer(config(epochs=6, out=str(out), checkpoint_every=6), small_graph()).fit()
    (state,) = out.glob("checkpoints/*/state.json")
    for was_faulty, has_jumped, chunks, is_exact in (
        (False, False, 6, False),
        (False, True, 6, True),
        (True, False, 6, True),
        (False, True, 5, False),
        (True, False, 5, True),
    ):
        start = find_start(out, resumed_config(out, {"epochs": 7}), Mesh.alone(), True)[0]
        start = replace(start, was_faulty=was_faulty, has_jumped=has_jumped)
        monkeypatch.setattr(trainer, "find_start", lambda *_, start=start: (start, ""))
        changes = {"epochs": 7, "chunks": chunks, "out": "off", "checkpoint_every": 0}
        result = Trainer(resumed_config(out, changes), small_graph(), resume=out).fit()
        assert result.history[-1].staleness.is_exact == is_exact
    assert {"was_faulty", "has_jumped"} <= json.loads(state.read_text()).keys()


def test_verify_says_which_epochs_were_exact():
    found = compare_epochs(
        small_graph(), prepare(config(epochs=8), Mesh.alone(), small_graph()), Mesh.alone(), 8
    )
    exact = fit(1, 1, 8)[1]
    assert [c.is_exact for c in found] == exact
    assert ["(exact)" in c.text() for c in found] == exact
    assert all(c.worst in c.text() for c in found)
    grads = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert relative_difference(grads, grads) == (0.0, "")
    assert "()" not in Comparison(0, 0.0, 0.0, "", is_exact=False).text()


def test_what_counts_as_a_jump():
    program, exact = (SimpleNamespace(is_exact=is_exact) for is_exact in (False, True))
    techniques = SimpleNamespace(exact_above=2.0)
    prepared = SimpleNamespace(
        staleness=techniques,
        exact_program=exact,
        program=program,
        program_of=lambda epoch: exact if epoch == 0 else program,
    )
    epochs, grad_clip = ExactEpochs(prepared), SimpleNamespace(step_limit=None)

    def walked(epoch, begun=epochs):
        return begun.begin(epoch, grad_clip), grad_clip.step_limit

    def stale(*lengths):
        for length in lengths:
            epochs.end(program, length, has_stepped=True)

    assert walked(0) == (exact, math.inf)
    epochs.end(exact, 50.0, has_stepped=True)  # whole gradients say nothing of the others
    stale(1.0, 1.0, 1.0, 9.0)
    assert walked(4) == (program, math.inf)  # too few to tell
    stale(2.0)
    assert walked(5) == (program, 2.0)  # not more than twice the median
    stale(3.1)
    assert walked(6) == (exact, 1.5)
    again = ExactEpochs(prepared, list(epochs.lengths), epochs.was_faulty, epochs.has_jumped)
    assert walked(6, again) == (exact, 1.5)
    epochs.end(exact, math.nan, has_stepped=False)
    assert walked(7) == (exact, 1.5)  # not answered yet
    epochs.end(exact, 100.0, has_stepped=True)
    assert walked(8) == (program, 3.0)  # one is enough
    stale(*[5.0] * 20)
    assert walked(9) == (program, 10.0)  # the old ones are forgotten
    epochs.end(program, math.nan, has_stepped=False)
    assert walked(10) == (exact, 5.0)  # there may be zeros in the tables
    epochs.end(exact, 5.0, has_stepped=True)
    assert walked(11) == (program, 10.0)
    stale(10.5)
    assert walked(12) == (exact, 5.0)
    techniques.exact_above = 0.0
    assert walked(12) == (program, math.inf)


@pytest.mark.parametrize(("recent", "median"), [(9, 1.0), (10, 4.0), (11, 7.0)])
def test_the_median_is_that_of_the_last_twenty_epochs(recent, median):
    program = SimpleNamespace(is_exact=False)
    prepared = SimpleNamespace(
        staleness=SimpleNamespace(exact_above=100.0),
        program=program,
        program_of=lambda epoch: program,
    )
    epochs, grad_clip = ExactEpochs(prepared), SimpleNamespace(step_limit=None)
    for norm in [1.0] * 50 + [7.0] * recent:
        epochs.end(program, norm, has_stepped=True)
    epochs.begin(50 + recent, grad_clip)
    assert grad_clip.step_limit == 2 * median


def test_a_jump_of_one_chunk_changes_nothing(tmp_path):
    kept = []
    for factor in (0.0, FACTOR):
        run = config(chunks=1, exact_above=factor, out=str(tmp_path / str(factor)))
        Trainer(run, small_graph()).fit()
        with open(tmp_path / str(factor) / "metrics.csv", encoding="utf-8", newline="") as file:
            kept.append([row["loss"] for row in csv.DictReader(file)])
    assert kept[0] == kept[1]


def test_exact_needs_no_jumps():
    with pytest.raises(
        InputError, match=r"--exact-above 2\.0: has no effect with --staleness exact"
    ):
        TrainConfig(chunks=4, staleness="exact", exact_above=2.0)


def test_a_program_that_calls_itself_exact_is_proved():
    prepared = Trainer(config(), small_graph())._setup()[1]
    assert check(prepared.exact_program).is_exact
    with pytest.raises(ProgramError, match="exact"):
        check(replace(prepared.program, consistency=Consistency()))
