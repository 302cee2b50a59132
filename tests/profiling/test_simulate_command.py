"""`gnnpipe simulate`: any shape, on any cluster, in one process."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_graph
from profiles import ONE_HOT, prepared_of, profile_of

import gnnpipe
from gnnpipe.cli.main import main
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.perf import simulate as simulate_tasks
from gnnpipe.perf.unroll import program_tasks
from gnnpipe.perf.what_if import critical_shares, sensitivity
from gnnpipe.plan.cluster import Cluster, Device, Link
from gnnpipe.profiling.predict import run_costs
from gnnpipe.profiling.scenario import (
    GraphShape,
    memory_of_shape,
    model_on_shape,
    scenario_of,
    scenario_of_shape,
)
from gnnpipe.profiling.simulate import simulate

SHAPE = "vertices=1000,edges=8000,features=16,classes=4"
MADE_UP = ["--shape", SHAPE, "--layers", "4", "--hidden", "8", "--hardware", "h100:10gbe"]


def config_of(**changes):
    return TrainConfig(
        **{"dataset": "karate", "layers": 4, "hidden": 8, "out": "off", "cache_dir": "off"}
        | changes
    )


def cluster_of(count, memory_bytes=10**12, speed=1.0, slow=None):
    """Equal devices on links of 1 GB/s; between the ranks ``slow`` a thousandth of it."""
    pairs = {} if slow is None else {slow: Link(1e6, 0.0)}
    return Cluster((Device(speed, memory_bytes),) * count, Link(1e9, 0.0), pairs)


def test_a_dataset_costs_what_its_run_would(tmp_path):
    prepared = prepared_of(layers=4, stages=2, chunks=3)
    path = tmp_path / "profile.json"
    path.write_text(profile_of(prepared.model_graph).to_json())
    config = config_of(stages=2, chunks=3, profile=str(path))
    found = simulate(config)
    costs = run_costs(prepared, profile_of(prepared.model_graph), 2)
    order = scenario_of(prepared).order
    made = simulate_tasks(program_tasks(prepared.program, costs, order)).makespan_s
    assert found.predicted_epoch_time_s == pytest.approx(made)
    assert found.comm_bytes_per_epoch == prepared.volume.to_dict()


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "async"])
def test_a_plan_gives_the_shape_of_a_graph_in_numbers(schedule, tmp_path):
    shape = GraphShape(1000, 8000, 16, 4)
    config = config_of(stages=2, shards=2, chunks=4, schedule=schedule)
    flags = simulate(config, shape=shape, hardware="h100:10gbe")
    plan = tmp_path / "plan.json"
    prepared = scenario_of_shape(config, shape)
    assert prepared.has_forecasts == (schedule == "fill-drain")
    plan.write_text(prepared.plan.to_json())
    found = simulate(config_of(plan=str(plan)), shape=shape, hardware="h100:10gbe")
    assert found.predicted_epoch_time_s == flags.predicted_epoch_time_s
    assert found.memory_bytes == flags.memory_bytes


def test_a_plan_that_a_shape_cannot_follow_is_refused(tmp_path):
    shape = GraphShape(1000, 8000, 16, 4)
    plan = scenario_of_shape(config_of(stages=2, shards=2, chunks=4), shape).plan
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    with pytest.raises(InputError, match="--staleness exact allows none"):
        simulate(config_of(plan=str(file), staleness="exact"), shape=shape, hardware="h100:10gbe")
    stages = tuple(replace(stage, shares=(0.7, 0.3)) for stage in plan.stages)
    file.write_text(replace(plan, stages=stages).to_json())
    with pytest.raises(InputError, match="unequal shares"):
        simulate(config_of(plan=str(file)), shape=shape, hardware="h100:10gbe")


def test_the_answer_of_a_shape(tmp_path, capsys):
    path = tmp_path / "answer.json"
    words = ["simulate", *MADE_UP, "--stages", "2", "--shards", "2", "--chunks", "4"]
    assert main([*words, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    for word in ("predicted: ", "bubble", "exposed communication", "critical path: ", "memory of"):
        assert word in out
    answer = json.loads(path.read_text())
    assert (answer["stages"], answer["shards"], answer["chunks"]) == (2, 2, 4)
    assert "by hand" in answer["profile"]
    assert len(answer["memory_bytes"]) == len(answer["predicted_time_shares"]) == 4
    assert sum(answer["critical_path"].values()) == pytest.approx(1)
    changes = answer["what_if_s"]
    epoch_s = answer["predicted_epoch_time_s"]
    assert changes["twice the bandwidth between stages"] <= epoch_s
    assert changes["nothing overlapped"] >= epoch_s
    assert any(words.endswith("half as fast") for words in changes)
    assert "--chunks 8" in changes
    # A tenth of what has a share of the path can shorten the epoch by a tenth of that at most.
    for place, change in answer["sensitivity"].items():
        assert -0.1 * answer["critical_path"][place] - 1e-9 <= change <= 1e-9


def test_a_shape_shares_out_all_there_is():
    shape = GraphShape.parse("vertices=1001,edges=8003,features=16,classes=4,halo=0.5")
    scenario = scenario_of_shape(config_of(stages=2, shards=3, chunks=4), shape)
    assert scenario.sizes.stages[0].rows[""].sum() == 1001
    assert scenario.sizes.stages[0].edges[""].sum() == 8003
    assert scenario.sizes.stages[0].entries[""].sum() == 1001 * 16
    assert np.ptp(scenario.sizes.stages[0].rows[""]) <= 1
    assert len(scenario.memory_bytes) == 6
    assert scenario.volume.pipeline == 2 * 1001 * 8 * 4


def test_a_shape_is_near_the_graph_that_it_is_of():
    # With labels on nearly all vertices: a shape has no number of training vertices.
    place = np.arange(ONE_HOT.num_vertices)
    masks = {"train_mask": place > 3, "val_mask": place < 2, "test_mask": (place > 1) & (place < 4)}
    graph = replace(ONE_HOT, **masks)
    prepared = prepared_of(graph, layers=4, stages=2, shards=2, chunks=3)
    real = scenario_of(prepared)
    even = scenario_of_shape(prepared.config, real.shape)
    assert even.plan == real.plan
    assert even.volume.pipeline == real.volume.pipeline
    assert even.volume.graph == pytest.approx(real.volume.graph, rel=0.1)
    assert even.memory_bytes == pytest.approx(real.memory_bytes, rel=0.3)


def test_a_cluster_of_half_the_speed_takes_twice_the_time():
    shape = GraphShape.parse(SHAPE)
    fast, slow = (
        simulate(
            config_of(), shape=shape, hardware="h100:10gbe", cluster=cluster_of(1, speed=speed)
        )
        for speed in (1.0, 0.5)
    )
    assert slow.predicted_epoch_time_s == pytest.approx(2 * fast.predicted_epoch_time_s)


def test_a_slow_pair_is_the_critical_one():
    shape = GraphShape.parse(SHAPE)
    config = config_of(stages=4, chunks=4)
    even = simulate(config, shape=shape, hardware="h100:10gbe", cluster=cluster_of(4))
    slow = simulate(config, shape=shape, hardware="h100:10gbe", cluster=cluster_of(4, slow=(1, 2)))
    assert slow.predicted_epoch_time_s > 2 * even.predicted_epoch_time_s
    assert next(iter(slow.critical_path)) in ("transfer 1 to 2", "transfer 2 to 1")
    shards = config_of(shards=4)
    even = simulate(shards, shape=shape, hardware="h100:10gbe", cluster=cluster_of(4))
    slow = simulate(shards, shape=shape, hardware="h100:10gbe", cluster=cluster_of(4, slow=(1, 2)))
    assert slow.predicted_epoch_time_s > 2 * even.predicted_epoch_time_s


def test_what_does_not_fit_is_refused_with_the_nearest_that_does():
    shape = GraphShape.parse("vertices=100000,edges=800000,features=16,classes=4")
    config = config_of(chunks=4)
    need = max(scenario_of_shape(config, shape).memory_bytes)
    with pytest.raises(InputError, match=r"--stages 1 .*fits; try that") as caught:
        simulate(
            config,
            shape=shape,
            hardware="h100:10gbe",
            cluster=cluster_of(4, memory_bytes=need // 3),
        )
    words = str(caught.value).split("by estimate ")[1].split(" fits")[0].split()
    wanted = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    tried = scenario_of_shape(
        config_of(stages=wanted["--stages"], shards=wanted["--shards"], chunks=wanted["--chunks"]),
        shape,
    )
    assert max(tried.memory_bytes) <= need // 3
    with pytest.raises(InputError, match="nor does any shape on these 4 devices"):
        simulate(
            config, shape=shape, hardware="h100:10gbe", cluster=cluster_of(4, memory_bytes=1000)
        )
    simulate(config, shape=shape, hardware="h100:10gbe", cluster=cluster_of(4, memory_bytes=need))


HUGE = GraphShape.parse("vertices=2400000,edges=124000000,features=100,classes=47")


def named(config, shape, cluster):
    """The shape that a refusal names, which is tried at once, and (stages, shards, chunks)."""
    with pytest.raises(InputError, match="fits; try that") as caught:
        simulate(config, shape=shape, hardware="h100:100gbe", cluster=cluster)
    words = str(caught.value).split("by estimate ")[1].split(" fits")[0].split()
    values = dict(zip([w.strip("-") for w in words[::2]], map(int, words[1::2]), strict=True))
    simulate(replace(config, **values), shape=shape, hardware="h100:100gbe", cluster=cluster)
    return values["stages"], values["shards"], values["chunks"]


@pytest.mark.parametrize(
    ("stages", "shards", "chunks"),
    [
        (2, 1, 1),
        pytest.param(8, 2, 16, marks=pytest.mark.slow),
        pytest.param(4, 4, 16, marks=pytest.mark.slow),
    ],
)
def test_the_nearest_shape_may_have_fewer_stages_and_no_more_ranks_than_there_are(
    stages, shards, chunks
):
    config = config_of(layers=8, hidden=256, stages=stages, shards=shards, chunks=chunks)
    room = 7_000_000_000
    cluster = cluster_of(16, memory_bytes=room)
    found = named(config, HUGE, cluster)
    assert found[0] * found[1] <= 16

    def takes(stages, shards, chunks):
        wanted = replace(config, stages=stages, shards=shards, chunks=chunks)
        return max(memory_of_shape(wanted, HUGE, model_on_shape(wanted, HUGE)))

    # Whoever has the fewest chunks of as many ranks; and no fewer ranks do.
    assert found[2] == 1 or takes(*found[:2], found[2] // 2) > room
    assert takes(1, found[0] * found[1] - 1, found[2]) > room


def test_whole_numbers_of_a_shape_may_be_short():
    shape = GraphShape.parse("vertices=1e3,edges=5e3,features=16,classes=4")
    assert (shape.vertices, shape.edges) == (1000, 5000)
    assert isinstance(shape.vertices, int)
    for number in ("1.5", "inf", "nan", "many", ""):
        with pytest.raises(InputError, match=f"vertices '{number}' is no whole number"):
            GraphShape.parse(f"vertices={number},edges=5,features=16,classes=4")


def test_many_ranks_are_told_by_what_not_by_where():
    shape = GraphShape.parse("vertices=10000,edges=80000,features=16,classes=4")
    found = simulate(config_of(layers=18, stages=9, chunks=3), shape=shape, hardware="h100:10gbe")
    assert {"all compute", "all transfers"} <= set(found.critical_path)
    assert sum(found.critical_path.values()) == pytest.approx(1)
    assert set(found.sensitivity) <= set(found.critical_path)
    assert all(
        -0.1 * found.critical_path[kind] - 1e-9 <= change < 0
        for kind, change in found.sensitivity.items()
        if found.critical_path[kind] > 1e-6
    )


def test_what_is_not_on_the_path_changes_nothing():
    prepared = prepared_of(layers=4, stages=2, chunks=3)
    costs = run_costs(prepared, profile_of(prepared.model_graph), 2)
    timeline = simulate_tasks(program_tasks(prepared.program, costs))
    found = sensitivity(timeline, most=100)
    assert found.keys() == critical_shares(timeline).keys()
    assert all(change < 0 for change in found.values())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ["--profile", "--hardware"]),
        (
            ["--hardware", "h100:10gbe", "--profile", "x.json"],
            ["--hardware h100:10gbe", "--profile gives", "leave one out"],
        ),
        (["--profile", "x.json"], ["x.json", "cannot be read"]),
        (["--hardware", "h100"], ["--hardware 'h100'", "names no link", "like h100:100gbe"]),
        (["--hardware", "h100:"], ["names no link", "like h100:100gbe"]),
        (["--hardware", "p4:10gbe"], ["--hardware 'p4:10gbe'", "give a device and a link"]),
        (
            ["--hardware", "h100:10gbe", "--shape=" + SHAPE, "--dataset", "karate"],
            ["--dataset karate", "goes with no --shape"],
        ),
        (
            ["--hardware", "h100:10gbe", "--shape", "vertices=3,edges=10,features=1,classes=2"],
            ["edges must be at most", "9"],
        ),
        (["--hardware", "h100:10gbe", "--cluster", "x.toml"], ["--cluster", "x.toml"]),
        (["--hardware", "h100:10gbe", "--json", ""], ["--json ''"]),
        (["--hardware", "h100:10gbe", "--json", "no/x.json"], ["--json", "'no' is not a folder"]),
        (["--hardware", "h100:10gbe", "--json", "."], ["--json '.'", "exists already"]),
        (["--hardware", "h100:10gbe", "--shape", SHAPE + ",edges=2"], ["edges is given twice"]),
        (["--hardware", "h100:10gbe", "--shape", SHAPE + ",stored=1e9"], ["at most vertices"]),
        (
            ["--hardware", "h100:10gbe", "--shape", "vertices=1e15,edges=1,features=1e5,classes=2"],
            ["vertices times features must be at most"],
        ),
        (
            ["--hardware", "h100:10gbe", "--shape", "vertices=3"],
            ["--shape", "edges and features and classes missing", "vertices=1e6"],
        ),
        (["--hardware", "h100:10gbe", "--shape", "vertexes=3"], ["did you mean 'vertices'"]),
        (["--hardware", "h100:10gbe", "--shape", "vertices=x"], ["vertices 'x'"]),
        (["--hardware", "h100:10gbe", "--shape", SHAPE + ",halo=-1"], ["halo must be"]),
        (["--hardware", "h100:10gbe", "--shape", SHAPE + ",halo=nan"], ["halo must be"]),
        (["--hardware", "h100:10gbe", "--shape", SHAPE, "--chunks", "1001"], ["--chunks 1001"]),
        (["--hardware", "h100:10gbe", "--shape", SHAPE, "--stages", "9"], ["--stages 9"]),
        (
            ["--hardware", "h100:10gbe", "--shape", "vertices=3e9,edges=6e10,features=1,classes=2"],
            [
                "rank 0 takes",
                "its device has 74.5 GiB (--hardware h100:10gbe); by estimate",
                "fits; try that",
            ],
        ),
    ],
)
def test_mistakes_are_one_line(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = [] if "--shape" in words else ["--dataset", "karate"]
    assert main(["simulate", *dataset, "--cache-dir", "off", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gnnpipe: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in told), err


def test_more_ranks_than_devices(tmp_path, capsys):
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[[devices]]\nspeed = 1.0\nmemory_bytes = 1_000_000_000\n"
        "[link]\nbandwidth_bytes_per_s = 1e9\nlatency_s = 0.0\n"
    )
    assert main(["simulate", *MADE_UP, "--stages", "2", "--cluster", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"--cluster '{path}': number of devices 1, and --stages 2 --shards 1 needs 2; add" in err


def test_the_cluster_of_the_page(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "predict-epoch-time.md"
    guide = page.read_text(encoding="utf-8")
    path = tmp_path / "cluster.toml"
    path.write_text(re.search(r"```toml\n(\[\[devices.*?)```", guide, re.DOTALL).group(1))
    cluster = Cluster.read(str(path))
    assert [device.speed for device in cluster.devices] == [1.0] * 4 + [0.5] * 4
    assert cluster.between(2, 3).bandwidth_bytes_per_s > cluster.between(3, 4).bandwidth_bytes_per_s
    even = cluster_of(8)
    shape, config = GraphShape.parse(SHAPE), config_of(layers=8, stages=8, chunks=2)
    times = [
        simulate(config, shape=shape, hardware="h100:10gbe", cluster=c).predicted_epoch_time_s
        for c in (even, cluster)
    ]
    assert times[0] < times[1]


def test_the_function_takes_a_profile_a_graph_and_a_model():
    from torch_geometric.nn import GCN

    graph, module = small_graph(), GCN(7, 8, 3, 3)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    config = TrainConfig(stages=2, chunks=2, cache_dir="off")
    prepared = prepared_of(graph, GCN(7, 8, 3, 3), stages=2, chunks=2)
    profile = profile_of(prepared.model_graph)
    found = gnnpipe.simulate(config, graph, module, profile)
    costs, order = run_costs(prepared, profile, 2), scenario_of(prepared).order
    made = simulate_tasks(program_tasks(prepared.program, costs, order)).makespan_s
    assert found.predicted_epoch_time_s == pytest.approx(made)
    assert str(found) == "\n".join(found.lines())
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())


def test_the_function_refuses_two_graphs_and_two_costs():
    shape, graph = GraphShape(1000, 8000, 16, 4), small_graph()
    with pytest.raises(InputError, match="graph and shape: each stands for the graph"):
        gnnpipe.simulate(TrainConfig(), graph, shape=shape, hardware="h100:10gbe")
    profile = profile_of(prepared_of().model_graph)
    with pytest.raises(InputError, match="--hardware h100:10gbe: --profile gives the times"):
        gnnpipe.simulate(TrainConfig(), graph, profile=profile, hardware="h100:10gbe")
    with pytest.raises(InputError, match="shape: vertices must be 1 to"):
        GraphShape(0, 8000, 16, 4)
