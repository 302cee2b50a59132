"""A user who adds ``--schedule async --chunks 32`` to a full-batch run needs nothing else."""

import pytest
from helpers import SHARED, quick_config

from gnnpipe import Trainer


def accuracy(**settings):
    config = quick_config(
        dataset=str(SHARED / "amazon_photo.npz"),
        split="10/20/70",
        symmetrize=True,
        remove_self_loops=True,
        model="gcn",
        layers=4,
        hidden=64,
        dtype="float32",
        epochs=30,
        eval_every=30,
        **settings,
    )
    return Trainer(config).fit().history[-1].scores.test_acc


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the graphs of ../shared/data")
def test_the_rates_of_the_full_batch_are_right_for_chunks_and_save_epochs():
    by_chunk = accuracy(chunks=32, schedule="async")
    assert by_chunk > 0.85
    assert by_chunk > accuracy() + 0.05
