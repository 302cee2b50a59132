"""`gnnpipe profile`, end to end, on one rank and on two."""

from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
import torch
from helpers import run_ranks, small_graph

import gnnpipe
from gnnpipe.cli.main import main
from gnnpipe.config import TrainConfig
from gnnpipe.perf import Profile
from gnnpipe.profiling import profile, steps
from gnnpipe.profiling.links import _shard_links

SMALL = [
    "profile",
    "--dataset",
    "karate",
    "--hidden",
    "8",
    "--model",
    "gcnii",
    "--layers",
    "3",
    "--cache-dir",
    "off",
    "--device",
    "cpu",
]

NOT_RECORDED = """
import torch

class Net(torch.nn.Linear):
    def forward(self, x, edge_index):
        return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)

def make(graph, config):
    return Net(graph.num_features, graph.num_classes)
"""


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(steps, "MIN_TIME_S", 0.0)


def test_a_profile_of_one_rank(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert main([*SMALL, "--save", str(path)]) == 0
    out = capsys.readouterr().out
    found = Profile.from_json(path.read_text())
    assert found.source == "measured"
    assert [times.ranks for times in found.compute] == [1]
    ops = found.compute[0].ops
    # Before the layers, in the layers, which are alike, and behind them.
    names = ["model_encode", "relu", "drop", "aggregate", "drop", "model_decode"]
    assert [kind.partition(",")[0] for kind in ops] == names
    assert all(f"  {kind} (fit off by" in out for kind in ops)
    for op in ops.values():
        # On a graph of 34 vertices only the base can be told apart from noise.
        assert op.forward_after.time_s(34, 156) > 0
        assert op.backward_after.time_s(34, 156) > 0
        assert op.forecast.time_s(34) > 0
    assert found.message is None
    assert "links: not measured" in out
    assert f"profile: {path}" in out


def test_a_rank_that_waits_for_a_core_is_told_and_recorded(tmp_path, capsys, monkeypatch):
    waited_s = count(0.0, 1000.0)
    monkeypatch.setattr(profile, "waited_for_core_s", lambda: next(waited_s))
    path = tmp_path / "profile.json"
    assert main([*SMALL, "--staleness", "exact", "--save", str(path)]) == 0
    found = Profile.from_json(path.read_text())
    assert found.waiting_share > 1, "1,000 s in every measurement"
    assert f"a rank waited for a core for {found.waiting_share:.0%}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "waited_s"),
    [("7 2500000000 1\n", 2.5), ("", 0.0), ("7\n", 0.0), ("a b c\n", 0.0), (None, 0.0)],
)
def test_time_without_a_core_is_that_of_the_kernel(text, waited_s, tmp_path):
    path = tmp_path / "schedstat"
    if text is not None:
        path.write_text(text)
    assert profile.waited_for_core_s(str(path)) == waited_s


def test_without_a_name_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--staleness", "exact"]) == 0
    assert not list(tmp_path.iterdir())
    assert "ms a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stages", "2"], ["--stages 2", "leave it out"]),
        (["--shards", "2"], ["--shards 2", "leave it out"]),
        (["--schedule", "1f1b"], ["--schedule 1f1b", "every schedule", "leave it out"]),
        (["--schedule", "async", "--weights", "stash"], ["--schedule async", "leave it out"]),
        (["--save", "here.json"], ["--save 'here.json'", "new name"]),
        (["--save", "no/where.json"], ["--save 'no/where.json'", "'no'"]),
        (["--dataset", "krate"], ["--dataset", "karate"]),
        (["--chunks", "35"], ["--chunks 35", "34"]),
        (["--profile", "p.json"], ["--profile 'p.json'", "try --save 'p.json'"]),
        (["--row-way", "columns"], ["--row-way columns", "--shards 1"]),
        (["--plan", "p.json"], ["--plan 'p.json'", "leave it out"]),
        (["--model", "net.py:make"], ["net.py, line 6"]),
        (["--seeds", "2"], ["--seeds", "not a flag of `gnnpipe profile`", "`gnnpipe train`"]),
        (["--hardware", "h100"], ["--hardware 'h100'", "h100:100gbe"]),
        (["--hardware", "h10:100gbe"], ["--hardware 'h10:100gbe'", "'h100'"]),
        (["--hardware", "h100:11gbe"], ["--hardware 'h100:11gbe'", "gbe"]),
    ],
)
def test_mistakes_are_one_line_before_any_measurement(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile, "measure_steps", lambda *given: pytest.fail("was measured"))
    (tmp_path / "here.json").write_text("kept")
    (tmp_path / "net.py").write_text(NOT_RECORDED)
    assert main([*SMALL, *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gnnpipe: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in told), err
    assert (tmp_path / "here.json").read_text() == "kept"


def test_a_profile_of_hardware_that_is_not_here_says_so(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert main([*SMALL, "--hardware", "h100:100gbe", "--save", str(path)]) == 0
    found = Profile.from_json(path.read_text())
    assert found.source == "by hand"
    assert "data sheet" in found.note
    assert found.note.startswith("dataset karate; ")
    assert "assumed" in found.note
    assert "(by hand: " in capsys.readouterr().out


def test_the_function_measures_a_graph_and_a_model_and_leaves_the_model_alone(capsys):
    from torch_geometric.nn import GCN

    module = GCN(7, 8, 2, 3)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    config = gnnpipe.TrainConfig(staleness="exact", cache_dir="off", device="cpu")
    found = gnnpipe.profile(config, small_graph(), module)
    assert found.source == "measured"
    assert found == Profile.from_json(found.to_json())
    assert str(found).startswith("profile of ")
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())
    assert capsys.readouterr().out == ""
    sheets = gnnpipe.profile(config, small_graph(), module, hardware="h100:100gbe")
    assert sheets.note.startswith("dataset small; ")


def _profile(path):
    return main([*SMALL, "--chunks", "2", "--save", path])


@pytest.mark.slow
def test_a_profile_of_two_ranks(tmp_path):
    path = tmp_path / "profile.json"
    assert run_ranks(_profile, 2, str(path)) == [0, 0]
    found = Profile.from_json(path.read_text())
    assert [times.ranks for times in found.compute] == [1, 2]
    assert found.compute[0].ops.keys() == found.compute[1].ops.keys()
    for link in (found.message, found.exchange, found.shard_sum):
        assert link.time_s(1 << 23) > link.time_s(1 << 10) > 0
    assert found.pair_exchange is found.pair_sum is None


@pytest.mark.slow
def test_three_ranks_measure_exchanges_of_two_shards_as_well(tmp_path):
    path = tmp_path / "profile.json"
    assert run_ranks(_profile, 3, str(path)) == [0, 0, 0]
    found = Profile.from_json(path.read_text())
    for name, pair in (("exchange", found.pair_exchange), ("shard_sum", found.pair_sum)):
        assert pair.time_s(1 << 23) > pair.time_s(1 << 10) > 0
        assert found.link(name, 2) == pair != found.link(name, 3) == getattr(found, name)


def _stages_that_are_measured():
    measured = []

    def record(mesh, test):
        measured.append(mesh.placement.stages)
        return _shard_links(mesh, test)

    with patch("gnnpipe.profiling.links._shard_links", record):
        assert main([*SMALL, "--chunks", "2"]) == 0
    return measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "pairs"), [(2, []), (3, [((0, 1), (2,))]), (5, [((0, 1), (2, 3), (4,))])]
)
def test_exchanges_are_measured_among_all_ranks_and_among_pairs(ranks, pairs):
    found = run_ranks(_stages_that_are_measured, ranks)
    assert found == [[(tuple(range(ranks)),), *pairs]] * ranks


def _profile_of_too_many_chunks():
    return main([*SMALL, "--chunks", "35"])


@pytest.mark.slow
def test_two_ranks_refuse_together():
    assert run_ranks(_profile_of_too_many_chunks, 2, timeout_s=60) == [2, 2]


@pytest.mark.parametrize("chunks", [1, 4])
def test_data_sheets_serve_every_number_of_chunks(chunks):
    """Runs that read stale rows aggregate other rows in the last layer than exact ones."""
    config = TrainConfig(dataset="karate", layers=2, hidden=8, out="off", cache_dir="off")
    found = gnnpipe.profile(replace(config, chunks=chunks), hardware="h100:100gbe")
    for run in (1, 4):
        gnnpipe.simulate(replace(config, chunks=run), profile=found)
