"""Recorded PyG models on several processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyg_models
import pytest
import torch
from helpers import assert_all_within, quick_config, run_ranks, small_graph
from recorded import ON_RANKS, largest_difference, made

from gnnpipe import Trainer

pytestmark = pytest.mark.slow


def test_two_ranks():
    shapes = [(2, 1, 1), (1, 2, 1), (2, 1, 6)]
    assert_all_within(run_ranks(largest_difference, 2, shapes, ON_RANKS)[0])


def test_four_ranks():
    assert_all_within(run_ranks(largest_difference, 4, [(2, 2, 6)], ON_RANKS)[0])


def trained(names):
    """By name, the result of a run on two stages and the state dict that this rank ends with."""
    found = {}
    for name in names:
        config = quick_config(stages=2, chunks=4)
        trainer = Trainer(config, graph=small_graph(), model=made(name))
        result = trainer.fit()
        found[name] = result, {k: v.numpy() for k, v in trainer.model.state_dict().items()}
        trainer.close()
    return found


@pytest.mark.filterwarnings("ignore:model. .* normalises over all vertices")
def test_bytes_and_weights_after_two_stages():
    names = ("branches", "GCN batch norm")
    ranks = run_ranks(trained, 2, names)
    for name in names:
        alone = Trainer(quick_config(chunks=4), graph=small_graph(), model=made(name))
        loss = alone.fit().loss
        for result, weights in (found[name] for found in ranks):
            assert result.comm_bytes_per_epoch == result.comm_bytes_closed_form
            assert result.comm_bytes_per_epoch["pipeline"] > 0
            assert weights.keys() == made(name).state_dict().keys()
            np.testing.assert_allclose(result.loss, loss, rtol=1e-9)
            for key, value in alone.model.state_dict().items():
                np.testing.assert_allclose(weights[key], value.numpy(), rtol=1e-6, atol=1e-9)


def bytes_on_two_shards():
    run = quick_config(shards=2, chunks=4, epochs=2)
    trainer = Trainer(run, graph=small_graph(), model=made("GCN batch norm"))
    result = trainer.fit()
    trainer.close()
    return result.comm_bytes_per_epoch, result.comm_bytes_closed_form


def frozen_on_two_shards():
    torch.manual_seed(0)
    model = pyg_models.Sgc()
    model.conv.lin.bias.requires_grad_(False)
    before = model.conv.lin.bias.detach().clone()
    config = quick_config(shards=2, weight_decay=0.1)
    trainer = Trainer(config, graph=small_graph(), model=model)
    trainer.fit()
    trainer.close()
    return float((model.conv.lin.bias - before).abs().max())


def on_two_shards():
    return *bytes_on_two_shards(), frozen_on_two_shards()


def test_the_bytes_of_a_mean_are_the_closed_form_and_frozen_weights_stay():
    for counted, formula, moved in run_ranks(on_two_shards, 2):
        assert moved == 0.0
        assert counted == formula
        # Two norms of 8 columns, means of rows and squares, 4 chunks, there and back, 2 shards.
        assert counted["graph"] > 2 * 16 * 4 * 2 * 2 * 8


TWICE = """
import os

import torch
from torch_geometric.nn import GraphSAGE
from gnnpipe import TrainConfig, Trainer

for _ in range(2):
    torch.manual_seed(0)
    config = TrainConfig(dataset="karate", epochs=1, out="off", quiet=True, stages=2)
    trainer = Trainer(config, model=GraphSAGE(34, 8, 2, 4))
    # One write for a line: ranks share the pipe.
    os.write(1, f"{trainer.fit().loss}\\n".encode())
    trainer.close()
"""


@pytest.mark.slow
def test_ranks_may_meet_again(tmp_path):
    """torchrun's store still knows the first group."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, *words],
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    losses = done.stdout.split()
    assert len(losses) == 4
    assert len(set(losses)) == 1
