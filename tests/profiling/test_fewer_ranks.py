"""``--plan auto`` may leave out ranks of the launch: these end, and the others train."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import quick_config, run_ranks
from profiles import prepared_of, profile_of

from gnnpipe import TrainConfig, Trainer, fit_seeds
from gnnpipe.errors import IdleRank, InputError
from gnnpipe.perf.profile import Affine, ComputeTimes, LinkTimes, OpTimes
from gnnpipe.planner import GivenPlan
from gnnpipe.profiling.search import RunPlanner, run_planner
from gnnpipe.run.resume import last_run, note_launch
from gnnpipe.runtime.comm.launch import launched_world_size
from gnnpipe.runtime.comm.world import World

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "dataset": "karate",
    "layers": 2,
    "hidden": 8,
    "cache_dir": "off",
    "plan": "auto",
    "staleness": "exact",
}


def profile_file(folder, best):
    """A profile by which so many ranks are fastest: links are slow, or more ranks slow each other.

    ``best``: 1 to 3.
    """
    known = profile_of(prepared_of(layers=2).model_graph, dtype="float64")
    row = Affine(0.0, 1e-3)
    ops = dict.fromkeys(known.compute[0].ops, OpTimes(row, row, row, row, *[Affine()] * 3, 0.0))
    slow = {kind: replace(times, forward_after=Affine(0.0, 1.0)) for kind, times in ops.items()}
    compute = [
        ComputeTimes(n, slow if n > best else ops, Affine(), Affine(), 0.0) for n in (1, 2, 3)
    ]
    link = LinkTimes(1e-7, 1e12, 0.0)
    found = replace(known, compute=tuple(compute), message=link, exchange=link, shard_sum=link)
    path = folder / "profile.json"
    path.write_text(found.to_json())
    return path


def launch(ranks, *words, restarts=0):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts"]
    return subprocess.Popen(
        [*line, str(restarts), "--nproc-per-node", str(ranks), *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train_words(profile, out, *more):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    words += ["--dtype=float64", f"--profile={profile}", f"--out={out}"]
    return ["-m", "gnnpipe", "train", *words, *more]


def finished(process, timeout_s=120):
    said = process.communicate(timeout=timeout_s)[0]
    assert process.returncode == 0, said
    return said


def single_loss(epochs):
    return Trainer(quick_config(**SETTINGS | {"plan": "uniform", "epochs": epochs})).fit().loss


def test_one_of_two_ranks_trains_and_goes_on(tmp_path):
    out, words = tmp_path / "run", ["--epochs=4", "--checkpoint-every=2"]
    said = finished(launch(2, *train_words(profile_file(tmp_path, 1), out, *words)))
    assert said.count("rank 1: the plan uses 1 of 2 ranks; this rank is not needed, and ends") == 1
    assert "on 1 of 2 devices" in said
    result = json.loads((out / "result.json").read_text())
    assert result["world_size"] == 1
    assert result["loss"] == pytest.approx(single_loss(4), rel=1e-9)
    more = ["-m", "gnnpipe", "train", "--resume", out, "--epochs", "6"]
    said = finished(launch(2, *more))
    assert "search:" not in said
    assert said.count("rank 1: the plan uses 1 of 2 ranks") == 1
    loss = json.loads((out / "result.json").read_text())["loss"]
    assert loss == pytest.approx(single_loss(6), rel=1e-9)


def test_a_plan_for_more_ranks_is_refused():
    with pytest.raises(InputError, match=r"plan: needs 2 ranks, and the world has 1 rank; start 2"):
        World.alone().keep(2)


def test_verify_keeps_the_ranks_of_the_plan(tmp_path):
    words = train_words(profile_file(tmp_path, 1), "off", "--epochs=2")
    said = finished(launch(2, "-m", "gnnpipe", "verify", *words[3:]))
    assert said.count("rank 1: the plan uses 1 of 2 ranks") == 1
    assert "on 1 rank" in said


SCRIPT = """
import os, signal, sys
from dataclasses import replace
from gnnpipe import Callback, TrainConfig, Trainer


class Fails(Callback):
    on_all_ranks = True

    def on_epoch_end(self, trainer, row):
        if row.epoch == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


config = TrainConfig(**SETTINGS, dtype="float64", epochs=4, checkpoint_every=2)
config = replace(config, profile=sys.argv[1], out=sys.argv[2])
trainer = Trainer(config, callbacks=[Fails()] if sys.argv[3] == "fails" else [])
result = trainer.fit()
shape = tuple(trainer.predict().shape)
print(f"trained {result.world_size} {shape}\\n", end="", flush=True)
trainer.close()
again = Trainer(replace(config, out="off", checkpoint_every=0)).fit()
print(f"again {again.world_size} {again.loss == result.loss}\\n", end="", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("SETTINGS", repr(SETTINGS)))
    return path


def test_two_of_three_ranks_go_on_with_the_script(script, tmp_path):
    out = tmp_path / "run"
    said = finished(launch(3, script, profile_file(tmp_path, 2), out, "lasts"))
    assert said.count("rank 2: the plan uses 2 of 3 ranks") == 1
    assert said.count("trained 2 (34, 4)") == said.count("again 2 True") == 2
    loss = json.loads((out / "result.json").read_text())["loss"]
    assert loss == pytest.approx(single_loss(4), rel=1e-9)


def test_a_restart_takes_the_plan_of_the_run(script, tmp_path):
    profile, out = profile_file(tmp_path, 2), tmp_path / "run"
    said = finished(launch(3, script, profile, out, "fails", restarts=1))
    before, after = said.split("resuming from")
    assert before.count("search: ") == 1
    assert before.count("rank 2: the plan uses 2 of 3 ranks") == 2, "once for each start"
    # The second run of the script searches again.
    assert after.index("trained 2 (34, 4)") < after.index("search: ")
    loss = json.loads((out / "result.json").read_text())["loss"]
    assert loss == pytest.approx(single_loss(4), rel=1e-9)


def test_a_kept_rank_that_dies_later_ends_the_run(tmp_path):
    out, more = tmp_path / "run", ["--epochs=1000000", "--timeout=32", "--checkpoint-every=2"]
    process = launch(3, *train_words(profile_file(tmp_path, 2), out, *more))
    rows = out / "metrics.csv"
    while not rows.exists() or rows.read_text().count("\n") < 4:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    time.sleep(7)  # nobody waits for the rank that has ended: the watchdog would fire after 4 s
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in children]
    running = [int(pid) for pid, state in zip(children, states, strict=True) if state != "Z"]
    assert len(running) == 2, states
    os.kill(running[1], signal.SIGKILL)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "gnnpipe: rank 0 lost another rank (" in said
    assert f"go on with --resume {out}" in said


def shrunk():
    """What each of three ranks sees of worlds of three, two and one."""
    first = World.meet(3)
    seen = [first.gather(first.rank)]
    world = first
    try:
        for count in (2, 1):
            world = world.keep(count, is_quiet=True)
            seen.append(world.gather(world.rank))
            seen.append((world.sum([1.0]), launched_world_size()))
    except IdleRank as error:
        seen.append(error.code)
    try:
        Trainer(quick_config(dataset="karate"), world=first).fit()
    except InputError as error:
        seen.append(str(error))
    return seen


def test_ranks_part_one_after_the_other():
    every, both = [0, 1, 2], [[0, 1], ([2.0], 2)]
    parted = (
        "world: its process group is closed; pass Trainer.world of the run that was planned, or "
        "make a new Trainer"
    )
    assert run_ranks(shrunk, 3) == [
        [every, *both, [0], ([1.0], 1), parted],
        [every, *both, 0, parted],
        [every, 0, parted],
    ]


def seeds(profile):
    """Number of searches on this rank, and ranks and losses of the runs; None on an idle rank."""
    searches = []
    search = RunPlanner.plan
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunPlanner, "plan", lambda *a: searches.append(0) or search(*a))
        try:
            found = fit_seeds(quick_config(**SETTINGS, profile=str(profile)), 2)
        except IdleRank:
            return None
    return len(searches), [(r.world_size, r.loss) for r in found.results]


def test_seeds_are_planned_once(tmp_path):
    *kept, idle = run_ranks(seeds, 3, profile_file(tmp_path, 2))
    alone = fit_seeds(quick_config(**SETTINGS | {"plan": "uniform"}), 2)
    assert kept[0] == kept[1]
    assert kept[0][0] == 1
    for (ranks, loss), run in zip(kept[0][1], alone.results, strict=True):
        assert (ranks, loss) == (2, pytest.approx(run.loss, rel=1e-9))
    assert idle is None


def in_a_group_of_the_script(profile):
    dist.init_process_group("gloo")
    config = quick_config(**SETTINGS, profile=str(profile))
    return Trainer(config).fit().world_size


def test_a_group_of_the_script_keeps_its_ranks(tmp_path):
    found = run_ranks(in_a_group_of_the_script, 2, profile_file(tmp_path, 1))
    assert found == [2, 2]


@pytest.mark.parametrize(
    ("launched", "now", "is_ours"), [(4, 4, True), (4, 1, True), (4, 2, False), (1, 2, False)]
)
def test_a_plan_is_taken_again_by_as_many_ranks(launched, now, is_ours, tmp_path, monkeypatch):
    monkeypatch.setattr(World, "can_shrink", property(lambda self: self.world_size > 1))
    plan = prepared_of(layers=2).plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    note_launch(tmp_path, launched, is_new=True)
    world = replace(World.alone(), world_size=now)
    found = run_planner(TrainConfig(plan="auto"), world, None, *last_run([tmp_path]))
    assert isinstance(found, GivenPlan if is_ours else RunPlanner)
    assert last_run([]) == (None, 0)
    assert last_run([tmp_path / "gone"])[1] == 0
