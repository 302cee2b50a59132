"""Ranks that were started with other settings are refused, on every rank and before any work; a
closed trainer leaves nothing open."""

import gc
import os

import pytest
import torch.distributed as dist
from helpers import quick_config, run_ranks

from gnnpipe import Trainer
from gnnpipe.errors import InputError
from gnnpipe.runtime.comm.world import World
from gnnpipe.setup.prepare import prepare

COMMON = {"dataset": "karate", "model": "gcn", "hidden": 8, "shards": 2, "predict": False}


def refusal(settings, **more):
    """The text of the error of this rank, "" if it trains; ``settings``: of each rank."""
    own = COMMON | settings[int(os.environ["RANK"])]
    trainer = Trainer(quick_config(**own), **more)
    try:
        trainer.fit()
    except InputError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def refusals(cases):
    """One process group for all cases, as a user's script makes it."""
    dist.init_process_group("gloo")
    found = [refusal(settings) for settings in cases]
    dist.destroy_process_group()
    return found


def test_ranks_with_other_settings_are_refused():
    cases = [
        ({"lr": 0.01}, {"lr": 0.05}),
        ({"epochs": 4}, {"epochs": 6, "eval_every": 2}),
        ({"shards": 2}, {"stages": 2}),
        ({}, {"patience": 20}),
        ({"dataset": "karate"}, {"dataset": "synthetic:planted:n=500"}),
    ]
    mine, other = run_ranks(refusals, 2, cases)
    assert mine == other
    hint = ": start every rank with the same settings"
    assert mine[0] == f"--lr 0.01 on rank 0, 0.05 on rank 1{hint}"
    assert "--epochs 4 on rank 0, 6 on rank 1; --eval-every 10 on rank 0, 2 on rank 1" in mine[1]
    assert mine[2] == f"--stages 1 on rank 0, 2 on rank 1{hint}"
    assert mine[3] == f"--patience 0 on rank 0, 20 on rank 1{hint}"
    assert mine[4].startswith("--dataset karate on rank 0, synthetic:planted:n=500 on rank 1")


def test_folders_and_output_may_differ(tmp_path):
    settings = ({"quiet": True, "cache_dir": "off"}, {"cache_dir": str(tmp_path), "out": ""})
    assert run_ranks(refusals, 2, [settings]) == [[""], [""]]


def with_another_shape():
    os.environ["TORCHELASTIC_RUN_ID"] = "any"  # as torchrun sets it
    found = refusal(({"shards": 2}, {"shards": 1}))
    assert not dist.is_initialized()
    return found


def test_a_rank_with_another_number_of_ranks_tells_the_others():
    found = run_ranks(with_another_shape, 2)
    text = "--shards 2 on rank 0, 1 on rank 1: start every rank with the same settings"
    assert found == [text, text]


def plans_of_ranks():
    """Rank 1 has a plan of more chunks."""
    chunks = 4 + int(os.environ["RANK"])
    config = quick_config(**COMMON, chunks=chunks)
    plan = prepare(config, World.alone()).plan
    return refusal(({}, {}), plan=plan)


def test_plans_of_ranks_are_compared():
    mine, other = run_ranks(plans_of_ranks, 2)
    assert mine == other
    assert mine.startswith("--plan with checksum ")


def left_behind(shape):
    """Threads and open files of this process after each of three trainers that were closed."""
    stages, shards = shape
    found = []
    for _ in range(3):
        trainer = Trainer(quick_config(**COMMON | {"stages": stages, "shards": shards}))
        trainer.fit()
        trainer.close()
        del trainer
        gc.collect()
        found.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
    return found


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_closed_trainer_leaves_no_thread_and_no_file_open(shape):
    for first, _, last in run_ranks(left_behind, 2, shape):
        assert last[0] <= first[0]
        assert last[1] <= first[1]
