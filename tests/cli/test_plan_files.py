"""Wrong plan, profile and cluster files on the command line: one line with file, field and remedy.

A case changes one place of a file that is right, and lists words that the line must hold.
"""

from __future__ import annotations

import json

import pytest
from helpers import small_graph
from profiles import prepared_of, profile_of

from gnnpipe.cli.main import main

SMALL = ["--dataset", "karate", "--hidden", "8", "--layers", "4", "--cache-dir", "off"]
SHAPE = ["--shape", "vertices=1000,edges=8000,features=16,classes=4", "--layers", "4"]
GONE = object()
"""Stands for a field that is left out."""

PLAN = {
    "version": 6,
    "stages": [
        {"ops": [0, 1, 2, 3, 4], "ranks": [0, 1], "shares": [0.7, 0.3]},
        {"ops": [5, 6, 7, 8], "ranks": [2], "shares": [1.0]},
    ],
    "chunks": 2,
    "schedule": "layer-sync",
}


def changed(data, path, value):
    """The data with the value at ``path`` replaced, or left out."""
    found = json.loads(json.dumps(data))
    place = found
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return found


def refusal(words, capsys):
    """The line with which a command ends."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("gnnpipe: error: ")
    assert err.count("\n") == 1
    assert out == ""
    return err.removeprefix("gnnpipe: error: ")


def test_the_plan_is_right(tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN))
    assert main(["info", *SMALL, "--plan", str(file)]) == 0
    assert "rank 2" in capsys.readouterr().out


STAGE = "stages", 0
PLANS = {
    "rank twice": (
        (*STAGE, "ranks"),
        [0, 2],
        ["stages[1]: ranks [2]: rank 2 is in stages[0], too"],
    ),
    "rank twice in a stage": ((*STAGE, "ranks"), [1, 1], ["stages[0]: ranks [1, 1]", "twice"]),
    "rank missing": (
        (*STAGE, "ranks"),
        [0, 3],
        ["rank 1 is in no stage", "rank 3 is in stages[0]"],
    ),
    "rank far off": ((*STAGE, "ranks"), [0, 10**15], ["rank 1 is in no stage", "without a gap"]),
    "ranks descend": (
        (*STAGE, "ranks"),
        [1, 0],
        ["ranks [1, 0]: must ascend; try [0, 1]", "shares"],
    ),
    "no ranks": ((*STAGE, "ranks"), [], ["stages[0]: ranks []: is empty; give at least one rank"]),
    "rank of text": ((*STAGE, "ranks"), ["a"], ["stages[0]: ranks[0] 'a': must be a whole number"]),
    "rank negative": ((*STAGE, "ranks"), [-1, 0], ["ranks[0] -1: must be a whole number from 0"]),
    "rank of a fraction": ((*STAGE, "ranks"), [0, 1.5], ["ranks[1] 1.5: must be a whole number"]),
    "rank true": ((*STAGE, "ranks"), [0, True], ["ranks[1] True: must be a whole number"]),
    "rank huge": ((*STAGE, "ranks"), [0, 10**30], ["ranks[1] 1000000", "must be a whole number"]),
    "ranks a number": ((*STAGE, "ranks"), 2, ["stages[0]: ranks 2: must be a list"]),
    "ranks left out": (
        (*STAGE, "ranks"),
        GONE,
        ["stages[0]: ranks is missing", "ops, ranks, shares"],
    ),
    "op twice": (
        (*STAGE, "ops"),
        [0, 1, 2, 3, 4, 5],
        ["stages[1]: ops [5, 6, 7, 8]: op 5 is in stages[0], too"],
    ),
    "op missing": ((*STAGE, "ops"), [0], ["op 1 is in no stage", "op 8 is in stages[1]"]),
    "ops descend": ((*STAGE, "ops"), [1, 0], ["stages[0]: ops [1, 0]: must ascend; try [0, 1]"]),
    "no ops": ((*STAGE, "ops"), [], ["stages[0]: ops []: is empty", "leave the stage out"]),
    "share too few": ((*STAGE, "shares"), [1.0], ["stages[0]: shares [1.0]: 1 for 2 ranks"]),
    "shares sum": ((*STAGE, "shares"), [0.7, 0.2], ["[0.7, 0.2]: sum to 0.9", "divide each by"]),
    "share 0": ((*STAGE, "shares"), [1.0, 0.0], ["[1.0, 0.0]: each must be above 0; leave out"]),
    "share nan": ((*STAGE, "shares"), [float("nan"), 1.0], ["stages[0]: shares[0] nan", "from 0"]),
    "share negative": (
        (*STAGE, "shares"),
        [-0.5, 1.5],
        ["shares[0] -0.5: must be a number from 0"],
    ),
    "share huge": ((*STAGE, "shares"), [1e308, 1.0], ["shares[0] 1e+308: must be a number from 0"]),
    "share of text": ((*STAGE, "shares"), ["half", 0.5], ["shares[0] 'half': must be a number"]),
    "recompute 1": ((*STAGE, "recompute"), 1, ["stages[0]: recompute 1: must be true or false"]),
    "unknown in a stage": ((*STAGE, "rank"), [0], ["stages[0]: 'rank' is not a field", "'ranks'?"]),
    "stage a list": (STAGE, [0], ["stages[0] [0]: must be an object"]),
    "stages null": (("stages",), None, ["stages None: must be a list"]),
    "no stages": (("stages",), [], ["stages []: is empty; give at least one stage"]),
    "unknown field": (("chunk",), 2, ["'chunk' is not a field; did you mean 'chunks'?"]),
    "chunks left out": (("chunks",), GONE, ["chunks is missing"]),
    "chunks 0": (("chunks",), 0, ["chunks 0: must be at least 1"]),
    "chunks of text": (("chunks",), "two", ["chunks 'two': must be a whole number"]),
    "chunks huge": (("chunks",), 10**9, ["chunks 1000000000: too many for 34 vertices"]),
    "schedule unknown": (("schedule",), "layer-snc", ["schedule 'layer-snc'", "'layer-sync'?"]),
    "schedule 3": (("schedule",), 3, ["schedule 3: must be text"]),
    "comm_dtype unknown": (("comm_dtype",), "f8", ["comm_dtype 'f8': must be same or bf16"]),
    "comm_dtype not allowed": (("comm_dtype",), "bf16", ["rows in bf16", "--comm-dtype bf16"]),
    "collective unknown": (("collectives",), {"shard_sum": "x"}, ["shard_sum 'x'", "known: "]),
    "collective misspelt": (
        ("collectives",),
        {"shard_sun": "x"},
        ["collectives: 'shard_sun'", "?"],
    ),
    "way unknown": (("ways",), {"1": "column"}, ["ways: 1 'column': must be one of halo, gather"]),
    "way of no op": (("ways",), {"9": "columns"}, ["ways: 9: must be an op from 0 to 8"]),
    "way of a name": (("ways",), {"drop": "columns"}, ["ways: 'drop': must be a whole number"]),
    "way with a zero": (("ways",), {"01": "halo"}, ["ways: '01': must be", "leading zeros"]),
    "way without shards": (
        ("ways",),
        {"7": "columns"},
        ["ways: columns: op 7 (aggregate_3)", "single rank"],
    ),
    "ways a list": (("ways",), ["halo"], ["ways ['halo']: must be an object"]),
    "version old": (
        ("version",),
        5,
        ["version 5: another gnnpipe", "reads version 6", "plan.json"],
    ),
    "version of text": (("version",), "6", ["version '6': another gnnpipe"]),
    "version left out": (("version",), GONE, ["version is missing", "plan.json of a run"]),
    "stages not convex": (
        ("stages",),
        [
            {"ops": [0, 1, 2, 3, 5], "ranks": [0], "shares": [1.0]},
            {"ops": [4, 6, 7, 8], "ranks": [1], "shares": [1.0]},
        ],
        ["stage 0 is not convex", "op 4 between them is in stage 1"],
    ),
    "model of fewer layers": (
        ("stages", 1, "ops"),
        [5, 6, 7],
        [
            "is for 8 ops, and GCN has 9; try the --layers that the plan was made with, "
            "--plan uniform or --plan auto"
        ],
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_wrong_plan_is_refused_by_file_and_field(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, value, words = PLANS[case]
    (tmp_path / "plan.json").write_text(json.dumps(changed(PLAN, path, value)))
    line = refusal(["info", *SMALL, "--plan", "plan.json"], capsys)
    assert line.startswith("--plan 'plan.json': ")
    for word in words:
        assert word in line, line
    assert len(line) < 300


FILES = {
    "not there": (None, ["cannot be read (No such file"]),
    "empty": (b"", ["not "]),
    "blank": (b" \n", ["not "]),
    "binary": (bytes(range(128, 256)), ["cannot be read (byte 0 is not UTF-8)"]),
    "zeros": (bytes(64), ["not "]),
    "a folder": ("folder", ["cannot be read (not a regular file)"]),
    "too large": (b"#" * (2 << 20), ["larger than 1 MiB"]),
    "too deep": (b"[" * 50_000, ["not "]),
    "many digits": (b'{"version": ' + b"9" * 9000 + b"}", ["not "]),
    "other words": (b"layers = four", ["not "]),
}
COMMANDS = {
    "--plan": (["info", *SMALL], "plan.json"),
    "--profile": (["simulate", *SMALL], "`gnnpipe profile --save`"),
    "--cluster": (["simulate", *SHAPE, "--hardware", "h100:10gbe"], "predict-epoch-time.md"),
}


@pytest.mark.parametrize("flag", COMMANDS)
@pytest.mark.parametrize("case", FILES)
def test_what_is_no_such_file_is_refused(case, flag, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, words = FILES[case]
    if content == "folder":
        (tmp_path / "file").mkdir()
    elif content is not None:
        (tmp_path / "file").write_bytes(content)
    command, remedy = COMMANDS[flag]
    line = refusal([*command, flag, "file"], capsys)
    assert line.startswith(f"{flag} 'file': ")
    if flag == "--cluster" and content is not None and not content.strip():
        words, remedy = ["devices is missing"], "the fields are devices, link, pairs"
    for word in [*words, remedy]:
        assert word in line, line


@pytest.mark.parametrize("text", ["3", "null", "[]", '"plan"'])
@pytest.mark.parametrize("flag", ["--plan", "--profile"])
def test_json_that_is_no_object_is_refused(text, flag, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text(text)
    line = refusal([*COMMANDS[flag][0], flag, str(file)], capsys)
    assert f"{flag} '{file}': is " in line
    assert "not a JSON object" in line
    assert COMMANDS[flag][1] in line


def test_a_field_that_is_given_twice_is_refused(tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN)[:-1] + ', "chunks": 4}')
    assert "'chunks' is given twice" in refusal(["info", *SMALL, "--plan", str(file)], capsys)


SIMULATED = ["simulate", *SMALL, "--profile", "profile.json"]
PROFILES = {
    # GCN aggregates the features once; SAGE reads them, too, and aggregates what it maps.
    "another model": (
        {"model": "sage"},
        (),
        None,
        ["has no op like aggregate (aggregate, out 34, flops 0 a row), but one with", "take one"],
    ),
    "a model without its convolution": (
        {"model": "gat"},
        (),
        None,
        ["has no op like aggregate (aggregate, ", "only ", "model_convs", "take one"],
    ),
    "another width": (
        {"hidden": 16},
        (),
        None,
        ["has no op like drop (drop, out 8", "but one with out 16", "take one"],
    ),
    "another graph": ("small graph", (), None, ["has no op like ", "dataset and the model"]),
    "no ops": ({}, ("compute", 0, "ops"), {}, ["has no op like ", "only none; take one"]),
    "another number type": (
        {},
        ("dtype",),
        "float64",
        ["with float64, not float32", "--dtype float32"],
    ),
    "rows in bf16": ({}, ("comm_dtype",), "bf16", ["with bf16, not same", "--comm-dtype same"]),
    "recomputation": ({}, ("recompute",), True, ["taken with --recompute, and the run does not"]),
    "unknown field": ({}, ("thread",), 1, ["'thread' is not a field; did you mean 'threads'?"]),
    "field left out": ({}, ("threads",), GONE, ["threads is missing; the fields are machine"]),
    "time of text": (
        {},
        ("compute", 0, "update", "base_s"),
        "1",
        ["compute[0]: update: base_s '1'"],
    ),
    "time nan": (
        {},
        ("compute", 0, "update", "base_s"),
        float("nan"),
        ["base_s nan: must be a num"],
    ),
    "time negative": ({}, ("compute", 1, "begin", "base_s"), -1, ["compute[1]: begin: base_s -1"]),
    "ranks descend": ({}, ("compute", 0, "ranks"), 9, ["compute: ranks [9, 2]: must ascend"]),
    "source unknown": ({}, ("source",), "guess", ["source 'guess': must be measured or by hand"]),
    "link too slow": (
        {},
        ("message", "bandwidth_bytes_per_s"),
        0,
        ["message: bandwidth_bytes_per_s 0"],
    ),
    "version old": ({}, ("version",), 3, ["version 3: another gnnpipe", "gnnpipe profile --save"]),
}


@pytest.mark.parametrize("case", PROFILES)
def test_a_wrong_profile_is_refused_by_file_and_field(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, path, value, words = PROFILES[case]
    graph = small_graph() if settings == "small graph" else None
    changes = settings if graph is None else {}
    model = prepared_of(graph, **{"layers": 4} | changes).model_graph
    data = json.loads(profile_of(model).to_json())
    data = changed(data, path, value) if path else data
    (tmp_path / "profile.json").write_text(json.dumps(data))
    line = refusal(SIMULATED, capsys)
    assert line.startswith("--profile 'profile.json': ")
    for word in words:
        assert word in line, line


@pytest.mark.parametrize("flags", [["--stages", "2"], ["--shards", "2"]])
def test_a_profile_without_links_names_the_link_and_the_command(
    flags, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    given = profile_of(prepared_of(layers=4).model_graph, message=None, exchange=None)
    (tmp_path / "profile.json").write_text(given.to_json())
    line = refusal([*SIMULATED, *flags], capsys)
    link = "message" if "--stages" in flags else "exchange"
    assert line.startswith(f"--profile 'profile.json': {link}: was not measured; take the profile")
    assert "torchrun --nproc-per-node 2 -m gnnpipe profile" in line


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_plan_of_more_ranks_says_how_to_start_them(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    line = refusal([command, *SMALL, "--plan", "plan.json"], capsys)
    assert line.startswith("--plan 'plan.json': need 3 ranks, not 1; try --plan auto or --plan uni")
    assert "or type: torchrun --nproc-per-node 3" in line


def test_a_resumed_run_names_the_plan_in_its_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = changed(PLAN, ("stages",), [{"ops": [*range(9)], "ranks": [0], "shares": [1.0]}])
    (tmp_path / "plan.json").write_text(json.dumps(alone))
    run = ["--epochs", "2", "--checkpoint-every", "2", "--no-predict", "--quiet", "--out", "run"]
    assert main(["train", *SMALL, "--plan", "plan.json", *run]) == 0
    capsys.readouterr()
    again = ["train", "--resume", "run", "--epochs", "4", "--quiet"]
    for plan, words in {
        json.dumps(PLAN): "need 3 ranks, not 1; try --plan auto or --plan uniform",
        json.dumps(
            changed(alone, ("stages", 0, "ops"), [*range(8)])
        ): "is for 8 ops, and GCN has 9",
        json.dumps(alone | {"chunk": 2}): "'chunk' is not a field; did you mean 'chunks'?",
        "": "not JSON",
    }.items():
        (tmp_path / "run" / "plan.json").write_text(plan)
        assert refusal(again, capsys).startswith(f"--plan 'run/plan.json': {words}")
    assert main([*again, "--plan", "uniform"]) == 0


def test_a_planner_is_suggested_for_a_name_that_is_no_file(capsys):
    line = refusal(["train", *SMALL, "--plan", "unifrm"], capsys)
    assert "--plan 'unifrm': cannot be read" in line
    assert "did you mean 'uniform'?" in line
