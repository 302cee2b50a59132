"""What the devices of the ranks are: measured speeds and links, and the cluster file."""

import pytest
from helpers import quick_config, run_ranks
from slow_ranks import slow_devices

import gnnpipe
from gnnpipe import Trainer
from gnnpipe.cli.main import main
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan
from gnnpipe.plan.cluster import NO_LINK, Cluster, Device, Link
from gnnpipe.profiling import profile, steps
from gnnpipe.profiling.devices import RankSpeeds, _alike_pairs
from gnnpipe.runtime.comm.world import World

GRAPH = "synthetic:planted:n=1000,degree=12,classes=4,features=32"
WORK = {"dataset": GRAPH, "layers": 4, "hidden": 64, "dtype": "float32"}
DEVICE, LINK = Device(1.0, 10**9), Link(1e9, 1e-5)


def test_speeds_are_relative_to_the_fastest():
    assert RankSpeeds.of_times([(1.0, 2.0, 4.0)] * 3).speeds == (1.0, 0.5, 0.25)
    assert RankSpeeds.of_times([(4.0, 2.0, 1.95)] * 3).reference == [1, 2]


def test_a_disturbed_round_changes_no_speed():
    rounds = [(1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (5.0, 2.0), (1.0, 9.0)]
    assert RankSpeeds.of_times(rounds).speeds == (1.0, 0.5)


def test_differences_within_the_spread_are_no_difference():
    rounds = [(1.0, 1.2), (1.6, 1.3), (1.0, 1.9), (1.5, 1.2), (1.1, 1.7)]
    assert RankSpeeds.of_times(rounds).are_equal
    assert not RankSpeeds.of_times([(1.0, 1.2)] * 5).are_equal


def test_of_many_ranks_one_pair_is_measured_for_each_two_machines():
    assert len(_alike_pairs(["a", "a", "b"])) == 3
    groups = _alike_pairs([host for host in "abc" for _ in range(4)])
    assert len(groups) == 6
    assert sum(map(len, groups.values())) == 12 * 11 / 2


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster((DEVICE,), NO_LINK),
        Cluster((DEVICE, DEVICE, Device(0.4321, 7)), LINK, {(0, 2): Link(2.5e9, 0.0)}),
    ],
)
def test_a_written_cluster_is_read_again(cluster, tmp_path):
    (tmp_path / "c.toml").write_text(cluster.to_toml("measured\ntoday"))
    assert Cluster.read(str(tmp_path / "c.toml")) == cluster


def test_one_process_writes_a_cluster_of_one_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "MIN_TIME_S", 0.0)
    path = tmp_path / "c.toml"
    flags = ["--dataset", "karate", "--hidden", "8", "--staleness", "exact", "--cache-dir", "off"]
    assert main(["profile", *flags, "--device", "cpu", "--save-cluster", str(path)]) == 0
    found = Cluster.read(str(path))
    assert [device.speed for device in found.devices] == [1.0]
    assert found.devices[0].memory_bytes > 10**8
    assert f"cluster: {path}" in capsys.readouterr().out


def test_data_sheets_measure_no_cluster(tmp_path, capsys):
    flags = ["--hardware", "h100:100gbe", "--save-cluster", str(tmp_path / "c.toml")]
    assert main(["profile", "--dataset", "karate", *flags]) == 2
    assert "measures nothing; leave one out" in capsys.readouterr().err


def test_a_cluster_needs_a_search():
    with pytest.raises(InputError, match="cluster: no effect without --plan auto"):
        Trainer(quick_config(), cluster=Cluster((DEVICE,), NO_LINK))


def test_a_cluster_of_other_ranks_is_refused():
    config = quick_config(dataset="karate", plan="auto")
    with pytest.raises(
        InputError, match="cluster: number of devices 2, number of ranks 1; give one"
    ):
        Trainer(config, cluster=Cluster((DEVICE, DEVICE), LINK)).fit()


def measured(slow, path):
    """Runs the command with rank ``slow`` at half speed."""
    steps.MIN_TIME_S, profile.CHUNK_COUNTS = 0.0, (1,)
    flags = ["--dataset", GRAPH, "--layers", "4", "--staleness", "exact", "--cache-dir", "off"]
    with slow_devices(slow):
        return main(["profile", *flags, "--save-cluster", path])


@pytest.mark.parametrize(("ranks", "slow"), [(2, 1), (2, 0), (3, 2)])
def test_the_profile_of_a_throttled_rank_tells_its_speed(ranks, slow, tmp_path):
    path = str(tmp_path / "cluster.toml")
    assert run_ranks(measured, ranks, slow, path) == [0] * ranks
    cluster = Cluster.read(path)
    for rank, device in enumerate(cluster.devices):
        assert device.speed == pytest.approx(0.5 if rank == slow else 1.0, rel=0.1)
    assert cluster.link.bandwidth_bytes_per_s > 0


def planned(slow, folder, cluster):
    """Trains with --plan auto on all ranks; rank ``slow`` at half speed, whatever ``cluster``."""
    config = quick_config(**WORK, plan="auto", staleness="exact", out=folder, quiet=True)
    with slow_devices(slow), pytest.MonkeyPatch.context() as patched:
        patched.setattr(World, "can_shrink", property(lambda self: False))
        Trainer(config, cluster=cluster).fit()


def work_of_ranks(folder):
    """Ops times share of each rank."""
    plan = Plan.from_json((folder / "plan.json").read_text())
    return {
        rank: len(stage.ops) * share
        for stage in plan.stages
        for rank, share in zip(stage.ranks, stage.shares, strict=True)
    }


def test_a_slow_rank_gets_less_work_without_being_told(tmp_path):
    run_ranks(planned, 2, 1, str(tmp_path / "run"), None)
    work = work_of_ranks(tmp_path / "run")
    assert work[1] < 0.75 * work[0]


def test_a_given_cluster_counts_instead(tmp_path):
    devices = (Device(0.5, 10**10), Device(2.0, 10**10))
    run_ranks(planned, 2, None, str(tmp_path / "run"), Cluster(devices, LINK))
    work = work_of_ranks(tmp_path / "run")
    assert work[0] < 0.5 * work[1]


def test_the_cluster_is_public():
    assert gnnpipe.Cluster is Cluster
