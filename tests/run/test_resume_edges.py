"""Going on where it is hardest: at the end, over a foreign run, from what is forged or damaged."""

import json
import re
import shutil
import time
from dataclasses import replace

import pytest
import torch
from helpers import small_graph
from resume_runs import EPOCHS, config, table
from test_resume import damage, outcome, stop_after
from torch import nn
from torch_geometric.nn import GCN, GCN2Conv
from torch_geometric.utils import dropout_edge

from gnnpipe import TrainConfig, Trainer
from gnnpipe.checkpoint import writer
from gnnpipe.errors import FailedError, InputError, StoppedError
from gnnpipe.run import resume
from gnnpipe.run.folder import run_path
from gnnpipe.run.resume import resumed_config
from gnnpipe.train import loop, trainer


def again(out, **changes):
    return Trainer(resumed_config(out, changes), small_graph(), resume=out).fit()


@pytest.mark.parametrize("settings", [{}, {"patience": 2, "eval_every": 1, "lr": 1e-9}])
def test_killed_before_the_result_only_that_is_left_to_do(settings, tmp_path, monkeypatch):
    settings = settings | {"checkpoint_every": 2}
    whole = Trainer(config(tmp_path / "whole", **settings), small_graph()).fit()
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "gather_result", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            Trainer(config(out, **settings), small_graph()).fit()
    assert not (out / "result.json").exists()
    result = again(out)
    assert outcome(out) == outcome(tmp_path / "whole")
    assert result.epochs == whole.epochs == (3 if "patience" in settings else EPOCHS)
    assert result.comm_bytes_per_epoch == whole.comm_bytes_per_epoch
    with pytest.raises(InputError, match=r"epochs are done|--patience 2 has stopped"):
        again(out)


def test_a_foreign_checkpoint_in_the_folder_is_passed_over(tmp_path, capsys):
    out = tmp_path / "run"
    Trainer(config(out, checkpoint_every=2), small_graph()).fit()
    kept = out / "checkpoints"
    newest = max(kept.iterdir())
    # Whole, and not of the epoch that its name says.
    shutil.copytree(newest, kept / "epoch-000099")
    again(out, epochs=EPOCHS + 1, quiet=False)
    said = capsys.readouterr().out
    assert f"damaged checkpoint: {kept / 'epoch-000099'}: not the state of a run" in said
    assert f"resuming from {newest}" in said


@pytest.mark.slow
def test_torchrun_again_does_not_take_over_a_foreign_run(tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    Trainer(config(out, checkpoint_every=2), small_graph()).fit()
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(InputError, match="holds another run"):
        Trainer(config(out, checkpoint_every=2, epochs=20), small_graph()).fit()
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(InputError, match="--seed: is 7 now, and 0 in"):
        Trainer(config(out, checkpoint_every=2, epochs=20, seed=7), small_graph()).fit()
    Trainer(config(out, checkpoint_every=2, epochs=20), small_graph()).fit()
    assert len(table(out)) == 20


def test_a_time_limit_holds_over_restarts(tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(StoppedError):
        Trainer(config(out, epochs=10**6, time_limit_s=1), small_graph()).fit()
    note = json.loads((out / ".launch.json").read_text())
    (out / ".launch.json").write_text(json.dumps(note | {"started": note["started"] - 60}))
    done = len(table(out))
    with pytest.raises(StoppedError, match="--time-limit 30"):
        Trainer(config(out, epochs=10**6, time_limit_s=30), small_graph()).fit()
    assert len(table(out)) == done + 1


def test_a_new_folder_under_restarts_goes_on_with_itself(tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    Trainer(config(old, epochs=4, checkpoint_every=2), small_graph()).fit()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    run = resumed_config(old, {"epochs": EPOCHS, "out": str(new)})
    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_epochs", stop_after(7))
        with pytest.raises(StoppedError):
            Trainer(run, small_graph(), resume=old).fit()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    Trainer(run, small_graph(), resume=old).fit()
    assert len(table(new)) == EPOCHS


@pytest.mark.slow
def test_a_damaged_newer_checkpoint_does_not_count(tmp_path, monkeypatch):
    out = tmp_path / "run"
    Trainer(config(out, epochs=8, checkpoint_every=4), small_graph()).fit()
    damage(out / "checkpoints" / "epoch-000008" / "state.json", 0.5)
    monkeypatch.setattr(loop, "train_epochs", stop_after(6))
    with pytest.raises(StoppedError):
        again(out, epochs=20, keep=1)
    monkeypatch.undo()
    assert again(out, epochs=20).epochs == 20


def test_from_stale_to_exact(tmp_path):
    for name, changes in {"one": {"chunks": 1}, "exact": {"staleness": "exact"}}.items():
        out = tmp_path / name
        Trainer(config(out, epochs=4, checkpoint_every=2, quiet=False), small_graph()).fit()
        assert again(out, epochs=6, **changes).epochs == 6


def test_the_last_epoch_is_a_checkpoint_of_a_resumed_run(tmp_path):
    out = tmp_path / "run"
    Trainer(config(out, epochs=4, checkpoint_every=4), small_graph()).fit()
    again(out, epochs=6, checkpoint_every=None)
    assert (out / "checkpoints" / "epoch-000006").exists()


def test_another_model_with_fewer_weights_is_refused(tmp_path):
    out = tmp_path / "run"
    run = config(out, epochs=4, checkpoint_every=2)
    Trainer(run, small_graph()).fit()
    with pytest.raises(InputError, match="--layers: is 3 now, and 4 in"):
        Trainer(replace(run, layers=3, epochs=6), small_graph(), resume=out).fit()


class Deep(nn.Module):
    """GCNII; nothing of what may be changed shows in the shapes of the weights."""

    def __init__(self, act=torch.relu, scale=1.0, drop_edge=0.2, shift=0.5, **conv):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(7, 8), nn.Linear(8, 3)
        self.conv = GCN2Conv(8, conv.get("alpha", 0.1), 1.0, 1)
        self.drop = nn.Dropout(conv.get("dropout", 0.5))
        self.started = time.time()  # an attribute that differs in every process
        self._act, self._constants = act, (scale, drop_edge, shift)

    def forward(self, x, edge_index):
        scale, drop_edge, shift = self._constants
        edge_index, _ = dropout_edge(edge_index, drop_edge, training=self.training)
        first = self.drop(self.enter(x)) + torch.tensor([shift] * 8)
        return self.leave(first + self._act(self.conv(first, first, edge_index)) * scale)


def test_a_passed_in_graph_and_model_name_the_folder_and_a_resumed_run_stays_there(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    bare = TrainConfig(dataset="karate")
    assert run_path(bare).name.startswith("karate-gcn-2")
    assert run_path(bare, replace(small_graph(), name="a/B")).name.startswith("a-b-gcn-2")
    assert run_path(bare, model=Deep()).name.startswith("karate-Deep-2")
    assert (
        run_path(bare, model=Deep, graph=replace(small_graph(), name="")).name[:11] == "graph-Deep-"
    )
    graph, settings = small_graph(), replace(config("", checkpoint_every=2), out="")
    Trainer(replace(settings, epochs=4), graph, Deep()).fit()
    (run,) = tmp_path.glob("runs/*")
    assert re.fullmatch(r"small-Deep-\d{8}-\d{6}", run.name)
    Trainer(replace(settings, epochs=6), graph, Deep(), resume=run).fit()
    assert list(tmp_path.glob("runs/*")) == [run]
    assert json.loads((run / "result.json").read_text())["epochs"] == 6
    with pytest.raises(InputError, match="--resume 'none': has no complete checkpoint"):
        Trainer(replace(settings, epochs=6), graph, Deep(), resume="none").fit()


@pytest.mark.parametrize(
    ("features", "hidden", "text"),
    [
        (
            9,
            8,
            "graph: its vertices, edges, labels, split or data that the model reads differ from",
        ),
        (7, 6, "model: names, shapes or number types of its weights differ from"),
    ],
)
def test_what_has_changed_is_named(features, hidden, text, tmp_path):
    out = tmp_path / "run"
    Trainer(config(out, epochs=4, checkpoint_every=2), small_graph(), GCN(7, 8, 2, 3)).fit()
    longer = resumed_config(out, {"epochs": 6})
    graph = small_graph(features=features)
    with pytest.raises(InputError, match=text):
        Trainer(longer, graph, GCN(features, hidden, 2, 3), resume=out).fit()


CHANGES = [
    {"alpha": 0.6},
    {"dropout": 0.0},
    {"act": torch.tanh},
    {"scale": 0.5},
    {"drop_edge": 0.5},
    {"shift": 0.1},
]
"""Settings of modules, operations, constants, work on edges, and tensors made in forward."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_forward_is_refused(change, tmp_path):
    out, graph = tmp_path / "run", small_graph()
    Trainer(config(out, epochs=4, checkpoint_every=2), graph, Deep()).fit()
    longer = resumed_config(out, {"epochs": 6})
    with pytest.raises(InputError, match=r"model: operations of its forward.*epoch-0000"):
        Trainer(longer, graph, Deep(**change), resume=out).fit()
    assert Trainer(longer, graph, Deep(), resume=out).fit().epochs == 6


class Counting(Deep):
    """Runs as it is, and counts its calls."""

    def forward(self, x, edge_index):
        self.calls = getattr(self, "calls", 0) + 1
        self.largest = float(x.max())
        return super().forward(x, edge_index)


@pytest.mark.parametrize(("kind", "chunks"), [(Deep, 2), (Counting, 1)])
def test_a_model_that_has_trained_resumes_in_the_same_process(kind, chunks, tmp_path):
    out, graph = tmp_path / "run", small_graph()
    model = kind()
    Trainer(config(out, epochs=4, checkpoint_every=2, chunks=chunks), graph, model).fit()
    longer = resumed_config(out, {"epochs": 6, "chunks": 1})
    assert Trainer(longer, graph, model, resume=out).fit().epochs == 6


def test_a_forward_recorded_by_another_version_is_not_compared(tmp_path, monkeypatch, capsys):
    out, graph = tmp_path / "run", small_graph()
    Trainer(config(out, epochs=4, checkpoint_every=2), graph, Deep()).fit()
    monkeypatch.setattr(resume, "__version__", "9.9")
    longer = resumed_config(out, {"epochs": 6, "quiet": False})
    assert Trainer(longer, graph, Deep(alpha=0.6), resume=out).fit().epochs == 6
    assert "whether the model has changed is not checked" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_tell_the_operations(tmp_path, monkeypatch):
    def before(*parts):
        unknown = (resume.DIGEST, resume.LIBRARIES)
        return {k: v for k, v in resume.identity_of(*parts).items() if k not in unknown}

    out, graph = tmp_path / "run", small_graph()
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "identity_of", before)
        Trainer(config(out, epochs=4, checkpoint_every=2), graph, Deep()).fit()
    longer = resumed_config(out, {"epochs": 6})
    assert Trainer(longer, graph, Deep(), resume=out).fit().epochs == 6


def test_a_disk_that_ranks_do_not_share_is_found(tmp_path, monkeypatch):
    real = writer._finish

    def lost(path, unfinished, checksums, texts):
        (unfinished / "rank-0.safetensors").unlink()
        real(path, unfinished, checksums, texts)

    monkeypatch.setattr(writer, "_finish", lost)
    with pytest.raises(FailedError, match="--out must be on a disk that all ranks share"):
        Trainer(config(tmp_path / "run", checkpoint_every=2), small_graph()).fit()


FORGED = {
    "no rows": lambda s, r: (s, ""),
    "a row less": lambda s, r: (s, "\n".join(r.splitlines()[:-1]) + "\n"),
    "rows of words": lambda s, r: (s, r.replace(",", ",x", 40)),
    "factor nan": lambda s, r: (s | {"lr_factor": float("nan")}, r),
    "factor 2": lambda s, r: (s | {"lr_factor": 2}, r),
    "best of no epoch": lambda s, r: (s | {"best": s["best"] | {"epoch": 1e400}}, r),
    "best of a word": lambda s, r: (s | {"best": {"epoch": 2, "scores": "x"}}, r),
    "scores of words": lambda s, r: (s | {"best": {"epoch": 2, "scores": {"train_acc": "x"}}}, r),
    "identity of nobody": lambda s, r: (s | {"identity": {}}, r),
    "identity of a list": lambda s, r: (s | {"identity": [1]}, r),
    "bytes": lambda s, r: (s | {"sent_bytes": [1]}, r),
    "cut": lambda s, r: (s | {"cut": 3}, r),
    "no state": lambda s, r: ([], r),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_state_is_one_line(name, tmp_path):
    import hashlib

    out = tmp_path / "run"
    Trainer(config(out, epochs=4, checkpoint_every=4), small_graph()).fit()
    folder = out / "checkpoints" / "epoch-000004"
    state, rows = FORGED[name](
        json.loads((folder / "state.json").read_text()), (folder / "metrics.csv").read_text()
    )
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "metrics.csv").write_text(rows)
    manifest = json.loads((folder / "manifest.json").read_text().partition("\n")[2])
    for file in manifest["files"]:
        manifest["files"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    text = json.dumps(manifest)
    head = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(f"{head}\n{text}")
    before = (out / "metrics.csv").read_bytes()
    with pytest.raises(InputError) as caught:
        again(out, epochs=6)
    assert "\n" not in str(caught.value)
    assert before == (out / "metrics.csv").read_bytes()


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
def test_a_skipped_step_leaves_moving_statistics_alone(tmp_path, monkeypatch):
    from test_resume import normed

    from gnnpipe.runtime.grad_clip import GradClip

    real = GradClip.clip
    seen = []

    def passes(self, loss):
        seen.append(loss)
        return real(self, float("nan") if len(seen) == 3 else loss)

    monkeypatch.setattr(GradClip, "clip", passes)
    model = normed()
    stats = []
    plain = loop.train_epochs

    def train(*words):
        found = plain(*words)
        stats.append({k: v.clone() for k, v in model.state_dict().items() if "running" in k})
        return found

    monkeypatch.setattr(loop, "train_epochs", train)
    Trainer(config(tmp_path / "run", on_nan="skip"), small_graph(), model).fit()
    assert stats[0]
    for name, value in stats[2].items():
        assert torch.equal(value, stats[1][name])
        assert not torch.equal(value, stats[3][name])


def test_restore_needs_tables():
    with pytest.raises(InputError, match="--no-checkpoint-tables"):
        config("x", on_nan="restore", checkpoint_tables=False)


@pytest.mark.parametrize(("partitioner", "told"), [("metis", False), ("random", True)])
def test_another_cut_is_told_of(partitioner, told, tmp_path, capsys):
    out = tmp_path / "run"
    Trainer(config(out, epochs=4, checkpoint_every=4), small_graph()).fit()
    again(out, epochs=6, partitioner=partitioner, quiet=False)
    assert ("partition differs from before" in capsys.readouterr().out) == told


def test_a_first_checkpoint_that_was_not_finished_is_told_of(tmp_path):
    out = tmp_path / "run"
    Trainer(config(out, epochs=2, checkpoint_every=2), small_graph()).fit()
    whole = out / "checkpoints" / "epoch-000002"
    whole.rename(whole.with_name(f".unfinished-{whole.name}"))
    with pytest.raises(InputError, match=r"no complete checkpoint \(the run ended while"):
        again(out, epochs=6)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(InputError, match=r"no complete checkpoint \(--checkpoint-every 10 writes"):
        again(out, epochs=6)
