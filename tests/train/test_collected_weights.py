"""At the end of a run, weights are sent and saved without the memory around them.

Steps by chunk keep the weights of a stage as views of one tensor, and a pickled view holds the
whole tensor.
"""

import pickle

import torch
from helpers import quick_config, run_ranks, small_graph

from gnnpipe import Trainer
from gnnpipe.runtime.comm.world import World


def sent_bytes():
    """Size of all weights, and of the weights of each broadcast; the last two are at the end."""
    found, share = [], World.share

    def noting(self, value=None, source=0):
        shared = share(self, value, source)
        if isinstance(shared, dict) and all(map(torch.is_tensor, shared.values())):
            found.append(len(pickle.dumps(value)))
        return shared

    World.share = noting
    try:
        config = quick_config(
            model="sage", layers=6, hidden=64, chunks=8, stages=2, schedule="async"
        )
        trainer = Trainer(config, graph=small_graph())
        trainer.fit()
    finally:
        World.share = share
    weights = trainer.model.state_dict().values()
    return sum(w.numel() * w.element_size() for w in weights), found


def test_a_stage_sends_its_weights_once():
    for whole, found in run_ranks(sent_bytes, 2):
        assert max(found[-2:]) < 0.6 * whole


def test_saved_weights_are_as_large_as_those_of_the_full_batch(tmp_path):
    sizes = []
    for schedule in ("fill-drain", "async"):
        folder = tmp_path / schedule
        config = quick_config(
            model="sage", layers=3, hidden=64, chunks=8, schedule=schedule, out=str(folder)
        )
        Trainer(config, graph=small_graph(sparse=True)).fit()
        sizes.append((folder / "model.pt").stat().st_size)
    assert sizes[1] < 1.02 * sizes[0]
