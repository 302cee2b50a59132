"""A run predicts its epochs, from a short profile or a given one, and is the same to the bit."""

import gc
import json
import math
import warnings

import pytest
import torch
from helpers import quick_config, run_ranks, small_graph
from profiles import prepared_of, profile_of

from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.output import human_bytes
from gnnpipe.perf import read_trace, simulate
from gnnpipe.profiling import predict as predicting
from gnnpipe.profiling import profile as profiling
from gnnpipe.profiling.predict import MIN_EPOCHS
from gnnpipe.profiling.profile import take_short_profile
from gnnpipe.profiling.steps import measured_epochs
from gnnpipe.run import epoch_times
from gnnpipe.run.resume import resumed_config
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.executor import Executor
from gnnpipe.runtime.history.base import History
from gnnpipe.runtime.staleness.forecast import Forecaster
from gnnpipe.setup.chunk_sizes import chunk_sizes
from gnnpipe.setup.prepare import prepare

PARTS = ("compute_s", "exposed_pipeline_s", "exposed_graph_s", "bubble_s", "imbalance_s")


def both_ways(shapes, module=None, **changes):
    """By shape the run with and without a prediction: losses, weights, predicted time."""
    found = []
    for stages, shards, chunks in shapes:
        mesh = Mesh.join(stages, shards)
        runs = []
        for predict in (True, False):
            settings = {
                "epochs": MIN_EPOCHS,
                "layers": 4,
                "hidden": 8,
                "model": "gcnii",
                "stages": stages,
                "shards": shards,
                "chunks": chunks,
                "dtype": "float32",
            }
            torch.manual_seed(0)
            trainer = Trainer(
                quick_config(**settings | {"predict": predict} | changes),
                graph=small_graph(),
                model=None if module is None else module(),
                world=mesh,
            )
            result = trainer.fit()
            state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
            losses = [row.loss for row in result.history]
            runs.append((losses, state, torch.rand(1), result.predicted_epoch_time_s))
        found.append(runs)
    return found


def assert_same(runs):
    (losses, state, drawn, predicted), (plain_losses, plain_state, plain_drawn, none) = runs
    assert predicted > 0
    assert none is None
    assert losses == plain_losses
    assert all(torch.equal(state[k], plain_state[k]) for k in plain_state)
    assert torch.equal(drawn, plain_drawn)


@pytest.mark.parametrize("staleness", ["auto", "paper", "exact"])
def test_a_run_is_the_same_to_the_bit_with_a_prediction(staleness):
    for runs in both_ways([(1, 1, 1), (1, 1, 3)], staleness=staleness):
        assert_same(runs)


@pytest.mark.slow
def test_so_are_runs_of_two_ranks():
    for of_rank in run_ranks(both_ways, 2, [(2, 1, 3), (1, 2, 1), (1, 2, 3)]):
        for runs in of_rank:
            assert_same(runs)


def own_model():
    from torch_geometric.nn import GCN

    return GCN(7, 8, num_layers=3, out_channels=3, norm="BatchNorm", dropout=0.5)


@pytest.mark.filterwarnings("ignore:model. GCN normalises")
def test_so_is_a_model_of_the_users_own_with_running_means():
    (runs,) = both_ways([(1, 1, 2)], own_model)
    assert_same(runs)


def test_measured_epochs_change_the_weights_and_restore_them():
    prepared = prepare(quick_config(hidden=8, chunks=2), Mesh.alone(), small_graph())
    before = {k: v.clone() for k, v in prepared.model.module.state_dict().items()}
    with measured_epochs(prepared, [Mesh.alone()], has_cores=True) as run_epoch:
        times = run_epoch()
        moved = prepared.model.module.state_dict()
        assert any(not torch.equal(before[k], moved[k]) for k in before), "it took a real step"
    after = prepared.model.module.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in prepared.model.module.parameters())
    steps = {key for key in times if key[0] in ("forward", "backward")}
    assert steps == {
        (way, 0, chunk, step)
        for way in ("forward", "backward")
        for chunk in range(2)
        for step in range(prepared.dag.steps[0])
    }


def own_blocks():
    """A convolution that runs on blocks, with messages."""
    from torch_geometric.nn import GATv2Conv, Sequential

    return Sequential(
        "x, edge_index",
        [(GATv2Conv(7, 8), "x, edge_index -> x"), (GATv2Conv(8, 3), "x, edge_index -> x")],
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gcn", "gat", "own model", "own blocks"])
def test_nothing_of_it_waits_for_the_cycle_collector(name):
    """Its tables and rows would stand beside those of the run: half as much memory again."""
    module = {"own model": own_model, "own blocks": own_blocks}.get(name, lambda: None)()
    config = quick_config(hidden=8, chunks=2, model=name if module is None else "gcn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(config, Mesh.alone(), small_graph(), module)

    def tensor_bytes():
        # Some of torch's objects warn when they are asked for their class.
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        # Other tests leave sparse ones, which have no such number.
        return sum(t.nbytes for t in tensors if t.layout == torch.strided)

    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes()
        take_short_profile(prepared, Mesh.alone(), chunk_sizes(prepared), 20)
        kinds = Executor, History, Forecaster
        left = [o for o in gc.get_objects() if issubclass(type(o), kinds)]
        grown = tensor_bytes() - before
    finally:
        gc.enable()
    assert left == []
    # Structures that are made once for the run stay, a table of rows would be 60 x 8 x 8 bytes.
    assert grown < 2000


def trained(tmp_path, *words):
    out = tmp_path / "run"
    settings = ["--dataset", "karate", "--hidden", "8", "--cache-dir", "off", "--device", "cpu"]
    assert main(["train", *settings, "--out", str(out), *words]) == 0
    return json.loads((out / "result.json").read_text()), out


def test_predicted_and_measured_stand_side_by_side(tmp_path, capsys):
    result, out = trained(tmp_path, "--epochs", "12", "--chunks", "3")
    said = capsys.readouterr().out
    assert "predicted: " in said
    grown = result["peak_memory_bytes"][0] - result["memory_before_bytes"][0]
    estimate = sum(result["memory_estimate_bytes"][0].values())
    sizes = human_bytes(max(grown, 0)), human_bytes(estimate)
    assert "memory grew by {} in training, estimated {}".format(*sizes) in said
    line = next(line for line in said.splitlines() if line.startswith("predicted ") and "%" in line)
    assert all(word in line for word in ("measured", "compute", "communication", "bubble"))
    (share,) = result["predicted_time_shares"]
    assert sum(share[part] for part in PARTS) == pytest.approx(result["predicted_epoch_time_s"])
    trace = read_trace(out / "trace.json")
    for kind in ("F", "B"):
        walks = [
            [span.chunk for span in spans if span.kind == kind]
            for spans in (trace.predicted, trace.measured)
        ]
        assert walks[0] == walks[1], "the same chunks in the same order"
    assert max(s.end_s for s in trace.predicted) == pytest.approx(result["predicted_epoch_time_s"])


@pytest.mark.parametrize(
    ("predicted_s", "load", "is_told"),
    [(0.5, 9.5, True), (0.5, 2.9, False), (0.9, 9.5, False), (8.5, 9.5, True), (8.5, 2.9, False)],
)
def test_a_busy_machine_is_told_of_where_a_prediction_is_far_off(
    predicted_s, load, is_told, monkeypatch
):
    monkeypatch.setattr(epoch_times.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(epoch_times.os, "cpu_count", lambda: 2)
    line = epoch_times.prediction_line(predicted_s, 1.0, [], [])
    assert ("the machine is busy, with a load of 9.5 on 2 cores" in line) == is_told


@pytest.mark.parametrize(
    "words", [["--epochs", "12", "--no-predict"], ["--epochs", str(MIN_EPOCHS - 1)]]
)
def test_nothing_is_predicted_where_nothing_is_asked_or_worth_it(words, tmp_path, capsys):
    result, out = trained(tmp_path, *words)
    assert result["predicted_epoch_time_s"] is None
    assert result["predicted_time_shares"] == []
    assert not read_trace(out / "trace.json").predicted
    assert "predicted: " not in capsys.readouterr().out


def test_a_profile_that_would_take_too_long_is_given_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profiling, "SHORT_MIN_S", 0.0)
    monkeypatch.setattr(profiling, "SHORT_RUN_SHARE", 0.0)
    result, _ = trained(tmp_path, "--epochs", "12")
    assert result["predicted_epoch_time_s"] is None
    assert math.isfinite(result["epoch_time_s"])
    assert capsys.readouterr().out.count("no prediction: measuring would take more than") == 1


def test_a_given_profile_is_used_whatever_the_length(tmp_path, monkeypatch):
    simulated = []

    def counting(tasks):
        simulated.append(tasks)
        return simulate(tasks)

    monkeypatch.setattr(predicting, "simulate", counting)
    profile = profile_of(prepared_of(layers=2).model_graph)
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    result, _ = trained(tmp_path, "--epochs", "2", "--profile", str(path))
    # Before the run, once for the line and for the watch of slow ranks, and for the result.
    assert len(simulated) == 2
    # Every op takes half a second for each of four parts, and half for what is once an epoch.
    assert result["predicted_epoch_time_s"] > 4


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("gone.json", None, ["--profile", "gone.json", "No such file", "gnnpipe profile --save"]),
        ("bad.json", "{", ["--profile", "bad.json", "not JSON"]),
        ("other.json", '{"version": 99}', ["other.json", "version"]),
        ("own.json", "other model", ["own.json': has no op like", "take one with the dataset"]),
    ],
)
def test_a_profile_that_cannot_be_used_is_one_line(name, text, told, tmp_path, capsys):
    path = tmp_path / name
    if text == "other model":
        text = profile_of(prepared_of(model="sage").model_graph).to_json()
    if text is not None:
        path.write_text(text)
    words = ["train", "--dataset", "karate", "--hidden", "8", "--cache-dir", "off", "--out"]
    assert main([*words, str(tmp_path / "run"), "--profile", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gnnpipe: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in told), err


def test_predictions_are_no_part_of_a_run_that_goes_on(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(profile_of(prepared_of(layers=2).model_graph).to_json())
    words = ["train", "--dataset", "karate", "--hidden", "8", "--cache-dir", "off", "--quiet"]
    words += ["--epochs", "2", "--checkpoint-every", "2", "--out"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main([*words, first, "--no-predict"]) == 0
    assert main([*words, second, "--profile", str(profile)]) == 0
    assert resumed_config(first, {"profile": str(profile)}).predict
    assert resumed_config(second, {}).profile == str(profile)
    assert resumed_config(second, {"predict": False}).profile == ""
    profile.unlink()
    assert main(["train", "--resume", second, "--epochs", "4", "--quiet"]) == 0


def test_a_profile_goes_with_no_switch_against_it(capsys):
    assert main(["train", "--dataset", "karate", "--no-predict", "--profile", "x.json"]) == 2
    assert "--no-predict" in capsys.readouterr().err
